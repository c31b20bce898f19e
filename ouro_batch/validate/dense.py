"""The model by itself: every position at once, no cache, no batch, no fused weights.

It reads a checkpoint on its own and shares no code with the engine. In FP64 or FP32 it is the
equations of ``docs/design.md``; in BF16 it follows the released modeling code operation by
operation, each of which rounds: norms in FP32 whose result is rounded before the weight, cosines
and sines rounded, a softmax in FP32 rounded, the residual and the gate in BF16. A model that was
cast to BF16 as a whole has rounded its rotary frequencies too (``rounded_frequencies``); with that,
the errors are those of tests/data/oracle/bf16-192/bf16_error.json to the digit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` with what it may leave out, and RoPE in its older spelling.

    ``rope_theta`` is set, and ``rope_scaling`` has a ``factor`` or nothing.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = config.get("rope_parameters") or {}
    config["rope_theta"] = parameters.get("rope_theta") or config["rope_theta"]
    scaling = parameters or config.get("rope_scaling") or {}
    linear = "linear" in (scaling.get("rope_type"), scaling.get("type"))
    config["rope_scaling"] = {"factor": scaling["factor"]} if linear else {}
    for name, value in (("early_exit_threshold", 1.0), ("tie_word_embeddings", False)):
        if config.get(name) is None:
            config[name] = value
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name, in the dtype of its file.

    Of ``model.safetensors`` or, where there is none, the shards that the index names.
    """
    paths = [folder / "model.safetensors"]
    if not paths[0].exists():
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@dataclass(frozen=True)
class LoopStates:
    """What a loop gives for S tokens."""

    hidden: Tensor  # [S, hidden], after the final norm
    gate: Tensor  # [S], logits of the exit gate
    logits: Tensor  # [S, V]


class DenseModel:
    """Weights by checkpoint name, in one dtype on one device; ``config`` as ``read_config``."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounded_frequencies: bool = False,
    ):
        self._rounded_frequencies = rounded_frequencies
        self.config = config
        self._dtype = dtype
        self._tensors = {name: t.to(device, dtype) for name, t in tensors.items()}

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, device: torch.device, **options: bool
    ) -> DenseModel:
        return cls(read_config(folder), read_tensors(folder), dtype, device, **options)

    @torch.inference_mode()
    def run(self, tokens: list[int], loops: int | None = None) -> list[LoopStates]:
        """All loops of a text, first to last."""
        embed = self._tensors["model.embed_tokens.weight"]
        ids = torch.tensor(tokens, device=embed.device)
        h = embed[ids]
        positions = torch.arange(len(tokens), device=embed.device)
        states = []
        for _ in range(loops or self.config["total_ut_steps"]):
            h = self._loop(h, positions)
            states.append(LoopStates(h, self._gate(h), self._logits(h)))
        return states

    def _loop(self, h: Tensor, positions: Tensor) -> Tensor:
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            x = self._attention(self._norm(h, f"{name}.input_layernorm"), index, positions)
            h = h + self._norm(x, f"{name}.input_layernorm_2")
            x = self._mlp(self._norm(h, f"{name}.post_attention_layernorm"), index)
            h = h + self._norm(x, f"{name}.post_attention_layernorm_2")
        return self._norm(h, "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.config["rms_norm_eps"])
        return self._tensors[f"model.{name}.weight"] * wide.to(x.dtype)

    def _attention(self, x: Tensor, index: int, positions: Tensor) -> Tensor:
        c = self.config
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        def project(name: str, count: int) -> Tensor:
            return self._linear(x, index, f"self_attn.{name}").view(-1, count, size).transpose(0, 1)

        cos, sin = self._rotation(positions)
        q, k = (
            self._rotate(project(name, n), cos, sin)
            for name, n in (("q_proj", heads), ("k_proj", groups))
        )
        k = k.repeat_interleave(heads // groups, 0)
        v = project("v_proj", groups).repeat_interleave(heads // groups, 0)
        scores = q @ k.transpose(1, 2) * size**-0.5
        later = positions[None, :] > positions[:, None]
        scores = scores.masked_fill(later, -math.inf)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weights = scores.softmax(-1, dtype=wide).to(x.dtype)
        return self._linear((weights @ v).transpose(0, 1).flatten(1), index, "self_attn.o_proj")

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        c, size = self.config, self.config["head_dim"]
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, size, 2, dtype=wide, device=positions.device) / size
        frequencies = c["rope_theta"] ** -exponents
        if self._rounded_frequencies:
            frequencies = frequencies.to(self._dtype).to(wide)
        factor = (c["rope_scaling"] or {}).get("factor", 1.0)
        angles = positions.to(wide)[:, None] / factor * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def _mlp(self, x: Tensor, index: int) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(x, index, "mlp.gate_proj"))
        return self._linear(gate * self._linear(x, index, "mlp.up_proj"), index, "mlp.down_proj")

    def _linear(self, x: Tensor, index: int, name: str) -> Tensor:
        return x @ self._tensors[f"model.layers.{index}.{name}.weight"].T

    def _gate(self, h: Tensor) -> Tensor:
        weight = self._tensors["model.early_exit_gate.weight"]
        return torch.nn.functional.linear(
            h, weight, self._tensors["model.early_exit_gate.bias"]
        ).squeeze(-1)

    def _logits(self, h: Tensor) -> Tensor:
        tied = self.config["tie_word_embeddings"]
        return h @ self._tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T
