"""RMSNorm, alone or fused with what precedes it: the residual add, or the start of a loop step.

Arithmetic is FP32 with one rounding at each store; the residual is normalized as stored, so a
fused launch gives the bits of its parts. One program owns one row of any width. Launchers write
into given tensors, allocate nothing and never wait for the device; ``count`` (int32 [1], on the
device) ends the programs of the rows beyond it at once; ``overlap`` is that of ``overlap.py``.

A row of 2,048 takes 8 warps (8 values a thread, 16 bytes in BF16), 16 where it adds up partial
sums, whose latency decides, and 4 from 1,024 rows on, where instructions decide. Microseconds of
``add_rms_norm`` on one H200 (torch 2.11, Triton 3.6, 2026-12-01; docs/performance/tune.json):

| rows | 4 warps | 8 | 16 |
|---|---|---|---|
| 1 | 1.92 | 1.94 | 2.06 |
| 1, sums of 4 | 2.39 | 2.25 | **2.20** |
| 64, sums of 4 | 2.61 | 2.53 | **2.46** |
| 128 | 2.19 | **2.19** | 2.34 |
| 4,096 | **16.8** | 18.7 | 22.5 |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

MANY_ROWS = 1024


@triton.jit
def _normalized(x, weight, width, eps):
    """``weight * x / rms(x)`` of one row in FP32; lanes past ``width`` hold zeros."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight


@triton.jit
def _rms_norm(
    out, x, weight, count, width, out_stride, x_stride, eps,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    join(OVERLAP)
    if row >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    h = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    y = _normalized(h, w, width, eps)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    hidden, update, update_weight, out, out_weight, count,
    width, hidden_stride, update_stride, split_stride, out_stride, eps,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    # The weights wait neither for the update nor for its sum of squares.
    update_w = tl.load(update_weight + column, mask=inside, other=0).to(tl.float32)
    out_w = tl.load(out_weight + column, mask=inside, other=0).to(tl.float32)
    join(OVERLAP)
    if row >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    h = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0).to(tl.float32)
    at = update + row * update_stride + column
    u = tl.load(at, mask=inside, other=0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        u += tl.load(at + split * split_stride, mask=inside, other=0)
    # Partial sums are rounded as a finished product would have been.
    u = u.to(hidden.dtype.element_ty).to(tl.float32)
    stored = (h + _normalized(u, update_w, width, eps)).to(hidden.dtype.element_ty)
    tl.store(hidden + row * hidden_stride + column, stored, mask=inside)
    y = _normalized(stored.to(tl.float32), out_w, width, eps)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed_norm(
    hidden, out, embed, token, carried, rows, fresh, weight, count,
    width, hidden_stride, out_stride, embed_stride, carried_stride, eps,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    join(OVERLAP)
    if entry >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    row = entry
    if rows is not None:
        row = tl.load(rows + entry).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    starts = tl.load(fresh + entry) != 0
    source = carried + row * carried_stride
    if starts:
        source = embed + tl.load(token + row).to(tl.int64) * embed_stride
    w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    h = tl.load(source + column, mask=inside, other=0)
    tl.store(hidden + entry * hidden_stride + column, h, mask=inside)
    y = _normalized(h.to(tl.float32), w, width, eps)
    tl.store(out + entry * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    count: Tensor | None = None,
    num_warps: int | None = None,
    overlap: bool = False,
) -> None:
    """``out`` = ``weight * x / rms(x)`` for ``out``, ``x`` [T, width]; they may be the same."""
    tokens, width = x.shape
    _rms_norm[(tokens,)](
        out, x, weight, count, width, out.stride(0), x.stride(0), eps,
        WIDTH=triton.next_power_of_2(width),
        num_warps=num_warps or _warps(width, tokens),
        **overlapped(overlap),
    )  # fmt: skip


def add_rms_norm(
    hidden: Tensor,
    update: Tensor,
    update_weight: Tensor,
    out: Tensor,
    out_weight: Tensor,
    eps: float,
    *,
    count: Tensor | None = None,
    num_warps: int | None = None,
    overlap: bool = False,
) -> None:
    """``hidden += rms_norm(update) * update_weight``; ``out = rms_norm(hidden) * out_weight``.

    ``hidden``, ``out`` [T, width]; ``update`` [T, width], or FP32 [S, T, width]: the partial sums
    of a product split S ways, added in order of S. ``out`` may be ``update``, where it is no split.
    """
    tokens, width = hidden.shape
    split = update.dim() == 3
    _add_rms_norm[(tokens,)](
        hidden, update, update_weight, out, out_weight, count,
        width, hidden.stride(0), update.stride(-2), update.stride(0) if split else 0,
        out.stride(0), eps,
        SPLITS=update.shape[0] if split else 1,
        WIDTH=triton.next_power_of_2(width),
        num_warps=num_warps or _warps(width, tokens, split),
        **overlapped(overlap),
    )  # fmt: skip


def embed_norm(
    hidden: Tensor,
    out: Tensor,
    *,
    embed: Tensor,
    token: Tensor,
    carried: Tensor,
    rows: Tensor | None,
    fresh: Tensor,
    weight: Tensor,
    eps: float,
    count: Tensor | None = None,
    num_warps: int | None = None,
    overlap: bool = False,
) -> None:
    """The start of a loop: entry i of M takes its token's embedding where fresh, else its state.

    ``hidden[i] = embed[token[rows[i]]] if fresh[i] else carried[rows[i]]``, and
    ``out[i] = rms_norm(hidden[i]) * weight``. ``hidden``, ``out`` [M, width], ``embed`` [V, width],
    ``token`` int32 [R], ``carried`` [R, width], ``rows`` int32 [M] (None: row i is entry i),
    ``fresh`` bool or uint8 [M]. ``hidden`` may be ``carried`` only where ``rows`` is None.
    """
    entries, width = hidden.shape
    _embed_norm[(entries,)](
        hidden, out, embed, token, carried, rows, fresh, weight, count,
        width, hidden.stride(0), out.stride(0), embed.stride(0), carried.stride(0), eps,
        WIDTH=triton.next_power_of_2(width),
        num_warps=num_warps or _warps(width, entries),
        **overlapped(overlap),
    )  # fmt: skip


def row_warps(width: int) -> int:
    """Warps of a row of ``width``, where the number of rows is not to choose."""
    return max(1, min(16, triton.next_power_of_2(width) // 256))


def _warps(width: int, rows: int, split: bool = False) -> int:
    warps = row_warps(width)
    if split:
        return min(16, 2 * warps)
    return max(1, warps // 2) if rows >= MANY_ROWS else warps
