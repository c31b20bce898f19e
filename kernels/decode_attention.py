"""Paged attention of one decode step: split over the context, merged in order, one query a row.

Shapes: M entries of a step, R rows of state, L loops, H query heads, G key/value heads, D head
dimension, B slots a block. ``keys`` and ``values`` of one layer are [blocks, B, G, D] views with
any strides for the first three dimensions, so that both [block, slot, head, dim] and
[block, head, slot, dim] memory can stand behind them.

Position p of row r in plane k lies, below the row's prompt length, in block
``prompt_blocks[r, k, p // B]`` at offset ``p % B``, and beyond it in slot
``decode_slots[r, k, p - prompt_lengths[r]]``; slot s is block ``s // B``, offset ``s % B``.

The work of a step is a list of items (entry, part), made once a loop step by ``decode_work.py`` and
walked in every layer. An entry's parts are merged in order, so its result has the same bits
whichever other entries share the launch and however many programs walk the list. Each program
takes every ``programs``-th pair (item, key/value head).

Within an item a program reads tiles of ``tile`` positions. With one query head a key/value head
it keeps a softmax of its own for every lane of the tile (running maximum, sum and weighted
values) and joins the lanes once at the end: inside the loop no thread waits for another warp, the
next tile is loaded into registers while one is computed, and products are elementwise FP32. With
several query heads they are padded to 16 rows of a matrix product, so that keys and values are
read once for the whole group.

Choices of the launch. ``split``, ``tile`` and ``num_warps`` decide the order of additions and so
belong to a model where results must not depend on the batch; the others never change a bit. Times
are of one layer in microseconds, BF16, D = 128, 16 heads, 15/16 of the context in prompt blocks and
the rest in token slots, measured on one H200 (torch 2.11, Triton 3.6, 2026-12-01; all of them in
docs/performance/tune.json, made by tests/gpu/tune.py) with the fused merge and 16 programs a
multiprocessor:

| split, tile, warps | 1 x 256 | 8 x 1,088 | 32 x 1,088 | 128 x 1,088 | 256 x 256 | 1 x 16,384 | 16 x 16,384 |
|---|---|---|---|---|---|---|---|
| 64, 16, 2 | **7.2** | 28.9 | 92 | 327 | 155 | 55 | 602 |
| 128, 16, 2 | 10.7 | **26.7** | 80 | 288 | 145 | 46 | 552 |
| 256, 16, 2 | 15.6 | 25.6 | 76 | 278 | 128 | **39.4** | 513 |
| 512, 16, 2 | | 35.6 | **72.2** | **268** | **128** | 42.4 | **489** |
| 1,024, 16, 2 | | 58.7 | 82 | 264 | | 67.7 | 483 |
| 64, 32, 4 | 6.4 | 31.9 | 98 | 366 | 184 | 67 | 676 |
| 256, 32, 4 | 9.5 | 26.0 | 80 | 283 | 131 | 44 | 511 |

Bold is the best split up to 512; a step takes by itself one between ``split`` and ``max_split`` of
its work list. One that must not follow the batch is best at 256. The table was made without a limit
on registers (168 a thread, six programs a multiprocessor). With 128 of them (``decode_registers``)
eight fit and nothing spills; within the engine, at contexts of about 1,050, a layer then takes

| registers | 8 rows | 32 | 128 | 128, parts of 1,024 |
|---|---|---|---|---|
| 168 | 29.4 | 88.9 | 286 | |
| 128 | 23.6 | 69.6 | 260 | 256 |

(docs/performance/engine-experiments.txt). The defaults are tile 16 and 2 warps (``decode_tile``),
16 programs a multiprocessor (``decode_programs``), the merge fused into the last program of an
entry; a second kernel merges about 1 us a layer slower at few rows. With several query heads a
key/value head: 4 warps and 3 stages, not measured.
"""  # noqa: E501

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_parts import attend_group, attend_one, merge_parts
from .decode_work import ITEM_FIELDS, DecodeWork
from .overlap import join, overlapped

LOG2_E = 1.4426950408889634
MERGE_TILE = 16  # parts merged at a time


def decode_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Positions a tile, from the bytes of a padded head alone."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return max(16, min(128, 4096 // row_bytes))


def decode_registers(head_dim: int, dtype: torch.dtype, group: int) -> int | None:
    """Registers a thread may take: eight programs a multiprocessor, where nothing spills."""
    measured = group == 1 and dtype.itemsize == 2 and 64 < head_dim <= 128
    return 128 if measured else None


def decode_programs(work: DecodeWork, device: torch.device) -> int:
    """Programs that walk the list, no more than it has units for.

    Some times more than run at once, for the hardware to balance.
    """
    units = work.items.shape[0] * work.arrivals.shape[1]
    if device.type != "cuda":
        return min(units, 8)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(units, processors * 16)


def decode_attention(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_blocks: Tensor,
    decode_slots: Tensor,
    work: DecodeWork,
    *,
    cos_sin: Tensor | None = None,
    scale: float | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    max_registers: int | None = None,
    programs: int | None = None,
    fused_merge: bool = True,
    merge: bool = True,
    overlap: bool = False,
) -> None:
    """Attention of one query an entry over its positions 0..context-1.

    Allocates nothing and never waits for the device, so a CUDA graph can hold it. Entries whose
    context is 0 keep what ``out`` held.

    With ``cos_sin``, RoPE and the write of the newest keys and values join in (one query head a
    key/value head only): ``queries`` is then the product [M, 3H, D] of queries, keys and values
    before their rotation, and position context-1 of each entry is rotated, stored in its slot and
    attended to from registers.

    Args:
        out: [M, H, D], dtype of ``queries``; last dimension contiguous.
        queries: [M, H, D], FP32, FP16 or BF16; last dimension contiguous.
        keys, values: [blocks, B, G, D] of one layer, same strides, last dimension contiguous.
        prompt_blocks: int32 [R, L, blocks of a row], last dimension contiguous.
        decode_slots: int32 [R, L, generated positions], last dimension contiguous.
        work: filled by ``build_decode_work`` from M contexts.
        cos_sin: FP32 [positions, D], the cosines of the D/2 frequencies, then their sines.
        scale: factor of the scores, D ** -0.5 where None.
        tile, num_warps, num_stages, max_registers, programs: choices of the launch (table above).
        fused_merge: the last program of an entry merges it; False: a second kernel does.
        merge: False promises that no context exceeds ``work.split``: no merge kernel is launched.
        overlap: as in ``overlap.py``; the kernel before must be neither what made the work list
            nor, with ``cos_sin``, what wrote older keys and values.
    """
    entries, heads, head_dim = out.shape
    _, block_size, kv_heads, _ = keys.shape
    if queries.shape[1] != (heads if cos_sin is None else 3 * heads):
        raise ValueError(f"{queries.shape[1]} heads of queries do not go with {heads} of out")
    new_keys, new_values = keys, values
    if keys.stride() != values.stride():
        raise ValueError(f"strides of keys {keys.stride()} and values {values.stride()} differ")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    group = heads // kv_heads
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries are {queries.dtype}, the cache is {keys.dtype}")
    tile = tile or decode_tile(head_dim, keys.dtype)
    num_stages = num_stages or (1 if group == 1 else 3)
    num_warps = num_warps or (2 if group == 1 else 4)
    max_registers = max_registers or decode_registers(head_dim, keys.dtype, group)
    if group == 1:
        if head_dim % 2:
            raise ValueError(f"a head dimension of {head_dim} is odd")
        # Words of two elements: a 16-bit value carried around the loop would take a register of
        # its own and wait for its load at once, to be cut out of it.
        word = torch.int64 if keys.dtype == torch.float32 else torch.int32
        keys, values = keys.view(word), values.view(word)
    stride_block, stride_slot, stride_head, _ = keys.stride()
    if scale is None:
        scale = head_dim**-0.5
    head_dim_padded = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(programs or decode_programs(work, queries.device),)](
        out,
        queries,
        keys,
        values,
        prompt_blocks,
        decode_slots,
        work.items,
        work.counts,
        work.partial_out,
        work.partial_lse,
        work.arrivals,
        new_keys,
        new_values,
        cos_sin,
        scale * LOG2_E,
        out.stride(0),
        out.stride(1),
        queries.stride(0),
        queries.stride(1),
        stride_block,
        stride_slot,
        stride_head,
        prompt_blocks.stride(0),
        prompt_blocks.stride(1),
        decode_slots.stride(0),
        decode_slots.stride(1),
        G=kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        D_PADDED=head_dim_padded,
        B=block_size,
        FLAT=stride_block == block_size * stride_slot,
        ALIGNED=_power_of_2_in(stride_block, stride_slot, stride_head),
        TILE=tile,
        STAGES=num_stages,
        FUSED_MERGE=fused_merge and merge,
        MERGE_TILE=MERGE_TILE,
        FIELDS=ITEM_FIELDS,
        # The interpreter multiplies BF16 matrices as if they were integers.
        UPCAST=not queries.is_cuda,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=max_registers,
        **overlapped(overlap),
    )
    if merge and not fused_merge:
        _merge_kernel[(entries, kv_heads)](
            out,
            work.entries,
            work.partial_out,
            work.partial_lse,
            out.stride(0),
            out.stride(1),
            H=heads,
            GROUP=group,
            D=head_dim,
            D_PADDED=head_dim_padded,
            MERGE_TILE=MERGE_TILE,
            num_warps=4,
        )


def _power_of_2_in(*numbers: int) -> int:
    """The largest power of two, 16 at most, that divides all of them."""
    return math.gcd(16, *numbers)


@triton.jit
def _decode_kernel(
    out,  # [M, H, D]
    queries,  # [M, H, D]
    keys,  # [blocks, B, G, D]
    values,  # [blocks, B, G, D]
    prompt_blocks,  # int32 [R, L, blocks of a row]
    decode_slots,  # int32 [R, L, generated positions]
    items,  # int32 [items, FIELDS]
    counts,  # int32 [3]
    partial_out,  # float32 [items, H, D]
    partial_lse,  # float32 [items, H]
    arrivals,  # int32 [M, G]
    new_keys,  # [blocks, B, G, D], by elements
    new_values,  # [blocks, B, G, D], by elements
    cos_sin,  # float32 [positions, D], or None
    scale,
    out_stride_entry,
    out_stride_head,
    query_stride_entry,
    query_stride_head,
    stride_block,
    stride_slot,
    stride_head,
    blocks_stride_row,
    blocks_stride_plane,
    slots_stride_row,
    slots_stride_plane,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    B: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FUSED_MERGE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    H: tl.constexpr = G * GROUP
    units = tl.load(counts) * G
    split = tl.load(counts + 2)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = items + (unit // G) * FIELDS
        kv_head = unit % G
        entry = tl.load(item)
        part = tl.load(item + 1)
        first = part * split
        end = tl.minimum(first + split, tl.load(item + 2))
        row = tl.load(item + 3).to(tl.int64)
        plane = tl.load(item + 4)
        prompt_length = tl.load(item + 5)
        index = tl.load(item + 6)
        number = tl.load(item + 7)
        blocks = prompt_blocks + row * blocks_stride_row + plane * blocks_stride_plane
        slots = decode_slots + row * slots_stride_row + plane * slots_stride_plane
        head_offset = kv_head.to(tl.int64) * stride_head
        query = queries + entry.to(tl.int64) * query_stride_entry
        query += kv_head * GROUP * query_stride_head
        target = out + entry.to(tl.int64) * out_stride_entry + kv_head * GROUP * out_stride_head
        partial = (index + part).to(tl.int64) * H + kv_head * GROUP
        dims = tl.arange(0, D_PADDED)

        if GROUP == 1:
            even, odd, lse = attend_one(
                query,
                query_stride_head * H,
                keys,
                values,
                new_keys,
                new_values,
                cos_sin,
                head_offset,
                blocks,
                slots,
                prompt_length,
                first,
                end,
                tl.load(item + 2),
                part == number - 1,
                scale,
                stride_block,
                stride_slot,
                D // 2,
                D_PADDED // 2,
                B,
                FLAT,
                ALIGNED,
                TILE,
                STAGES,
                OVERLAP,
            )
            pair = tl.arange(0, D_PADDED // 2)
            if number == 1:
                tl.store(target + 2 * pair, even.to(out.dtype.element_ty), mask=pair < D // 2)
                tl.store(target + 2 * pair + 1, odd.to(out.dtype.element_ty), mask=pair < D // 2)
            else:
                tl.store(partial_out + partial * D + 2 * pair, even, mask=pair < D // 2)
                tl.store(partial_out + partial * D + 2 * pair + 1, odd, mask=pair < D // 2)
                tl.store(partial_lse + partial, lse)
        else:
            join(OVERLAP)
            result, lse = attend_group(
                query,
                query_stride_head,
                keys,
                values,
                head_offset,
                blocks,
                slots,
                prompt_length,
                first,
                end,
                scale,
                stride_block,
                stride_slot,
                GROUP,
                GROUP_PADDED,
                D,
                D_PADDED,
                B,
                FLAT,
                ALIGNED,
                TILE,
                STAGES,
                UPCAST,
            )
            heads = tl.arange(0, GROUP_PADDED)
            mask = (heads < GROUP)[:, None] & (dims < D)[None, :]
            if number == 1:
                to = target + heads[:, None] * out_stride_head + dims[None, :]
                tl.store(to, result.to(out.dtype.element_ty), mask=mask)
            else:
                part_to = partial_out + (partial + heads[:, None]) * D + dims[None, :]
                tl.store(part_to, result, mask=mask)
                tl.store(partial_lse + partial + heads, lse, mask=heads < GROUP)

        if FUSED_MERGE and number > 1:
            # Every thread's partial result is written before the one arrival that tells.
            tl.debug_barrier()
            arrival = arrivals + entry * G + kv_head
            earlier = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            if earlier == number - 1:
                tl.store(arrival, 0)
                merge_parts(
                    target,
                    out_stride_head,
                    partial_out,
                    partial_lse,
                    index,
                    number,
                    kv_head,
                    H,
                    GROUP,
                    D,
                    D_PADDED,
                    MERGE_TILE,
                )
    # A program without work has not joined yet.
    join(OVERLAP)


@triton.jit
def _merge_kernel(
    out,  # [M, H, D]
    entries,  # int32 [M, 2]
    partial_out,  # float32 [items, H, D]
    partial_lse,  # float32 [items, H]
    out_stride_entry,
    out_stride_head,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    number = tl.load(entries + entry * 2 + 1)
    if number > 1:
        merge_parts(
            out + entry.to(tl.int64) * out_stride_entry + kv_head * GROUP * out_stride_head,
            out_stride_head,
            partial_out,
            partial_lse,
            tl.load(entries + entry * 2),
            number,
            kv_head,
            H,
            GROUP,
            D,
            D_PADDED,
            MERGE_TILE,
        )
