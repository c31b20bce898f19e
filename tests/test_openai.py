"""OpenAI's batch lines in, OpenAI's output out; and what reports and resumed jobs make of it."""

import os
import signal

import orjson
import pytest

from ouro_batch.jobs.openai import openai_record
from ouro_batch.jobs.reader import Line
from ouro_batch.jobs.records import RecordError, parse_record
from ouro_batch.params import SamplingParams
from ouro_batch.report.source import Output

from .test_cli_run import lines, names, run, write

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(custom_id, url=TEXT, **body):
    default = {"messages": [{"role": "user", "content": "ab"}]} if url == CHAT else {"prompt": "ab"}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "ouro", **default, **body},
    }


LINES = [
    ask("one"),
    ask("two", CHAT, max_completion_tokens=1, temperature=0.5, user="me"),
    {"id": "mine", "prompt": "native"},
    ask("three", n=3, max_tokens=5, logprobs=1),
    ask("bad", presence_penalty=1),
    ask("four", CHAT, n=2, logprobs=True, top_logprobs=1, exit_threshold=0.5),
    ask("five", CHAT, prompt="x"),
]


def without_times(value):
    """``value`` without what two runs of a job may differ in."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("timing", "created")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", LINES)
    return tmp_path


def test_answers_have_openais_form(folder):
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    one, two, native, three, bad, four, five = lines((folder / "out").read_bytes())
    assert native["text"] == "NATIVE"
    assert (one["custom_id"], one["error"]) == ("one", None)
    assert one["response"]["status_code"] == 200
    body = one["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "ouro")
    assert body["choices"] == [
        {"index": 0, "text": "AB", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert one["ouro_batch"]["records"][0]["exit_depths"] == [4, 3]
    chat = two["response"]["body"]
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "A", "refusal": None}
    assert chat["choices"][0]["finish_reason"] == "length"
    choices = three["response"]["body"]["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "AB"), (1, "AB1"), (2, "AB2")]
    assert choices[1]["logprobs"] == {
        "tokens": ["A", "B", "1"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"A": -0.5}, {"B": -0.5}, {"1": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert three["response"]["body"]["usage"]["completion_tokens"] == 2 + 3 + 3
    entry = {"token": "A", "logprob": -0.5, "bytes": [65]}
    content = four["response"]["body"]["choices"][1]["logprobs"]["content"]
    assert content[0] == entry | {"top_logprobs": [entry]}
    for line, number, message in ((bad, 5, "presence_penalty is"), (five, 7, "a prompt goes to")):
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["type"] == "invalid_request_error"
        assert line["response"]["body"]["error"]["message"].startswith(f"line {number}: {message}")
    assert (bad["custom_id"], five["custom_id"]) == ("bad", "five")


def test_a_line_that_reading_would_change_is_answered_in_openais_form(folder):
    write(folder / "in.jsonl", [ask("long", seed=7)])
    text = (folder / "in.jsonl").read_text().replace('"seed":7', f'"seed":{2**64}')
    (folder / "in.jsonl").write_text(text)
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    (answer,) = lines((folder / "out").read_bytes())
    assert answer["custom_id"] == "long"
    assert answer["response"]["body"]["error"]["message"] == (
        "line 1: seed: 18446744073709551616 does not fit 64 bits (give a smaller one)"
    )


def test_a_stream_gathers_the_samples_of_a_line(folder):
    streamed = lines(run(folder, "in.jsonl").stdout)
    run(folder, "in.jsonl", "-o", "out")
    whole = lines((folder / "out").read_bytes())
    by_id = {line.get("custom_id", "native"): without_times(line) for line in streamed}
    assert len(streamed) == len(by_id) == 7
    for line in whole:
        expected, got = without_times(line), by_id[line.get("custom_id", "native")]
        assert got.pop("ouro_batch", None) is not None or got["id"] == "mine"
        expected.pop("ouro_batch", None)
        assert got == expected


@pytest.mark.parametrize("kill_at", ["append:3", "append:5", "torn:7", "order:4", "rename:1"])
def test_a_job_that_was_cut_off_goes_on(folder, kill_at):
    run(folder, "in.jsonl", "-o", "whole")
    cut = run(folder, "in.jsonl", "-o", "out", env={**os.environ, "KILL_AT": kill_at})
    assert cut.returncode == -signal.SIGKILL
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    expected, got = (lines((folder / name).read_bytes()) for name in ("whole", "out"))
    for line in (*expected, *got):
        line.get("ouro_batch", {"records": []})["records"].sort(key=lambda r: r.get("sample", 0))
    assert without_times(got) == without_times(expected)


def test_errors_are_retried(folder):
    run(folder, "in.jsonl", "-o", "out")
    before = lines((folder / "out").read_bytes())
    mended = [*LINES[:4], ask("bad"), LINES[5], ask("five", CHAT)]
    write(folder / "in.jsonl", mended)
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors")
    assert result.returncode == 0, result.stderr
    after = lines((folder / "out").read_bytes())
    assert after[4]["response"]["body"]["choices"][0]["text"] == "AB"
    assert after[6]["response"]["status_code"] == 200
    assert [after[n] for n in (0, 1, 2, 3, 5)] == [before[n] for n in (0, 1, 2, 3, 5)]
    assert "out.part" not in names(folder)


def test_reports_read_them(folder):
    run(folder, "in.jsonl", "-o", "out")
    rows = list(Output(str(folder / "out")).rows())
    assert len(rows) == 1 + 1 + 1 + 3 + 1 + 2 + 1
    assert [row.text for row in rows if row.index == 3] == ["AB", "AB1", "AB2"]
    assert [row.failure.kind for row in rows if row.failure] == ["invalid_request"] * 2
    assert all(row.depths for row in rows if not row.failure)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (ask("x") | {"extra": 1}, "unknown field 'extra'; a batch line has custom_id"),
        (ask(7), "custom_id must be text, got 7"),
        (ask("") | {"custom_id": ""}, "custom_id must be text"),
        (ask("x") | {"method": "GET"}, "method must be POST, got 'GET'"),
        (ask("x", "/v1/embeddings"), "url must be /v1/completions or /v1/chat/completions"),
        (ask("x") | {"body": "hi"}, "body must be an object"),
        ({"custom_id": "x", "url": TEXT}, "body must be an object"),
        (ask("x", stream=True), "stream is not supported"),
        (ask("x", response_format={"type": "json_object"}), "response_format is not supported"),
        (ask("x", tools=[{"type": "function"}]), "tools is not supported"),
        (ask("x", logit_bias={"5": 1}), "logit_bias is not supported"),
        (ask("x", best_of=3), "best_of is not supported"),
        (ask("x", temprature=1), "unknown field 'temprature' (did you mean 'temperature'?)"),
        (ask("x", max_tokens=0), "max_tokens must be at least 1"),
        (ask("x", prompt=["a", "b"]), "a line has one prompt, this one has 2"),
        (ask("x", messages=[]), "messages go to /v1/chat/completions"),
        (ask("x", CHAT, top_logprobs=3), "top_logprobs needs logprobs: true"),
        (ask("x", CHAT, logprobs=3), "logprobs must be true or false"),
        (ask("x", CHAT, logprobs=True, top_logprobs=21), "logprobs must be at most 20"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(line, message):
    with pytest.raises(RecordError) as caught:
        parse_record(Line(3, 4, "in", orjson.dumps(line)), SamplingParams())
    assert message in str(caught.value)
    error = {"type": caught.value.type, "message": str(caught.value), "line": 4}
    native = {"id": caught.value.id, "index": 3, "error": error, "openai": caught.value.openai}
    assert openai_record([native])["response"]["status_code"] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto"},
        {"response_format": {"type": "text"}, "best_of": 1, "echo": False, "suffix": None},
        {"prompt": ["ab"]},
        {"prompt": [[97, 98]]},
        {"prompt": [97, 98]},
    ],
)
def test_what_changes_nothing_is_accepted(body):
    record = parse_record(Line(0, 1, "in", orjson.dumps(ask("x", **body))), SamplingParams(7))
    assert record.prompt in ("ab", [97, 98])
    assert record.params.max_tokens == 7  # the command line's, as for every other line
    assert record.metadata is None
