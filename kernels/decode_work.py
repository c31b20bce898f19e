"""The work list of a decode step's attention: which part of whose context each program takes.

M entries of a step, R rows of state. An entry is cut every ``split`` positions counted from 0 into
parts; an item is one (entry, part). Whole parts come first in the list and the shorter last parts
of the entries after them, which lets the programs that walk it end together. The list is made on
the device, once a loop step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

ITEM_FIELDS = 8  # entry, part, context, row, plane, prompt length, entry's first item and items
BUILD_BLOCK = 1024  # entries read at a time
STEP_PARTS = 64  # times the key/value heads, they keep every multiprocessor busy


@dataclass(frozen=True)
class DecodeWork:
    """The work list of one step and the room for partial results; all tensors keep their place.

    The counters in ``arrivals`` are zero between launches. One ``DecodeWork`` serves one stream.
    """

    split: int
    max_split: int
    items: Tensor  # int32 [items, ITEM_FIELDS]
    entries: Tensor  # int32 [M, 2]: index of the first item, number of items
    counts: Tensor  # int32 [3]: items in the list, items the contexts ask for, split of the step
    partial_out: Tensor  # float32 [items, H, D]
    partial_lse: Tensor  # float32 [items, H], base 2
    arrivals: Tensor  # int32 [M, G]

    @classmethod
    def allocate(
        cls,
        max_entries: int,
        max_items: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        split: int = 256,
        max_split: int | None = None,
    ) -> DecodeWork:
        """Room for ``max_entries`` entries of ``max_items`` items together (``max_items()``).

        With ``max_split``, each step takes the power of two times ``split`` up to it that gives
        about ``STEP_PARTS`` parts in all; without, results never depend on who shares the step.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            split,
            max_split or split,
            items=zeros(max_items, ITEM_FIELDS),
            entries=zeros(max_entries, 2),
            counts=zeros(3),
            partial_out=zeros(max_items, heads, head_dim, dtype=torch.float32),
            partial_lse=zeros(max_items, heads, dtype=torch.float32),
            arrivals=zeros(max_entries, kv_heads),
        )

    @staticmethod
    def max_items(
        max_entries: int, max_positions: int, split: int = 256, max_split: int | None = None
    ) -> int:
        """Items that contexts of ``max_positions`` positions together can ask for at most."""
        parts = max_positions // (max_split or split)
        if max_split is not None:
            parts = max(parts, 2 * STEP_PARTS)
        return max_entries + parts


def build_decode_work(
    work: DecodeWork,
    rows: Tensor,
    planes: Tensor,
    contexts: Tensor,
    prompt_lengths: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """Fill the work list for one loop step.

    Args:
        rows: int32 [M], the row of each entry.
        planes: int32 [M], the plane (0-based loop) that it reads.
        contexts: int32 [M], it attends to positions 0..context-1; 0 marks an unused entry, whose
            row and plane may be anything.
        prompt_lengths: int32 [R].
        overlap: as in ``overlap.py``.

    Contexts that ask for more items than ``work`` has room for leave an empty list, and
    ``work.counts[1]`` says how many they wanted.
    """
    entries = contexts.shape[0]
    if entries > work.entries.shape[0]:
        raise ValueError(f"{entries} entries; this work list holds {work.entries.shape[0]}")
    _build_kernel[(entries,)](
        rows,
        planes,
        contexts,
        prompt_lengths,
        work.items,
        work.entries,
        work.counts,
        entries,
        work.items.shape[0],
        work.split,
        work.max_split,
        FIELDS=ITEM_FIELDS,
        BLOCK=BUILD_BLOCK,
        CHUNK=128,
        STEP_PARTS=STEP_PARTS,
        num_warps=4,
        **overlapped(overlap),
    )


@triton.jit(do_not_specialize=["size", "capacity", "min_split", "max_split"])
def _build_kernel(
    rows,  # int32 [M]
    planes,  # int32 [M]
    contexts,  # int32 [M]
    prompt_lengths,  # int32 [R]
    items,  # int32 [capacity, FIELDS]
    entries,  # int32 [M, 2]
    counts,  # int32 [2]
    size,
    capacity,
    min_split,
    max_split,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program an entry: each adds up the contexts before its own, then writes its items."""
    join(OVERLAP)
    entry = tl.program_id(0)
    context = tl.load(contexts + entry)
    positions = 0
    for start in range(0, size, BLOCK):
        others = start + tl.arange(0, BLOCK)
        positions += tl.sum(tl.load(contexts + others, mask=others < size, other=0))
    split = min_split
    while (split * 2 <= max_split) & (split * 2 * STEP_PARTS <= positions):
        split *= 2
    whole_before = 0
    short_before = 0
    whole_total = 0
    short_total = 0
    for start in range(0, size, BLOCK):
        others = start + tl.arange(0, BLOCK)
        lengths = tl.load(contexts + others, mask=others < size, other=0)
        whole = lengths // split
        short = (lengths % split > 0).to(tl.int32)
        whole_before += tl.sum(tl.where(others < entry, whole, 0))
        short_before += tl.sum(tl.where(others < entry, short, 0))
        whole_total += tl.sum(whole)
        short_total += tl.sum(short)
    total = whole_total + short_total
    fits = total <= capacity
    if entry == 0:
        tl.store(counts, tl.where(fits, total, 0))
        tl.store(counts + 1, total)
        tl.store(counts + 2, split)

    whole_own = context // split
    number = tl.where(fits, (context + split - 1) // split, 0)
    index = whole_before + short_before
    tl.store(entries + entry * 2, index)
    tl.store(entries + entry * 2 + 1, number)
    if number > 0:
        row = tl.load(rows + entry)
        plane = tl.load(planes + entry)
        prompt_length = tl.load(prompt_lengths + row)
        for start in range(0, number, CHUNK):
            part = start + tl.arange(0, CHUNK)
            mask = part < number
            place = tl.where(part < whole_own, whole_before + part, whole_total + short_before)
            item = items + place * FIELDS
            tl.store(item, entry, mask=mask)
            tl.store(item + 1, part, mask=mask)
            tl.store(item + 2, context, mask=mask)
            tl.store(item + 3, row, mask=mask)
            tl.store(item + 4, plane, mask=mask)
            tl.store(item + 5, prompt_length, mask=mask)
            tl.store(item + 6, index, mask=mask)
            tl.store(item + 7, number, mask=mask)
