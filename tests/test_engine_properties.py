"""Properties of the engine over random arrivals, lengths, aborts, budgets and exits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ouro_batch import LLM, RequestOutput, SamplingParams
from ouro_batch.validate.oracle import SerialOracle

from .tiny import CONFIG, write_checkpoint

LOOPS = CONFIG["total_ut_steps"]
# FP32 against FP64: what a logit, a noisy logit or an exit probability may be off by.
MARGIN = 1e-4


@dataclass(frozen=True)
class Arrival:
    prompt: list[int]
    params: SamplingParams
    step: int  # engine step before which it is added
    abort: int | None  # steps later that it is aborted


@st.composite
def arrivals(draw):
    prompt = draw(st.lists(st.integers(1, CONFIG["vocab_size"] - 1), min_size=1, max_size=20))
    max_tokens = draw(st.integers(1, 10))
    min_loops = draw(st.integers(1, LOOPS))
    exits = {
        "exit_threshold": draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0])),
        "min_loops": min_loops,
        "max_loops": draw(st.none() | st.integers(min_loops, LOOPS + 1)),
    }
    if draw(st.integers(0, 3)) == 0:
        depths = draw(st.lists(st.integers(1, LOOPS), min_size=max_tokens, max_size=max_tokens))
        exits = {"exit_depths": [LOOPS, *depths[1:]]}
    sampling = draw(st.sampled_from([{}, {"temperature": 0.7, "seed": draw(st.integers(0, 99))}]))
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=draw(st.booleans()), **exits, **sampling
    )
    abort = draw(st.none() | st.none() | st.integers(0, 12))
    return Arrival(prompt, params, draw(st.integers(0, 20)), abort)


@dataclass(frozen=True)
class Options:
    schedule: str
    rows: int
    block_size: int
    batched: int
    spare_cache: float  # cache as a multiple of the largest request's worst case


options = st.builds(
    Options,
    schedule=st.sampled_from(["refill", "no-refill", "serial"]),
    rows=st.integers(1, 5),
    block_size=st.integers(1, 8),
    batched=st.integers(1, 24),
    spare_cache=st.floats(1.0, 3.0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder):
    return SerialOracle.from_folder(folder)


def worst_case(arrival: Arrival, block_size: int) -> int:
    slots = LOOPS * (arrival.params.max_tokens - 1)
    return LOOPS * math.ceil(len(arrival.prompt) / block_size) + math.ceil(slots / block_size)


def poison_freed_blocks(llm: LLM) -> None:
    """From now on a slot that nobody owns holds NaN: whoever reads one gets a wrong answer."""
    cache, blocks = llm.engine.runner.cache, llm.blocks
    give = blocks._give

    def poison(freed):
        for block in freed:
            cache.keys[:, block] = math.nan
            cache.values[:, block] = math.nan
        give(freed)

    blocks._give = poison
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)


def check_ownership(llm: LLM) -> None:
    running = llm.engine.scheduler.running
    owned = [block for request in running.values() for block in request.blocks.all()]
    assert len(owned) == len(set(owned)) == llm.blocks.in_use
    taken = llm.engine.runner.state.slots_taken
    for row, request in running.items():
        assert int(taken[row]) <= len(request.blocks.decode) * llm.blocks.block_size


def run(llm: LLM, requests: list[Arrival]) -> list[RequestOutput]:
    """Feed requests at their steps, abort at theirs, checking every step; results in order."""
    poison_freed_blocks(llm)
    ids: dict[int, int] = {}
    outputs: dict[int, RequestOutput] = {}
    step = 0
    while len(outputs) < len(requests):
        for index, arrival in enumerate(requests):
            if arrival.step == step:
                ids[index] = llm.add_request(arrival.prompt, arrival.params, index=index)
            if arrival.abort is not None and step == arrival.step + arrival.abort:
                output = llm.abort(ids[index])
                if output is not None:
                    assert output.finish_reason == "abort"
                    outputs[ids[index]] = output
        for output in llm.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        check_ownership(llm)
        step += 1
        assert step < 5000, "the engine makes no progress"
    llm.step()
    assert llm.blocks.in_use == 0
    assert not llm.engine.runner.state.active.any()
    assert not llm.has_unfinished
    return [outputs[ids[index]] for index in range(len(requests))]


@given(requests=st.lists(arrivals(), min_size=1, max_size=8), options=options)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_every_schedule_agrees_with_the_serial_oracle(folder, oracle, requests, options):
    rows = 1 if options.schedule == "serial" else options.rows
    largest = max(worst_case(arrival, options.block_size) for arrival in requests)
    blocks = int(largest * options.spare_cache)
    llm = LLM(
        folder,
        schedule=options.schedule,
        max_rows=rows,
        max_batched_tokens=rows + options.batched,
        block_size=options.block_size,
        kv_tokens=math.ceil(blocks / LOOPS) * options.block_size,
        max_model_len=32,
    )
    outputs = run(llm, requests)
    with torch.inference_mode():
        for arrival, output in zip(requests, outputs, strict=True):
            stop_ids = () if arrival.params.ignore_eos else (CONFIG["eos_token_id"],)
            expected = oracle.generate(arrival.prompt, arrival.params, stop_ids)
            count = len(output.token_ids)
            margins = map(min, expected.margins[:count], expected.exit_margins)
            close = [i for i, margin in enumerate(margins) if margin < MARGIN]
            if close:  # decided by rounding: whatever follows may differ
                count = close[0]
            assert output.token_ids[:count] == expected.tokens[:count]
            assert output.exit_depths[:count] == expected.depths[:count]
            if not close and output.finish_reason != "abort":
                assert len(output.token_ids) == len(expected.tokens)
                stopped = output.token_ids[-1] in stop_ids
                assert output.finish_reason == ("stop" if stopped else "length")
            assert output.usage.loops == sum(output.exit_depths[1:])


@given(
    requests=st.lists(arrivals(), min_size=3, max_size=10),
    rows=st.integers(2, 6),
    block_size=st.integers(1, 8),
)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_admission_never_deadlocks_in_the_smallest_cache(folder, requests, rows, block_size):
    """A cache that holds the largest request and nothing more still finishes all of them."""
    largest = max(worst_case(arrival, block_size) for arrival in requests)
    llm = LLM(
        folder,
        max_rows=rows,
        max_batched_tokens=rows + 4,
        block_size=block_size,
        kv_tokens=math.ceil(largest / LOOPS) * block_size,
        max_model_len=32,
    )
    outputs = run(llm, requests)
    assert all(output.finish_reason for output in outputs)


@pytest.mark.parametrize(("threshold", "more"), [(0.0, True), (1.0, False)])
def test_early_exits_let_more_requests_run_at_once(folder, threshold, more):
    """In a cache with room for two full-depth requests."""
    params = SamplingParams(max_tokens=20, exit_threshold=threshold, ignore_eos=True)
    arrival = Arrival([1, 2, 3, 4], params, 0, None)
    llm = LLM(
        folder,
        max_rows=16,
        block_size=4,
        kv_tokens=2 * 4 * math.ceil(worst_case(arrival, 4) / LOOPS),
        max_model_len=32,
    )
    run(llm, [arrival] * 12)
    assert (llm.statistics()["peak_requests"] > 2) == more
