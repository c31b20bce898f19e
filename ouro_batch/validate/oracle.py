"""An independent oracle: one request at a time, one token at a time, in FP64.

It shares no code with the engine but the noise of sampling: no batch, no blocks, no fused
weights; a token that exits early has its keys and values copied into the planes it skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ouro_batch.params import SamplingParams
from ouro_batch.runner.sampling import gumbel_noise
from ouro_batch.validate.dense import read_config, read_tensors

CPU = torch.device("cpu")


@dataclass
class OracleOutput:
    """A generation, and the whole cache after it; G key/value heads, N layers, L loops.

    Of each token: ``margins`` is how far its logit (with temperature and noise, where it is drawn)
    is above the next one's, ``logit_scales`` the largest logit's magnitude (over the temperature),
    ``exit_margins`` how far the nearest exit decision was from falling otherwise.
    """

    tokens: list[int]
    depths: list[int]
    margins: list[float]
    exit_margins: list[float]
    logit_scales: list[float]
    keys: torch.Tensor  # [L, N, positions, G, D], on the CPU
    values: torch.Tensor


class Choice(NamedTuple):
    """A token, and of the scores it was chosen by: see ``OracleOutput``."""

    token: int
    margin: float
    scale: float


class SerialOracle:
    """Random or loaded weights by checkpoint name; ``config`` is a config.json as a dict.

    It takes 8 bytes a parameter on ``device``.
    """

    def __init__(
        self, config: dict, tensors: Mapping[str, torch.Tensor], device: torch.device = CPU
    ):
        self.config = config
        self.tensors = {name: t.to(device, torch.float64) for name, t in tensors.items()}
        self.device = device

    @classmethod
    def from_folder(cls, folder: Path) -> SerialOracle:
        return cls(read_config(folder), read_tensors(folder))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        rms = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / rms * self.tensors[f"model.{name}.weight"]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        exponents = torch.arange(half, dtype=torch.float64, device=self.device) / half
        frequency = self.config["rope_theta"] ** -exponents
        scaling = self.config.get("rope_scaling") or {}
        places = positions.double() / scaling.get("factor", 1.0)
        angle = (places[:, None] * frequency)[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def loop(self, h, positions, keys, values):
        """One loop for tokens [T]; appends to this plane's per-layer lists of keys and values."""
        c = self.config
        heads, groups, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        for i in range(c["num_hidden_layers"]):

            def linear(x, name, i=i):
                return x @ self.tensors[f"model.layers.{i}.{name}.weight"].T

            x = self.norm(h, f"layers.{i}.input_layernorm")
            q = self.rotate(linear(x, "self_attn.q_proj").view(-1, heads, dim), positions)
            k = self.rotate(linear(x, "self_attn.k_proj").view(-1, groups, dim), positions)
            v = linear(x, "self_attn.v_proj").view(-1, groups, dim)
            keys[i] = torch.cat((keys[i], k))
            values[i] = torch.cat((values[i], v))
            all_k = keys[i].repeat_interleave(heads // groups, 1)
            all_v = values[i].repeat_interleave(heads // groups, 1)
            scores = torch.einsum("thd,khd->htk", q, all_k) / math.sqrt(dim)
            places = torch.arange(len(all_k), device=self.device)
            later = places[None, :] > positions[:, None]
            weights = scores.masked_fill(later, -math.inf).softmax(-1)
            out = torch.einsum("htk,khd->thd", weights, all_v).flatten(1)
            h = h + self.norm(linear(out, "self_attn.o_proj"), f"layers.{i}.input_layernorm_2")
            x = self.norm(h, f"layers.{i}.post_attention_layernorm")
            gate = linear(x, "mlp.gate_proj")
            x = linear(gate * gate.sigmoid() * linear(x, "mlp.up_proj"), "mlp.down_proj")
            h = h + self.norm(x, f"layers.{i}.post_attention_layernorm_2")
        return self.norm(h, "norm")

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], params: SamplingParams, stop_ids: tuple[int, ...] = ()
    ) -> OracleOutput:
        c, tensors = self.config, self.tensors
        loops, layers = c["total_ut_steps"], c["num_hidden_layers"]
        shape = 0, c["num_key_value_heads"], c["head_dim"]
        empty = torch.zeros(shape, dtype=torch.float64, device=self.device)
        keys = [[empty] * layers for _ in range(loops)]
        values = [[empty] * layers for _ in range(loops)]
        positions = torch.arange(len(prompt), device=self.device)
        h = tensors["model.embed_tokens.weight"][prompt]
        for d in range(loops):
            h = self.loop(h, positions, keys[d], values[d])
        chosen = [self.choose(h[-1], params, 0)]
        depths, exit_margins = [loops], [math.inf]
        threshold = c["early_exit_threshold"]
        if params.exit_threshold is not None:
            threshold = params.exit_threshold
        deepest = min(loops, params.max_loops or loops)
        while chosen[-1].token not in stop_ids and len(chosen) < params.max_tokens:
            h = tensors["model.embed_tokens.weight"][[chosen[-1].token]]
            position = torch.tensor([len(prompt) + len(chosen) - 1], device=self.device)
            survival, nearest = 1.0, math.inf
            for d in range(1, deepest + 1):
                h = self.loop(h, position, keys[d - 1], values[d - 1])
                gate = h[0] @ tensors["model.early_exit_gate.weight"][0]
                gate = gate + tensors["model.early_exit_gate.bias"][0]
                survival *= 1 - float(gate.sigmoid())
                if d == deepest:
                    break
                if params.exit_depths is not None:
                    if d >= params.exit_depths[len(chosen)]:
                        break
                elif threshold < 1 and d >= params.min_loops:
                    nearest = min(nearest, abs(1 - survival - threshold))
                    if 1 - survival >= threshold:
                        break
            for skipped in range(d, loops):
                for i in range(layers):
                    keys[skipped][i] = torch.cat((keys[skipped][i], keys[d - 1][i][-1:]))
                    values[skipped][i] = torch.cat((values[skipped][i], values[d - 1][i][-1:]))
            chosen.append(self.choose(h[0], params, len(chosen)))
            depths.append(d)
            exit_margins.append(nearest)
        stack = [torch.stack([torch.stack(plane) for plane in kv]).cpu() for kv in (keys, values)]
        return OracleOutput(
            [choice.token for choice in chosen],
            depths,
            [choice.margin for choice in chosen],
            exit_margins,
            [choice.scale for choice in chosen],
            *stack,
        )

    def choose(self, h: torch.Tensor, params: SamplingParams, position: int) -> Choice:
        tied = self.config["tie_word_embeddings"]
        head = self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        scores = (head @ h).cpu() / (params.temperature or 1.0)
        scale = float(scores.abs().max())
        if params.temperature > 0:
            noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([position]), len(scores))
            scores = scores + noise[0].double()
        best = scores.topk(2)
        return Choice(int(best.indices[0]), float(best.values[0] - best.values[1]), scale)
