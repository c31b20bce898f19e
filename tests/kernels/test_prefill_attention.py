"""Prefill attention against FP64 over the same poisoned, shuffled cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ouro_batch.kernels.prefill_attention import (
    PrefillConfig,
    prefill_attention,
    prefill_config,
    prefill_tiles,
)
from torch import Tensor

from .attention_cases import (
    DEVICE,
    Cache,
    GuardedOut,
    assert_close,
    make_cache,
    random_queries,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = PrefillConfig(16, 16, 4, 1)
PROMPTS = [(5, 2), (37, 0), (16, 0), (1, 0), (70, 3)]  # prompt, generated


def attend(
    cache: Cache,
    queries: Tensor,
    segments: list[tuple[int, int, int]],
    plane: int,
    config: PrefillConfig | None = SMALL,
) -> Tensor:
    """Run packed segments (row, start, length), check what surrounds the result, return it."""
    block_m = (config or prefill_config(queries.dtype, queries.shape[-1])).block_m
    tiles = torch.tensor(prefill_tiles(segments, block_m), dtype=torch.int32, device=DEVICE)
    guarded = GuardedOut(*queries.shape, queries.dtype)
    prefill_attention(
        guarded.out,
        queries,
        cache.keys,
        cache.values,
        tiles,
        plane,
        cache.prompt_blocks,
        config=config,
    )
    guarded.check()
    return guarded.out


def expected(
    cache: Cache, queries: Tensor, segments: list[tuple[int, int, int]], plane: int
) -> Tensor:
    """FP64 [T, H, D]."""
    kv_heads, head_dim = cache.keys.shape[2:]
    block_size = cache.keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64, device=DEVICE)
    begin = 0
    for row, start, length in segments:
        slots = cache.slots[row][plane][: start + length]
        keys = cache.keys[slots // block_size, slots % block_size].double()
        values = cache.values[slots // block_size, slots % block_size].double()
        q = queries[begin : begin + length].double().reshape(length, kv_heads, -1, head_dim)
        scores = torch.einsum("tgmd,kgd->gmtk", q, keys) * head_dim**-0.5
        own = torch.arange(start, start + length, device=DEVICE)
        hidden = torch.arange(start + length, device=DEVICE)[None, :] > own[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        result = torch.einsum("gmtk,kgd->tgmd", weights, values)
        out[begin : begin + length] = result.reshape(length, -1, head_dim)
        begin += length
    return out


def check(
    cache: Cache, queries: Tensor, segments: list[tuple[int, int, int]], plane: int, out: Tensor
) -> None:
    assert_close(out, expected(cache, queries, segments, plane))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_packed_rows(dtype, heads, kv_heads):
    cache = make_cache(PROMPTS, kv_heads=kv_heads, dtype=dtype, seed=heads)
    # whole prompts, a first and a last chunk, a single token in the middle
    segments = [(1, 0, 37), (3, 0, 1), (4, 40, 30), (0, 2, 1), (2, 0, 9)]
    queries = random_queries(78, heads, 16, dtype, seed=heads)
    check(cache, queries, segments, 2, attend(cache, queries, segments, 2))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_head_dimensions(head_dim):
    cache = make_cache(PROMPTS, head_dim=head_dim, seed=head_dim)
    segments = [(4, 25, 20), (1, 0, 5)]
    queries = random_queries(25, 2, head_dim, torch.float32, seed=head_dim)
    check(cache, queries, segments, 1, attend(cache, queries, segments, 1))


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_block_sizes_and_memory_layouts(block_size, head_major):
    cache = make_cache(PROMPTS, block_size=block_size, head_major=head_major, seed=block_size)
    segments = [(4, 35, 35), (1, 30, 7)]
    queries = random_queries(42, 2, 16, torch.float32, seed=block_size)
    check(cache, queries, segments, 0, attend(cache, queries, segments, 0))


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 17, 31, 32])
def test_borders_of_query_and_key_tiles(start):
    cache = make_cache([(70, 0)], loops=1, kv_heads=1, block_size=4, seed=start)
    for length in (1, 16, 17):
        segments = [(0, start, length)]
        queries = random_queries(length, 1, 16, torch.float32, seed=start)
        check(cache, queries, segments, 0, attend(cache, queries, segments, 0))


@pytest.mark.parametrize("config", [PrefillConfig(32, 16, 4, 1), PrefillConfig(16, 64, 4, 1), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tile_choices(dtype, config):
    cache = make_cache([(150, 0)], loops=1, kv_heads=1, dtype=dtype)
    segments = [(0, 0, 150)]
    queries = random_queries(150, 1, 16, dtype, seed=0)
    check(cache, queries, segments, 0, attend(cache, queries, segments, 0, config))


def test_long_prompt():
    cache = make_cache([(2048, 0)], loops=1, kv_heads=1)
    segments = [(0, 2048 - 80, 80)]
    queries = random_queries(80, 1, 16, torch.float32, seed=0)
    config = PrefillConfig(64, 64, 4, 1)
    check(cache, queries, segments, 0, attend(cache, queries, segments, 0, config))


def test_chunks_equal_the_whole():
    cache = make_cache(PROMPTS, seed=9)
    queries = random_queries(70, 2, 16, torch.float32, seed=9)
    whole = attend(cache, queries, [(4, 0, 70)], 1)
    check(cache, queries, [(4, 0, 70)], 1, whole)
    begin = 0
    for length in (16, 1, 20, 33):
        chunk = attend(cache, queries[begin : begin + length], [(4, begin, length)], 1)
        torch.testing.assert_close(chunk, whole[begin : begin + length], rtol=1e-5, atol=1e-6)
        begin += length


def test_bits_do_not_depend_on_the_other_rows():
    cache = make_cache(PROMPTS, seed=4)
    queries = random_queries(57, 2, 16, torch.float32, seed=4)
    together = attend(cache, queries, [(1, 0, 20), (4, 50, 20), (1, 20, 17)], 0)
    alone = attend(cache, queries[20:40], [(4, 50, 20)], 0)
    assert torch.equal(together[20:40], alone)


def test_nothing_to_do():
    cache = make_cache(PROMPTS)
    queries = random_queries(0, 2, 16, torch.float32, seed=0)
    tiles = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(queries)
    prefill_attention(out, queries, cache.keys, cache.values, tiles, 0, cache.prompt_blocks)


def test_wrong_arguments_are_named():
    cache = make_cache(PROMPTS)
    with pytest.raises(ValueError, match="queries are"):
        attend(cache, random_queries(3, 2, 16, torch.float16, seed=0), [(1, 0, 3)], 0)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        attend(cache, random_queries(3, 3, 16, torch.float32, seed=0), [(1, 0, 3)], 0)


def test_tiles_begin_with_the_longest_context():
    assert prefill_tiles([(7, 0, 5), (2, 100, 9), (3, 2, 4)], 4) == [
        (2, 13, 108, 1),
        (2, 9, 104, 4),
        (2, 5, 100, 4),
        (3, 14, 2, 4),
        (7, 4, 4, 1),
        (7, 0, 0, 4),
    ]
    assert prefill_tiles([], 4) == []


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 70)), max_size=6),
    st.sampled_from([16, 64]),
)
def test_tiles_cover_every_token_once(chunks, block_m):
    segments = [(row, start, length) for row, (start, length) in enumerate(chunks)]
    packed = [(row, start + i) for row, start, length in segments for i in range(length)]
    tiles = prefill_tiles(segments, block_m)
    covered = {}
    for row, first, position, tokens in tiles:
        assert 0 < tokens <= block_m
        for i in range(tokens):
            assert first + i not in covered
            covered[first + i] = (row, position + i)
    assert [covered[token] for token in range(len(packed))] == packed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 4), (3, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_full_sizes(head_dim, heads, kv_heads, dtype):
    lengths = [(1024, 4), (1, 0), (300, 0), (2048, 0), (129, 0)]
    cache = make_cache(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, loops=2)
    segments = [(0, 0, 1024), (1, 0, 1), (3, 1500, 548), (2, 100, 200), (4, 0, 129)]
    tokens = sum(length for _, _, length in segments)
    queries = random_queries(tokens, heads, head_dim, dtype, seed=head_dim)
    for plane in (0, 1):
        out = attend(cache, queries, segments, plane, None)
        check(cache, queries, segments, plane, out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize(
    "config", [PrefillConfig(128, 128, 8, 2), PrefillConfig(64, 64, 4, 3), None]
)
def test_tile_choices_on_a_gpu(config, block_size):
    cache = make_cache(
        [(1500, 0)], kv_heads=4, head_dim=128, block_size=block_size, dtype=torch.bfloat16, loops=1
    )
    queries = random_queries(1500, 4, 128, torch.bfloat16, seed=0)
    out = attend(cache, queries, [(0, 0, 1500)], 0, config)
    check(cache, queries, [(0, 0, 1500)], 0, out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_agree_with_the_whole(dtype):
    cache = make_cache([(1000, 0)], kv_heads=4, head_dim=128, dtype=dtype, loops=1)
    queries = random_queries(1000, 4, 128, dtype, seed=0)
    whole = attend(cache, queries, [(0, 0, 1000)], 0, None)
    begin = 0
    for length in (128, 1, 300, 571):
        chunk = attend(cache, queries[begin : begin + length], [(0, begin, length)], 0, None)
        # Not bit for bit: the compiler contracts masked and unmasked tiles differently.
        tolerance = {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {}
        torch.testing.assert_close(chunk, whole[begin : begin + length], **tolerance)
        begin += length
