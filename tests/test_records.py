"""Input lines become records or say what is wrong with them; results become output records."""

import orjson
import pytest

from ouro_batch.jobs.reader import Line
from ouro_batch.jobs.records import (
    InputFormat,
    RecordError,
    error_record,
    parse_record,
    result_record,
)
from ouro_batch.params import RequestOutput, SamplingParams, Timing, Usage


def line(fields, index=3, number=7):
    data = fields if isinstance(fields, bytes) else orjson.dumps(fields)
    return Line(index, number, "in.jsonl", data)


def parse(fields, **defaults):
    return parse_record(line(fields), SamplingParams(**defaults))


def output(**changes):
    fields = {
        "request_id": 9,
        "text": "42",
        "token_ids": [5, 6, 2],
        "exit_depths": [4, 1, 2],
        "finish_reason": "stop",
        "usage": Usage(11, 3, 3),
        "timing": Timing(0.1, 0.2, 0.3, 0.6),
        "seed": 77,
    }
    return RequestOutput(**{**fields, **changes})


def test_prompt_as_text():
    record = parse({"id": "a", "prompt": "hello", "metadata": {"answer": [1]}})
    assert (record.id, record.index, record.line, record.source) == ("a", 3, 7, "in.jsonl")
    assert record.prompt == "hello"
    assert record.messages is None
    assert record.metadata == {"answer": [1]}


def test_prompt_as_token_ids():
    assert parse({"prompt": [0, 17, 2]}).prompt == [0, 17, 2]


def test_messages_with_template_arguments():
    messages = [{"role": "user", "content": "hi"}]
    record = parse({"messages": messages, "chat_template_kwargs": {"enable_thinking": True}})
    assert record.messages == messages
    assert record.prompt is None
    assert record.chat_template_kwargs == {"enable_thinking": True}


def test_null_is_left_out_as_tables_export_it():
    fields = {"prompt": "p", "messages": None, "max_tokens": None, "seed": None, "metadata": None}
    record = parse(fields, max_tokens=9)
    assert record.params.max_tokens == 9
    assert record.messages is None


def test_content_may_be_a_list_of_text_parts():
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert parse({"messages": messages}).messages == messages


@pytest.mark.parametrize("value", ["x", 5, 1.5, None, True, [1, "a"], {"k": None}])
def test_any_id_comes_back(value):
    assert parse({"id": value, "prompt": "p"}).id == value


def test_missing_id_is_the_index():
    assert parse({"prompt": "p"}).id == 3


def test_own_fields_win_over_defaults():
    record = parse({"prompt": "p", "max_tokens": 5, "stop": "x"}, max_tokens=9, temperature=0.5)
    assert record.params.max_tokens == 5
    assert record.params.temperature == 0.5
    assert record.params.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "both"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": None}, "this one has neither"),
        ({"prompt": 5}, "got a number"),
        ({"prompt": [1, -1]}, "got -1"),
        ({"prompt": [1, True]}, "got True"),
        ({"prompt": ["a"]}, "got 'a'"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "got text"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0] needs role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0] needs content as text"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "goes with messages"),
        (
            {"messages": [{"role": "user", "content": "b"}], "chat_template_kwargs": 1},
            "must be an object",
        ),
        ({"prompt": "a", "max_token": 5}, "did you mean 'max_tokens'?"),
        ({"promt": "a"}, "did you mean 'prompt'?"),
        ({"prompt": "a", "zzz": 5}, "unknown field 'zzz'; known are id, prompt"),
        ({"text": "a"}, "(where it holds the prompt, give --prompt-field text)"),
        (
            {"index": 0, "text": "a", "exit_depths": [4], "usage": {}},
            "unknown field 'index': this is an output record; give the input that it answers",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be an integer"),
        ({"prompt": "a", "temperature": -1}, "temperature must be at least 0"),
        ({"prompt": "a", "stop": [1]}, "stop must hold only str"),
        ({"prompt": "a", "n": 0}, "n must be at least 1"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must be at most 20"),
    ],
)
def test_refused_with_its_id(fields, message):
    with pytest.raises(RecordError) as caught:
        parse({"id": "x", **fields})
    assert message in str(caught.value)
    assert caught.value.type == "invalid_request"
    assert caught.value.id == "x"


@pytest.mark.parametrize(
    "data", [b"{", b'{"prompt": NaN}', b"{'prompt': 'a'}", b'{"prompt": "a"} x', b'"\xff"']
)
def test_not_json_has_no_id(data):
    with pytest.raises(RecordError, match="not valid JSON") as caught:
        parse(data)
    assert caught.value.type == "invalid_json"
    assert caught.value.id is None
    assert ("--format text" in str(caught.value)) == (not data.startswith(b"{"))


@pytest.mark.parametrize(("data", "kind"), [(b"[1]", "a list"), (b"5", "a number")])
def test_not_an_object(data, kind):
    with pytest.raises(RecordError, match=kind) as caught:
        parse(data)
    assert caught.value.id is None


@pytest.mark.parametrize("name", ["metadata", "id"])
def test_nested_deeper_than_can_be_written(name):
    nested = b"[" * 400 + b"]" * 400
    with pytest.raises(RecordError, match=f"{name} is nested too deeply"):
        parse(b'{"prompt": "a", "%s": %s}' % (name.encode(), nested))


def test_result_record():
    record = parse({"id": "a", "prompt": "p", "metadata": 5})
    result = result_record(record, output(), token_ids=False, token_text=chr)
    assert result == {
        "id": "a",
        "index": 3,
        "text": "42",
        "finish_reason": "stop",
        "exit_depths": [4, 1, 2],
        "mean_exit_depth": 1.5,
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "loops": 3},
        "timing": {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3, "total_s": 0.6},
        "seed": 77,
        "metadata": 5,
    }
    assert result_record(record, output(), token_ids=True, token_text=chr)["token_ids"] == [5, 6, 2]


def test_result_of_a_single_token_has_no_mean_depth():
    single = output(token_ids=[5], exit_depths=[4])
    assert (
        result_record(parse({"prompt": "p"}), single, token_ids=False, token_text=chr)[
            "mean_exit_depth"
        ]
        is None
    )


def test_error_record():
    error = RecordError("too long", "too_long", "a")
    expected = {"type": "too_long", "message": "too long", "line": 7}
    assert error_record(line({}), error, name_file=False) == {
        "id": "a",
        "index": 3,
        "error": expected,
    }
    assert error_record(line({}), error, name_file=True)["error"]["file"] == "in.jsonl"


def test_a_line_of_text_is_a_prompt():
    text = InputFormat(text=True)
    line = Line(3, 4, "in.txt", '  {"no": json}, é \u2028 '.encode())
    record = parse_record(line, SamplingParams(max_tokens=5), text)
    assert (record.prompt, record.id, record.params.max_tokens) == (line.data.decode(), 3, 5)
    with pytest.raises(RecordError, match="the line is not UTF-8") as error:
        parse_record(Line(3, 4, "in.txt", b"\xff"), SamplingParams(), text)
    assert (error.value.type, error.value.id) == ("invalid_text", 3)


def test_columns_of_other_peoples_data():
    format = InputFormat(prompt_field="question", id_field="qid")
    row = {"qid": 7, "question": "why?", "answer": "42", "id": "theirs", "max_tokens": 3}
    record = parse_record(Line(0, 1, "in", orjson.dumps(row)), SamplingParams(), format)
    assert (record.id, record.prompt, record.params.max_tokens) == (7, "why?", 3)
    assert record.metadata == {"answer": "42", "id": "theirs"}
    row["metadata"] = {"own": 1}
    record = parse_record(Line(0, 1, "in", orjson.dumps(row)), SamplingParams(), format)
    assert record.metadata == {"own": 1}
    with pytest.raises(RecordError, match="no column 'question'; there are 'text'") as error:
        parse_record(Line(0, 1, "in", b'{"qid": 7, "text": "x"}'), SamplingParams(), format)
    assert error.value.id == 7


@pytest.mark.parametrize(
    "id", ["7", '"seven"', "7.5", "-1e3", "true", "null", "[1, [2.5, null]]", '{"a": {"b": [0]}}']
)
@pytest.mark.parametrize("wrong", ['"seed": 1e1, "seed": 2', '"metadata": [18446744073709551616]'])
def test_a_line_that_reading_would_change_keeps_its_id(id, wrong):
    line = f'{{"prompt": "x", "id": {id}, {wrong}}}'.encode()
    with pytest.raises(RecordError, match=r"twice|64 bits") as error:
        parse_record(Line(0, 1, "in", line), SamplingParams())
    assert orjson.dumps(error.value.id) == orjson.dumps(orjson.loads(id))


@pytest.mark.parametrize(
    "id", ["18446744073709551616", "[1, 18446744073709551616]", '{"a": 1, "a": 2}', "[" * 300]
)
def test_an_id_that_reading_would_change_is_none(id):
    id += "]" * 300 if id == "[" * 300 else ""
    line = f'{{"prompt": "x", "seed": 18446744073709551616, "id": {id}}}'.encode()
    with pytest.raises(RecordError, match=r"twice|64 bits") as error:
        parse_record(Line(0, 1, "in", line), SamplingParams())
    assert error.value.id is None


def test_columns_that_are_named_are_no_openai_line_in_errors_either():
    format = InputFormat(id_field="qid")
    row = b'{"qid": 7, "custom_id": "c", "url": "/v1", "body": {"n": 18446744073709551616}}'
    with pytest.raises(RecordError, match="64 bits") as error:
        parse_record(Line(0, 1, "in", row), SamplingParams(), format)
    assert (error.value.id, error.value.openai) == (7, None)
