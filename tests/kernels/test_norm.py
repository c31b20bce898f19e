"""RMSNorm and its fusions against FP64."""

from __future__ import annotations

import pytest
import torch
from ouro_batch.kernels import norm
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
EPS = 1e-6
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(1, 5), (7, 64), (3, 192), (2, 2048), *(pytest.param(s, marks=gpu) for s in
          ((1, 2048), (256, 2048), (4096, 2048), (3, 8192)))]  # fmt: skip


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poisoned(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A NaN matrix and the view [rows, width] in its middle that a kernel may write."""
    whole = torch.full((rows + 2, width + 16), torch.nan, dtype=dtype, device=DEVICE)
    return whole, whole[1:-1, 8:-8]


def check_guard(whole: Tensor, rows: int | None = None) -> None:
    """Nothing but the middle (its first ``rows``) was written."""
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[1:-1, 8:-8] = False
    if rows is not None:
        outside[1 + rows :] = True
    assert whole[outside].isnan().all()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_close(got: Tensor, want: Tensor, steps: float = 1.0) -> None:
    rounding = ROUNDING[got.dtype] * steps
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=rounding / 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    whole, out = poisoned(*shape, dtype)
    norm.rms_norm(out, x, weight, EPS)
    check_close(out, exact_norm(x, weight))
    check_guard(whole)


def test_rms_norm_in_place_and_of_zeros() -> None:
    x, weight = randn(3, 48, dtype=torch.float32), randn(48, dtype=torch.float32)
    x[1] = 0
    want = exact_norm(x, weight)
    norm.rms_norm(x, x, weight, EPS)
    check_close(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole_hidden, hidden = poisoned(*shape, dtype)
    hidden.copy_(randn(*shape, dtype=dtype))
    before = hidden.clone()
    update = randn(*shape, dtype=dtype)
    update_weight, weight = randn(shape[1], dtype=dtype), randn(shape[1], dtype=dtype)
    whole, out = poisoned(*shape, dtype)
    norm.add_rms_norm(hidden, update, update_weight, out, weight, EPS)
    added = exact_norm(update, update_weight)
    # The sum may cancel: its error is that of its terms.
    tolerance = ROUNDING[dtype] * (before.double().abs() + added.abs() + 1e-3)
    assert ((hidden.double() - before.double() - added).abs() <= tolerance).all()
    check_close(out, exact_norm(hidden, weight))
    check_guard(whole_hidden)
    check_guard(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_launches_have_the_bits_of_their_parts(dtype: torch.dtype) -> None:
    hidden, update = randn(5, 96, dtype=dtype), randn(5, 96, dtype=dtype)
    weights = randn(2, 96, dtype=dtype)
    out, again = torch.full_like(hidden, torch.nan), torch.full_like(hidden, torch.nan)
    norm.add_rms_norm(hidden, update, weights[0], out, weights[1], EPS)
    norm.rms_norm(again, hidden, weights[1], EPS)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_sums_have_the_bits_of_their_sum(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter cuts FP32 to BF16 where a GPU rounds")
    partials = randn(4, 5, 96, dtype=torch.float32)
    total = (partials[0] + partials[1] + partials[2] + partials[3]).to(dtype)
    start, weights = randn(5, 96, dtype=dtype), randn(2, 96, dtype=dtype)
    results = []
    for update in (partials, total):
        hidden, out = start.clone(), torch.full_like(start, torch.nan)
        norm.add_rms_norm(hidden, update, weights[0], out, weights[1], EPS)
        results.append((hidden, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flag", [torch.bool, torch.uint8])
def test_embed_norm(dtype: torch.dtype, flag: torch.dtype) -> None:
    rows_held, width, entries = 9, 80, 6
    embed, carried = randn(31, width, dtype=dtype), randn(rows_held, width, dtype=dtype)
    token = torch.randint(0, 31, (rows_held,), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(rows_held, device=DEVICE)[:entries].int()
    fresh = torch.tensor([1, 0, 1, 1, 0, 0], device=DEVICE).to(flag)
    weight = randn(width, dtype=dtype)
    whole_hidden, hidden = poisoned(entries, width, dtype)
    whole, out = poisoned(entries, width, dtype)
    arguments = dict(
        embed=embed, token=token, carried=carried, rows=rows, fresh=fresh, weight=weight, eps=EPS
    )
    norm.embed_norm(hidden, out, **arguments)
    at = rows.long()
    want = torch.where(fresh[:, None] != 0, embed[token[at].long()], carried[at])
    assert torch.equal(hidden, want)
    check_close(out, exact_norm(want, weight))
    check_guard(whole_hidden)
    check_guard(whole)

    arguments |= dict(rows=None, token=token[at], carried=carried[at])
    again_hidden, again = torch.full_like(hidden, torch.nan), torch.full_like(out, torch.nan)
    norm.embed_norm(again_hidden, again, **arguments)
    assert torch.equal(again_hidden, hidden)
    assert torch.equal(again, out)


def test_rows_beyond_the_count_are_left_alone() -> None:
    count = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    x, weight = randn(4, 32, dtype=torch.float32), randn(32, dtype=torch.float32)
    whole, out = poisoned(4, 32, torch.float32)
    norm.rms_norm(out, x, weight, EPS, count=count)
    check_guard(whole, 2)
    check_close(out[:2], exact_norm(x[:2], weight))

    whole, out = poisoned(4, 32, torch.float32)
    hidden = x.clone()
    norm.add_rms_norm(hidden, x, weight, out, weight, EPS, count=count)
    check_guard(whole, 2)
    assert torch.equal(hidden[2:], x[2:])

    whole, out = poisoned(4, 32, torch.float32)
    whole_hidden, hidden = poisoned(4, 32, torch.float32)
    norm.embed_norm(
        hidden,
        out,
        embed=x,
        token=torch.zeros(4, dtype=torch.int32, device=DEVICE),
        carried=x,
        rows=None,
        fresh=torch.zeros(4, dtype=torch.uint8, device=DEVICE),
        weight=weight,
        eps=EPS,
        count=count,
    )
    check_guard(whole, 2)
    check_guard(whole_hidden, 2)
    assert torch.equal(hidden[:2], x[:2])
