"""The matrix products of a loop, each by the implementation that is fastest for its shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_batch.kernels import matmul, mlp
from ouro_batch.model.weights import ModelWeights


class Projections:
    """Products with a model's weights, into given tensors; x [T, in].

    Up to ``skinny_rows`` rows, where the time is that of reading the weights, the Triton kernels
    of ``kernels/matmul.py`` run; beyond it torch's library.
    """

    def __init__(self, weights: ModelWeights, skinny_rows: int):
        self._weights = weights
        self.skinny_rows = skinny_rows
        layer, head, device = weights.layers[0], weights.lm_head, weights.embed.device
        shapes = [
            self._space(layer.qkv, gated=False),
            self._space(layer.gate_up, gated=True),
            self._space(head, gated=False),
        ]
        words, counters = (max(sizes) for sizes in zip(*shapes, strict=True))
        self._partials = torch.empty(words, dtype=torch.float32, device=device)
        self._counters = torch.zeros(counters, dtype=torch.int32, device=device)
        # Sums that their consumer, the norm, adds up; both products have hidden_size columns.
        self._split_o, self._split_down = self._split(layer.o), self._split(layer.down)
        words = max(self._split_o, self._split_down) * skinny_rows * layer.o.shape[0]
        self._sums = torch.empty(words, dtype=torch.float32, device=device)

    def qkv(self, layer: int, x: Tensor, out: Tensor) -> None:
        self._linear(x, self._weights.layers[layer].qkv, out)

    def o(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """Into ``out`` [T, hidden], or as FP32 partial sums [split, T, hidden]; returns which."""
        return self._update(x, self._weights.layers[layer].o, out, self._split_o)

    def mlp(self, layer: int, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """``silu(gate) * up`` into ``out`` [T, I]; ``gate_up`` [T, 2I] is work space."""
        weight = self._weights.layers[layer].gate_up
        if self._skinny(x):
            self._skinny_linear(x, weight, out, gated=True)
        else:
            torch.mm(x, weight.t(), out=gate_up)
            mlp.silu_mul(out, gate_up)

    def down(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """As ``o``."""
        return self._update(x, self._weights.layers[layer].down, out, self._split_down)

    def lm_head(self, x: Tensor, out: Tensor, count: Tensor) -> None:
        """Only the first ``count`` (int32 [1], on the device) rows are needed."""
        if self._skinny(x):
            self._skinny_linear(x, self._weights.lm_head, out, count=count)
        else:
            torch.mm(x, self._weights.lm_head.t(), out=out)

    def _skinny(self, x: Tensor) -> bool:
        return x.shape[0] <= self.skinny_rows

    def _linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self._skinny(x):
            self._skinny_linear(x, weight, out)
        else:
            torch.mm(x, weight.t(), out=out)

    def _skinny_linear(self, x: Tensor, weight: Tensor, out: Tensor, **options: object) -> None:
        matmul.linear(out, x, weight, partials=self._partials, counters=self._counters, **options)

    def _update(self, x: Tensor, weight: Tensor, out: Tensor, split: int) -> Tensor:
        if not self._skinny(x):
            return torch.mm(x, weight.t(), out=out)
        sums = self._sums[: split * out.numel()].view(split, *out.shape)
        matmul.linear_partials(sums, x, weight)
        return sums

    def _space(self, weight: Tensor, gated: bool) -> tuple[int, int]:
        columns, inner = weight.shape
        columns = columns // 2 if gated else columns
        rows = max(self.skinny_rows, 1)
        return matmul.workspace_shape(rows, columns, inner, gated, weight.dtype)

    def _split(self, weight: Tensor) -> int:
        columns, inner = weight.shape
        return matmul.choose_tiles(1, columns, inner, False, weight.dtype).split_k
