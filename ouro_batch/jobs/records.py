"""The records of a job: one input line parsed into a ``Record``, one result into an output record.

An input record is a JSON object, or one of OpenAI's batch lines (``openai.py``)::

    {"id": any, "prompt": text | token ids, "messages": [...], SAMPLING FIELDS,
     "chat_template_kwargs": {...}, "metadata": any}
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from ouro_batch.errors import RequestError
from ouro_batch.jobs.openai import asked, is_openai_line, record_fields
from ouro_batch.jobs.reader import Line
from ouro_batch.params import RequestOutput, SamplingParams

SAMPLING_FIELDS = SamplingParams.names()
LONG_NUMBER = re.compile(rb"[0-9]{19}")
FIELDS = ("id", "prompt", "messages", *SAMPLING_FIELDS, "chat_template_kwargs", "metadata")


class RecordError(RequestError):
    """A line that is no valid record. ``id`` is the line's, None where it could not be read.

    ``openai`` is what ``Record`` has.
    """

    def __init__(
        self,
        message: str,
        type: str = "invalid_request",
        id: Any = None,
        openai: dict[str, Any] | None = None,
    ):
        super().__init__(message, type)
        self.id = id
        self.openai = openai


@dataclass(frozen=True)
class Record:
    """One request of a job; exactly one of ``prompt`` and ``messages`` is set.

    ``index`` counts the non-blank lines of all inputs from 0; ``line`` is the number of the line
    in its ``source``, from 1. A record without an id has its index for one. ``openai`` is set where
    the answer is to have OpenAI's form: what was asked, as ``openai.asked`` has it.
    """

    index: int
    line: int
    source: str
    id: Any
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    metadata: Any = None
    has_own_id: bool = False
    openai: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # the fields of ``InputFormat.extra``


@dataclass(frozen=True)
class InputFormat:
    """How lines are read: as JSON objects, or with ``text`` as one prompt each.

    ``prompt_field`` and ``id_field`` name columns that stand for prompt and id in other people's
    data. With either, columns that mean nothing here go into ``metadata``, unless a record has one.
    ``extra`` are fields that a command takes besides those of a record.
    """

    text: bool = False
    prompt_field: str | None = None
    id_field: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def names_columns(self) -> bool:
        return self.prompt_field is not None or self.id_field is not None

    @property
    def without_effect(self) -> list[str]:
        """What is said to somebody who asked for columns where there are none."""
        names = (("prompt", self.prompt_field), ("id", self.id_field)) if self.text else ()
        return [
            f"--{name}-field {column} changes nothing with --format text: a line is a prompt"
            for name, column in names
            if column is not None
        ]


def parse_record(line: Line, defaults: SamplingParams, format: InputFormat | None = None) -> Record:
    """The record in a line; sampling fields that it does not name are those of ``defaults``.

    Raises:
        RecordError: the line is not JSON (or UTF-8), or not a record that can be run.
    """
    format = format or InputFormat()
    if line.problem is not None:
        raise RecordError(line.problem, "invalid_value")
    if format.text:
        return _text_record(line, defaults)
    try:
        fields = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        hint = "" if line.data.lstrip()[:1] in b"{[" else " (--format text takes plain prompts)"
        raise RecordError(f"the line is not valid JSON: {error}{hint}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise RecordError(f"the line must be a JSON object, got {_kind(fields)}")
    if _may_lose(line.data, fields):
        _check_lossless(line, fields, format)
    extra = {name: fields.pop(name) for name in format.extra if name in fields}
    if is_openai_line(fields) and not format.names_columns:
        return replace(_openai_record(line, fields, defaults), extra=extra)
    fields = _rename_columns(fields, format)
    record_id = fields.get("id", line.index)
    if not _can_be_written(record_id):
        raise RecordError("id is nested too deeply to be written back")
    try:
        record = _record(line, record_id, fields, defaults, format.extra)
        return replace(record, extra=extra) if extra else record
    except RequestError as error:
        raise RecordError(str(error), error.type, record_id) from None


def _openai_record(line: Line, fields: dict[str, Any], defaults: SamplingParams) -> Record:
    try:
        own = record_fields(fields)
        record = _record(line, own["id"], own, defaults)
        return replace(record, openai=asked(fields, record.params.n))
    except RequestError as error:
        raise _openai_error(str(error), error.type, fields) from None


def _openai_error(message: str, type: str, fields: Mapping[str, Any]) -> RecordError:
    record_id = fields.get("custom_id")
    if not isinstance(record_id, str):
        record_id = None
    return RecordError(message, type, record_id, asked(fields, 1))


def _may_lose(data: bytes, fields: Mapping[str, Any]) -> bool:
    """Whether reading a line may have changed it; quick, and never wrong where it says no."""
    return (
        data.count(b"{") > 1
        or LONG_NUMBER.search(data) is not None
        or b"\\" in data
        or any(data.count(b'"%s"' % name.encode()) > 1 for name in fields)
    )


def _check_lossless(line: Line, fields: Mapping[str, Any], format: InputFormat) -> None:
    """Refuse what reading would change: long integers, and all but the last of equal names.

    Raises:
        RecordError: naming the number or the field, with the line's id where that is sure.
    """
    problem = ""

    def integer(digits: str) -> int:
        nonlocal problem
        value = int(digits[:40])
        if not problem and not -(2**63) <= value < 2**64:
            shown = digits if len(digits) <= 40 else f"{digits[:37]}..."
            problem = f"{shown} does not fit 64 bits"
        return value

    def unique(pairs: list[tuple[str, Any]]) -> _Pairs:
        nonlocal problem
        names = [name for name, _ in pairs]
        if not problem and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            problem = f"the field {twice!r} is there twice"
        return _Pairs(pairs)

    try:
        pairs: _Pairs = json.loads(line.data, parse_int=integer, object_pairs_hook=unique)
    except RecursionError:  # what is nested so deeply is refused where it is used
        return
    if not problem:
        return
    if problem.endswith("64 bits"):
        where, value = _with_long_integer(pairs)
        if where == "body" and isinstance(value, _Pairs):  # of OpenAI
            where, _ = _with_long_integer(value)
        number = where == "prompt" or where in SAMPLING_FIELDS
        way_out = "give a smaller one" if number else "write it in quotes"
        problem = f"{where}: {problem} ({way_out})"
    if is_openai_line(fields) and not format.names_columns:
        raise _openai_error(problem, "invalid_request", fields)
    name = format.id_field or "id"
    own_ids = [value for own, value in pairs if own == name]
    record_id = line.index if not own_ids else None
    if len(own_ids) == 1 and _is_whole(own_ids[0]) and _can_be_written(fields[name]):
        record_id = fields[name]
    raise RecordError(problem, id=record_id)


class _Pairs(list):
    """The names and values of a JSON object, equal names and all."""


def _with_long_integer(pairs: _Pairs) -> tuple[str, Any]:
    return next(pair for pair in pairs if _has_long_integer(pair[1]))


def _has_long_integer(value: Any) -> bool:
    if isinstance(value, _Pairs):
        return any(_has_long_integer(item) for _, item in value)
    if isinstance(value, list):
        return any(map(_has_long_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _is_whole(value: Any) -> bool:
    """Whether reading cannot have changed a value."""
    if isinstance(value, _Pairs):
        names = {name for name, _ in value}
        return len(names) == len(value) and all(_is_whole(item) for _, item in value)
    if isinstance(value, list):
        return all(map(_is_whole, value))
    return not _has_long_integer(value)


def input_hash(line: Line, record: Record | None) -> int:
    """64 bits of what a line asks for, whatever its spelling; of its bytes where it is no record.

    Equal lines ask for the same only under the same defaults.
    """
    data = line.data
    if record is not None:
        fields = (
            record.id,
            record.prompt,
            record.messages,
            record.chat_template_kwargs,
            dict(vars(record.params)),
            record.metadata,
        )
        data = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def result_record(
    record: Record,
    output: RequestOutput,
    *,
    token_ids: bool,
    token_text: Callable[[int], str],
) -> dict[str, Any]:
    """The output record of a request that has finished; ``token_ids`` only where asked for."""
    result: dict[str, Any] = {"id": record.id, "index": record.index}
    if record.params.n > 1:
        result["sample"] = output.sample
    result |= {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "exit_depths": list(output.exit_depths),
        "mean_exit_depth": output.mean_exit_depth,
        "usage": dict(vars(output.usage)),
        "timing": dict(vars(output.timing)),
        "seed": output.seed,
        "metadata": record.metadata,
    }
    if output.truncated_tokens:
        result["truncated_tokens"] = output.truncated_tokens
    if token_ids:
        result["token_ids"] = list(output.token_ids)
    if output.logprobs is not None:

        def named(token: int, logprob: float) -> dict[str, Any]:
            return {"token": token_text(token), "token_id": token, "logprob": logprob}

        result["logprobs"] = [
            named(token, entry.logprob) | {"top": [named(*other) for other in entry.top]}
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    if record.openai is not None:
        result["openai"] = record.openai
        result["timing"]["finished_at"] = int(time.time())
    return result


def error_record(line: Line, error: RecordError, *, name_file: bool) -> dict[str, Any]:
    """The output record of a line that cannot be run; ``name_file`` where a job has several."""
    details = {"type": error.type, "message": str(error), "line": line.number}
    if name_file:
        details["file"] = line.source
    result = {"id": error.id, "index": line.index, "error": details}
    if error.openai is not None:
        result["openai"] = error.openai
    return result


def _text_record(line: Line, defaults: SamplingParams) -> Record:
    try:
        prompt = line.data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"the line is not UTF-8: {error}", "invalid_text", line.index) from None
    return Record(line.index, line.number, line.source, line.index, defaults, prompt)


def _rename_columns(fields: dict[str, Any], format: InputFormat) -> dict[str, Any]:
    """``fields`` under the names they have here.

    Raises:
        RecordError: a column that should be there is not.
    """
    if not format.names_columns:
        return fields
    fields = dict(fields)
    renamed = {}
    for name, column in (("id", format.id_field), ("prompt", format.prompt_field)):
        if column is None:
            continue
        if column not in fields:
            there = ", ".join(map(repr, fields)) or "none"
            message = f"there is no column {column!r}; there are {there}"
            raise RecordError(message, id=renamed.get("id"))
        renamed[name] = fields.pop(column)
    # What stood under the names that now mean another column is foreign too.
    others = {
        name: value for name, value in fields.items() if name not in FIELDS or name in renamed
    }
    own = {name: value for name, value in fields.items() if name not in others}
    if others and own.get("metadata") is None:
        own["metadata"] = others
    return own | renamed


def _record(
    line: Line,
    record_id: Any,
    fields: dict[str, Any],
    defaults: SamplingParams,
    extra: Sequence[str] = (),
) -> Record:
    for name in fields:
        if name not in FIELDS:
            raise RequestError(_unknown_field(name, fields, extra))
    # Tables exported to JSON carry null where a column has no value.
    fields = {name: value for name, value in fields.items() if value is not None}
    if ("prompt" in fields) == ("messages" in fields):
        both = "prompt" in fields
        raise RequestError(
            "a record needs either prompt or messages, one of the two; "
            + ("this one has both" if both else "this one has neither")
        )
    if "prompt" in fields:
        _check_prompt(fields["prompt"])
        if "chat_template_kwargs" in fields:
            raise RequestError("chat_template_kwargs goes with messages; this record has a prompt")
    else:
        _check_messages(fields["messages"])
    template = fields.get("chat_template_kwargs", {})
    if not isinstance(template, dict):
        raise RequestError(f"chat_template_kwargs must be an object, got {_kind(template)}")
    for name in ("messages", "chat_template_kwargs"):
        if not _can_be_written(fields.get(name)):
            raise RequestError(f"{name} is nested too deeply")
    metadata = fields.get("metadata")
    if not _can_be_written(metadata):
        raise RequestError("metadata is nested too deeply to be written back")
    own = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    return Record(
        index=line.index,
        line=line.number,
        source=line.source,
        id=record_id,
        params=replace(defaults, **own) if own else defaults,
        prompt=fields.get("prompt"),
        messages=fields.get("messages"),
        chat_template_kwargs=template,
        metadata=metadata,
        has_own_id=fields.get("id") is not None,
    )


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, (str, list)):
        raise RequestError(f"prompt must be text or a list of token ids, got {_kind(prompt)}")
    if not prompt:
        raise RequestError("prompt is empty: it needs at least one token")
    if isinstance(prompt, list):
        for token in prompt:
            # bool is an int to Python, and JSON's true is no token id.
            if type(token) is not int or token < 0:
                raise RequestError(
                    f"prompt must hold only token ids (integers >= 0), got {token!r}"
                )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list of objects, got {_kind(messages)}")
    if not messages:
        raise RequestError("messages is empty: it needs at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{position}] must be an object, got {_kind(message)}")
        for name, kinds in (("role", str), ("content", (str, list))):
            if not isinstance(message.get(name), kinds):
                got = _kind(message[name]) if name in message else "none"
                raise RequestError(f"messages[{position}] needs {name} as text, got {got}")


def _unknown_field(name: str, fields: Mapping[str, Any], extra: Sequence[str]) -> str:
    known = tuple(dict.fromkeys((*FIELDS, *extra)))
    nearest = difflib.get_close_matches(name, known, n=1)
    if {"index", "exit_depths", "usage"} <= fields.keys():
        hint = ": this is an output record; give the input that it answers"
        hint += ", and this file as --answers" if extra else ""
    elif nearest:
        hint = f" (did you mean {nearest[0]!r}?)"
    else:
        hint = f"; known are {', '.join(known)}"
        if not {"prompt", "messages"} & fields.keys() and isinstance(fields[name], str):
            hint += f" (where it holds the prompt, give --prompt-field {name})"
    return f"unknown field {name!r}{hint}"


def _can_be_written(value: Any) -> bool:
    """orjson reads deeper nesting than it writes."""
    if not isinstance(value, (dict, list)):
        return True
    try:
        orjson.dumps({"value": value})
    except orjson.JSONEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """A JSON value's type in JSON's words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
