"""Decode attention against FP64 over the same poisoned, shuffled cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ouro_batch.kernels import decode_work as module
from ouro_batch.kernels.decode_attention import decode_attention, decode_tile
from ouro_batch.kernels.decode_work import DecodeWork, build_decode_work
from torch import Tensor

from .attention_cases import (
    DEVICE,
    WILD,
    Cache,
    GuardedOut,
    assert_close,
    make_cache,
    random_queries,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = [(5, 9), (37, 0), (16, 20), (1, 3), (30, 34)]  # prompt, generated


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def attend(
    cache: Cache,
    queries: Tensor,
    entries: list[tuple[int, int, int]],
    split: int = 16,
    max_items: int | None = None,
    max_split: int | None = None,
    at_once: int = 64,
    **choices: object,
) -> Tensor:
    """Run ``entries`` (row, plane, context), check what surrounds the result, return it."""
    rows, planes, contexts = (int32(list(column)) for column in zip(*entries, strict=True))
    positions = sum(context for _, _, context in entries)
    heads, head_dim = queries.shape[1:]
    if "cos_sin" in choices:
        heads //= 3  # queries, keys and values
    work = DecodeWork.allocate(
        len(entries),
        max_items or DecodeWork.max_items(len(entries), positions, split, max_split, at_once),
        heads,
        cache.keys.shape[2],
        head_dim,
        DEVICE,
        split,
        max_split,
        at_once,
    )
    # Nothing may depend on what an earlier step left behind.
    work.items.fill_(WILD)
    work.entries.fill_(WILD)
    work.partial_out.fill_(float("nan"))
    work.partial_lse.fill_(float("nan"))
    guarded = GuardedOut(len(entries), heads, head_dim, queries.dtype)
    build_decode_work(work, rows, planes, contexts, cache.prompt_lengths)
    decode_attention(
        guarded.out,
        queries,
        cache.keys,
        cache.values,
        cache.prompt_blocks,
        cache.decode_slots,
        work,
        **choices,
    )
    guarded.check()
    assert not work.arrivals.any()
    return guarded.out


def check(cache: Cache, queries: Tensor, entries: list[tuple[int, int, int]], out: Tensor) -> None:
    for at, (row, plane, context) in enumerate(entries):
        if context:
            assert_close(out[at], cache.attend(queries[at], row, plane, context))
        else:
            assert bool(out[at].isnan().all()), "an unused entry was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_rows_of_different_lengths(dtype, heads, kv_heads):
    cache = make_cache(SMALL, kv_heads=kv_heads, dtype=dtype, seed=heads)
    entries = [(4, 1, 64), (0, 2, 14), (2, 0, 36), (3, 2, 1), (1, 0, 37)]
    queries = random_queries(len(entries), heads, 16, dtype, seed=heads)
    out = attend(cache, queries, entries, tile=16, programs=3)
    check(cache, queries, entries, out)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_head_dimensions(head_dim, heads, kv_heads):
    cache = make_cache(SMALL, kv_heads=kv_heads, head_dim=head_dim, seed=head_dim)
    entries = [(4, 2, 61), (0, 1, 9)]
    queries = random_queries(2, heads, head_dim, torch.float32, seed=head_dim)
    check(cache, queries, entries, attend(cache, queries, entries, split=32))


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_block_sizes_and_memory_layouts(block_size, head_major):
    for kv_heads in (1, 2):
        cache = make_cache(SMALL, kv_heads=kv_heads, block_size=block_size, head_major=head_major)
        entries = [(4, 0, 59), (2, 1, 30), (1, 2, 33)]
        queries = random_queries(3, 2, 16, torch.float32, seed=block_size)
        check(cache, queries, entries, attend(cache, queries, entries, tile=16))


@pytest.mark.parametrize("context", [1, 15, 16, 17, 32, 33, 36, 37, 38, 63, 64, 65])
def test_borders_of_tile_split_block_and_prompt(context):
    cache = make_cache([(37, 30), (1, 66)], block_size=4, kv_heads=1, loops=2, seed=context)
    entries = [(0, 1, context), (1, 1, context)]
    queries = random_queries(2, 1, 16, torch.float32, seed=context)
    check(cache, queries, entries, attend(cache, queries, entries, split=32, tile=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_context(dtype):
    cache = make_cache([(1100, 948), (3, 0)], loops=2, kv_heads=1, dtype=dtype)
    entries = [(1, 0, 2), (0, 1, 2048)]
    queries = random_queries(2, 1, 16, dtype, seed=1)
    # 32 parts are merged in more than one go
    check(cache, queries, entries, attend(cache, queries, entries, split=64))


@pytest.mark.parametrize("fused_merge", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1)])
def test_bits_do_not_depend_on_the_batch(heads, kv_heads, fused_merge):
    cache = make_cache(SMALL, kv_heads=kv_heads)
    queries = random_queries(5, heads, 16, torch.float32, seed=3)
    entries = [(4, 1, 64), (0, 2, 14), (2, 0, 36), (3, 2, 1), (1, 0, 37)]
    choices = {"tile": 16, "fused_merge": fused_merge}
    together = attend(cache, queries, entries, programs=4, **choices)
    check(cache, queries, entries, together)
    for at in (0, 2):
        alone = attend(cache, queries[at : at + 1], [entries[at]], programs=1, **choices)
        assert torch.equal(alone[0], together[at])
    order = [3, 0, 4, 1]
    mixed = attend(cache, queries[order], [entries[at] for at in order], programs=7, **choices)
    assert torch.equal(mixed, together[order])


def test_unused_entries_are_left_alone():
    cache = make_cache(SMALL)
    entries = [(WILD, WILD, 0), (4, 1, 50), (-7, WILD, 0), (0, 0, 3), (WILD, -1, 0)]
    queries = random_queries(5, 2, 16, torch.float32, seed=0)
    queries[[0, 2, 4]] = float("nan")
    for choices in ({"fused_merge": True}, {"programs": 64}):
        check(cache, queries, entries, attend(cache, queries, entries, **choices))
    unused = [(WILD, WILD, 0)] * 3
    check(cache, queries, unused, attend(cache, queries[:3], unused))


def test_no_merge_is_needed_within_one_split():
    cache = make_cache(SMALL)
    entries = [(4, 1, 64), (0, 0, 3)]
    queries = random_queries(2, 2, 16, torch.float32, seed=0)
    check(cache, queries, entries, attend(cache, queries, entries, split=64, merge=False))


def test_planes_that_share_a_slot_see_the_last_exited():
    cache = make_cache([(2, 12)], loops=4, seed=5)
    shared = cache.decode_slots[0, 1:, :12] == cache.decode_slots[0, :-1, :12]
    assert bool(shared.any())
    entries = [(0, plane, 14) for plane in range(4)]
    queries = random_queries(1, 2, 16, torch.float32, seed=5).repeat(4, 1, 1)
    check(cache, queries, entries, attend(cache, queries, entries))


def test_work_list():
    work = DecodeWork.allocate(6, 9, 2, 2, 16, DEVICE, split=10)
    prompts = int32([3, 4, 5])
    build_decode_work(
        work, int32([2, WILD, 0, 1]), int32([1, 9, 0, 2]), int32([25, 0, 10, 31]), prompts
    )
    # entry, part, context, row, plane, prompt length, first item and items of the entry
    assert work.items[:8].tolist() == [
        [0, 0, 25, 2, 1, 5, 0, 3],
        [0, 1, 25, 2, 1, 5, 0, 3],
        [2, 0, 10, 0, 0, 3, 3, 1],
        [3, 0, 31, 1, 2, 4, 4, 4],
        [3, 1, 31, 1, 2, 4, 4, 4],
        [3, 2, 31, 1, 2, 4, 4, 4],
        [0, 2, 25, 2, 1, 5, 0, 3],
        [3, 3, 31, 1, 2, 4, 4, 4],
    ]
    assert work.counts[:2].tolist() == [8, 8]
    assert work.entries[:4].tolist() == [[0, 3], [3, 0], [3, 1], [4, 4]]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(1, 128))
@settings(max_examples=10, deadline=None)
def test_work_list_covers_every_position_once(contexts, split):
    entries = len(contexts)
    room = DecodeWork.max_items(entries, sum(contexts), split)
    work = DecodeWork.allocate(entries, room, 1, 1, 2, DEVICE, split)
    zeros = int32([0] * entries)
    build_decode_work(work, zeros, zeros, int32(contexts), int32([1]))
    items, wanted = work.counts[:2].tolist()
    assert items == wanted == sum(-(-context // split) for context in contexts) <= room
    listed = work.items[:items].tolist()
    expected = {(entry, part) for entry, c in enumerate(contexts) for part in range(-(-c // split))}
    assert {(item[0], item[1]) for item in listed} == expected
    # the parts of all entries have rooms of their own, in order
    assert {item[6] + item[1] for item in listed} == set(range(items))
    assert all(item[2] == contexts[item[0]] for item in listed)


def test_more_entries_than_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "BUILD_BLOCK", 8)
    contexts = torch.randint(0, 30, (21,), generator=torch.Generator().manual_seed(0))
    work = DecodeWork.allocate(21, 80, 1, 1, 2, DEVICE, split=10)
    zeros = int32([0] * 21)
    build_decode_work(work, zeros, zeros, contexts.int().to(DEVICE), int32([1]))
    numbers = -(-contexts // 10)
    assert work.entries[:, 1].tolist() == numbers.tolist()
    assert work.entries[:, 0].tolist() == (numbers.cumsum(0) - numbers).tolist()
    assert work.counts[:2].tolist() == [int(numbers.sum())] * 2


def test_a_list_too_short_stays_empty_and_says_so():
    cache = make_cache(SMALL)
    entries = [(4, 1, 64), (0, 0, 3)]
    queries = random_queries(2, 2, 16, torch.float32, seed=0)
    assert bool(attend(cache, queries, entries, max_items=4).isnan().all())
    work = DecodeWork.allocate(2, 4, 2, 2, 16, DEVICE, split=16)
    build_decode_work(work, int32([4, 0]), int32([1, 0]), int32([64, 3]), cache.prompt_lengths)
    assert work.counts[:2].tolist() == [0, 5]


def test_a_step_chooses_its_split_by_its_contexts():
    cache = make_cache(SMALL)
    queries = random_queries(3, 2, 16, torch.float32, seed=0)
    for entries in ([(4, 1, 64), (0, 0, 3), (1, 2, 37)], [(0, 0, 2), (4, 0, 5), (1, 1, 30)]):
        out = attend(cache, queries, entries, split=4, max_split=32, at_once=4)
        check(cache, queries, entries, out)


@pytest.mark.parametrize(
    ("contexts", "split"),
    [
        ([1], 64),  # never below the smallest
        ([1050] * 8, 144),  # even shares of 132, in steps of 16: 8 parts each
        ([1088] * 8, 144),
        ([1153] * 8, 160),
        ([1088] * 32, 544),  # 528 would cut each into three
        ([1088] * 11, 224),  # 192 and 208 give six parts each, 66 beyond 64
        ([1088] * 128, 1024),  # more than run at once whatever the split: the largest
        ([16_384] + [10] * 50, 256),  # a split that suits all at once is too uneven
        ([0, 0, 640, 0], 64),
    ],
)
def test_parts_run_at_once_where_they_can(contexts, split):
    capacity = DecodeWork.max_items(len(contexts), sum(contexts), 64, 1024, 64)
    work = DecodeWork.allocate(len(contexts), capacity, 1, 1, 2, DEVICE, 64, 1024, 64)
    zeros = int32([0] * len(contexts))
    build_decode_work(work, zeros, zeros, int32(contexts), int32([1]))
    parts = sum(-(-context // split) for context in contexts)
    assert work.counts.tolist() == [parts, parts, split]


def test_without_a_largest_split_it_never_follows_the_contexts():
    for contexts in ([1], [1050] * 8, [9] * 40 + [5000]):
        capacity = DecodeWork.max_items(len(contexts), sum(contexts), 256)
        work = DecodeWork.allocate(len(contexts), capacity, 1, 1, 2, DEVICE, 256)
        zeros = int32([0] * len(contexts))
        build_decode_work(work, zeros, zeros, int32(contexts), int32([1]))
        assert work.counts[2] == 256


def test_wrong_arguments_are_named():
    cache = make_cache(SMALL)
    entries = [(4, 1, 64)]
    queries = random_queries(1, 2, 16, torch.float16, seed=0)
    with pytest.raises(ValueError, match="queries are"):
        attend(cache, queries, entries)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        attend(cache, random_queries(1, 3, 16, torch.float32, seed=0), entries)
    work = DecodeWork.allocate(1, 4, 2, 2, 16, DEVICE)
    with pytest.raises(ValueError, match="2 entries; this work list holds 1"):
        build_decode_work(work, int32([0, 0]), int32([0, 0]), int32([1, 1]), cache.prompt_lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_default_tile(head_dim, dtype):
    tile = decode_tile(head_dim, dtype)
    assert tile & (tile - 1) == 0
    assert 16 <= tile <= 128


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused_merge", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 4), (12, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_full_sizes(head_dim, heads, kv_heads, dtype, fused_merge):
    lengths = [(1024, 64), (1, 200), (128, 1), (777, 500), (3000, 1)] * 3
    cache = make_cache(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, loops=2)
    random = torch.Generator().manual_seed(head_dim)
    entries = []
    for at, (prompt, generated) in enumerate(lengths):
        context = int(torch.randint(1, prompt + generated + 1, (1,), generator=random))
        entries.append((at, at % 2, prompt + generated if at < 5 else context))
    entries.insert(4, (WILD, WILD, 0))
    queries = random_queries(len(entries), heads, head_dim, dtype, seed=head_dim)
    for choices in ({"split": 256}, {"split": 64}, {"split": 512, "num_stages": 3}):
        out = attend(cache, queries, entries, fused_merge=fused_merge, **choices)
        check(cache, queries, entries, out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused_merge", [False, True])
def test_longest_context_beside_short_ones(fused_merge):
    lengths = [(65_000, 536)] + [(20, 12)] * 127
    cache = make_cache(lengths, kv_heads=4, head_dim=128, dtype=torch.bfloat16, loops=1)
    entries = [(row, 0, prompt + generated) for row, (prompt, generated) in enumerate(lengths)]
    queries = random_queries(128, 4, 128, torch.bfloat16, seed=0)
    out = attend(cache, queries, entries, split=256, fused_merge=fused_merge)
    check(cache, queries, entries, out)
    again = attend(cache, queries, entries, split=256, fused_merge=fused_merge, programs=1000)
    assert torch.equal(out, again)
    alone = attend(cache, queries[:1], entries[:1], split=256, fused_merge=fused_merge)
    assert torch.equal(out[:1], alone)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused_merge", [False, True])
def test_a_graph_replays_with_new_contexts(fused_merge):
    lengths = [(700, 300)] * 8
    cache = make_cache(lengths, kv_heads=16, head_dim=128, dtype=torch.bfloat16, loops=2)
    queries = random_queries(8, 16, 128, torch.bfloat16, seed=0)
    rows, planes = int32(list(range(8))), int32([0, 1] * 4)
    contexts = int32([1] * 8)
    work = DecodeWork.allocate(8, DecodeWork.max_items(8, 8000), 16, 16, 128, DEVICE)
    out = torch.empty_like(queries)

    def step() -> None:
        build_decode_work(work, rows, planes, contexts, cache.prompt_lengths)
        decode_attention(
            out,
            queries,
            cache.keys,
            cache.values,
            cache.prompt_blocks,
            cache.decode_slots,
            work,
            fused_merge=fused_merge,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for values in ([1000, 1, 256, 257, 699, 700, 701, 0], [3] * 8, [512] * 8):
        out.fill_(float("nan"))
        contexts.copy_(int32(values))
        graph.replay()
        entries = [(row, row % 2, context) for row, context in enumerate(values)]
        check(cache, queries, entries, out)


def rotate(x: Tensor, cos_sin: Tensor, positions: list[int]) -> Tensor:
    """FP64 half-split RoPE of x [M, H, D]."""
    half = x.shape[-1] // 2
    table = cos_sin.double()[positions][:, None]  # [M, 1, D]
    cos, sin = table[..., :half], table[..., half:]
    a, b = x.double()[..., :half], x.double()[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "split"), [(16, 4, 16), (80, 16, 32), (64, 5, 64)]
)
def test_rope_and_the_newest_position_within_the_launch(dtype, head_dim, block_size, split):
    """Contexts that end before, at and past the borders of tiles and parts; one position too."""
    lengths = [(37, 30), (0, 3), (16, 20), (15, 40), (31, 2)]
    entries = [(0, 1, 65), (1, 2, 1), (2, 0, 33), (3, 2, 17), (4, 1, 32), (3, 0, 49)]
    heads = 2
    cache = make_cache(lengths, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=split)
    random = torch.Generator().manual_seed(split)
    qkv = torch.randn(len(entries), 3 * heads, head_dim, generator=random).to(DEVICE, dtype)
    cos_sin = torch.randn(128, head_dim, generator=random).to(DEVICE)
    positions = [context - 1 for _, _, context in entries]
    q = rotate(qkv[:, :heads], cos_sin, positions).to(dtype)
    k = rotate(qkv[:, heads : 2 * heads], cos_sin, positions).to(dtype)
    for tensor in (cache.keys, cache.values):  # the newest position of each entry: not there yet
        for row, plane, context in entries:
            slot = int(cache.slots[row][plane][context - 1])
            tensor[slot // block_size, slot % block_size] = float("nan")
    before = cache.keys.clone(), cache.values.clone()
    out = attend(cache, qkv, entries, split=split, cos_sin=cos_sin)
    newest = []
    for at, (row, plane, context) in enumerate(entries):
        slot = int(cache.slots[row][plane][context - 1])
        newest.append(slot)
        place = slot // block_size, slot % block_size
        assert_close(cache.keys[place], k[at].double())
        assert torch.equal(cache.values[place], qkv[at, 2 * heads :])
        assert_close(out[at], cache.attend(q[at], row, plane, context))
    for tensor, old in zip((cache.keys, cache.values), before, strict=True):
        for slot in newest:
            place = slot // block_size, slot % block_size
            tensor[place] = old[place]
        assert torch.equal(tensor.nan_to_num(), old.nan_to_num()), "another slot was written"
