"""Golden data, schedules and accuracy on a GPU, and what is left of its memory afterwards."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ouro_batch import LLM, SamplingParams

from ..conftest import load_oracle
from ..test_first_run import SAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCHEDULES = ("refill", "no-refill", "serial")


@pytest.mark.parametrize("name", ["mha-4loop", "gqa-3loop", "bf16-192"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_golden_data(name, schedule, attention):
    oracle = load_oracle(name)
    with LLM(
        oracle.folder,
        dtype="float32",
        schedule=schedule,
        attention=attention,
        max_rows=8,
        max_batched_tokens=48,
    ) as llm:
        outputs = llm.generate(
            [case["prompt"] for case in oracle.cases], [oracle.params(c) for c in oracle.cases]
        )
    for case, output in zip(oracle.cases, outputs, strict=True):
        assert output.token_ids == case["tokens"]
        assert output.exit_depths == case["exit_depths"]


def mixed_requests(vocab: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(0)
    prompts, params = [], []
    for index in range(count):
        prompts.append([draw.randrange(3, vocab) for _ in range(draw.choice([1, 7, 30, 120]))])
        exits = {"exit_threshold": draw.choice([0.2, 0.5, 0.8, 1.0])}
        if index % 5 == 0:
            exits = {"exit_depths": [4] + [draw.randint(1, 4) for _ in range(39)]}
        sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 40} if index % 3 == 0 else {}
        params.append(
            SamplingParams(max_tokens=draw.choice([1, 5, 40]), seed=index, **exits, **sampling)
        )
    return prompts, params


def test_six_configurations_agree_in_fp32():
    prompts, params = mixed_requests(1024, 60)
    results = {}
    for attention in ("torch", "triton"):
        for schedule in SCHEDULES:
            with LLM(
                str(SAMPLES / "tiny-ouro"),
                dtype="float32",
                attention=attention,
                schedule=schedule,
                max_rows=24,
            ) as llm:
                results[attention, schedule] = [
                    (o.token_ids, o.exit_depths) for o in llm.generate(prompts, params)
                ]
    first = results["torch", "serial"]
    for configuration, result in results.items():
        differing = [
            i for i, pair in enumerate(zip(result, first, strict=True)) if pair[0] != pair[1]
        ]
        assert not differing, (configuration, differing)


def test_a_prompt_means_the_same_whether_a_graph_runs_it_or_not():
    """A bucket of prompt tokens runs plainly first, is captured, and is replayed from then on."""
    prompts, params = mixed_requests(1024, 12)
    prompts += [[7 + n % 50 for n in range(length)] for length in (2, 3, 255, 257, 400)]
    params += [SamplingParams(max_tokens=3, ignore_eos=True)] * 5
    with LLM(str(SAMPLES / "tiny-ouro"), dtype="float32", max_batched_tokens=3000) as llm:
        rounds = []
        for _ in range(4):
            alone = [llm.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
            together = llm.generate(prompts, params)
            rounds += [[(o.token_ids, o.exit_depths) for o in run] for run in (alone, together)]
    assert all(other == rounds[0] for other in rounds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_the_small_model_answers_as_well_as_on_a_cpu(dtype, attention):
    records = [json.loads(line) for line in (SAMPLES / "eval.jsonl").read_text().splitlines()]
    with LLM(str(SAMPLES / "tiny-ouro"), dtype=dtype, attention=attention) as llm:
        ids = {}
        for index, record in enumerate(records):
            source = {name: record[name] for name in ("prompt", "messages") if name in record}
            params = SamplingParams(max_tokens=record["max_tokens"])
            ids[llm.add_request(params=params, index=index, **source)] = record
        right = 0
        while llm.has_unfinished:
            for output in llm.step():
                answer = ids[output.request_id]["metadata"]["answer"]
                right += output.text.strip() == answer
    assert right >= 0.985 * len(records)


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_nothing_is_left_on_the_device_after_close(attention):
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM(str(SAMPLES / "tiny-ouro"), attention=attention)
    for index in range(20):
        llm.add_request([5 + index, 6, 7], SamplingParams(max_tokens=30), index=index)
    llm.step()
    llm.step()
    llm.abort(3)
    llm.close()
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 2**20 * 34  # cuBLAS keeps its work space


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs a Hopper GPU or a later one",
)
def test_no_kernel_reads_what_the_one_before_has_yet_to_write():
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.late_join"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
