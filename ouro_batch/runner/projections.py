"""The matrix products of a loop, each by the implementation that is fastest for its shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_batch.model.weights import ModelWeights


class Projections:
    """``out = x @ weight.T`` into given tensors; x [T, in], out [T, out]."""

    def __init__(self, weights: ModelWeights):
        self._layers = weights.layers
        self._lm_head = weights.lm_head

    def qkv(self, layer: int, x: Tensor, out: Tensor) -> None:
        _linear(x, self._layers[layer].qkv, out)

    def o(self, layer: int, x: Tensor, out: Tensor) -> None:
        _linear(x, self._layers[layer].o, out)

    def gate_up(self, layer: int, x: Tensor, out: Tensor) -> None:
        _linear(x, self._layers[layer].gate_up, out)

    def down(self, layer: int, x: Tensor, out: Tensor) -> None:
        _linear(x, self._layers[layer].down, out)

    def lm_head(self, x: Tensor, out: Tensor, count: Tensor) -> None:
        """Only the first ``count`` (int32 [1], on the device) rows are needed."""
        _linear(x, self._lm_head, out)


def _linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)
