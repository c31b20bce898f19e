"""Causal paged attention of packed prompt chunks: tiles of queries against their rows' own history.

Shapes: T packed prompt tokens, R rows of state, L loops, H query heads, G key/value heads, D head
dimension, B slots a block. ``keys`` and ``values`` of one layer are [blocks, B, G, D] views with
any strides for the first three dimensions; position p of row r in plane k lies in block
``prompt_blocks[r, k, p // B]`` at offset ``p % B``. Keys and values of the chunk itself are
written before.

A chunk is cut into tiles of consecutive queries by ``prefill_tiles`` on the host; one program takes
one tile of one head. Key tiles start at position 0 and have a fixed size. Those that every query
of the tile sees come first and need no mask, those on the diagonal follow. Which tile a query
falls into changes where its masked part begins, not what is added in which order; on an H200 its
last bits still differ, as the compiler contracts the two parts' products and sums differently.
With ``PrefillConfig.masks_all`` they do not (tests/gpu/test_validate_gpu.py: BF16 with the choice
below at D = 128, and through the engine at D = 64).
FP32 is exact (no TF32); FP16 and BF16 multiply on tensor cores and accumulate in FP32, the weights
rounded to the cache's dtype.

Every position looks its block up by itself: neighbours in a block read the same table entry from
the first-level cache, any B works, and the entries of the next key tile are loaded while the
current one is computed.

Choices of the launch, ``prefill_config(dtype, head_dim)``.

Measured on one H200 (2026-12-02, docs/performance/engine-experiments-3.txt): 4,096 tokens of four
prompts in 63 us a layer (271 TFLOP/s), 4,096 at position 12,288 in 1,007 us (478 TFLOP/s), both the
best of the 19 choices that fit. With at most 128 registers a thread two programs fit a
multiprocessor, and one multiplies while the other exponentiates; without the limit the same tiles
take 84 and 1,557 us.

| dtype | D padded | block_m | block_n | num_warps | num_stages | registers | measured |
|---|---|---|---|---|---|---|---|
| BF16, FP16 | up to 128 | 128 | 64 | 8 | 2 | 128 | above |
| BF16, FP16 | 256 | 128 | 32 | 8 | 3 | | not measured |
| FP32 | up to 64 | 64 | 32 | 8 | 1 | | not measured |
| FP32 | 128 | 32 | 32 | 8 | 1 | | not measured |
| FP32 | 256 | 32 | 16 | 8 | 1 | | not measured |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
TILE_FIELDS = 4  # row, first packed token, its position, tokens


@dataclass(frozen=True)
class PrefillConfig:
    """Queries and keys a tile, and how a program runs them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor
    masks_all: bool = False  # mask tiles that need none: a query's bits are those of any other tile


def prefill_config(dtype: torch.dtype, head_dim: int) -> PrefillConfig:
    """The default choice (table above)."""
    if dtype != torch.float32 and head_dim <= 128:
        return PrefillConfig(128, 64, 8, 2, max_registers=128)
    if dtype != torch.float32:
        return PrefillConfig(128, 32, 8, 3)
    if head_dim <= 64:
        return PrefillConfig(64, 32, 8, 1)
    return PrefillConfig(32, 32 if head_dim <= 128 else 16, 8, 1)


def prefill_tiles(
    segments: Iterable[tuple[int, int, int]], block_m: int
) -> list[tuple[int, int, int, int]]:
    """Tiles (row, first packed token, its position, tokens) of segments packed one after another.

    ``segments`` are (row, start position, length). Longest contexts come first: programs start in
    this order, and a short tail lets them end together.
    """
    tiles = []
    packed = 0
    for row, start, length in segments:
        for done in range(0, length, block_m):
            tiles.append((row, packed + done, start + done, min(block_m, length - done)))
        packed += length
    return sorted(tiles, key=lambda tile: tile[2] + tile[3], reverse=True)


def prefill_attention(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    plane: int,
    prompt_blocks: Tensor,
    *,
    scale: float | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of packed queries over positions 0..own of their rows in one plane.

    Args:
        out: [T, H, D], dtype of ``queries``; last dimension contiguous.
        queries: [T, H, D], FP32, FP16 or BF16; last dimension contiguous.
        keys, values: [blocks, B, G, D] of one layer in the dtype of ``queries``, same strides,
            last dimension contiguous.
        tiles: int32 [tiles, TILE_FIELDS] of ``prefill_tiles`` for ``config.block_m``, and any
            number of zeros behind them.
        plane: the 0-based loop whose keys and values are read.
        prompt_blocks: int32 [R, L, blocks of a row], last dimension contiguous.
        scale: factor of the scores, D ** -0.5 where None.
        config: ``prefill_config(queries.dtype, D)`` where None.
    """
    _, heads, head_dim = queries.shape
    _, block_size, kv_heads, _ = keys.shape
    if keys.stride() != values.stride():
        raise ValueError(f"strides of keys {keys.stride()} and values {values.stride()} differ")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries are {queries.dtype}, the cache is {keys.dtype}")
    if not len(tiles):
        return
    if scale is None:
        scale = head_dim**-0.5
    config = config or prefill_config(queries.dtype, head_dim)
    stride_block, stride_slot, stride_head, _ = keys.stride()
    # Heads go first, so that all heads of the longest tiles start before any shorter tile.
    _prefill_kernel[(heads, len(tiles))](
        out,
        queries,
        keys,
        values,
        tiles,
        prompt_blocks,
        plane,
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
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PADDED=max(16, triton.next_power_of_2(head_dim)),
        B=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        FIELDS=TILE_FIELDS,
        # The interpreter multiplies BF16 matrices as if they were integers.
        UPCAST=not queries.is_cuda,
        MASKS_ALL=config.masks_all,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )


# A plane of 0 or 1 must not compile a kernel of its own.
@triton.jit(do_not_specialize=["plane"])
def _prefill_kernel(
    out,  # [T, H, D]
    queries,  # [T, H, D]
    keys,  # [blocks, B, G, D]
    values,  # [blocks, B, G, D]
    tiles,  # int32 [tiles, FIELDS]
    prompt_blocks,  # int32 [R, L, blocks of a row]
    plane,
    scale,
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    stride_block: tl.constexpr,
    stride_slot: tl.constexpr,
    stride_head,
    blocks_stride_row,
    blocks_stride_plane,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKS_ALL: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * FIELDS
    row = tl.load(tile).to(tl.int64)
    token = tl.load(tile + 1).to(tl.int64)
    position = tl.load(tile + 2)
    tokens = tl.load(tile + 3)
    if tokens == 0:  # padding of the list
        return
    kv_offset = (head // GROUP).to(tl.int64) * stride_head
    blocks = prompt_blocks + row * blocks_stride_row + plane * blocks_stride_plane

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_PADDED)
    mask = (members < tokens)[:, None] & (dims < D)[None, :]
    source = queries + token * query_stride_token + head * query_stride_head
    q = tl.load(
        source + members[:, None] * query_stride_token + dims[None, :], mask=mask, other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    own = position + members
    end = position + tokens
    # Keys below ``clear`` are seen by every query of the tile.
    clear = 0 if MASKS_ALL else (position + 1) // BLOCK_N * BLOCK_N

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    if not MASKS_ALL:
        top, total, acc = _attend(
            top,
            total,
            acc,
            q,
            keys + kv_offset,
            values + kv_offset,
            blocks,
            own,
            0,
            clear,
            end,
            scale,
            stride_block,
            stride_slot,
            D,
            D_PADDED,
            B,
            BLOCK_N,
            False,
            UPCAST,
        )
    top, total, acc = _attend(
        top,
        total,
        acc,
        q,
        keys + kv_offset,
        values + kv_offset,
        blocks,
        own,
        clear,
        end,
        end,
        scale,
        stride_block,
        stride_slot,
        D,
        D_PADDED,
        B,
        BLOCK_N,
        True,
        UPCAST,
    )
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    target = out + token * out_stride_token + head * out_stride_head
    tl.store(target + members[:, None] * out_stride_token + dims[None, :], result, mask=mask)


@triton.jit
def _attend(
    top,
    total,
    acc,
    q,
    keys,
    values,
    blocks,
    own,
    begin,
    stop,
    end,
    scale,
    stride_block: tl.constexpr,
    stride_slot: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One online-softmax pass over the key tiles from ``begin`` to ``stop``."""
    lanes = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D_PADDED)
    at = begin + lanes
    block = tl.load(blocks + at // B, mask=at < end, other=0)
    for start in range(begin, stop, BLOCK_N):
        at = start + lanes
        address = block.to(tl.int64) * stride_block + (at % B).to(tl.int64) * stride_slot
        address = address[:, None] + dims[None, :]
        if MASKED:
            mask = (at < end)[:, None] & (dims < D)[None, :]
            k = tl.load(keys + address, mask=mask, other=0.0)
            v = tl.load(values + address, mask=mask, other=0.0)
        elif D == D_PADDED:
            k = tl.load(keys + address)
            v = tl.load(values + address)
        else:
            k = tl.load(keys + address, mask=(dims < D)[None, :], other=0.0)
            v = tl.load(values + address, mask=(dims < D)[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # Table entries of the next tile are under way while this one is computed.
        following = at + BLOCK_N
        block = tl.load(blocks + following // B, mask=following < end, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            # Key 0 is in the first tile of every query, so no row stays without a maximum.
            scores = tl.where(own[:, None] >= at[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(scores * scale - new_top[:, None])
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc
