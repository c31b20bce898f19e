"""Inputs that nobody wants: each file of tests/data/hostile with what is said to every line.

``NAME.expected`` has a line for each record of ``NAME.jsonl``: its id, and its text or its error.
``*`` stands for the words of a JSON parser, which are not ours. To write it anew from what the
program says now, and to read the difference: ``python -m tests.test_hostile``.
"""

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from .test_cli_input import TINY_OURO
from .test_cli_run import COMMAND

HOSTILE = Path(__file__).parent / "data" / "hostile"
FILES = sorted(HOSTILE.rglob("*.jsonl"))
SUMMARY = rb"((\d+ records? failed, the first in line|no records: ).*\n)?"
ANY_WORDS = "the line is not valid JSON: "


def said(path):
    """What the program says to each line, shortened to what matters."""
    command = [*COMMAND, path.name, "-q", "-m", "x"]
    if path.parent.name == "model":
        command = [sys.executable, "-m", "ouro_batch", "run", path.name, "-q", "-m"]
        command += [str(TINY_OURO), "--kv-tokens", "256" if path.stem == "cache" else "1024"]
        command += ["--max-rows", "4", "--device", "cpu"]
    result = subprocess.run(command, cwd=path.parent, capture_output=True, timeout=120)
    # With --quiet: how many failed, and the first.
    assert re.fullmatch(SUMMARY, result.stderr)
    records = sorted(map(orjson.loads, result.stdout.splitlines()), key=lambda r: r["index"])
    assert result.returncode == any("error" in record for record in records)
    shown = []
    for record in records:
        kept = {"id": record["id"]}
        if "error" in record:
            error = record["error"]
            if error["message"].startswith(ANY_WORDS):
                error["message"] = f"{ANY_WORDS}*"
            kept["error"] = error
        else:
            kept["text"] = record["text"]
            if record["metadata"] is not None:
                kept["metadata"] = record["metadata"]
        shown.append(orjson.dumps(kept) + b"\n")
    return b"".join(shown)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_gets_the_record_it_should(path):
    assert said(path) == path.with_suffix(".expected").read_bytes()


def test_every_expectation_has_an_input():
    assert sorted(HOSTILE.rglob("*.expected")) == [path.with_suffix(".expected") for path in FILES]


if __name__ == "__main__":
    for file in FILES:
        file.with_suffix(".expected").write_bytes(said(file))
