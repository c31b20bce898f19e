"""A validation's record: every check with its numbers, as JSON and as Markdown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ouro_batch.bench.machine import machine, versions
from ouro_batch.validate import (
    equations,
    history,
    invariance,
    precision,
    quality,
    replay,
    resources,
    sampling,
    schedules,
)
from ouro_batch.validate.check import Context, Result

CHECKS: dict[str, Callable[[Context], Result]] = {
    module.__name__.rpartition(".")[2]: module.check
    for module in (
        equations,
        history,
        schedules,
        replay,
        resources,
        precision,
        quality,
        invariance,
        sampling,
    )
}
VERDICTS = {True: "passed", False: "FAILED", None: "not run"}


Done = list[tuple[Result, float]]  # checks with the seconds that each took


def run_checks(
    context: Context,
    names: Sequence[str],
    on_change: Callable[[str, Result | None], None],
    keep: Callable[[Done], None] = lambda done: None,
) -> Done:
    """Run checks by name, each with the seconds that it took.

    ``on_change`` is told of each before and after, ``keep`` of all that are done after each. A
    check that raises has failed, and says why.
    """
    done: Done = []
    for name in names:
        on_change(name, None)
        start = time.perf_counter()
        try:
            result = CHECKS[name](context)
        except Exception as error:
            result = Result(name, f"{name} could not be checked", False)
            result.note = f"{type(error).__name__}: {error}"
        done.append((result, time.perf_counter() - start))
        on_change(name, result)
        keep(done)
    return done


def make_record(
    context: Context,
    model: dict[str, Any],
    command: str,
    done: Done,
    unfinished: Sequence[str] = (),
) -> dict[str, Any]:
    """Ready for JSON; ``passed`` where no check failed and at least one could run.

    It is null as long as there are ``unfinished`` checks and none has failed.
    """
    verdicts = [result.passed for result, _ in done]
    passed: bool | None = False not in verdicts and True in verdicts
    if unfinished and False not in verdicts:
        passed = None
    return {
        "kind": "validation",
        "passed": passed,
        "unfinished": list(unfinished),
        "level": "full" if context.full else "quick",
        "command": command,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": context.commit,
        "machine": machine(context.device),
        "versions": versions(),
        "model": model,
        "prompts": {
            "count": len(context.prompts),
            "tokens": sum(map(len, context.prompts)),
            "questions": len(context.questions),
        },
        "checks": [asdict(result) | {"seconds": round(seconds, 3)} for result, seconds in done],
    }


def as_markdown(record: dict[str, Any]) -> str:
    """The record for people."""
    processor = record["machine"]["gpu"]["name"] if record["machine"]["gpu"] else None
    lines = [
        f"# Validation of {record['model']['name']}: {'passed' if record['passed'] else 'FAILED'}",
        "",
        f"{record['date']}, `{record['command']}`, commit {record['commit'] or 'unknown'}, on"
        f" {processor or record['machine']['cpu']}, torch {record['versions']['torch']},"
        f" Triton {record['versions']['triton']}.",
        f"{record['prompts']['count']} prompts of {record['prompts']['tokens']:,} tokens,"
        f" {record['prompts']['questions']:,} questions with known answers.",
        "",
        "| Check | Verdict | Seconds |",
        "|---|---|---|",
    ]
    for check in record["checks"]:
        verdict = VERDICTS[check["passed"]]
        lines.append(f"| {check['title']} | {verdict} | {check['seconds']:.1f} |")
    for check in record["checks"]:
        lines += ["", f"## {check['name']}: {VERDICTS[check['passed']]}", "", f"{check['title']}."]
        if check["note"]:
            lines += ["", f"Note: {check['note']}"]
        if check["limits"]:
            limits = "; ".join(f"{name} {value}" for name, value in check["limits"].items())
            lines += ["", f"Limits: {limits}"]
        if check["numbers"]:
            lines += ["", *_numbers(check["numbers"])]
    return "\n".join(lines) + "\n"


def _numbers(numbers: dict[str, Any], depth: int = 0) -> list[str]:
    lines = []
    indent = "  " * depth
    for name, value in numbers.items():
        if isinstance(value, dict):
            lines += [f"{indent}- {_words(name)}:", *_numbers(value, depth + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            table = _table(value)
            lines += [f"{indent}- {_words(name)}:", "", *(f"{indent}  {line}" for line in table)]
            lines.append("")
        else:
            lines.append(f"{indent}- {_words(name)}: {_text(value)}")
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    flat = [_flatten(row) for row in rows]
    names = list(flat[0])
    return [
        "| " + " | ".join(map(_words, names)) + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(_text(row.get(name)) for name in names) + " |" for row in flat),
    ]


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name} ")
        else:
            flat[prefix + name] = value
    return flat


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)
