"""RoPE of a fused query/key/value product, with the keys and values written into their slots.

A program rotates a few heads of one token in FP32 and rounds once; values pass unchanged.

| heads a program | warps | why (not measured) |
|---|---|---|
| 8 | 4 | 8 values a thread at D = 128; six programs a token of 16 + 2 * 16 heads |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped


@triton.jit
def _rope_store(
    q_out, qkv, keys, values, slots, positions, cos_sin, count,
    heads, kv_heads, head_dim, block_size,
    q_token_stride, q_head_stride, qkv_stride,
    key_block_stride, key_slot_stride, key_head_stride,
    value_block_stride, value_slot_stride, value_head_stride, table_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = head_dim // 2
    slot = tl.load(slots + token).to(tl.int64)
    # Padding may carry any position; it must not read outside the table.
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    column = tl.arange(0, HALF)
    inside = column < half
    cos = tl.load(cos_sin + position * table_stride + column, mask=inside, other=0)[None, :]
    sin = tl.load(cos_sin + position * table_stride + half + column, mask=inside, other=0)[None, :]

    # Slots and positions are older than the product that this kernel follows.
    join(OVERLAP)
    if token >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < heads + 2 * kv_heads)[:, None] & inside[None, :]
    at = qkv + token * qkv_stride + head[:, None] * head_dim + column[None, :]
    a = tl.load(at, mask=real, other=0)
    b = tl.load(at + half, mask=real, other=0)
    a32, b32 = a.to(tl.float32), b.to(tl.float32)
    first = (a32 * cos - b32 * sin).to(a.dtype)
    second = (b32 * cos + a32 * sin).to(a.dtype)

    is_query = real & (head < heads)[:, None]
    to = q_out + token * q_token_stride + head[:, None] * q_head_stride + column[None, :]
    tl.store(to, first, mask=is_query)
    tl.store(to + half, second, mask=is_query)

    stored_heads = tl.where(slot >= 0, kv_heads, 0)
    block, offset = slot // block_size, slot % block_size
    key = (head - heads).to(tl.int64)
    is_key = real & ((key >= 0) & (key < stored_heads))[:, None]
    to = keys + block * key_block_stride + offset * key_slot_stride
    to = to + key[:, None] * key_head_stride + column[None, :]
    tl.store(to, first, mask=is_key)
    tl.store(to + half, second, mask=is_key)

    value = key - kv_heads
    is_value = real & ((value >= 0) & (value < stored_heads))[:, None]
    to = values + block * value_block_stride + offset * value_slot_stride
    to = to + value[:, None] * value_head_stride + column[None, :]
    tl.store(to, a, mask=is_value)
    tl.store(to + half, b, mask=is_value)


def rope_store(
    q_out: Tensor,
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    count: Tensor | None = None,
    heads_per_program: int = 8,
    num_warps: int = 4,
    overlap: bool = False,
) -> None:
    """Rotate queries into ``q_out``, keys into the cache, and copy values into the cache.

    ``q_out`` [T, H, D]; ``qkv`` [T, (H + 2G) * D], queries first; ``keys``, ``values`` of one
    layer, logically [blocks, B, G, D], any strides but 1 in the last dimension; ``slots`` int32 or
    int64 [T], slot s being place ``s % B`` of block ``s // B``, negative for padding, which the
    cache never sees; ``positions`` int32 [T]; ``cos_sin`` FP32 [positions, D], the cosines of the
    D/2 frequencies and then their sines (half-split rotation). Writes into given tensors, allocates
    nothing and never waits for the device; tokens from ``count`` (int32 [1]) on are left alone.
    With ``overlap`` (``overlap.py``), the kernel before must not be what wrote slots or positions.
    """
    tokens, heads, head_dim = q_out.shape
    block_size, kv_heads = keys.shape[1:3]
    all_heads = heads + 2 * kv_heads
    per_program = min(heads_per_program, triton.next_power_of_2(all_heads))
    _rope_store[(tokens, triton.cdiv(all_heads, per_program))](
        q_out, qkv, keys, values, slots, positions, cos_sin, count,
        heads, kv_heads, head_dim, block_size,
        q_out.stride(0), q_out.stride(1), qkv.stride(0),
        *keys.stride()[:3], *values.stride()[:3], cos_sin.stride(0),
        HEADS=per_program,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=num_warps,
        **overlapped(overlap),
    )  # fmt: skip
