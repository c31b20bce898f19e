"""Rows in blocks of a fixed size, so that a row's bits depend on that row alone.

A matrix product adds up in an order that its library chooses by the number of rows, and a vector
loop treats the elements that are left over by other instructions. In blocks of one shape, filled
up where rows are missing, neither can depend on how many rows share a step, and a check at the
start makes sure that it does not depend on a row's place in its block either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ouro_batch.errors import EngineError
from ouro_batch.model.ouro import Attend, Ouro

SIZES = (16, 8, 4, 2, 1)
# Elements from which torch divides an operation among threads, wherever that cuts a row.
SERIAL_ELEMENTS = 32768
TRIALS = 3


class RowBlocks:
    """Blocks of all rows at once (``size`` None), or of a fixed number of rows."""

    def __init__(self, model: Ouro, positions: int, *, fixed: bool):
        self._model = model
        self.size = _block_size(model) if fixed else None
        # Cosines and sines of every position, each computed once.
        self._rope = model.rope(torch.arange(positions, device=model.device)) if fixed else None

    def parts(self, count: int, size: int | None = None) -> list[slice]:
        """The blocks of ``count`` rows, each of up to ``size`` rows (None: as many as a block)."""
        if self.size is None:
            return [slice(0, count)]
        size = size or self.size
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def loop(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``Ouro.loop`` of one block's rows at their positions, int64 [T]."""
        if self.size is None:
            return self._model.loop(hidden, self._model.rope(positions), attend)
        count = len(hidden)

        def attend_rows(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._fill(attend(layer, q[:count], k[:count], v[:count]))

        cos, sin = (self._fill(table[positions]) for table in self._rope)
        return self._model.loop(self._fill(hidden), (cos, sin), attend_rows)[:count]

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function`` of rows [T, ...], block by block."""
        if self.size is None:
            return function(x)
        done = [function(self._fill(x[p]))[: p.stop - p.start] for p in self.parts(len(x))]
        return torch.cat(done)

    def _fill(self, x: Tensor) -> Tensor:
        """``x`` [T, ...] with zeros for the rows that are missing from its block."""
        full = x.new_zeros((self.size, *x.shape[1:]))
        full[: len(x)] = x
        return full


def _block_size(model: Ouro) -> int:
    """The largest size at which a row's result does not depend on its place in the block."""
    width = max(model.config.intermediate_size, model.config.hidden_size)
    for size in SIZES:
        if (size * width < SERIAL_ELEMENTS or size == 1) and _places_agree(model, size):
            return size
    raise EngineError(
        f"batch_invariant cannot be had on {model.device}: the same row gives other bits at the"
        " second time (leave it out)"
    )


@torch.inference_mode()
def _places_agree(model: Ouro, size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        row = torch.randn(1, model.config.hidden_size, generator=generator)
        # Two blocks of size 1 must agree too.
        blocks = row.to(model.device, model.dtype).repeat(max(size, 2), 1).split(size)
        found = torch.cat([_all_products(model, block) for block in blocks])
        if not torch.equal(found, found[:1].expand_as(found)):
            return False
    return True


def _all_products(model: Ouro, x: Tensor) -> Tensor:
    """What a block goes through, but for its attention; FP32 [T, values]."""
    rope = model.rope(torch.zeros(len(x), dtype=torch.int64, device=x.device))
    hidden = model.loop(x, rope, lambda layer, q, k, v: q)
    exits = torch.sigmoid(-model.gate(hidden))[:, None]
    return torch.cat((hidden.float(), model.logits(hidden), exits), dim=1)
