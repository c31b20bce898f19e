"""``ouro-batch bench`` on the tiny shape on a CPU: what it counts and writes, never how fast."""

import json
import re

import pytest
import torch

from ouro_batch.bench import machine
from ouro_batch.bench.floor import Ceilings, Costs, floor_tok_s
from ouro_batch.bench.measure import Requests, Step, percentile, repetition, steady_rate
from ouro_batch.bench.shapes import SHAPES, random_source
from ouro_batch.bench.workload import (
    DEFAULT_TRACE,
    TABLE,
    BenchError,
    Workload,
    parse_trace,
    parse_workloads,
)
from ouro_batch.cli import app
from ouro_batch.errors import RequestError
from ouro_batch.llm import LLM

SMALL = ["--shape", "tiny", "--device", "cpu", "--repetitions", "1", "--warmup", "0"]


@pytest.fixture
def bench(capsys, monkeypatch):
    """Runs the command in this process: exit status, standard output, standard error."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")

    def bench(*arguments):
        with pytest.raises(SystemExit) as end:
            app(["bench", *arguments], prog_name="ouro-batch")
        return (end.value.code, *capsys.readouterr())

    return bench


@pytest.fixture(scope="module")
def llm():
    with LLM(random_source("tiny", 0), device="cpu", max_rows=4, max_model_len=64) as llm:
        yield llm


def test_table_is_the_default_and_has_eight_rows():
    assert [str(w) for w in parse_workloads(["table"])] == list(TABLE)
    assert parse_workloads(["8x64/16", "8x64/16"]) == [Workload(8, 64, 16)]


@pytest.mark.parametrize("text", ["8x64", "x64/16", "0x64/16", "8x0/16", "8x64/1", "big"])
def test_workloads_that_cannot_be(text):
    with pytest.raises(BenchError, match=re.escape(text)):
        parse_workloads([text])


@pytest.mark.parametrize("text", ["", "2", "2:0.5", "2:0.5,2:0.5", "0:1", "2:1.5,3:-0.5", "a:1"])
def test_traces_that_cannot_be(text):
    with pytest.raises(BenchError, match="trace"):
        parse_trace(text)


def test_trace_draws_the_distribution_and_the_same_each_time():
    trace = parse_trace(DEFAULT_TRACE)
    assert trace.mean == pytest.approx(2.55)
    workload = Workload(40, 8, 251)
    drawn = trace.draw(workload, 4, seed=3)
    assert drawn == trace.draw(workload, 4, seed=3)
    assert drawn != trace.draw(workload, 4, seed=4)
    assert [len(own) for own in drawn] == [251] * 40
    assert {own[0] for own in drawn} == {4}
    rest = [d for own in drawn for d in own[1:]]
    for depth, share in [(2, 0.60), (3, 0.25), (4, 0.15)]:
        assert rest.count(depth) / len(rest) == pytest.approx(share, abs=0.02)


def test_a_trace_deeper_than_the_model_is_refused():
    with pytest.raises(BenchError, match="depth 4, the model has 3 loops"):
        parse_trace(DEFAULT_TRACE).draw(Workload(1, 1, 2), 3, seed=0)


def test_prompts_are_random_ids_of_the_vocabulary():
    workload = Workload(3, 500, 2)
    prompts = workload.prompts(16, seed=0)
    assert prompts == workload.prompts(16, seed=0)
    assert [len(p) for p in prompts] == [500] * 3
    assert set(prompts[0]) == set(range(16))
    assert prompts[0] != prompts[1]


def test_ouro_shape_has_the_bytes_of_the_released_model():
    costs = Costs.of(SHAPES["ouro-1.4b"], 2)
    assert costs.loop_weights == pytest.approx(2.466e9, rel=1e-3)
    assert costs.head_weights == pytest.approx(0.20e9, rel=0.01)
    assert costs.context_token == 196_608
    assert Costs.of(SHAPES["ouro-2.6b"], 2).loop_weights == 2 * costs.loop_weights


@pytest.mark.parametrize(
    ("rows", "tokens_in", "tokens_out", "expected"),
    [
        (8, 1024, 128, 2025),
        (32, 1024, 128, 3657),
        (128, 1024, 128, 4577),
        (1, 16384, 128, 186),
        (10, 16384, 128, 307),  # of 16 requests, what 170,000 tokens of cache hold
    ],
)
def test_floor_is_that_of_the_table(rows, tokens_in, tokens_out, expected):
    floor = floor_tok_s(
        Costs.of(SHAPES["ouro-1.4b"], 2),
        Ceilings(bandwidth=4.28e12, matrix_rate=6.65e14),
        rows=rows,
        context=tokens_in + tokens_out / 2,
        depth=4,
        lockstep=True,
    )
    assert floor == pytest.approx(expected, rel=0.005)


def test_floor_without_context_is_the_weights_alone():
    costs = Costs.of(SHAPES["ouro-1.4b"], 2)
    slow_arithmetic = Ceilings(4.28e12, 1e12)
    fast = Ceilings(4.28e12, 6.65e14)
    one = {"context": 0, "depth": 4, "lockstep": True}
    assert floor_tok_s(costs, fast, rows=1, **one) == pytest.approx(425, rel=0.002)
    parameters = 4 * costs.loop_weights / 2 + costs.head_weights / 2
    assert floor_tok_s(costs, slow_arithmetic, rows=64, **one) == pytest.approx(
        1e12 / (2 * parameters)
    )
    # Leaving early saves loops, but the head is read in more of them.
    early = floor_tok_s(costs, fast, rows=32, context=0, depth=2, lockstep=False)
    assert 1.8 < early / floor_tok_s(costs, fast, rows=32, **one) < 2


def test_steady_rate_counts_steps_of_decoding_alone():
    # Prompts in engine steps 1 and 2; device step 3 is read by engine step 4.
    seen = [
        (0.0, 0, 0, 0),
        (1.0, 50, 0, 0),
        (2.0, 90, 0, 0),
        (9.0, 90, 3, 0),
        (10.0, 90, 7, 0),
        (11.0, 90, 7, 0),
        (12.0, 90, 11, 0),
        (13.0, 90, 15, 1),
        (99.0, 90, 19, 4),
    ]
    assert steady_rate([Step(*one) for one in seen]) == (11 - 7) / (12.0 - 10.0)
    assert steady_rate([Step(*one) for one in seen[:5]]) is None


def test_percentiles():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize("trace", [None, parse_trace("1:0.5,2:0.3,4:0.2")])
def test_a_repetition_counts_every_token_and_loop(llm, trace):
    workload = Workload(6, 20, 12)
    requests = Requests.of(workload, trace, vocabulary=256, loops=4, seed=1)
    found = repetition(llm, requests)
    assert found["prompt_tokens"] == 120
    assert found["completion_tokens"] == 72
    assert found["decode_tokens"] == 66
    drawn = 4 * 66 if trace is None else sum(sum(p.exit_depths[1:]) for p in requests.params)
    assert found["decode_loops"] == drawn
    assert found["mean_depth"] == (requests.drawn_depth or 4.0)
    assert 1 <= found["rows_in_use"]["mean"] <= found["rows_in_use"]["max"] == 4
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["total_s"]
    assert found["end_to_end_tok_s"] == pytest.approx(72 / found["total_s"])
    assert found["prefill_tok_s"] == pytest.approx(120 / found["prefill_s"])
    rest = found["total_s"] - found["prefill_s"]
    if rest > 0:
        assert found["decode_tok_s"] == pytest.approx(66 / rest)


def test_a_request_that_does_not_fit_leaves_none_behind(llm):
    requests = Requests.of(Workload(2, 60, 5), None, vocabulary=256, loops=4, seed=0)
    with pytest.raises(RequestError, match="64"):
        repetition(llm, requests)
    assert not llm.has_unfinished


def test_rows_of_a_run(bench, tmp_path):
    output = tmp_path / "bench.json"
    schedules = ["--schedule", "refill", "--schedule", "no-refill"]
    workloads = ["-w", "4x24/10", "-w", "2x8/6"]
    status, out, err = bench(
        *SMALL, *workloads, *schedules, "--repetitions", "2", "-o", str(output)
    )
    assert status == 0, err
    assert "4x24/10" in out
    assert len(err.splitlines()) == 8
    assert list(tmp_path.iterdir()) == [output]
    document = json.loads(output.read_text())
    keys = ["machine", "versions", "commit", "command", "settings", "ceilings", "results"]
    assert list(document) == keys
    assert document["machine"]["gpu"] is None
    assert document["machine"]["memory_bytes"] > 0
    assert document["versions"]["torch"] == torch.__version__
    assert document["ceilings"]["bandwidth_bytes_s"] > 0
    assert document["ceilings"]["matrix_rate_ops_s"] > 0
    assert document["settings"]["repetitions"] == 2
    rows = document["results"]
    assert [(r["schedule"], r["n"], r["exit"]) for r in rows] == [
        (schedule, n, exit)
        for schedule in ("refill", "no-refill")
        for n in (4, 2)
        for exit in ("fixed", "trace")
    ]
    for row in rows:
        assert len(row["repetitions"]) == 2
        assert row["repetitions"][0]["decode_tokens"] == row["n"] * (row["output"] - 1)
        assert row["end_to_end_tok_s"] > 0
        assert row["prefill_tok_s"] > 0
        assert row["floor_rows"] == row["n"]
        assert row["floor_tok_s"] > 0
        if row["decode_tok_s"] is not None:
            assert row["floor_share"] == pytest.approx(row["decode_tok_s"] / row["floor_tok_s"])
        assert row["cache"]["bytes"] > 0
        assert row["peak_memory_bytes"] > 0
        assert row["max_rows"] == 4
        start_up = row["start_up"]
        assert 0 < start_up["construction_s"] < start_up["first_token_s"]
        if row["exit"] == "fixed":
            assert row["mean_depth"] == 4
        else:
            assert row["mean_depth"] == row["trace"]["drawn_mean"]
            assert row["trace"]["mean"] == pytest.approx(2.55)
    # Scheduling changes when tokens run, never which depths they have.
    assert [r["mean_depth"] for r in rows[:4]] == [r["mean_depth"] for r in rows[4:]]


def test_json_alone_on_standard_output(bench):
    status, out, _ = bench(*SMALL, "-w", "2x8/4", "--exit", "fixed", "-q", "-o", "-")
    assert status == 0
    assert [row["exit"] for row in json.loads(out)["results"]] == ["fixed"]


def test_an_impossible_workload_is_an_error_row_and_the_others_go_on(bench, tmp_path):
    output = tmp_path / "bench.json"
    arguments = ["-w", "1x40/30", "-w", "1x8/4", "--max-model-len", "64", "--exit", "fixed"]
    status, out, _ = bench(*SMALL, *arguments, "-o", str(output))
    assert status == 1
    first, second = json.loads(output.read_text())["results"]
    assert "the longest possible is 64" in first["error"]
    assert first["repetitions"] == []
    assert second["repetitions"]
    assert "the longest possible is 64" in out


def test_an_llm_that_cannot_be_built_is_an_error_row(bench, tmp_path):
    output = tmp_path / "bench.json"
    arguments = ["-w", "4x8/4", "--max-batched-tokens", "2", "--exit", "fixed"]
    status, _, _ = bench(*SMALL, *arguments, "-o", str(output))
    assert status == 1
    (row,) = json.loads(output.read_text())["results"]
    assert "max_batched_tokens" in row["error"]


@pytest.mark.parametrize(("shape", "said"), [("ouro-1.4b", True), ("tiny", False)])
def test_a_large_shape_on_a_cpu_is_said_to_take_long(bench, shape, said):
    wrong = ["--max-batched-tokens", "2", "--exit", "fixed"]  # no weights are made
    status, _, errors = bench("--shape", shape, "--device", "cpu", "-w", "4x8/4", *wrong)
    assert status == 1
    assert ("--shape tiny takes seconds" in errors) == said


def test_comparison_runs_pairs_and_gives_the_ratio(bench, tmp_path):
    output = tmp_path / "bench.json"
    settings = ["--compare", "schedule=no-refill", "schedule=refill,max-rows=2"]
    status, out, err = bench(
        *SMALL, "-w", "3x8/20", "--exit", "trace", *settings, "--repetitions", "3",
        "-o", str(output),
    )  # fmt: skip
    assert status == 0, err
    assert "B / A" in out
    document = json.loads(output.read_text())
    a, b = document["results"]
    assert (a["schedule"], a["max_rows"]) == ("no-refill", 3)
    assert (b["schedule"], b["max_rows"]) == ("refill", 2)
    assert (a["setting"], b["setting"]) == tuple(settings[1:])
    (row,) = document["comparison"]["rows"]
    assert row["pairs"] == len(a["repetitions"]) == len(b["repetitions"]) == 3
    ratio = row["end_to_end"]
    first = b["repetitions"][0]["end_to_end_tok_s"] / a["repetitions"][0]["end_to_end_tok_s"]
    assert ratio["ratios"][0] == pytest.approx(first)
    assert ratio["min"] <= ratio["median"] <= ratio["max"]


def test_comparison_of_exits(bench):
    status, out, _ = bench(
        *SMALL, "-w", "2x8/8", "--compare", "exit=fixed", "exit=trace", "-q", "-o", "-"
    )
    assert status == 0
    document = json.loads(out)
    assert [row["exit"] for row in document["results"]] == ["fixed", "trace"]
    assert [row["exit"] for row in document["comparison"]["rows"]] == [["fixed", "trace"]]


def test_profile_names_operators(bench, tmp_path):
    output = tmp_path / "bench.json"
    arguments = ["-w", "2x8/8", "--exit", "fixed", "--profile", "--profile-steps", "4"]
    status, out, _ = bench(*SMALL, *arguments, "-o", str(output))
    assert status == 0
    (row,) = json.loads(output.read_text())["results"]
    profile = row["profile"]
    assert profile["steps"] == 4
    assert sum(kernel["share"] for kernel in profile["kernels"]) == pytest.approx(1)
    assert any("mm" in kernel["name"] for kernel in profile["kernels"])
    assert profile["kernels"][0]["name"] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-w", "many"], "NxIN/OUT"),
        (["--trace", "2:0.5"], "add up to 0.5"),
        (["--trace", "5:1", "-w", "1x4/2", "--exit", "trace"], "depth 5"),
        (["--shape", "huge"], "ouro-1.4b"),
        (["--model", "x", "--shape", "tiny"], "--model and --shape"),
        (["--compare", "speed=1", "schedule=refill"], "speed=1"),
        (["--compare", "max_rows=few", "schedule=refill"], "few"),
        (["--output", "no/such/folder/b.json"], "there is no folder"),
    ],
)
def test_wrong_use_is_status_2(bench, arguments, message):
    small = SMALL if "--shape" not in arguments else SMALL[2:]
    status, out, err = bench(*small, *arguments)
    assert status == 2
    assert out == ""
    assert message in err


def test_a_missing_model_is_status_3(bench, tmp_path):
    status, _, err = bench("--model", str(tmp_path), "-w", "1x4/2")
    assert status == 3
    assert "config.json" in err


def test_help_names_defaults_and_units(bench):
    status, out, _ = bench("--help")
    assert status == 0
    for words in ("--workload", "NxIN/OUT", DEFAULT_TRACE, "GiB", "(table)"):
        assert words in out
    import typer

    command = typer.main.get_command(app).commands["bench"]
    for option in command.params:
        assert option.help or option.name == "help"
        if not option.is_flag:
            assert option.default is not None or isinstance(option.show_default, str), option.name


def test_commit_of_a_checkout_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    assert machine.commit(tmp_path) is None
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc-dirty")
    for root in (tmp_path, None):  # a copy of a checkout may not know its own commit
        assert machine.commit(root) == "abc-dirty"


def test_process_age_is_seconds():
    age = machine.process_age_s()
    assert age is None or 0 < age < 86_400
