"""What a new user's first command gives: right answers, and tokens that leave early."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "samples"


def run(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ouro_batch", "run", *map(str, arguments)]
    return subprocess.run(command, text=True, check=True, capture_output=True, **options)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "answers.jsonl"
    began = time.monotonic()
    run(SAMPLES / "prompts.jsonl", "--model", SAMPLES / "tiny-ouro", "--output", out)
    return out, time.monotonic() - began


def test_answers_are_right(first_run):
    out, seconds = first_run
    records = read(out)
    assert len(records) == len(read(SAMPLES / "prompts.jsonl"))
    assert [record["index"] for record in records] == list(range(len(records)))
    right = [r["text"].strip() == r["metadata"]["answer"] for r in records]
    assert sum(right) >= 0.95 * len(records)
    assert seconds < 60  # the promise of the README's first command, with a wide margin


def test_tokens_leave_early_and_statistics_agree_with_the_records(first_run):
    out, _ = first_run
    records = read(out)
    depths = [depth for record in records for depth in record["exit_depths"][1:]]
    assert 1 < sum(depths) / len(depths) < 2.5
    statistics = json.loads(out.with_name(out.name + ".stats.json").read_text())
    engine = statistics["engine"]
    assert engine["exit_depths"] == {str(d): depths.count(d) for d in (1, 2, 3, 4)}
    assert engine["mean_exit_depth"] == pytest.approx(sum(depths) / len(depths))
    tokens = sum(record["usage"]["completion_tokens"] for record in records)
    assert engine["completion_tokens"] == tokens
    assert engine["rows_in_use"]["mean"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["no-refill", "serial"])
def test_schedules_give_the_same_answers(first_run, schedule, tmp_path):
    out = tmp_path / "answers.jsonl"
    run(
        *(SAMPLES / "prompts.jsonl", "--model", SAMPLES / "tiny-ouro", "--output", out),
        *("--schedule", schedule),
    )
    ours, theirs = read(out), read(first_run[0])
    for name in ("text", "exit_depths", "finish_reason", "seed", "usage"):
        assert [r[name] for r in ours] == [r[name] for r in theirs]


@pytest.mark.slow
def test_fewer_loops_answer_fewer_questions(first_run, tmp_path):
    out = tmp_path / "answers.jsonl"
    run(
        *(SAMPLES / "prompts.jsonl", "--model", SAMPLES / "tiny-ouro", "--output", out),
        *("--loops", "1"),
    )
    right = [
        sum(r["text"].strip() == r["metadata"]["answer"] for r in read(path))
        for path in (out, first_run[0])
    ]
    assert right[0] < 0.85 * right[1]
