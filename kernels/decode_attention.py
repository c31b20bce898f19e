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
            even, odd, lse = _attend_one(
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
            result, lse = _attend_group(
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
                _merge(
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
def _attend_one(
    query,
    heads_stride,
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
    context,
    last,
    scale,
    stride_block,
    stride_slot,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    B: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One query head over positions ``first`` to ``end``.

    ``keys`` and ``values`` are words of two elements. With ``cos_sin``, the ``last`` part stores
    and sees the newest position, context-1, without reading it from the cache.
    Returns the even and the odd elements of the result, FP32 [PAIRS_PADDED] each, and the base-2
    logarithm of the sum of exponentials.
    """
    pair = tl.arange(0, PAIRS_PADDED)
    lanes = tl.arange(0, TILE)
    position = context - 1
    if cos_sin is not None:
        end -= last.to(tl.int32)
    # A softmax a lane: lane n sees positions first + n, first + n + TILE, ...
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc_even = tl.zeros([TILE, PAIRS_PADDED], tl.float32)
    acc_odd = tl.zeros([TILE, PAIRS_PADDED], tl.float32)
    at = _look_up(blocks, slots, first + lanes, prompt_length, end, B)
    address = _offset(at, head_offset, stride_block, stride_slot, B, FLAT, ALIGNED)
    address = address[:, None] + pair[None, :]
    mask = (first + lanes < end)[:, None] & (pair < PAIRS)[None, :]
    next_k = tl.load(keys + address, mask=mask, other=0)
    next_v = tl.load(values + address, mask=mask, other=0)
    at = _look_up(blocks, slots, first + TILE + lanes, prompt_length, end, B)
    join(OVERLAP)
    kind = query.dtype.element_ty
    if cos_sin is None:
        q_even = tl.load(query + 2 * pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
        q_odd = tl.load(query + 2 * pair + 1, mask=pair < PAIRS, other=0.0).to(tl.float32)
    else:
        angles = cos_sin + position.to(tl.int64) * (2 * PAIRS)
        q_even = _rotated(query, angles, 2 * pair, PAIRS).to(kind).to(tl.float32)
        q_odd = _rotated(query, angles, 2 * pair + 1, PAIRS).to(kind).to(tl.float32)
    q_even *= scale
    q_odd *= scale
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        k = next_k
        v = next_v
        # The next tile is under way while this one is computed, and the table entries of the one
        # after it too.
        address = _offset(at, head_offset, stride_block, stride_slot, B, FLAT, ALIGNED)
        address = address[:, None] + pair[None, :]
        mask = (start + TILE + lanes < end)[:, None] & (pair < PAIRS)[None, :]
        next_k = tl.load(keys + address, mask=mask, other=0)
        next_v = tl.load(values + address, mask=mask, other=0)
        at = _look_up(blocks, slots, start + 2 * TILE + lanes, prompt_length, end, B)

        k_even, k_odd = _unpack(k, query.dtype.element_ty)
        scores = tl.sum(k_even * q_even[None, :] + k_odd * q_odd[None, :], 1)
        scores = tl.where(start + lanes < end, scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        # A lane that has seen nothing yet must not compute inf - inf.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - shift)
        weight = tl.exp2(scores - shift)
        total = total * keep + weight
        v_even, v_odd = _unpack(v, query.dtype.element_ty)
        acc_even = acc_even * keep[:, None] + weight[:, None] * v_even
        acc_odd = acc_odd * keep[:, None] + weight[:, None] * v_odd
        top = new_top
    if cos_sin is None:
        all_top = tl.max(top, 0)
        keep = tl.exp2(top - all_top)
        all_total = tl.sum(total * keep, 0)
        even = tl.sum(acc_even * keep[:, None], 0)
        odd = tl.sum(acc_odd * keep[:, None], 0)
    else:
        new_score = tl.full([], float("-inf"), tl.float32)
        new_even = tl.zeros([PAIRS_PADDED], tl.float32)
        new_odd = tl.zeros([PAIRS_PADDED], tl.float32)
        if last:
            key = query + heads_stride
            value = key + heads_stride
            k_even = _rotated(key, angles, 2 * pair, PAIRS).to(kind)
            k_odd = _rotated(key, angles, 2 * pair + 1, PAIRS).to(kind)
            v_even = tl.load(value + 2 * pair, mask=pair < PAIRS, other=0.0)
            v_odd = tl.load(value + 2 * pair + 1, mask=pair < PAIRS, other=0.0)
            slot = _look_up(blocks, slots, position, prompt_length, position + 1, B)
            # Strides count words of two elements.
            to = 2 * _offset(slot, head_offset, stride_block, stride_slot, B, FLAT, ALIGNED)
            to += 2 * pair
            tl.store(new_keys + to, k_even, mask=pair < PAIRS)
            tl.store(new_keys + to + 1, k_odd, mask=pair < PAIRS)
            tl.store(new_values + to, v_even, mask=pair < PAIRS)
            tl.store(new_values + to + 1, v_odd, mask=pair < PAIRS)
            new_score = tl.sum(k_even.to(tl.float32) * q_even + k_odd.to(tl.float32) * q_odd, 0)
            new_even = v_even.to(tl.float32)
            new_odd = v_odd.to(tl.float32)
        all_top = tl.maximum(tl.max(top, 0), new_score)
        keep = tl.exp2(top - all_top)
        weight_new = tl.exp2(new_score - all_top)
        all_total = tl.sum(total * keep, 0) + weight_new
        even = tl.sum(acc_even * keep[:, None], 0) + weight_new * new_even
        odd = tl.sum(acc_odd * keep[:, None], 0) + weight_new * new_odd
    return even / all_total, odd / all_total, all_top + tl.log2(all_total)


@triton.jit
def _rotated(x, angles, index, HALF: tl.constexpr):
    """RoPE, half-split, of the elements ``index`` of a head ``x``, FP32; 0 from 2 * HALF on."""
    inside = index < 2 * HALF
    frequency = tl.where(index < HALF, index, index - HALF)
    cos = tl.load(angles + frequency, mask=inside, other=0.0)
    sin = tl.load(angles + HALF + frequency, mask=inside, other=0.0)
    own = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    partner = tl.where(index < HALF, index + HALF, index - HALF)
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    return own * cos + tl.where(index < HALF, -other, other) * sin


@triton.jit
def _unpack(words, KIND: tl.constexpr):
    """The even and odd elements, FP32, of words that hold two elements of ``KIND`` each."""
    if KIND == tl.bfloat16:  # noqa: SIM300
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    elif KIND == tl.float16:  # noqa: SIM300
        even = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = words.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _attend_group(
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
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    B: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The query heads of one key/value head -> (FP32 [GROUP_PADDED, D_PADDED], [GROUP_PADDED])."""
    heads = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, D_PADDED)
    lanes = tl.arange(0, TILE)
    at_query = heads[:, None] * query_stride_head + dims[None, :]
    is_query = (heads < GROUP)[:, None] & (dims < D)[None, :]
    q = tl.load(query + at_query, mask=is_query, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32)
    at = _look_up(blocks, slots, first + lanes, prompt_length, end, B)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        seen = start + lanes < end
        address = _offset(at, head_offset, stride_block, stride_slot, B, FLAT, ALIGNED)
        address = address[:, None] + dims[None, :]
        mask = seen[:, None] & (dims < D)[None, :]
        k = tl.load(keys + address, mask=mask, other=0.0)
        v = tl.load(values + address, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        at = _look_up(blocks, slots, start + TILE + lanes, prompt_length, end, B)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(scores - new_top[:, None])
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def _look_up(blocks, slots, positions, prompt_length, end, B: tl.constexpr):
    """Slots, int32, at ``positions`` of one row and plane; 0 from ``end`` on."""
    prompt = positions < prompt_length
    block = tl.load(blocks + positions // B, mask=prompt & (positions < end), other=0)
    slot = tl.load(slots + (positions - prompt_length), mask=~prompt & (positions < end), other=0)
    return tl.where(prompt, block * B + positions % B, slot)


@triton.jit
def _offset(
    slots,
    head_offset,
    stride_block,
    stride_slot,
    B: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where a head of ``slots`` begins in a layer, int64: a pool may pass 2**31 elements."""
    if FLAT:
        offset = slots.to(tl.int64) * stride_slot + head_offset
    else:
        block = (slots // B).to(tl.int64)
        offset = block * stride_block + (slots % B).to(tl.int64) * stride_slot + head_offset
    return tl.multiple_of(offset, ALIGNED)


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
        _merge(
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


@triton.jit
def _merge(
    target,
    out_stride_head,
    partial_out,
    partial_lse,
    index,
    number,
    kv_head,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    """Join an entry's ``number`` parts from ``index`` on, for the heads of one key/value head."""
    dims = tl.arange(0, D_PADDED)
    lanes = tl.arange(0, MERGE_TILE)
    for member in range(0, GROUP):
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([D_PADDED], tl.float32)
        for start in range(0, number, MERGE_TILE):
            there = start + lanes < number
            part = (index + start + lanes).to(tl.int64) * H + kv_head * GROUP + member
            # Past the first-level cache, which may hold what another multiprocessor replaced.
            lse = tl.load(partial_lse + part, mask=there, other=float("-inf"), cache_modifier=".cg")
            results = tl.load(
                partial_out + part[:, None] * D + dims[None, :],
                mask=there[:, None] & (dims < D)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            keep = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top)
            total = total * keep + tl.sum(weight, 0)
            acc = acc * keep + tl.sum(weight[:, None] * results, 0)
            top = new_top
        result = (acc / total).to(target.dtype.element_ty)
        tl.store(target + member * out_stride_head + dims, result, mask=dims < D)
