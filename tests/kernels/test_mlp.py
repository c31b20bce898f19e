"""SiLU-and-multiply against FP64."""

from __future__ import annotations

import pytest
import torch
from ouro_batch.kernels import mlp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (5, 96), (3, 1024), (2, 1025), pytest.param((4096, 5632), marks=gpu)],
)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, width = shape
    gate_up = (4 * torch.randn(tokens, 2 * width, device=DEVICE)).to(dtype)
    whole = torch.full((tokens + 2, width + 8), torch.nan, dtype=dtype, device=DEVICE)
    out = whole[1:-1, 4:-4]
    mlp.silu_mul(out, gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want = gate * torch.sigmoid(gate) * up
    # Relative in a range that the type holds without denormals.
    torch.testing.assert_close(out.double(), want, rtol=ROUNDING[dtype], atol=1e-6)
    whole[1:-1, 4:-4] = torch.nan
    assert whole.isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_extremes_and_the_count() -> None:
    gate = torch.tensor([-1e4, -100.0, -88.5, 0.0, 88.5, 1e4], device=DEVICE)
    gate_up = torch.cat((gate, torch.ones_like(gate))).expand(3, -1).contiguous()
    out = torch.full((3, 6), torch.nan, device=DEVICE)
    mlp.silu_mul(out, gate_up, count=torch.tensor([2], dtype=torch.int32, device=DEVICE))
    want = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(out[:2].double(), want.expand(2, -1), rtol=1e-6, atol=1e-30)
    assert out[2].isnan().all()
