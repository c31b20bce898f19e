"""Skinny matrix products, ``out = x @ weight^T`` for few rows of x: as fast as the weights arrive.

The weight's rows are the large operand of the matrix instruction, x's rows the small one, padded to
16. A product with fewer column tiles than keep the machine's memory busy is split over K; the last
program to finish a tile adds the partial sums, always in order of the split, so no launch follows
and the result does not depend on who was last. Tensor-core products accumulate in FP32; FP32
products are exact FP32 (no TF32). Launchers write into given tensors, allocate nothing and never
wait for the device.

**Batch invariance.** A weight has one K tile, one split and one kind of matrix instruction (a
column tile of 64 or more: wgmma on Hopper) for every number of rows, so the bits of a row do not
depend on how many rows share the launch. Column tile, row tile, warps and stages are free.

BF16 and FP16 choices for up to 64 rows, and microseconds of one product by rows, measured on one
H200 (torch 2.11, Triton 3.6, 2026-12-01; docs/performance/tune.json, made by tests/gpu/tune.py).
cuBLAS needs about 9.3 (1 row) to 9.8 (128 rows) for QKV, 6.1 to 6.6 for the output, 13.4 to 15.1
for gate/up without the SiLU, 11.6 to 12.7 for down and 54 to 56 for lm_head.

| N, K | column tile | K tile | split | stages, at most | warps | 1 row | 8 | 32 | 64 |
|---|---|---|---|---|---|---|---|---|---|
| 6144, 2048: QKV | 64 | 128 | 1 | 6 | 4 | | | | |
| the same, split | 64 | 128 | 2 | 3 | 4 | 9.3 | 10.1 | 13.4 | 18.0 |
| 2048, 2048: output, partial sums | 64 | 128 | 4 | 5 | 4 | 4.5 | 4.5 | 4.7 | 5.5 |
| 2 x 5632, 2048: gate/up with SiLU | 2 x 64 | 128 | 1 | 3 | 4 | | | | |
| the same, split | 2 x 64 | 128 | 2 | 3 | 4 | 15.5 | 16.3 | 21.9 | 27.9 |
| 2048, 5632: down, partial sums | 64 | 128 | 4 | 5 | 4 | 7.7 | 7.8 | 8.0 | 8.9 |
| 49152, 2048: lm_head | 128 | 64 | 1 | 3 | 8 | 48.6 | 49.9 | 55.4 | 63.9 |
| others | 64 | 128 | about 264 programs, 8 at most | 4 | 4 | | | | |

QKV and gate/up are not split: in the whole model, where kernels start ahead of the one before, that
takes 15 and 18 us off the 1,640 of a loop step of 24 layers at 8 rows. In the model 4 stages for
the output and down products (tuned alone: 5, as in the table) and 6 for QKV take 26 off 1,510.

Beyond 64 rows the row tile is 128 and the column tile 128 (gated: 64); beyond 128 rows the row
tiles of a column tile run side by side and share its weights in L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

_PROGRAMS = 264  # two a multiprocessor of an H200; fixed, so that the split is the same anywhere


@dataclass(frozen=True)
class Tiles:
    """How a product is cut. ``block_k`` and ``split_k`` are part of the result's bits."""

    block_k: int
    split_k: int
    block_n: int = 64
    stages: int = 4
    warps: int = 4
    block_m: int = 0  # 0: the power of two that holds the rows, from 16 to ``max_block_m``
    max_block_m: int = 128


# (N, K, gated) of 16-bit weights, N being the columns of ``out``.
_TILES = {
    (6144, 2048, False): Tiles(128, 1, stages=6),
    (2048, 2048, False): Tiles(128, 4, stages=4),
    (5632, 2048, True): Tiles(128, 1, stages=3),
    (11264, 2048, False): Tiles(128, 1, stages=6),
    (2048, 5632, False): Tiles(128, 4, stages=4),
    (49152, 2048, False): Tiles(64, 1, block_n=128, stages=3, warps=8),
}


def choose_tiles(rows: int, columns: int, inner: int, gated: bool, dtype: torch.dtype) -> Tiles:
    """The tiles of ``out`` [rows, columns]; ``block_k`` and ``split_k`` never depend on rows."""
    if dtype == torch.float32:
        # FP32 has no matrix instruction: small tiles that fit the registers of its plain products.
        split = min(8, max(1, _PROGRAMS // triton.cdiv(columns, 64)), triton.cdiv(inner, 32))
        return Tiles(32, split, stages=2, max_block_m=32)
    tiles = _TILES.get((columns, inner, gated))
    if tiles is None:
        split = max(1, _PROGRAMS // triton.cdiv(columns, 64))
        tiles = Tiles(128, min(8, split, triton.cdiv(inner, 128)))
    if rows <= 64:
        # Two programs fit a multiprocessor: with more stages a second wave would begin late.
        block_m = max(16, triton.next_power_of_2(rows))
        stage = 2 * tiles.block_k * (tiles.block_n * (2 if gated else 1) + block_m)
        return replace(tiles, stages=max(2, min(tiles.stages, 110 * 1024 // stage)))
    return replace(tiles, block_n=64 if gated else 128, warps=8, stages=3)


def workspace_shape(
    rows: int, columns: int, inner: int, gated: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, int]:
    """(FP32 words, int32 counters) of work space for up to ``rows`` rows of one product.

    Products that do not run at the same time can share both, at the largest sizes.
    """
    split = choose_tiles(rows, columns, inner, gated, dtype).split_k
    if split == 1:
        return 0, 0
    counters = triton.cdiv(columns, 16) * triton.cdiv(rows, 16)
    return split * rows * columns * (2 if gated else 1), counters


@triton.jit
def _store_product(
    out, gate, up, m, n, inside, stride, GATED: tl.constexpr
):  # fmt: skip
    """Store a tile [BLOCK_N, BLOCK_M], or silu(gate) * up, rounded once."""
    y = gate
    if GATED:
        y = gate / (1.0 + tl.exp(-gate)) * up
    at = out + m.to(tl.int64)[None, :] * stride + n[:, None]
    tl.store(at, y.to(out.dtype.element_ty), mask=inside)


# Knowing that 16 divides the columns makes the accesses of sums and results 16 bytes wide.
@triton.jit(do_not_specialize=["rows"])
def _linear(
    out, x, weight, partials, counters, count,
    rows, columns, inner, out_stride, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, FINISH: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # Row tiles are neighbours in launch order: they read the same weights.
    tile_m, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end read the last weight row again, which costs less than a mask.
    weight_row = tl.minimum(n, columns - 1).to(tl.int64)
    gate_at = weight + weight_row[:, None] * weight_stride + k[None, :]
    up_at = gate_at + tl.full([], columns, tl.int64) * weight_stride
    tiles = tl.cdiv(inner, BLOCK_K)
    first = split * tiles // SPLIT_K
    end = (split + 1) * tiles // SPLIT_K
    join(OVERLAP)
    valid = rows
    if count is not None:
        valid = tl.minimum(rows, tl.load(count))
    if tile_m * BLOCK_M >= valid:
        return
    real_m = m < valid
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in range(first, end):
        begin = tile * BLOCK_K
        if EVEN_K:
            w = tl.load(gate_at + begin)
            xs = tl.load(x_at + begin, mask=real_m[None, :], other=0.0)
        else:
            left = inner - begin
            w = tl.load(gate_at + begin, mask=k[None, :] < left, other=0.0)
            xs = tl.load(x_at + begin, mask=real_m[None, :] & (k[:, None] < left), other=0.0)
        if UPCAST:
            w = w.to(tl.float32)
            xs = xs.to(tl.float32)
        gate = tl.dot(w, xs, gate, input_precision="ieee")
        if GATED:
            if EVEN_K:
                w = tl.load(up_at + begin)
            else:
                w = tl.load(up_at + begin, mask=k[None, :] < inner - begin, other=0.0)
            if UPCAST:
                w = w.to(tl.float32)
            up = tl.dot(w, xs, up, input_precision="ieee")

    inside = real_m[None, :] & (n < columns)[:, None]
    if SPLIT_K == 1:
        _store_product(out, gate, up, m, n, inside, out_stride, GATED)
    else:
        # Partial sums are [split, rows, columns], gate before up within the columns.
        width = columns * 2 if GATED else columns
        at = partials + m.to(tl.int64)[None, :] * width + n[:, None]
        size = rows.to(tl.int64) * width
        tl.store(at + split * size, gate, mask=inside)
        if GATED:
            tl.store(at + split * size + columns, up, mask=inside)
        if FINISH:
            # Every thread's sums are written before the one arrival that tells of them.
            tl.debug_barrier()
            counter = counters + tile_n * tl.num_programs(0) + tile_m
            earlier = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if earlier == SPLIT_K - 1:
                tl.store(counter, 0)  # ready for the next launch
                # Past this multiprocessor's own cache, which cannot know of the others' stores.
                total = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
                total_up = total
                for s in tl.static_range(1, SPLIT_K):
                    total += tl.load(at + s * size, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    at_up = at + columns
                    total_up = tl.load(at_up, mask=inside, other=0.0, cache_modifier=".cg")
                    for s in tl.static_range(1, SPLIT_K):
                        total_up += tl.load(
                            at_up + s * size, mask=inside, other=0.0, cache_modifier=".cg"
                        )
                _store_product(out, total, total_up, m, n, inside, out_stride, GATED)


def linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    partials: Tensor | None = None,
    counters: Tensor | None = None,
    count: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
    overlap: bool = False,
) -> None:
    """``out`` [M, N] = ``x`` [M, K] @ ``weight`` [N, K]^T, all of one dtype, rows contiguous.

    With ``gated``, ``weight`` is [2N, K], gate rows first, and ``out = silu(gate) * up`` in FP32.
    ``partials`` (FP32) and ``counters`` (int32, zero before the first launch, zero again after
    each) hold what ``workspace_shape`` says, where the product is split; one launch at a time may
    use them. Only the first ``count`` (int32 [1], on the device) rows are computed and written; at
    0 no weight is read. ``tiles`` overrides ``choose_tiles``.
    """
    rows, columns = out.shape
    inner = x.shape[1]
    tiles = tiles or choose_tiles(rows, columns, inner, gated, x.dtype)
    if tiles.split_k > 1 and (partials is None or counters is None):
        raise ValueError(f"a product split {tiles.split_k} ways needs partials and counters")
    _launch(out, x, weight, partials, counters, count, rows, columns, gated, tiles, True, overlap)


def linear_partials(
    partials: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    count: Tensor | None = None,
    tiles: Tiles | None = None,
    overlap: bool = False,
) -> None:
    """The partial sums of ``x @ weight^T``, FP32 ``partials`` [split, M, N], left for the consumer.

    Added in order they have the bits of ``linear`` before its rounding; ``norm.add_rms_norm``
    takes them as its ``update``. ``partials.shape[0]`` must be the split of ``tiles``.
    """
    split, rows, columns = partials.shape
    tiles = tiles or choose_tiles(rows, columns, x.shape[1], False, x.dtype)
    if split != tiles.split_k:
        raise ValueError(f"partials hold {split} sums, the product is split {tiles.split_k} ways")
    out = partials if split == 1 else None
    _launch(out, x, weight, partials, None, count, rows, columns, False, tiles, False, overlap)


def _launch(
    out: Tensor | None,
    x: Tensor,
    weight: Tensor,
    partials: Tensor | None,
    counters: Tensor | None,
    count: Tensor | None,
    rows: int,
    columns: int,
    gated: bool,
    tiles: Tiles,
    finish: bool,
    overlap: bool,
) -> None:
    inner = x.shape[1]
    block_m = tiles.block_m or min(tiles.max_block_m, max(16, triton.next_power_of_2(rows)))
    grid = triton.cdiv(rows, block_m), triton.cdiv(columns, tiles.block_n), tiles.split_k
    _linear[grid](
        out, x, weight, partials, counters, count,
        rows, columns, inner,
        0 if out is None else out.stride(-2), x.stride(0), weight.stride(0),
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLIT_K=tiles.split_k,
        EVEN_K=inner % tiles.block_k == 0, GATED=gated, FINISH=finish,
        # Triton's interpreter cannot multiply BF16.
        UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,
        num_warps=tiles.warps, num_stages=tiles.stages, **overlapped(overlap),
    )  # fmt: skip
