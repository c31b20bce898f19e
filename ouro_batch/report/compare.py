"""Sets a run beside another: the same prompts, joined by id, or by index where ids repeat."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from ouro_batch.report.tally import Joinable


@dataclass(frozen=True)
class Comparison:
    """A run beside the first one, over the ``joined`` prompts that both answered."""

    joined: int
    joined_by: str
    same_text: int
    tokens: tuple[int, int]
    mean_depth: tuple[float | None, float | None]


def compare(first: Joinable, other: Joinable) -> Comparison:
    """Compare ``other`` with ``first``; numbers come in that order."""
    by = "id"
    keys = _array(first.keys), _array(other.keys)
    if any(len(np.unique(side)) < len(side) for side in keys):
        by = "index"
        keys = _array(first.indexes), _array(other.indexes)
    _, left, right = np.intersect1d(*keys, return_indices=True)
    places = ((first, left), (other, right))
    texts = [_array(side.texts)[chosen] for side, chosen in places]
    tokens = [_array(side.tokens)[chosen].astype(np.int64) for side, chosen in places]
    loops = [int(_array(side.loops)[chosen].sum()) for side, chosen in places]
    decoded = [int(np.maximum(counts - 1, 0).sum()) for counts in tokens]
    depths = [total / count if count else None for total, count in zip(loops, decoded, strict=True)]
    return Comparison(
        joined=len(left),
        joined_by=by,
        same_text=int((texts[0] == texts[1]).sum()),
        tokens=(int(tokens[0].sum()), int(tokens[1].sum())),
        mean_depth=(depths[0], depths[1]),
    )


def _array(values: array) -> np.ndarray:
    return np.frombuffer(values, values.typecode) if values else np.empty(0, values.typecode)
