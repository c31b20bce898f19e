"""The engine against golden data made with the released modeling code, FP32."""

from __future__ import annotations

import pytest
import torch

from ouro_batch import LLM, SamplingParams

TOLERANCE = 1e-4


@pytest.mark.parametrize("schedule", ["refill", "no-refill", "serial"])
def test_tokens_and_exit_depths(oracle, schedule):
    llm = LLM(oracle.folder, schedule=schedule, max_rows=7, max_batched_tokens=40, block_size=4)
    outputs = llm.generate(
        [case["prompt"] for case in oracle.cases], [oracle.params(c) for c in oracle.cases]
    )
    for case, output in zip(oracle.cases, outputs, strict=True):
        assert output.token_ids == case["tokens"]
        assert output.exit_depths == case["exit_depths"]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("schedule", ["refill", "no-refill", "serial"])
def test_cache_planes(oracle, schedule):
    """Every plane of the request whose cache was recorded, its neighbours at other depths."""
    (recorded,) = (i for i, case in enumerate(oracle.cases) if case.get("kv_planes"))
    llm = LLM(oracle.folder, schedule=schedule, max_rows=32, block_size=8)
    rows = {}
    ids = [llm.add_request(c["prompt"], oracle.params(c)) for c in oracle.cases]
    while llm.has_unfinished:
        for row, request in llm.engine.scheduler.running.items():
            rows[request.request_id] = row
        finished = {output.request_id for output in llm.step()}
        if ids[recorded] in finished:
            length = oracle.tensors["kv_keys"].shape[2]
            keys, values = llm.engine.runner.read_planes(rows[ids[recorded]], length)
            break
    torch.testing.assert_close(keys, oracle.tensors["kv_keys"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(values, oracle.tensors["kv_values"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_hidden_states_gates_and_logits_of_every_loop(oracle, chunk, monkeypatch):
    llm = LLM(oracle.folder, max_rows=1, max_batched_tokens=1 + chunk)
    model = llm.engine.runner.model
    loops: list[list[torch.Tensor]] = [[] for _ in range(llm.config.loops)]
    run_loop, calls = model.loop, 0

    def recording_loop(*args):
        nonlocal calls
        hidden = run_loop(*args)
        loops[calls % len(loops)].append(hidden.clone())
        calls += 1
        return hidden

    monkeypatch.setattr(model, "loop", recording_loop)
    llm.generate([oracle.tensors["dense_ids"].tolist()], SamplingParams(max_tokens=1))
    hidden = torch.stack([torch.cat(chunks) for chunks in loops])
    expected = oracle.tensors
    torch.testing.assert_close(hidden, expected["dense_hidden"], atol=TOLERANCE, rtol=0)
    gates = torch.stack([model.gate(h) for h in hidden])
    torch.testing.assert_close(gates, expected["dense_gate_logits"], atol=TOLERANCE, rtol=0)
    logits = torch.stack([model.logits(h) for h in hidden])
    scale = expected["dense_logits"].abs().max()
    torch.testing.assert_close(
        logits, expected["dense_logits"], atol=TOLERANCE * float(scale), rtol=0
    )


def test_fewer_loops_run_the_whole_model_shallower(oracle):
    """``loops=d`` continues a prompt by the argmax of the dense logits of loop d."""
    ids = oracle.tensors["dense_ids"].tolist()
    for depth, logits in enumerate(oracle.tensors["dense_logits"], start=1):
        llm = LLM(oracle.folder, loops=depth)
        (output,) = llm.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True))
        assert output.token_ids == [int(logits[-1].argmax())]
        assert output.exit_depths == [depth]
