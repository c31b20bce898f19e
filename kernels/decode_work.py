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
SPLIT_STEP = 16  # positions; splits are multiples of it
RESIDENT = 8  # programs of the decode attention that a multiprocessor runs at once


@dataclass(frozen=True)
class DecodeWork:
    """The work list of one step and the room for partial results; all tensors keep their place.

    The counters in ``arrivals`` are zero between launches. One ``DecodeWork`` serves one stream.
    """

    split: int
    max_split: int
    at_once: int
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
        at_once: int = 64,
    ) -> DecodeWork:
        """Room for ``max_entries`` entries of ``max_items`` items together (``max_items()``).

        With ``max_split``, each step takes the split up to it that cuts all contexts into no more
        parts than run ``at_once`` (``parts_at_once``), none much longer than the average; where
        there is none, the largest power of two times ``split`` that makes at least so many.
        Without, results never depend on who shares the step.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            split,
            max_split or split,
            at_once,
            items=zeros(max_items, ITEM_FIELDS),
            entries=zeros(max_entries, 2),
            counts=zeros(3),
            partial_out=zeros(max_items, heads, head_dim, dtype=torch.float32),
            partial_lse=zeros(max_items, heads, dtype=torch.float32),
            arrivals=zeros(max_entries, kv_heads),
        )

    @staticmethod
    def max_items(
        max_entries: int,
        max_positions: int,
        split: int = 256,
        max_split: int | None = None,
        at_once: int = 64,
    ) -> int:
        """Items that contexts of ``max_positions`` positions together can ask for at most."""
        parts = max_positions // (max_split or split)
        if max_split is not None:
            parts = max(parts, 2 * at_once)
        return max_entries + parts


def parts_at_once(kv_heads: int, device: torch.device) -> int:
    """Parts that the device attends to at the same time, each in every key/value head."""
    if device.type != "cuda":
        return 64
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, processors * RESIDENT // kv_heads)


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
        work.at_once,
        FIELDS=ITEM_FIELDS,
        BLOCK=BUILD_BLOCK,
        CHUNK=128,
        SPLIT_STEP=SPLIT_STEP,
        num_warps=4,
        **overlapped(overlap),
    )


@triton.jit
def _parts(contexts, size, split, BLOCK: tl.constexpr):
    parts = 0
    for start in range(0, size, BLOCK):
        others = start + tl.arange(0, BLOCK)
        lengths = tl.load(contexts + others, mask=others < size, other=0)
        parts += tl.sum((lengths + split - 1) // split)
    return parts


@triton.jit
def _choose_split(
    contexts, size, min_split, max_split, at_once, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    positions = _parts(contexts, size, 1, BLOCK)
    even = tl.maximum(tl.cdiv(tl.cdiv(positions, at_once), STEP) * STEP, min_split)
    # Beyond a quarter more, the longest part costs more than a second round of parts.
    limit = tl.minimum(even + even // 4, max_split)
    split = even
    parts = _parts(contexts, size, split, BLOCK)
    while (parts > at_once) & (split + STEP <= limit):
        split += STEP
        parts = _parts(contexts, size, split, BLOCK)
    if (parts > at_once) | (split > max_split):
        split = min_split
        while (split * 2 <= max_split) & (split * 2 * at_once <= positions):
            split *= 2
    return split


@triton.jit(do_not_specialize=["size", "capacity", "min_split", "max_split", "at_once"])
def _build_kernel(
    rows,  # int32 [M]
    planes,  # int32 [M]
    contexts,  # int32 [M]
    prompt_lengths,  # int32 [R]
    items,  # int32 [capacity, FIELDS]
    entries,  # int32 [M, 2]
    counts,  # int32 [3]
    size,
    capacity,
    min_split,
    max_split,
    at_once,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program an entry: each adds up the contexts before its own, then writes its items."""
    join(OVERLAP)
    entry = tl.program_id(0)
    context = tl.load(contexts + entry)
    split = _choose_split(contexts, size, min_split, max_split, at_once, BLOCK, SPLIT_STEP)
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
