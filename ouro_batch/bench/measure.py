"""Runs one workload once and takes its times."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ouro_batch.bench.workload import Trace, Workload
from ouro_batch.llm import LLM
from ouro_batch.params import RequestOutput, SamplingParams


@dataclass(frozen=True)
class Step:
    """What the host had seen when an engine step returned. Times in seconds."""

    time: float
    prefill_tokens: int  # launched so far
    decode_tokens: int  # observed so far
    finished: int  # requests, so far


@dataclass(frozen=True)
class Pass:
    """One run of all requests from the first arrival to the last token."""

    seconds: float
    outputs: list[RequestOutput]
    steps: list[Step]
    rows: Counter[int]  # decode loop steps by rows that ran


@dataclass(frozen=True)
class Requests:
    """A workload's requests, ready to run as often as wanted."""

    workload: Workload
    prompts: list[list[int]]
    params: list[SamplingParams]

    @classmethod
    def of(
        cls, workload: Workload, trace: Trace | None, *, vocabulary: int, loops: int, seed: int
    ) -> Requests:
        """Greedy requests that ignore EOS; ``trace`` None is fixed depth."""
        depths: Sequence[list[int] | None] = [None] * workload.n
        if trace is not None:
            depths = trace.draw(workload, loops, seed)
        params = [
            SamplingParams(
                max_tokens=workload.output,
                ignore_eos=True,
                exit_threshold=1.0,
                exit_depths=own,
            )
            for own in depths
        ]
        return cls(workload, workload.prompts(vocabulary, seed), params)

    @property
    def first_tokens(self) -> list[SamplingParams]:
        """Parameters of the prefill pass: the same prompts with one output token."""
        return [SamplingParams(max_tokens=1, ignore_eos=True, exit_threshold=1.0)] * len(
            self.params
        )

    @property
    def drawn_depth(self) -> float | None:
        """Mean depth of the drawn trace, in loops; None at fixed depth."""
        drawn = [d for p in self.params for d in (p.exit_depths or ())[1 : p.max_tokens]]
        return sum(drawn) / len(drawn) if drawn else None


def run_pass(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Pass:
    """Queue every prompt at once and step to the end.

    Raises:
        RequestError: a request does not fit; none is left behind.
        EngineError: the device failed.
    """
    rows_before = _rows(llm)
    queued: list[int] = []
    outputs: list[RequestOutput] = []
    before = llm.snapshot()
    started = time.perf_counter()
    steps = [Step(started, 0, 0, 0)]
    try:
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            queued.append(llm.add_request(prompt, own, index=index))
        while llm.has_unfinished:
            outputs += llm.step()
            now = llm.snapshot()
            steps.append(
                Step(
                    time.perf_counter(),
                    now.prompt_tokens - before.prompt_tokens,
                    now.decode_tokens - before.decode_tokens,
                    len(outputs),
                )
            )
    except BaseException:
        if llm.engine is not None:
            for request_id in queued:
                llm.abort(request_id)
        raise
    return Pass(steps[-1].time - started, outputs, steps, _rows(llm) - rows_before)


def repetition(llm: LLM, requests: Requests) -> dict[str, Any]:
    """One prefill pass, then one full run: raw numbers, ready for JSON.

    Seconds carry ``_s``, rates ``_tok_s``. ``prefill_s`` is the time of the same prompts with one
    output token, ``decode_tok_s`` = n * (out - 1) / (total_s - prefill_s), so that a slow prefill
    flatters it: ``steady_decode_tok_s`` stands beside it. Times of tokens are those at which the
    host saw them: ``ttft`` from a request's arrival to its first token (all requests arrive at
    once), ``tpot`` from its first to its last over (out - 1).
    """
    workload = requests.workload
    prefill = run_pass(llm, requests.prompts, requests.first_tokens)
    full = run_pass(llm, requests.prompts, requests.params)
    decoded = sum(len(o.token_ids) - 1 for o in full.outputs)
    loops = sum(o.usage.loops for o in full.outputs)
    loop_steps = sum(full.rows.values())
    rest = full.seconds - prefill.seconds
    ttft = [o.timing.queue_s + o.timing.prefill_s for o in full.outputs]
    tpot = [o.timing.decode_s / (len(o.token_ids) - 1) for o in full.outputs]
    return {
        "prefill_s": prefill.seconds,
        "total_s": full.seconds,
        "prompt_tokens": workload.n * workload.input,
        "completion_tokens": decoded + workload.n,
        "decode_tokens": decoded,
        "decode_loops": loops,
        "mean_depth": loops / decoded,
        "prefill_tok_s": workload.n * workload.input / prefill.seconds,
        # A run faster than its own prefill pass (clock noise on tiny workloads) has no rate.
        "decode_tok_s": decoded / rest if rest > 0 else None,
        "end_to_end_tok_s": (decoded + workload.n) / full.seconds,
        "steady_decode_tok_s": steady_rate(full.steps),
        "ttft_s": {"p50": percentile(ttft, 50), "p99": percentile(ttft, 99)},
        "tpot_s": {"p50": percentile(tpot, 50), "p99": percentile(tpot, 99)},
        "rows_in_use": {
            "mean": sum(r * n for r, n in full.rows.items()) / loop_steps if loop_steps else None,
            "max": max(full.rows, default=0),
        },
        "steps": len(full.steps) - 1,
    }


def steady_rate(steps: Sequence[Step]) -> float | None:
    """Decode tokens/s while nothing but decoding ran; None where there was no such time.

    ``steps[0]`` is the start; ``steps[k]`` is taken when engine step k has returned. Engine step k
    launches device step k and then waits for device step k - 1, so the time between ``steps[k-1]``
    and ``steps[k]`` is that of device step k - 1. It counts where device step k - 1 carried no
    prompt tokens, some were prefilled before, and no request had finished when it was read. Of
    the first unbroken stretch of such steps the part between the first and the last step that
    gave a token is taken, so that whole tokens are measured where rows run in lockstep.
    """
    seen: list[Step] = []
    for k in range(2, len(steps)):
        launched = steps[k - 1].prefill_tokens - steps[k - 2].prefill_tokens
        steady = steps[k - 1].prefill_tokens > 0 and not launched and not steps[k].finished
        if steady and steps[k].decode_tokens > steps[k - 1].decode_tokens:
            seen.append(steps[k])
        elif not steady and len(seen) > 1:
            break
        elif not steady:
            seen.clear()
    if len(seen) < 2:
        return None
    return (seen[-1].decode_tokens - seen[0].decode_tokens) / (seen[-1].time - seen[0].time)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def _rows(llm: LLM) -> Counter[int]:
    by_rows = llm.statistics()["rows_in_use"]["steps_by_rows"]
    return Counter({int(rows): steps for rows, steps in by_rows.items()})
