"""The matrix products of a loop, each by the implementation that is fastest for its shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_batch.kernels import matmul, mlp
from ouro_batch.kernels.gemv import gemv
from ouro_batch.model.weights import ModelWeights

# Rows up to which products stream through registers (kernels/gemv.py), and up to which those of
# kernels/matmul.py beat torch's library: QKV and gate/up, and the others, whose outputs are narrow
# or whose rows are counted on the device.
GEMV_ROWS = 1
WIDE_ROWS = 8
NARROW_ROWS = 64


class Projections:
    """Products with a model's weights, into given tensors; x [T, in].

    At few rows, where the time is that of reading the weights, the Triton kernels of
    ``kernels/matmul.py`` run; beyond them torch's library, and for FP32 always.
    """

    def __init__(self, weights: ModelWeights, *, overlap: bool = False):
        self._weights = weights
        self._overlap = overlap  # start kernels ahead (kernels/overlap.py)
        # FP32 has no matrix instruction that a kernel of ours could feed better than the library.
        sixteen_bit = weights.embed.dtype.itemsize == 2
        self._gemv_rows = GEMV_ROWS if sixteen_bit else 0
        self._wide_rows = WIDE_ROWS if sixteen_bit else 0
        self._narrow_rows = NARROW_ROWS if sixteen_bit else 0
        layer, head, device = weights.layers[0], weights.lm_head, weights.embed.device
        shapes = [
            _space(layer.qkv, self._wide_rows),
            _space(layer.gate_up, self._wide_rows, gated=True),
            _space(head, self._narrow_rows),
        ]
        words, counters = (max(sizes) for sizes in zip(*shapes, strict=True))
        self._partials = torch.empty(words, dtype=torch.float32, device=device)
        self._counters = torch.zeros(counters, dtype=torch.int32, device=device)
        # Sums that their consumer, the norm, adds up; both products have hidden_size columns.
        self._split_o, self._split_down = _split(layer.o), _split(layer.down)
        words = max(self._split_o, self._split_down) * self._narrow_rows * layer.o.shape[0]
        self._sums = torch.empty(words, dtype=torch.float32, device=device)

    def qkv(self, layer: int, x: Tensor, out: Tensor) -> None:
        weight = self._weights.layers[layer].qkv
        if len(x) <= self._gemv_rows:
            gemv(out, x, weight, overlap=self._overlap)
        elif len(x) <= self._wide_rows:
            self._few_rows(x, weight, out)
        else:
            torch.mm(x, weight.t(), out=out)

    def o(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """Into ``out`` [T, hidden], or as FP32 partial sums [split, T, hidden]; returns which."""
        return self._update(x, self._weights.layers[layer].o, out, self._split_o)

    def mlp(self, layer: int, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """``silu(gate) * up`` into ``out`` [T, I]; ``gate_up`` [T, 2I] is work space."""
        weight = self._weights.layers[layer].gate_up
        if len(x) <= self._gemv_rows:
            gemv(out, x, weight, gated=True, overlap=self._overlap)
        elif len(x) <= self._wide_rows:
            self._few_rows(x, weight, out, gated=True)
        else:
            torch.mm(x, weight.t(), out=gate_up)
            mlp.silu_mul(out, gate_up, overlap=self._overlap)

    def down(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """As ``o``."""
        return self._update(x, self._weights.layers[layer].down, out, self._split_down)

    def lm_head(self, x: Tensor, out: Tensor, count: Tensor) -> None:
        """Only the first ``count`` (int32 [1], on the device) rows are needed."""
        if len(x) <= self._narrow_rows:
            self._few_rows(x, self._weights.lm_head, out, count=count)
        else:
            torch.mm(x, self._weights.lm_head.t(), out=out)

    def _few_rows(self, x: Tensor, weight: Tensor, out: Tensor, **options: object) -> None:
        matmul.linear(
            out,
            x,
            weight,
            partials=self._partials,
            counters=self._counters,
            overlap=self._overlap,
            **options,
        )

    def _update(self, x: Tensor, weight: Tensor, out: Tensor, split: int) -> Tensor:
        if len(x) <= self._gemv_rows:
            gemv(out, x, weight, overlap=self._overlap)
            return out
        if len(x) > self._narrow_rows:
            return torch.mm(x, weight.t(), out=out)
        sums = self._sums[: split * out.numel()].view(split, *out.shape)
        matmul.linear_partials(sums, x, weight, overlap=self._overlap)
        return sums


def _space(weight: Tensor, rows: int, gated: bool = False) -> tuple[int, int]:
    columns, inner = weight.shape
    columns = columns // 2 if gated else columns
    return matmul.workspace_shape(max(rows, 1), columns, inner, gated, weight.dtype)


def _split(weight: Tensor) -> int:
    columns, inner = weight.shape
    return matmul.choose_tiles(1, columns, inner, False, weight.dtype).split_k
