"""OpenAI's batch lines: read as records, and answered in OpenAI's form.

A line is ``{"custom_id", "method": "POST", "url", "body"}``; its body holds the request. While a
job runs its results are records like any other, with a key ``openai`` that says what was asked
(``Asked``); where they leave the job, ``OutputForm`` brings the samples of a line together into
one line of OpenAI's output, with everything that OpenAI has no place for under ``ouro_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ouro_batch.errors import RequestError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE_FIELDS = ("custom_id", "method", "url", "body")
# Fields of a body that cannot change what is generated here.
IGNORED = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
# Fields that may be there with the one value that means nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
KEPT = "ouro_batch"


def is_openai_line(fields: Mapping[str, Any]) -> bool:
    return "custom_id" in fields or ("body" in fields and "url" in fields)


def record_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a native record that asks for the same.

    Raises:
        RequestError: what the line asks for cannot be done here.
    """
    for name in fields:
        if name not in LINE_FIELDS:
            raise RequestError(f"unknown field {name!r}; a batch line has {', '.join(LINE_FIELDS)}")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id must be text, got {custom_id!r}")
    if fields.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, got {fields['method']!r}")
    if url not in (COMPLETIONS, CHAT):
        raise RequestError(f"url must be {COMPLETIONS} or {CHAT}, got {url!r}")
    if not isinstance(body, dict):
        raise RequestError("body must be an object with the request's fields")
    own = {name: value for name, value in body.items() if value is not None}
    for name in IGNORED:
        own.pop(name, None)
    for name, harmless in NEUTRAL.items():
        if name in own and own.pop(name) not in harmless:
            raise RequestError(f"{name} is not supported (leave it out)")
    return {"id": custom_id, **(_chat(own) if url == CHAT else _completion(own))}


def _completion(own: dict[str, Any]) -> dict[str, Any]:
    if "messages" in own:
        raise RequestError(f"messages go to {CHAT}; this line has url {COMPLETIONS}")
    prompt = own.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError(
                f"a line has one prompt, this one has {len(prompt)}: give each a line"
            )
        own["prompt"] = prompt[0]
    return own


def _chat(own: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in own:
        raise RequestError(f"a prompt goes to {COMPLETIONS}; this line has url {CHAT}")
    limits = [own.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in own]
    if limits:
        own["max_tokens"] = limits[0]
    wanted, top = own.pop("logprobs", False), own.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RequestError(f"logprobs must be true or false at {CHAT}, got {wanted!r}")
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true")
    if wanted:
        own["logprobs"] = 0 if top is None else top
    return own


def asked(fields: Mapping[str, Any], n: int) -> dict[str, Any]:
    """What ``OutputForm`` must know of a line, to stand in its records under ``openai``."""
    body = fields.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    url = fields.get("url")
    return {
        "url": url if isinstance(url, str) else None,
        "model": model if isinstance(model, str) else None,
        "n": n,
    }


class OutputForm:
    """Turns finished records into lines of output; samples of an OpenAI line become one line."""

    def __init__(self) -> None:
        self._samples: dict[int, list[dict[str, Any]]] = {}

    def push(self, record: dict[str, Any]) -> bytes:
        """The line that this record completes; nothing where others of its line are to come."""
        if "openai" not in record:
            return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        samples = self._samples.setdefault(record["index"], [])
        samples.append(record)
        if "error" not in record and len(samples) < record["openai"]["n"]:
            return b""
        del self._samples[record["index"]]
        return orjson.dumps(openai_record(samples), option=orjson.OPT_APPEND_NEWLINE)


def openai_record(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of OpenAI's output from all records of an OpenAI line."""
    first = samples[0]
    index = first["index"]
    if "error" in first:
        error = first["error"]
        status = 400
        body: dict[str, Any] = {
            "error": {
                "message": f"line {error['line']}: {error['message']}",
                "type": "invalid_request_error",
                "param": None,
                "code": error["type"],
            }
        }
    else:
        status, body = 200, _body(sorted(samples, key=lambda record: record.get("sample", 0)))
    return {
        "id": f"batch_req_{index}",
        "custom_id": first["id"],
        "response": {"status_code": status, "request_id": f"req_{index}", "body": body},
        "error": None,
        # Everything, so that a job can be taken up from here, and reported on.
        KEPT: {"records": [_without_text(record) for record in samples]},
    }


def native_records(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The records behind a line of output, whichever form it has.

    Raises:
        KeyError, TypeError, ValueError: it is no line of output.
    """
    if not isinstance(line, dict):
        raise ValueError("not an object")
    if KEPT not in line or "response" not in line:
        if "index" not in line:
            raise ValueError("no index")
        return [line]
    records = line[KEPT]["records"]
    choices = line["response"]["body"].get("choices", [])
    texts = [choice["message"]["content"] if "message" in choice else choice["text"]
             for choice in choices]  # fmt: skip
    for record in records:
        if "error" not in record:
            record["text"] = texts[record.get("sample", 0)]
    return records


def _without_text(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "text"}


def _body(samples: list[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    chat = first["openai"]["url"] == CHAT
    prompt_tokens = first["usage"]["prompt_tokens"]
    completion_tokens = sum(record["usage"]["completion_tokens"] for record in samples)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{first['index']}",
        "object": "chat.completion" if chat else "text_completion",
        "created": first["timing"]["finished_at"],
        "model": first["openai"]["model"],
        "choices": [_choice(record, chat) for record in samples],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _choice(record: dict[str, Any], chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": record.get("sample", 0)}
    entries = record.get("logprobs")
    if chat:
        choice["message"] = {"role": "assistant", "content": record["text"], "refusal": None}
        choice["logprobs"] = entries and {"content": [_chat_logprob(entry) for entry in entries]}
    else:
        choice["text"] = record["text"]
        choice["logprobs"] = entries and _completion_logprobs(entries)
    choice["finish_reason"] = record["finish_reason"]
    return choice


def _chat_logprob(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        **_named(entry),
        "top_logprobs": [_named(other) for other in entry["top"]],
    }


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry["token"]
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}


def _completion_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top"]} for entry in entries
        ],
        "text_offset": offsets,
    }
