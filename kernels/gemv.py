"""Matrix products of one to a few rows, ``out = x @ weight^T``: weights stream through registers.

At few rows a product is the time of reading its weights, and a matrix instruction's detour through
shared memory only adds latency. A program owns a few weight rows whole, loads all of them before it
waits for ``x`` (``overlap.py``), multiplies elementwise in FP32 and adds up once.

Choices at one row, of those tried in the whole model on one H200 (torch 2.11, Triton 3.6,
2026-12-01), BF16, one loop of Ouro-1.4B at context 128 taking 1,139 us with the products of
``matmul.py`` and 992 us with all four of these; at 8 rows they are slower than ``matmul.py``.

| N, K | weight rows a program | warps |
|---|---|---|
| 6144, 2048: QKV | 8 | 4 |
| 2048, 2048: output | 4 | 4 |
| 2 x 5632, 2048: gate/up with SiLU | 2 x 2 | 4 |
| 2048, 5632: down | 2 | 8 |
| others | 8,192 weights a program | 4, 8 for K above 4,096 |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

# (N, K, gated): weight rows a program, warps.
_CHOICES = {
    (6144, 2048, False): (8, 4),
    (2048, 2048, False): (4, 4),
    (5632, 2048, True): (2, 4),
    (2048, 5632, False): (2, 8),
}


@triton.jit(do_not_specialize=["rows"])
def _gemv(
    out, x, weight, rows, columns, inner, out_stride, x_stride, weight_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = k < inner
    real = n < columns
    at = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    mask = real[:, None] & inside[None, :]
    w = tl.load(at, mask=mask, other=0)
    up = w
    if GATED:
        up = tl.load(at + tl.full([], columns, tl.int64) * weight_stride, mask=mask, other=0)
    join(OVERLAP)
    for m in tl.static_range(ROWS):
        if m < rows:
            row = tl.load(x + m * x_stride + k, mask=inside, other=0).to(tl.float32)[None, :]
            y = tl.sum(w.to(tl.float32) * row, axis=1)
            if GATED:
                y = y / (1.0 + tl.exp(-y)) * tl.sum(up.to(tl.float32) * row, axis=1)
            tl.store(out + m * out_stride + n, y.to(out.dtype.element_ty), mask=real)


def gemv(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool = False,
    block_n: int | None = None,
    num_warps: int | None = None,
    overlap: bool = False,
) -> None:
    """``out`` [M, N] = ``x`` [M, K] @ ``weight`` [N, K]^T for a few rows M, rows contiguous.

    With ``gated``, ``weight`` is [2N, K], gate rows first, and ``out = silu(gate) * up`` in FP32.
    """
    rows, columns = out.shape
    inner = x.shape[1]
    block_k = triton.next_power_of_2(inner)
    default = _CHOICES.get((columns, inner, gated))
    if default is None:
        weights = block_k * 2 if gated else block_k
        default = max(1, 8192 // weights), 8 if block_k > 4096 else 4
    block_n = block_n or default[0]
    _gemv[(triton.cdiv(columns, block_n),)](
        out, x, weight, rows, columns, inner, out.stride(0), x.stride(0), weight.stride(0),
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATED=gated,
        num_warps=num_warps or default[1],
        **overlapped(overlap),
    )  # fmt: skip
