"""``ouro-batch score``: given completions and the answers of a run, from the command line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from ouro_batch.cli import app
from ouro_batch.jobs.openai import native_records
from ouro_batch.llm import LLM

from .test_cli_run import write
from .tiny import write_checkpoint

PROMPTS = [{"id": f"q{i}", "prompt": [1 + i, 2, 3], "metadata": {"i": i}} for i in range(6)]
SAMPLING = ["--temperature", "0.9", "--exit-threshold", "0.5", "--max-tokens", "9", "--ignore-eos"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "model")
    write(tmp_path / "in.jsonl", PROMPTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str, status: int = 0):
    result = CliRunner().invoke(app, [*arguments, "-m", "model"])
    assert result.exit_code == status, (result.stderr, result.exception)
    return result


def read(path: Path | str) -> list[dict]:
    return [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]


def answers() -> list[dict]:
    command("run", "in.jsonl", "-o", "out", "--token-ids", "--logprobs", "0", "-q", *SAMPLING)
    return read("out")


def test_the_answers_of_a_run_score_as_they_were_made(folder):
    made = answers()
    command("score", "in.jsonl", "--answers", "out", "-o", "scores")
    scores = read("scores")
    assert [s["id"] for s in scores] == [p["id"] for p in PROMPTS]
    for score, answer, prompt in zip(scores, made, PROMPTS, strict=True):
        own = [entry["logprob"] for entry in answer["logprobs"]]
        assert score["logprobs"] == pytest.approx(own, abs=5e-5)
        assert score["logprob"] == pytest.approx(sum(own), abs=5e-4)
        assert score["token_ids"] == answer["token_ids"]
        assert score["exit_depths"] == answer["exit_depths"]
        assert score["mean_exit_depth"] == answer["mean_exit_depth"]
        assert score["usage"] == answer["usage"]
        assert score["metadata"] == prompt["metadata"]


def test_depths_of_the_gate_instead_of_those_given(folder):
    answers()
    arguments = ["score", "in.jsonl", "--answers", "out", "--ignore-depths"]
    command(*arguments, "--exit-threshold", "0", "-o", "shallow")
    assert {depth for s in read("shallow") for depth in s["exit_depths"][1:]} == {1}
    command(*arguments, "--exit-threshold", "0", "--min-loops", "2", "-o", "second")
    assert {depth for s in read("second") for depth in s["exit_depths"][1:]} == {2}
    command(*arguments, "--exit-threshold", "0.5", "-o", "same")
    assert [s["exit_depths"] for s in read("same")] == [a["exit_depths"] for a in read("out")]


def test_lines_with_their_own_completions(folder):
    lines = [
        {"id": "ok", "prompt": [1, 2], "completion": [3, 4, 5]},
        {"id": "deep", "prompt": [1, 2], "completion": [3, 4, 5], "exit_depths": [3, 3, 3]},
        {"id": "none", "prompt": [1, 2]},
        {"id": "empty", "prompt": [1, 2], "completion": []},
        {"id": "few", "prompt": [1, 2], "completion": [3, 4], "exit_depths": [3]},
        {"id": "first", "prompt": [1, 2], "completion": [3, 4], "exit_depths": [1, 1]},
        {"id": "big", "prompt": [1, 2], "completion": [3, 9999]},
        {"id": "long", "prompt": [1, 2], "completion": [3] * 400},
        {"id": "odd", "prompt": [1, 2], "completion": [3], "completon": [4]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{broken\n"
    Path("pairs.jsonl").write_text(text)
    result = command("score", "pairs.jsonl", status=1)
    records = [orjson.loads(line) for line in result.stdout.splitlines()]
    assert [r["id"] for r in records] == [*(line["id"] for line in lines), None]
    assert len(records[0]["logprobs"]) == 3
    assert records[1]["exit_depths"] == [3, 3, 3]
    messages = [r.get("error", {}).get("message", "") for r in records]
    for message, words in zip(
        messages[2:],
        [
            "needs completion",
            "at least one",
            "1 exit_depths for 2 completion tokens",
            "exit_depths[0] is 1",
            "9999",
            "more than",
            "did you mean 'completion'",
            "not valid JSON",
        ],
        strict=True,
    ):
        assert words in message
    assert "2 of 10 records scored" in result.stderr


def test_a_score_that_was_interrupted_goes_on(folder, monkeypatch):
    answers()
    arguments = ["score", "in.jsonl", "--answers", "out", "-o", "scores"]
    score, calls = LLM.score, []

    def interrupted(self, *given, **named):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(self, *given, **named)

    monkeypatch.setattr(LLM, "score", interrupted)
    result = command(*arguments, status=130)
    assert "3 finished records in" in result.stderr
    assert not Path("scores").exists()
    command(*arguments)
    assert len(calls) == 4 + 3
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    command(*arguments[:-1], "again")
    assert read("scores") == read("again")
    command(*arguments, status=2)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda lines: lines[:4], 1, "4 of 6 records scored"),
        (lambda lines: [*lines, lines[-1].replace(b'"index":5', b'"index":6')], 2, "have index 6"),
        (lambda lines: [*lines, lines[-1]], 2, "out has two records of index 5, sample 0"),
        (lambda lines: [lines[0].replace(b'"q0"', b'"q9"'), *lines[1:]], 2, "has id 'q0'"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b'"q5"', b'"q9"')], 2, "has id 'q5'"),
        (
            lambda lines: [
                line.replace(b'"prompt_tokens":3', b'"prompt_tokens":9') for line in lines
            ],
            2,
            "line 1 of in.jsonl has a prompt of 3 tokens, its answer is to one of 9",
        ),
        (lambda lines: [b"x", *lines[1:]], 2, "line 1 of out is no output record"),
        (lambda lines: [*lines[:2], b"[]", *lines[2:]], 2, "line 3 of out is no output record"),
        (lambda lines: [b'{"index":-1,"error":{}}'], 2, "line 1 of out is no output record"),
        (lambda lines: [lines[0].replace(b'"index"', b'"indx"')], 2, "is no output record"),
        (
            lambda lines: [re.sub(rb'"token_ids":\[[^]]*\]', b'"token_ids":"x"', lines[0])],
            2,
            "is no output record",
        ),
    ],
)
def test_answers_that_are_not_those_of_the_input(folder, change, status, words):
    answers()
    lines = Path("out").read_bytes().splitlines()
    Path("out").write_bytes(b"\n".join(change(lines)) + b"\n")
    result = command("score", "in.jsonl", "--answers", "out", "-o", "scores", status=status)
    assert words in result.stderr
    assert "the same command goes on" not in result.stderr  # it would fail again


def test_depths_of_a_run_with_other_loops(folder):
    command("run", "in.jsonl", "-o", "out", "--token-ids", "-q", "--loops", "2", *SAMPLING)
    arguments = ["score", "in.jsonl", "--answers", "out", "-o", "scores"]
    result = command(*arguments, status=2)
    assert "line 1 of in.jsonl: exit_depths[0] is 2; prefill runs all 3 loops" in result.stderr
    assert "(give the --loops of the run that made them, or --ignore-depths)" in result.stderr
    assert not list(folder.glob("scores*"))
    command(*arguments, "--ignore-depths")
    command(*arguments, "--loops", "2", "--overwrite")
    assert [s["exit_depths"] for s in read("scores")] == [a["exit_depths"] for a in read("out")]
    line = {"prompt": [1, 2], "completion": [3, 4], "exit_depths": [2, 1]}
    write(folder / "own", [line, {**line, "exit_depths": [3, 1]}])
    result = command("score", "own", status=1)
    wrong, right = (orjson.loads(text) for text in result.stdout.splitlines())
    assert "or --ignore-depths" in wrong["error"]["message"]
    assert right["exit_depths"] == [3, 1]


@pytest.mark.parametrize("kind", ["reversed", "compressed", "openai"])
def test_answers_in_any_order_and_form(folder, kind):
    """Samples and all; errors stay errors."""
    lines = [{"custom_id" if kind == "openai" else "id": f"q{i}"} for i in range(4)]
    for i, line in enumerate(lines):
        request = {"prompt": [1 + i, 2, 3], "n": 1 + 2 * (i == 2), "top_k": -1 if i == 1 else 0}
        if kind == "openai":
            line |= {"method": "POST", "url": "/v1/completions", "body": request}
        else:
            line |= request
    write(folder / "in.jsonl", lines)
    command(
        "run", "in.jsonl", "-o", "out", "--token-ids", "--logprobs", "0", "-q", *SAMPLING, status=1
    )
    records = [r for line in read("out") for r in native_records(line)]
    name = "out"
    if kind == "reversed":
        lines = Path("out").read_bytes().splitlines(keepends=True)
        Path("out").write_bytes(b"".join(reversed(lines)))
    if kind == "compressed":
        name = "out.gz"
        Path(name).write_bytes(gzip.compress(Path("out").read_bytes()))
    command("score", "in.jsonl", "--answers", name, "-o", "scores", status=1)
    scores = read("scores")
    assert [(s["index"], s.get("sample", 0)) for s in scores] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0),
    ]  # fmt: skip
    for score, record in zip(scores, records, strict=True):
        assert ("error" in score) == ("error" in record) == (score["index"] == 1)
        if "error" not in score:
            assert score["token_ids"] == record["token_ids"]
            own = [entry["logprob"] for entry in record["logprobs"]]
            assert score["logprobs"] == pytest.approx(own, abs=5e-5)


def test_a_sample_that_changed_is_scored_again_with_its_line(folder, monkeypatch):
    write(folder / "in.jsonl", [{"prompt": [1, 2, 3], "n": 3}])
    command("run", "in.jsonl", "-o", "out", "--token-ids", "-q", *SAMPLING)
    records = read("out")
    write(folder / "more", [*records, records[0] | {"index": 9}])
    arguments = ["score", "in.jsonl", "-o", "scores", "-q", "--answers"]
    command(*arguments, "more", status=2)
    assert Path("scores.part").exists()
    records[1] |= {name: records[2][name] for name in ("token_ids", "exit_depths")}
    write(folder / "changed", records)
    command(*arguments, "changed", status=2)
    command(*arguments, "changed", "--resume", "force")
    assert [score["token_ids"] for score in read("scores")] == [r["token_ids"] for r in records]
    command(*arguments[:2], "-o", "few", "-q", "--answers", "more", status=2)
    write(folder / "first", records[:1])
    command(*arguments[:2], "-o", "few", "-q", "--answers", "first", "--resume", "force")
    assert len(read("few")) == 1


def test_answers_without_token_ids_are_refused_before_anything_is_loaded(folder):
    command("run", "in.jsonl", "-o", "out", "-q", *SAMPLING)
    result = CliRunner().invoke(app, ["score", "in.jsonl", "--answers", "out", "-m", "nowhere"])
    assert result.exit_code == 2
    assert "--token-ids" in result.stderr


def test_wrong_use(folder):
    assert "give --answers too" in command("score", "in.jsonl", "--format", "text", status=2).stderr
    assert "nowhere" in command("score", "nowhere", status=2).stderr
    assert "min_loops" in command("score", "in.jsonl", "--min-loops", "0", status=2).stderr
    write(folder / "there", [])
    assert "--overwrite" in command("score", "in.jsonl", "-o", "there", status=2).stderr


def test_the_answer_to_a_prompt_that_was_cut(folder):
    arguments = ["--max-model-len", "12", "--on-too-long", "truncate-left", "--token-ids", "-q"]
    write(folder / "in.jsonl", [{"prompt": [5] * 40}, {"prompt": [6]}])
    command("run", "in.jsonl", "-o", "out", *arguments, "--max-tokens", "4")
    result = command("score", "in.jsonl", "--answers", "out", status=1)
    first, second = map(orjson.loads, result.stdout.splitlines())
    assert first["error"]["type"] == "truncated"
    assert len(second["logprobs"]) == len(second["token_ids"])


def test_an_openai_line_is_no_line_to_score(folder):
    body = {"prompt": "x", "model": "m"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    write(folder / "in.jsonl", [line | {"completion": [3]}])
    result = command("score", "in.jsonl", status=1)
    assert "OpenAI" in orjson.loads(result.stdout)["error"]["message"]


def test_answers_of_another_input_are_found_and_those_of_the_right_one_go_on(folder):
    """The first lines have the same ids and lengths."""
    answers()
    lines = Path("out").read_bytes().splitlines()
    foreign = [line.replace(b'"id":"q4"', b'"id":"x"') for line in lines]
    Path("foreign").write_bytes(b"\n".join(foreign) + b"\n")
    result = command("score", "in.jsonl", "--answers", "foreign", "-o", "scores", status=2)
    assert "4 finished records in" in result.stderr
    assert "--resume never drops them" in result.stderr
    other = [{**json.loads(line), "token_ids": [5] * 9} for line in lines]
    write(folder / "other", other)
    result = command("score", "in.jsonl", "--answers", "other", "-o", "scores", status=2)
    assert "line 1 of in.jsonl" in result.stderr
    assert "or its answer is another" in result.stderr
    command("score", "in.jsonl", "--answers", "out", "-o", "scores")
    assert len(read("scores")) == 6


def test_another_field_is_noticed_when_a_score_goes_on(folder, monkeypatch):
    lines = [{"a": [1, 2], "b": [3], "completion": [4]} for _ in range(3)]
    write(folder / "in.jsonl", lines)
    score = LLM.score
    calls = []

    def interrupted(self, *given, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(self, *given, **named)

    monkeypatch.setattr(LLM, "score", interrupted)
    command("score", "in.jsonl", "--prompt-field", "a", "-o", "scores", status=130)
    result = command("score", "in.jsonl", "--prompt-field", "b", "-o", "scores", status=2)
    assert "prompt_field was a and is b" in result.stderr
