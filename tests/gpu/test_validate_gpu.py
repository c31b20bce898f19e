"""Batch invariance on a GPU, and checks of ``validate`` that only a GPU can break."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ouro_batch.kernels.prefill_attention import prefill_attention, prefill_config, prefill_tiles

from ouro_batch import LLM, SamplingParams
from ouro_batch.model.config import ModelConfig
from ouro_batch.validate.check import Context
from ouro_batch.validate.prompts import random_prompts
from ouro_batch.validate.record import CHECKS, run_checks

from ..test_batch_invariance import adapt_split
from ..test_dense import check_engine_errors
from ..test_first_run import SAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(SAMPLES) / "tiny-ouro"


@pytest.fixture(scope="module")
def context() -> Context:
    config = ModelConfig.from_folder(MODEL)
    prompts = random_prompts(config, full=False)
    return Context(str(MODEL), MODEL, config, torch.device("cuda"), False, prompts, [])


def passed(context: Context, name: str) -> bool | None:
    ((result, _),) = run_checks(context, [name], lambda name, result: None)
    print(result)
    return result.passed


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "quality"])
def test_every_check(context, name):
    assert passed(context, name) is True


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bf16_errors_of_the_golden_data(batch_invariant):
    check_engine_errors("cuda", "triton", batch_invariant)


def test_tf32_turns_equations_red(context, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert passed(context, "equations") is False


def test_a_split_that_depends_on_the_batch_turns_invariance_red(context, monkeypatch):
    """Contexts cut into as many parts as fill a device of two, as without batch invariance."""
    adapt_split(monkeypatch)
    assert passed(context, "invariance") is False


def test_unmasked_tiles_are_not_used_where_bits_must_agree():
    """A chunk begun at any position gives each query the bits of the whole prompt in one."""
    torch.manual_seed(0)
    heads, dim, block_size, length = 4, 128, 16, 700
    blocks = -(-length // block_size)
    config = replace(prefill_config(torch.bfloat16, dim), masks_all=True)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    keys = torch.randn(blocks, block_size, heads, dim, **make)
    values = torch.randn(blocks, block_size, heads, dim, **make)
    queries = torch.randn(length, heads, dim, **make)
    table = torch.randperm(blocks, device="cuda").int().view(1, 1, -1)

    def attend(start: int, end: int) -> torch.Tensor:
        out = torch.empty_like(queries[start:end])
        tiles = torch.tensor(prefill_tiles([(0, start, end - start)], config.block_m)).int().cuda()
        prefill_attention(out, queries[start:end], keys, values, tiles, 0, table, config=config)
        return out

    whole = attend(0, length)
    for start, end in ((0, 1), (1, 130), (77, 700), (256, 300), (699, 700), (63, 65)):
        assert torch.equal(attend(start, end), whole[start:end])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_same_bits_in_every_batch(dtype):
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 1000) for _ in range(draw.choice([1, 9, 60, 300]))] for _ in range(96)
    ]
    params = [
        SamplingParams(
            draw.randint(1, 40),
            exit_threshold=draw.choice([0.3, 0.6, 0.8, 1.0]),
            temperature=draw.choice([0.0, 0.9]),
            top_p=draw.choice([1.0, 0.9]),
            seed=index,
            logprobs=2,
            ignore_eos=True,
        )
        for index in range(96)
    ]

    def run(chosen: list[int], **options) -> dict[int, tuple]:
        with LLM(MODEL, dtype=dtype, batch_invariant=True, max_model_len=384, **options) as llm:
            outputs = llm.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
        return {
            i: (o.token_ids, o.exit_depths, o.logprobs)
            for i, o in zip(chosen, outputs, strict=True)
        }

    expected = run(list(range(96)), max_rows=96)
    for chosen, options in (
        (list(range(12)), {"schedule": "serial"}),
        (list(range(95, -1, -1)), {"max_rows": 7, "max_batched_tokens": 50}),
        (list(range(0, 96, 2)), {"max_rows": 40, "schedule": "no-refill"}),
        (list(range(96)), {"max_rows": 129, "max_batched_tokens": 4000}),
        (list(range(96)), {"max_rows": 300, "max_batched_tokens": 333}),
    ):
        found = run(chosen, **options)
        assert [i for i in chosen if found[i] != expected[i]] == []
