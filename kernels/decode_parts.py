"""What a program of the decode attention does with a part of a context, and with all parts.

Names and shapes are those of ``decode_attention.py``, whose kernels call these functions. A part is
positions ``first`` up to ``end`` of one row and plane; scores are base-2 exponents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .overlap import join


@triton.jit
def attend_one(
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
    and sees the newest position, context-1, without reading it from the cache. Without, the kernel
    before may be what writes it: the first tile is loaded ahead only where it lies behind.
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
    written = end
    if OVERLAP and cos_sin is None:
        written = tl.where(first + TILE < context, end, first)
    mask = (first + lanes < written)[:, None] & (pair < PAIRS)[None, :]
    next_k = tl.load(keys + address, mask=mask, other=0)
    next_v = tl.load(values + address, mask=mask, other=0)
    at = _look_up(blocks, slots, first + TILE + lanes, prompt_length, end, B)
    join(OVERLAP)
    if OVERLAP and cos_sin is None and first + TILE >= context:
        mask = (first + lanes < end)[:, None] & (pair < PAIRS)[None, :]
        next_k = tl.load(keys + address, mask=mask, other=0)
        next_v = tl.load(values + address, mask=mask, other=0)
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
def attend_group(
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
def merge_parts(
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
