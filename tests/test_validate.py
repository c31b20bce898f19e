"""``validate``: green on what is right, red with the right name on what is broken on purpose."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ouro_batch.bench.machine import COMMIT_VARIABLE
from ouro_batch.cli import app
from ouro_batch.model.config import ModelConfig
from ouro_batch.params import SamplingParams
from ouro_batch.validate import history, quality
from ouro_batch.validate.check import Context, Question, Result
from ouro_batch.validate.precision import allowed, within
from ouro_batch.validate.record import CHECKS, as_markdown, make_record, run_checks

from .tiny import write_checkpoint
from .validation import SMALL, context_of, verdicts

ROOT = Path(__file__).parents[1]
TINY_OURO = ROOT / "samples" / "tiny-ouro"


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    return context_of(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_every_check_of_a_small_model(context):
    assert verdicts(context) == dict.fromkeys(SMALL, True)


@pytest.mark.slow
def test_quick_level_on_the_sample_model(tmp_path):
    """Through the command line, as a user would; its record in both forms."""
    record = tmp_path / "validation.json"
    command = [
        *(sys.executable, "-m", "ouro_batch", "validate", "--model", str(TINY_OURO)),
        *("--prompts", str(ROOT / "samples" / "prompts.jsonl"), "--output", str(record)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(record.read_bytes())
    assert found["passed"]
    assert found["level"] == "quick"
    assert {check["name"]: check["passed"] for check in found["checks"]} == dict.fromkeys(
        CHECKS, True
    )
    for name in ("machine", "versions", "commit", "date", "command", "model"):
        assert name in found
    page = record.with_suffix(".md").read_text()
    for check in found["checks"]:
        assert f"## {check['name']}: passed" in page
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "validation.json exists (--overwrite" in again.stderr


def sample_questions(monkeypatch) -> Context:
    """Questions that the sample model answers, at one threshold."""
    monkeypatch.setattr(quality, "QUICK_THRESHOLDS", (0.5,))
    lines = (ROOT / "samples" / "prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[::2]]
    questions = [
        Question(
            {name: r[name] for name in ("prompt", "messages") if name in r},
            r["metadata"]["answer"],
            SamplingParams(r["max_tokens"]),
        )
        for r in records
    ]
    config = ModelConfig.from_folder(TINY_OURO)
    device = torch.device("cpu")
    return Context(str(TINY_OURO), TINY_OURO, config, device, False, [[5]], questions)


def test_a_gate_that_leaves_too_early_turns_quality_red(monkeypatch):
    context = sample_questions(monkeypatch)
    monkeypatch.setattr(
        "ouro_batch.intake.Intake.exit_threshold",
        lambda self, params: 0.0 if params.exit_threshold < 1 else float("inf"),
    )
    assert verdicts(context, "quality") == {"quality": False}


def test_a_threshold_that_does_not_lower_depth_turns_quality_red(monkeypatch):
    context = sample_questions(monkeypatch)
    monkeypatch.setattr(
        "ouro_batch.intake.Intake.exit_threshold",
        lambda self, params: 1 - params.exit_threshold if params.exit_threshold < 1 else 0.0,
    )
    assert verdicts(context, "quality") == {"quality": False}


@pytest.mark.parametrize("dims", [1, 64])
def test_few_tokens_may_be_above_the_limit_by_chance_only(dims):
    """606 tokens of random errors: the same size passes, 1.6 times it does not, whatever is
    drawn; with 10,000 tokens the limit is exact."""
    generator = torch.Generator().manual_seed(0)

    def squares(tokens: int, size: float) -> list[Tensor]:
        errors = size * torch.randn(tokens, dims, generator=generator, dtype=torch.float64)
        return list(errors.square().mean(1).tensor_split(8))

    for _ in range(50):
        assert within(squares(606, 1.0), squares(606, 1.0), 1.21)
        assert not within(squares(606, 1.6), squares(606, 1.0), 1.21)
    theirs = squares(10_000, 1.0)
    assert within([1.2 * text for text in theirs], theirs, 1.21)
    assert not within([1.22 * text for text in theirs], theirs, 1.21)


def test_texts_that_repeat_themselves_are_few_errors_counted_often():
    """Eight errors, 75 times each, are no worse than others of the same kind."""
    generator = torch.Generator().manual_seed(0)

    def squares(size: float) -> list[Tensor]:
        errors = size * torch.randn(8, 1, generator=generator, dtype=torch.float64)
        return list(errors.square().expand(8, 75))

    assert sum(within(squares(1.0), squares(1.0), 1.21) for _ in range(200)) >= 195


@pytest.mark.parametrize("tokens", [606, 10_000])
def test_the_ratio_that_the_record_calls_allowed_is_the_one_that_passes(tokens):
    generator = torch.Generator().manual_seed(0)
    verdicts = set()
    for size in torch.linspace(0.9, 1.6, 50):
        ours, theirs = (torch.randn(8, tokens // 8, generator=generator).square() for _ in range(2))
        ours *= size
        ratio = float(ours.mean() / theirs.mean())
        passed = within(list(ours), list(theirs), 1.1)
        assert passed == (ratio <= allowed(list(ours), list(theirs), 1.1))
        verdicts.add(passed)
    assert verdicts == {True, False}
    assert allowed([torch.ones(3)], [torch.zeros(3)], 1.1) is None


def test_a_model_too_large_for_the_oracle_is_said_and_is_no_failure(context, monkeypatch):
    monkeypatch.setattr(history, "CPU_PARAMETERS", 10_000)
    ((result, _),) = run_checks(context, ["history"], lambda name, result: None)
    assert result.passed is None
    assert "10,000 parameters" in result.note


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "default", "factor": 4.0}},
        {"early_exit_threshold": None, "tie_word_embeddings": None},
        {"early_exit_threshold": 0.5, "eos_token_id": [3, 5, 7, 9]},
        {"max_position_embeddings": 20},
        {"max_position_embeddings": 56, "total_ut_steps": 1},
        {"vocab_size": 2},
        {"vocab_size": 3},
        {"lm_head": 0.0},
        {"lm_head": 1e4},
        {"old": True},
    ],
    ids=str,
)
def test_no_false_red_of_a_model_that_is_unusual(tmp_path, change):
    folder = write_checkpoint(tmp_path)
    change = dict(change)
    tensors = load_file(folder / "model.safetensors")
    if change.pop("old", False):
        save_file({name: t + 1 for name, t in tensors.items()}, folder / "zz-old.safetensors")
    if "lm_head" in change:
        tensors["lm_head.weight"] *= change.pop("lm_head")
        save_file(tensors, folder / "model.safetensors")
    if "vocab_size" in change:
        write_checkpoint(tmp_path, **change)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    if "rope_parameters" in change:
        del config["rope_theta"]
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    context = context_of(folder)
    names = ("equations", "history", "schedules", "replay", "resources", "sampling")
    for result, _ in run_checks(context, names, lambda name, result: None):
        assert result.passed is not False, result


def test_a_lower_threshold_may_cost_more_by_chance_only():
    draw = random.Random(0)
    red = 0
    for _ in range(200):
        low, high = ([1 + draw.random() for _ in range(12)] for _ in range(2))
        red += quality.costs_more(low, high)
    assert red <= 10
    assert quality.costs_more([2.0 + draw.random() for _ in range(60)], [1.0] * 60)
    assert not quality.costs_more([None, 1.0], [2.0, None])
    assert not quality.costs_more([1.0], [1.0])


def test_what_cannot_run_is_said_and_is_no_failure(context):
    ((result, _),) = run_checks(context, ["quality"], lambda name, result: None)
    assert result.passed is None
    assert "metadata.answer" in result.note
    record = make_record(context, {"name": "tiny"}, "ouro-batch validate", [(result, 0.1)])
    assert not record["passed"]  # nothing was checked
    done = run_checks(context, ["quality", "resources"], lambda name, result: None)
    assert make_record(context, {"name": "tiny"}, "ouro-batch validate", done)["passed"]
    assert "## quality: not run" in as_markdown(record)


def test_a_record_names_the_commit_that_ran_though_the_tree_moves_on(context, monkeypatch):
    monkeypatch.setenv(COMMIT_VARIABLE, "before")
    began = context_of(context.folder)
    monkeypatch.setenv(COMMIT_VARIABLE, "after")
    assert make_record(began, {"name": "tiny"}, "ouro-batch validate", [])["commit"] == "before"


def test_a_run_that_is_cut_off_keeps_the_checks_that_were_done(tmp_path, monkeypatch):
    """Beside the record's place, which stays empty; the same command begins anew."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    command = ["validate", "--model", "model", "--only", "resources", "--only", "replay"]
    part = tmp_path / "validation.json.part"

    def interrupt(context: Context) -> Result:
        found = json.loads(part.read_bytes())
        assert found["passed"] is None
        assert found["unfinished"] == ["replay"]
        assert [check["name"] for check in found["checks"]] == ["resources"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(CHECKS, "replay", interrupt)
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 130
    assert "validation.json.part has the checks that were done" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", part.name]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = json.loads((tmp_path / "validation.json").read_bytes())
    assert found["passed"]
    assert found["unfinished"] == []
    assert not part.exists()


def test_a_failed_check_shows_in_an_unfinished_record(context):
    result = Result("replay", "Replay", False)
    record = make_record(context, {"name": "tiny"}, "", [(result, 0.1)], ["sampling"])
    assert record["passed"] is False


def test_what_another_job_left_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    part = tmp_path / "validation.json.part"
    part.write_text('{"id": "1"}\n{"id": "2"}\n')
    done = CliRunner().invoke(app, ["validate", "--model", "model", "--only", "resources"])
    assert done.exit_code == 2
    assert f"{part} is of another job" in done.stderr
    assert part.read_text() == '{"id": "1"}\n{"id": "2"}\n'


def test_two_jobs_cannot_write_one_output(tmp_path, monkeypatch):
    """Whichever comes second, a validation or a batch job."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"prompt": [5]}\n')
    found = []

    def meanwhile(context: Context) -> Result:
        for command in (
            ["validate", "--model", "model", "--only", "resources"],
            ["run", "in.jsonl", "--model", "model", "-o", "validation.json"],
        ):
            done = CliRunner().invoke(app, command)
            found.append((done.exit_code, "is being written by another job" in done.stderr))
        return Result("replay", "Replay", True)

    monkeypatch.setitem(CHECKS, "replay", meanwhile)
    command = ["validate", "--model", "model", "--only", "replay"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert found == [(2, True)] * 2
    assert json.loads((tmp_path / "validation.json").read_bytes())["passed"]


def test_what_was_kept_stays_until_there_is_something_newer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    part = tmp_path / "validation.json.part"
    kept = b'{\n  "kind": "validation",\n  "passed": null\n}\n'
    part.write_bytes(kept)

    def interrupt(context: Context) -> Result:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(CHECKS, "replay", interrupt)
        done = CliRunner().invoke(app, ["validate", "--model", "model", "--only", "replay"])
    assert done.exit_code == 130
    assert "no check was done" in done.stderr
    assert part.read_bytes() == kept


def test_a_part_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")

    def full(file: int, text: bytes, place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ouro_batch.validate.part.os.pwrite", full)
    done = CliRunner().invoke(app, ["validate", "--model", "model", "--only", "resources"])
    assert done.exit_code == 0, done.stderr
    assert "validation.json.part: No space left" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("model", "validation.json", "validation.md"),
    ]


def test_a_check_that_cannot_run_for_an_error_has_failed(context):
    gone = replace(context, model="/nowhere")
    ((result, _),) = run_checks(gone, ["replay"], lambda name, result: None)
    assert result.passed is False
    assert "ModelError" in result.note
    assert "/nowhere" in result.note


def test_an_interval_of_paired_answers():
    low, high = quality.paired_interval([True] * 100, [True] * 100)
    assert low < 0 < high < 0.03
    low, high = quality.paired_interval([True] * 100, [False] * 20 + [True] * 80)
    assert low < -0.2 < high < 0


def test_the_page_says_what_the_records_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from make_validation import TARGET, reference

    assert TARGET.read_text() == reference(), (
        "docs/validation.md is old: python docs/make_validation.py"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["-o", ""], 2, "the name of a file to write is empty"),
        (["-o", "."], 2, "it is a folder"),
        (["-o", "nowhere/v.json"], 2, "there is no folder"),
        (["-o", "v.md"], 2, "cannot be .md"),
        (["--prompts", "p.json", "-o", "p.json", "--overwrite"], 2, "is an input too"),
        (["--prompts", "p.md", "-o", "p.json", "--overwrite"], 2, "is an input too"),
        (["--prompts", "p.json", "-o", "v.json"], 3, "p.json, line 1: "),
        (["--prompts", "bad.json", "-o", "v.json"], 3, "bad.json, line 1: the line is not valid"),
        (["--prompts", "empty.json", "-o", "v.json"], 3, "empty.json has no prompts"),
    ],
)
def test_wrong_use(tmp_path, monkeypatch, arguments, status, words):
    long = {"prompt": "1 + 1 =", "max_tokens": 9999, "metadata": {"answer": "2"}}
    for name, text in (
        ("p.json", json.dumps(long)),
        ("p.md", "{}"),
        ("bad.json", "{"),
        ("empty.json", ""),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(
        app, ["validate", "-m", str(TINY_OURO), "--only", "quality", *arguments]
    )
    assert result.exit_code == status, result.stderr
    assert words in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
