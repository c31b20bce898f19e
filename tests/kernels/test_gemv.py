"""Products of a few rows against FP64, out and inputs being parts of larger poisoned tensors."""

from __future__ import annotations

import pytest
import torch
from ouro_batch.kernels.gemv import gemv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 48, 64), (1, 33, 160), (3, 7, 2048), (8, 5, 96), (2, 1, 1)]
FULL = [(1, 6144, 2048), (1, 2048, 5632), (4, 2048, 2048)]


def check(rows, columns, inner, dtype, gated, **choices):
    random = torch.Generator().manual_seed(rows * columns + inner)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(DEVICE, dtype)

    width = 2 * columns if gated else columns
    weight = torch.full((width + 1, inner), float("nan"), dtype=dtype, device=DEVICE)
    weight[:width] = normal(width, inner) * inner**-0.5
    x = torch.full((rows + 1, inner + 16), float("nan"), dtype=dtype, device=DEVICE)
    x[:rows, :inner] = normal(rows, inner)
    out = torch.full((rows + 2, columns + 16), 7.0, dtype=dtype, device=DEVICE)
    out[1:-1, :columns] = float("nan")
    gemv(out[1:-1, :columns], x[:rows, :inner], weight[:width], gated=gated, **choices)
    expected = x[:rows, :inner].double() @ weight[:width].double().t()
    if gated:
        expected = torch.nn.functional.silu(expected[:, :columns]) * expected[:, columns:]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(
        out[1:-1, :columns].double(), expected, rtol=tolerance, atol=tolerance
    )
    out[1:-1, :columns] = 7.0
    assert bool((out == 7.0).all()), "written outside of out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), SHAPES)
def test_against_fp64(rows, columns, inner, gated, dtype):
    check(rows, columns, inner, dtype, gated)


@pytest.mark.parametrize("block_n", [1, 2, 16])
def test_any_rows_a_program(block_n):
    check(2, 21, 100, torch.float32, True, block_n=block_n, num_warps=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), FULL)
def test_full_shapes(rows, columns, inner, gated, dtype, overlap):
    check(rows, columns, inner, dtype, gated, overlap=overlap)
