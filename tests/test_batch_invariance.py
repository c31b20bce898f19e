"""Batch invariance: a request's bits, whatever shares its steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ouro_batch.kernels.decode_work import DecodeWork

from ouro_batch import LLM, SamplingParams
from ouro_batch.attention.base import KVCache, SlotTables
from ouro_batch.attention.fixed import FixedAttention
from ouro_batch.attention.reference import ReferenceAttention
from ouro_batch.errors import EngineError
from ouro_batch.model.config import ModelConfig
from ouro_batch.runner import invariant
from ouro_batch.runner.invariant import InvariantProjections, Pieces

from .tiny import CONFIG, write_checkpoint


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(0)
    prompts = [
        [draw.randrange(1, CONFIG["vocab_size"]) for _ in range(draw.randint(1, 40))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            draw.randint(1, tokens),
            exit_threshold=draw.choice([0.3, 0.5, 0.7, 1.0]),
            temperature=draw.choice([0.0, 0.9]),
            top_k=draw.choice([0, 7]),
            seed=index,
            logprobs=2,
            ignore_eos=True,
        )
        for index in range(count)
    ]
    return prompts, params


def bits(folder, prompts, params, order=None, **options):
    order = order or list(range(len(prompts)))
    with LLM(folder, batch_invariant=True, max_model_len=64, block_size=4, **options) as llm:
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    found = dict(zip(order, outputs, strict=True))
    return [
        (found[i].token_ids, found[i].exit_depths, found[i].logprobs) for i in range(len(prompts))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_in_every_batch_on_a_cpu(tmp_path, dtype):
    folder = write_checkpoint(tmp_path)
    prompts, params = requests(14, 12)
    alone = bits(folder, prompts, params, dtype=dtype, schedule="serial")
    for options in (
        {"max_rows": 14},
        {"max_rows": 5, "max_batched_tokens": 6},
        {"max_rows": 3, "max_batched_tokens": 20, "schedule": "no-refill"},
        {"max_rows": 9, "max_batched_tokens": 70, "order": list(range(14))[::-1]},
    ):
        assert bits(folder, prompts, params, dtype=dtype, **options) == alone


def by_rows(a, b, dtype=None):
    """Products of the interpreter that treat every row alike, as numpy's do not."""
    return np.einsum("...ij,...jk->...ik", a, b, dtype=dtype)


@pytest.mark.slow
def test_the_same_bits_in_every_batch_of_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", by_rows)
    folder = write_checkpoint(tmp_path)
    prompts, params = requests(4, 4)
    options = {"attention": "triton", "dtype": "float32"}
    alone = bits(folder, prompts, params, schedule="serial", **options)
    for batching in (
        {"max_rows": 4},
        {"max_rows": 2, "max_batched_tokens": 13, "order": [3, 1, 0, 2]},
    ):
        assert bits(folder, prompts, params, **options, **batching) == alone


@pytest.mark.slow
def test_a_split_that_depends_on_the_batch_shows(tmp_path, monkeypatch):
    """Contexts cut into as many parts as a device of two runs at once, as without invariance."""
    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", by_rows)
    adapt_split(monkeypatch)
    folder = write_checkpoint(tmp_path)
    prompts, params = requests(3, 4)
    prompts = [(prompt * 40)[:40] for prompt in prompts]
    options = {"attention": "triton", "dtype": "float32"}
    alone = bits(folder, prompts, params, schedule="serial", **options)
    assert bits(folder, prompts, params, max_rows=3, **options) != alone


def adapt_split(monkeypatch):
    allocate = DecodeWork.allocate

    def adaptive(*arguments, **options):
        *first, _, _, _ = arguments
        return allocate(*first, 16, 1024, 2, **options)

    monkeypatch.setattr(DecodeWork, "allocate", adaptive)
    monkeypatch.setattr(DecodeWork, "max_items", staticmethod(lambda *arguments: 4096))


def test_close_to_the_engine_without_it(tmp_path):
    folder = write_checkpoint(tmp_path)
    prompts, params = requests(6, 8)
    found = bits(folder, prompts, params, dtype="float32")
    with LLM(folder, max_model_len=64, dtype="float32") as llm:
        for (tokens, depths, logprobs), plain in zip(
            found, llm.generate(prompts, params), strict=True
        ):
            assert (tokens, depths) == (plain.token_ids, plain.exit_depths)
            assert [entry.logprob for entry in logprobs] == pytest.approx(
                [entry.logprob for entry in plain.logprobs], abs=1e-4
            )


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (70, 7)])
def test_attention_over_contexts_of_many_lengths(heads, groups):
    torch.manual_seed(0)
    rows, dim, block_size, positions = 21, 8, 4, 150
    blocks = rows * -(-positions // block_size)
    config = ModelConfig.from_dict(
        CONFIG
        | {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim}
        | {"hidden_size": heads * dim, "num_hidden_layers": 1, "total_ut_steps": 1},
        "test",
    )
    device = torch.device("cpu")
    cache = KVCache.allocate(config, blocks, block_size, device, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    table = torch.randperm(blocks).int().view(rows, 1, -1)
    tables = SlotTables(
        table,
        torch.zeros(rows, 1, 1, dtype=torch.int32),
        torch.full((rows,), positions, dtype=torch.int32),
        block_size,
    )
    contexts = torch.randint(1, positions, (rows,))
    contexts[:3] = torch.tensor([1, 64, 128])
    queries = torch.randn(rows, heads, dim)
    entries, planes = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    results = []
    for attention in (FixedAttention(heads), ReferenceAttention()):
        out = torch.full_like(queries, float("nan"))
        plan = attention.plan_decode(tables, entries, planes, contexts)
        attention.decode(plan, queries, out, cache, 0)
        results.append(out)
    torch.testing.assert_close(*results)


@given(
    sizes=st.sets(st.sampled_from([16, 32, 64, 128, 256, 384, 512]), max_size=7),
    canonical=st.sampled_from([64, 128, 512]),
    most=st.integers(1, 3000),
    share=st.floats(0, 1),
)
def test_pieces_cover_every_row_once(sizes, canonical, most, share):
    pieces = Pieces({*sizes, canonical}, canonical, most)
    rows = max(1, int(share * most))
    end = 0
    for begin, size in pieces.cover(rows):
        assert begin == end < rows
        assert size in {*sizes, canonical}
        end = begin + size
    assert rows <= end <= pieces.limit


def test_few_large_pieces_rather_than_many_small_ones():
    """Each piece reads the weights again."""
    sizes = {64, 128, 256, 2048}
    assert [size for _, size in Pieces(sizes, 2048, 8320).cover(8320)] in (
        [2048, 2048, 2048, 2048, 128],
        [128, 2048, 2048, 2048, 2048],
    )


def test_sizes_that_add_up_otherwise_are_not_used(monkeypatch):
    """A library that splits a product's sum where there are few rows."""
    multiply = torch.mm

    def mm(x, weight, out=None):
        half = x.shape[1] // 2
        result = (
            multiply(x[:, :half].double(), weight[:half].double())
            + multiply(x[:, half:].double(), weight[half:].double())
            + (1e-3 if len(x) < 64 else 0)
        )
        result = result.to(x.dtype)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(invariant.torch, "mm", mm)
    weight = torch.randn(24, 16)
    assert invariant._agreeing(weight, 128, [16, 32, 64, 128, 256]) == (64, 128, 256)


def test_a_library_that_repeats_nothing_is_refused(monkeypatch):
    calls = iter(range(10**6))
    multiply = torch.mm
    monkeypatch.setattr(
        invariant.torch, "mm", lambda x, weight: multiply(x, weight) + 1e-3 * next(calls)
    )
    with pytest.raises(EngineError, match="batch_invariant cannot be had"):
        invariant._agreeing(torch.randn(24, 16), 64, [64, 128])


def test_rows_that_are_not_in_use_change_nothing(tmp_path):
    """Products of any number of rows, with what an earlier step left behind them."""
    from ouro_batch.model.source import CheckpointSource

    source = CheckpointSource(str(write_checkpoint(tmp_path)))
    weights = source.load(torch.device("cpu"), torch.float32)
    products = InvariantProjections(weights, canonical=64, sizes=[16, 64, 128], rows=200, head=True)
    width = weights.layers[0].qkv.shape
    x = torch.randn(products.capacity, width[1])
    whole = torch.empty(products.capacity, width[0])
    products.qkv(0, x[:200], whole[:200])
    for rows in (1, 17, 63, 64, 65, 130):
        out = torch.full((products.capacity, width[0]), float("nan"))
        noisy = x.clone()
        noisy[rows:] = float("inf")
        products.qkv(0, noisy[:rows], out[:rows])
        assert torch.equal(out[:rows], whole[:rows])
