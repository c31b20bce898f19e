"""RoPE and the cache write against FP64."""

from __future__ import annotations

import pytest
import torch
from ouro_batch.kernels import rope
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# tokens, H, G, D
SHAPES = [
    *((1, 4, 4, 16), (5, 6, 2, 24), (3, 2, 1, 128), (2, 16, 16, 8), (2, 1, 1, 256)),
    *(pytest.param(s, marks=gpu) for s in ((256, 16, 16, 128), (4096, 16, 16, 128))),
]
BLOCKS, BLOCK, POSITIONS = 7, 4, 50


def table(head_dim: int) -> Tensor:
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angles = torch.arange(POSITIONS, device=DEVICE)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """FP64 rotation of ``x`` [T, heads, D] by ``cos_sin`` [T, D]."""
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = cos_sin.double()[:, None, :].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def cache(layout: str, blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A NaN cache, logically [blocks, B, G, D]."""
    full = dict(fill_value=torch.nan, dtype=dtype, device=DEVICE)
    if layout == "head-major":
        return torch.full((blocks, kv_heads, BLOCK, head_dim), **full).transpose(1, 2)
    if layout == "padded":
        return torch.full((blocks, BLOCK, kv_heads, head_dim + 8), **full)[..., :head_dim]
    return torch.full((blocks, BLOCK, kv_heads, head_dim), **full)


def check_close(got: Tensor, want: Tensor) -> None:
    rounding = ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=4 * rounding)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["plain", "head-major", "padded"])
def test_rope_store(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim = shape
    blocks = max(BLOCKS, tokens // BLOCK + 1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    keys = cache(layout, blocks, kv_heads, head_dim, dtype)
    values = cache("plain", blocks, kv_heads, head_dim, dtype)
    slots = torch.randperm(blocks * BLOCK, device=DEVICE)[:tokens].int()
    positions = torch.randint(0, POSITIONS, (tokens,), dtype=torch.int32, device=DEVICE)
    cos_sin = table(head_dim)
    whole = torch.full((tokens + 2, heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    rope.rope_store(whole[1:-1], qkv, keys, values, slots, positions, cos_sin)

    q, k, v = qkv.view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    at = cos_sin[positions.long()]
    check_close(whole[1:-1], rotated(q, at))
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()
    place = slots.long() // BLOCK, slots.long() % BLOCK
    check_close(keys[place], rotated(k, at))
    assert torch.equal(values[place], v)
    keys[place] = torch.nan
    values[place] = torch.nan
    assert keys.isnan().all()
    assert values.isnan().all()


def test_padding_and_the_count_write_nothing() -> None:
    tokens, heads, kv_heads, head_dim = 4, 2, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE)
    keys = cache("plain", BLOCKS, kv_heads, head_dim, torch.float32)
    values = cache("plain", BLOCKS, kv_heads, head_dim, torch.float32)
    q_out = torch.full((tokens, heads, head_dim), torch.nan, device=DEVICE)
    slots = torch.tensor([-1, 5, 9, 11], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([-3, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    rope.rope_store(q_out, qkv, keys, values, slots, positions, table(head_dim), count=count)
    assert q_out[2:].isnan().all()
    assert not q_out[:2].isnan().any()
    written = keys.flatten(0, 1).isnan().logical_not().any(-1).any(-1)
    assert written.nonzero().flatten().tolist() == [5]
    assert not keys[1, 1].isnan().any()
    assert not values[1, 1].isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_addresses_beyond_two_to_the_31() -> None:
    blocks = 2**31 // (16 * 16 * 128) + 2
    keys = torch.empty(blocks, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    qkv = torch.randn(1, 48 * 128, device=DEVICE).bfloat16()
    q_out = torch.empty(1, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    slot = torch.tensor([blocks * 16 - 1], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    keys[-1, -1] = torch.nan
    values = torch.empty_like(keys)
    rope.rope_store(q_out, qkv, keys, values, slot, position, table(128))
    v = qkv.view(1, 48, 128)[:, 32:]
    assert torch.equal(values[-1, -1], v[0])
    assert not keys[-1, -1].isnan().any()
