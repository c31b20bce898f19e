"""The equations of a looped transformer: one loop over the layers, the exit gate, the logits.

Shapes: T packed tokens (decode rows or prompt tokens), H query heads, G key/value heads,
D head dimension, V vocabulary. Source: ../docs/design.md, "The model".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ouro_batch.model.config import ModelConfig
from ouro_batch.model.weights import LayerWeights, ModelWeights

# (layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]; stores k and v before it attends.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / rms(x)`` over the last dimension, in FP32 and not yet rounded."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of ``x`` [T, heads, D] by ``cos``, ``sin`` [T, D/2], in FP32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Ouro:
    """A looped transformer's arithmetic in plain torch, on any device.

    Between two matrix products it is FP32 and rounds once, as the kernels do.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights):
        self.config = config
        self.weights = weights
        device = weights.embed.device
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse_frequencies = (1.0 / config.rope_theta**exponents).to(device)

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [T] -> hidden states [T, hidden] that feed loop 1."""
        return F.embedding(tokens, self.weights.embed)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T] -> cos and sin, each FP32 [T, D/2]; the same in every loop."""
        scaled = positions.float() / self.config.rope_scaling_factor
        angles = scaled[:, None] * self._inverse_frequencies
        return angles.cos(), angles.sin()

    def loop(self, h: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One loop: hidden states [T, hidden] through all layers and the final norm."""
        for index, layer in enumerate(self.weights.layers):
            x = self._norm(h, layer.input_norm).to(h.dtype)
            x = self._attention(index, layer, x, rope, attend)
            h = (h + self._norm(x, layer.input_norm_2)).to(h.dtype)
            x = self._norm(h, layer.post_norm).to(h.dtype)
            h = (h + self._norm(self._mlp(layer, x), layer.post_norm_2)).to(h.dtype)
        return self._norm(h, self.weights.norm).to(h.dtype)

    def gate(self, h: Tensor) -> Tensor:
        """Exit gate logits, FP32 [T], of a loop's output [T, hidden]; lambda = sigmoid(gate)."""
        weights = self.weights
        return F.linear(h.float(), weights.exit_gate_weight, weights.exit_gate_bias).squeeze(-1)

    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits, FP32 [T, V], of the exit loop's output [T, hidden]."""
        return F.linear(h, self.weights.lm_head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        c = self.config
        heads, kv_heads = c.num_heads, c.num_kv_heads
        qkv = F.linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, c.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        out = attend(index, apply_rope(q, *rope), apply_rope(k, *rope), v)
        return F.linear(out.flatten(1), layer.o)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        return F.linear((F.silu(gate.float()) * up).to(x.dtype), layer.down)
