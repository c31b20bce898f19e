"""The Triton runner's whole step on a CPU, under the interpreter, against the eager runner."""

from __future__ import annotations

import pytest

from ouro_batch import LLM, SamplingParams

from .conftest import load_oracle
from .tiny import write_checkpoint

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 8, 8, 8], [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]]
PARAMS = [
    SamplingParams(6, exit_threshold=0.5, ignore_eos=True, logprobs=3),
    SamplingParams(5, exit_threshold=0.6, temperature=0.9, top_k=9, top_p=0.8, seed=3),
    SamplingParams(7, exit_depths=[3, 1, 2, 3, 1, 1, 3], ignore_eos=True),
    SamplingParams(1, logprobs=0),
]


@pytest.mark.parametrize("schedule", ["refill", pytest.param("no-refill", marks=pytest.mark.slow)])
def test_same_tokens_and_depths_as_the_eager_runner(tmp_path, schedule):
    folder = write_checkpoint(tmp_path)
    results = []
    for attention in ("torch", "triton"):
        llm = LLM(
            folder,
            attention=attention,
            schedule=schedule,
            max_rows=3,
            max_batched_tokens=9,
            block_size=4,
            max_model_len=32,
        )
        outputs = llm.generate(PROMPTS, PARAMS)
        results.append(outputs)
        assert llm.blocks.in_use == 0
    for ours, other in zip(*results, strict=True):
        assert (ours.token_ids, ours.exit_depths) == (other.token_ids, other.exit_depths)
        assert ours.finish_reason == other.finish_reason
        assert (ours.logprobs is None) == (other.logprobs is None)
        for entry, same in zip(ours.logprobs or [], other.logprobs or [], strict=True):
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-5)
            assert [id for id, _ in entry.top] == [id for id, _ in same.top]
            values = [value for _, value in same.top]
            assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-5)


def test_a_rehearsal_leaves_nothing_behind(tmp_path):
    """What a GPU does before the first step; here in the middle of a life, where traces count."""
    options = {"attention": "triton", "max_rows": 3, "max_batched_tokens": 9, "max_model_len": 32}
    with LLM(write_checkpoint(tmp_path), **options) as llm:
        before = llm.generate(PROMPTS[:2], PARAMS[:2])
        llm.engine.runner.rehearse()
        llm.engine.runner.allocate_cache(llm.blocks.blocks)
        after = llm.generate(PROMPTS[:2], PARAMS[:2])
    assert [o.token_ids for o in before] == [o.token_ids for o in after]
    assert [o.logprobs for o in before] == [o.logprobs for o in after]


@pytest.mark.slow
def test_golden_cases():
    """A live-gate case and one at fixed depth, side by side."""
    oracle = load_oracle("mha-4loop")
    cases = [oracle.cases[5] | {"max_tokens": 6}, oracle.cases[1] | {"max_tokens": 4}]
    llm = LLM(oracle.folder, attention="triton", max_rows=2, max_model_len=64)
    outputs = llm.generate([c["prompt"] for c in cases], [oracle.params(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case["tokens"][: case["max_tokens"]]
        assert output.exit_depths == case["exit_depths"][: case["max_tokens"]]


def test_skinny_products_in_sixteen_bit(tmp_path):
    """FP16 takes the kernels' own matrix products, and agrees with torch on greedy tokens."""
    folder = write_checkpoint(tmp_path, torch_dtype="float16", hidden_size=64, head_dim=16)
    results = []
    for attention in ("torch", "triton"):
        llm = LLM(folder, attention=attention, dtype="float16", max_rows=2, max_model_len=32)
        outputs = llm.generate(PROMPTS[:2], SamplingParams(4, exit_depths=[3, 1, 2, 3]))
        results.append([o.token_ids for o in outputs])
    assert results[0] == results[1]
