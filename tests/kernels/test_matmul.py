"""Skinny matrix products against FP64, and their bits over the number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ouro_batch.kernels import matmul, norm
from ouro_batch.kernels.matmul import Tiles
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RELEASED = [  # N, K, gated
    (6144, 2048, False),
    (2048, 2048, False),
    (11264, 2048, False),
    (5632, 2048, True),
    (2048, 5632, False),
    (49152, 2048, False),
]


class Product:
    """A random product with poisoned outputs and work space."""

    def __init__(self, rows: int, columns: int, inner: int, gated: bool, dtype: torch.dtype):
        self.gated = gated
        self.x = torch.randn(rows, inner, device=DEVICE).to(dtype)
        weight = torch.randn(columns * (2 if gated else 1), inner, device=DEVICE)
        self.weight = (weight * inner**-0.5).to(dtype)
        self.columns = columns

    def run(self, tiles: Tiles | None, count: int | None = None, rows: int | None = None) -> Tensor:
        x = self.x[:rows]
        dtype, rows = x.dtype, len(x)
        whole = torch.full((rows + 2, self.columns + 16), torch.nan, dtype=dtype, device=DEVICE)
        width = self.columns * (2 if self.gated else 1)
        partials = torch.full((16 * rows * width + 64,), torch.nan, device=DEVICE)
        counters = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        on_device = None
        if count is not None:
            on_device = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        for _ in range(2):  # the counters come back to zero
            matmul.linear(
                whole[1:-1, 8:-8],
                x,
                self.weight,
                partials=partials,
                counters=counters,
                count=on_device,
                gated=self.gated,
                tiles=tiles,
            )
            assert not counters.any()
        out = whole[1:-1, 8:-8].clone()
        whole[1:-1, 8:-8] = torch.nan
        assert whole.isnan().all()
        return out

    def exact(self) -> Tensor:
        y = self.x.double() @ self.weight.double().t()
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = gate * torch.sigmoid(gate) * up
        return y

    def check(self, got: Tensor) -> None:
        rounding = ROUNDING[got.dtype]
        # FP32 sums of K terms of standard deviation K**-0.5 besides the rounding of the store.
        torch.testing.assert_close(got.double(), self.exact(), rtol=rounding, atol=2e-5)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("shape", [(1, 48, 64), (5, 80, 136), (33, 1, 16), (2, 65, 50)])
def test_linear(shape: tuple[int, int, int], split: int, gated: bool, dtype: torch.dtype) -> None:
    rows, columns, inner = shape
    product = Product(rows, columns, inner, gated, dtype)
    product.check(product.run(Tiles(32, split, block_n=32)))


@pytest.mark.parametrize("gated", [False, True])
def test_chosen_tiles(gated: bool) -> None:
    for rows, dtype in ((1, torch.float16), (40, torch.float32), (70, torch.bfloat16)):
        product = Product(rows, 96, 200, gated, dtype)
        product.check(product.run(None))


@pytest.mark.parametrize("split", [1, 4])
def test_several_row_tiles(split: int) -> None:
    product = Product(70, 64, 128, False, torch.float32)
    product.check(product.run(Tiles(32, split, block_n=32, block_m=16)))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_count_on_the_device(split: int, gated: bool) -> None:
    product = Product(20, 48, 96, gated, torch.float32)
    tiles = Tiles(32, split, block_n=32, block_m=16)
    for count in (0, 1, 16, 17, 20, 99):
        got = product.run(tiles, count=count)
        assert got[count:].isnan().all()
        if count:
            whole = product.exact()[:count]
            torch.testing.assert_close(got[:count].double(), whole, rtol=1e-6, atol=2e-5)


def test_partials_feed_the_norm() -> None:
    product = Product(6, 64, 128, False, torch.float16)
    tiles = Tiles(32, 4, block_n=32)
    partials = torch.full((4, 6, 64), torch.nan, device=DEVICE)
    matmul.linear_partials(partials, product.x, product.weight, tiles=tiles)
    start, weights = torch.randn(6, 64, device=DEVICE).half(), torch.randn(2, 64, device=DEVICE)
    results = []
    for update in (partials, product.run(tiles)):
        hidden, out = start.clone(), torch.full_like(start, torch.nan)
        norm.add_rms_norm(hidden, update, weights[0].half(), out, weights[1].half(), 1e-6)
        results.append((hidden, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_rows_have_the_same_bits_in_one_row_tile() -> None:
    product = Product(16, 96, 256, False, torch.float32)
    tiles = Tiles(64, 2, block_n=32)
    want = product.run(tiles)
    for rows in range(1, 16):
        assert torch.equal(product.run(tiles, rows=rows), want[:rows])


def test_what_makes_the_bits_never_depends_on_rows() -> None:
    for dtype in ROUNDING:
        for columns, inner, gated in (*RELEASED, (96, 200, False), (7, 5, True)):
            one = matmul.choose_tiles(1, columns, inner, gated, dtype)
            for rows in range(2, 300):
                tiles = matmul.choose_tiles(rows, columns, inner, gated, dtype)
                assert (tiles.block_k, tiles.split_k) == (one.block_k, one.split_k)
                assert tiles.block_n >= 64
                assert tiles.warps % 4 == 0


def test_a_split_product_needs_its_work_space() -> None:
    x = torch.randn(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="split 2 ways needs partials"):
        matmul.linear(x.clone(), x, torch.randn(64, 64, device=DEVICE), tiles=Tiles(32, 2))
    with pytest.raises(ValueError, match="partials hold 3 sums"):
        matmul.linear_partials(x.new_empty(3, 2, 64), x, x.new_empty(64, 64), tiles=Tiles(32, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", RELEASED)
def test_released_shapes_for_any_rows(shape: tuple[int, int, bool], dtype: torch.dtype) -> None:
    """Right against FP64, and bit for bit the same over the number of rows."""
    columns, inner, gated = shape
    product = Product(256, columns, inner, gated, dtype)
    want = product.run(None)
    product.check(want)
    for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 255):
        assert torch.equal(product.run(None, rows=rows), want[:rows]), rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [s for s in RELEASED if s[0] < 49152])
def test_fp32_is_exact_fp32(shape: tuple[int, int, bool]) -> None:
    columns, inner, gated = shape
    product = Product(40, columns, inner, gated, torch.float32)
    want = product.run(None)
    product.check(want)
    for rows in (1, 16, 17, 33):
        assert torch.equal(product.run(None, rows=rows), want[:rows]), rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [False, True])
def test_column_tiles_do_not_change_the_bits(gated: bool) -> None:
    product = Product(40, 2048, 2048, gated, torch.bfloat16)
    tiles = Tiles(64, 4)
    want = product.run(tiles)
    for block_n, warps, stages in ((64, 8, 3), (128, 4, 2), (128, 8, 3)):
        other = replace(tiles, block_n=block_n, warps=warps, stages=stages)
        assert torch.equal(product.run(other), want)
