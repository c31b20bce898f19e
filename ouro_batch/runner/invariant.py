"""Matrix products whose rows have the same bits however many rows there are.

The library chooses how a product adds up by its number of rows, but many numbers lead to the same
order. Which ones do is found out at the start: for each weight shape, with a weight of the model,
the sizes whose rows have the bits of one size, the canonical one. Any number of rows is then run in
pieces of those sizes; a last piece that is not full reads and writes rows of its tensors that are
not in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ouro_batch.errors import EngineError
from ouro_batch.kernels import mlp
from ouro_batch.model.weights import ModelWeights

# Rows of a piece, from which those that agree with the canonical size are taken.
DECODE_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
DECODE_CANONICAL = 128
PREFILL_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
PREFILL_CANONICAL = 2048
TRIALS = 2
# Every piece reads the weights, which takes the time of computing so many rows.
WEIGHT_ROWS = 128


class Pieces:
    """The sizes in which one product may run, with equal bits, and how they cover rows.

    Args:
        sizes: ``canonical`` is among them.
        rows: at most.
    """

    def __init__(self, sizes: Sequence[int], canonical: int, rows: int):
        self.sizes = tuple(sorted(sizes))
        self.limit = -(-rows // canonical) * canonical  # where the last piece ends at most
        self._found: dict[int, list[tuple[int, int]]] = {}

    def cover(self, rows: int) -> list[tuple[int, int]]:
        """(first row, rows) of each piece, the cheapest together; the last may go beyond."""
        if rows not in self._found:
            self._found[rows] = self._cheapest(rows)
        return self._found[rows]

    def _cheapest(self, rows: int) -> list[tuple[int, int]]:
        # From each row on: what covering the rest costs, and the size that it begins with.
        best: dict[int, tuple[float, int]] = {}

        def cost(begin: int) -> float:
            if begin >= rows:
                return 0.0
            if begin not in best:
                best[begin] = min(
                    (WEIGHT_ROWS + size + cost(begin + size), size)
                    if begin + size <= self.limit
                    else (math.inf, size)
                    for size in self.sizes
                )
            return best[begin][0]

        cost(0)
        pieces, begin = [], 0
        while begin < rows:
            pieces.append((begin, best[begin][1]))
            begin += best[begin][1]
        return pieces


class InvariantProjections:
    """What ``Projections`` does, in pieces that agree.

    Args:
        weights: the model's.
        canonical: the size that others must agree with.
        sizes: candidates.
        rows: of a step at most.
        head: whether ``lm_head`` is among the products.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        canonical: int,
        sizes: Sequence[int],
        rows: int,
        head: bool,
        overlap: bool = False,
    ):
        self._weights = weights
        self._overlap = overlap
        candidates = sorted({canonical, *(size for size in sizes if size <= rows)})
        layer = weights.layers[0]
        shapes = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
        if head:
            shapes["lm_head"] = weights.lm_head
        self.pieces = {
            name: Pieces(_agreeing(weight, canonical, candidates), canonical, rows)
            for name, weight in shapes.items()
        }

    @property
    def capacity(self) -> int:
        """Rows that tensors must have room for."""
        return max(pieces.limit for pieces in self.pieces.values())

    def qkv(self, layer: int, x: Tensor, out: Tensor) -> None:
        self._product("qkv", x, self._weights.layers[layer].qkv, out)

    def o(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        self._product("o", x, self._weights.layers[layer].o, out)
        return out

    def mlp(self, layer: int, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """``silu(gate) * up`` into ``out`` [T, I]; ``gate_up`` [T, 2I] is work space."""
        self._product("gate_up", x, self._weights.layers[layer].gate_up, gate_up)
        mlp.silu_mul(out, gate_up, overlap=self._overlap)

    def down(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        self._product("down", x, self._weights.layers[layer].down, out)
        return out

    def lm_head(self, x: Tensor, out: Tensor, count: Tensor) -> None:
        """All rows, whatever ``count`` of them are needed."""
        self._product("lm_head", x, self._weights.lm_head, out)

    def _product(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        for begin, size in self.pieces[name].cover(len(x)):
            torch.mm(_rows(x, begin, size), weight.t(), out=_rows(out, begin, size))


def invariant_projections(
    weights: ModelWeights, rows: int, prompt_tokens: int, *, overlap: bool
) -> tuple[InvariantProjections, InvariantProjections]:
    """Those of decode steps of up to ``rows`` rows, and those of prompts."""
    decode = InvariantProjections(
        weights,
        canonical=DECODE_CANONICAL,
        sizes=DECODE_SIZES,
        rows=rows,
        head=True,
        overlap=overlap,
    )
    prefill = InvariantProjections(
        weights,
        canonical=PREFILL_CANONICAL,
        sizes=PREFILL_SIZES,
        rows=prompt_tokens,
        head=False,
        overlap=overlap,
    )
    if weights.embed.is_cuda:
        torch.cuda.empty_cache()  # what the comparisons took is the cache's
    return decode, prefill


def _rows(x: Tensor, begin: int, size: int) -> Tensor:
    """Rows from ``begin`` of ``x`` [T, width], beyond T too where its memory goes on."""
    return x.as_strided((size, x.shape[1]), x.stride(), x.storage_offset() + begin * x.stride(0))


@torch.inference_mode()
def _agreeing(weight: Tensor, canonical: int, candidates: Sequence[int]) -> tuple[int, ...]:
    """The candidates that give every row the bits that ``canonical`` gives it."""
    generator = torch.Generator(weight.device).manual_seed(0)
    largest = -(-max(candidates) // canonical) * canonical
    agreeing = set(candidates)
    for _ in range(TRIALS):
        x = torch.randn(
            largest, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype
        )
        expected = _in_pieces(x, weight, canonical)
        # A row's place in its piece must not count either.
        moved = torch.roll(x, canonical // 2 + 1, 0)
        again = torch.roll(_in_pieces(moved, weight, canonical), -(canonical // 2 + 1), 0)
        if not torch.equal(expected, again):
            raise EngineError(
                f"batch_invariant cannot be had on {weight.device}: a row of a product with a"
                f" weight {tuple(weight.shape)} has other bits at another place (leave it out)"
            )
        for size in candidates:
            if not torch.equal(_in_pieces(x[:size], weight, size), expected[:size]):
                agreeing.discard(size)
    return tuple(sorted(agreeing))


def _in_pieces(x: Tensor, weight: Tensor, size: int) -> Tensor:
    return torch.cat([torch.mm(part, weight.t()) for part in x.split(size)])
