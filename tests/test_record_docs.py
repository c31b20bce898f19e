"""docs/records.md names every field that the commands read and write, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from ouro_batch.cli import app
from ouro_batch.errors import RequestError
from ouro_batch.jobs.records import FIELDS
from ouro_batch.jobs.score import FIELDS as SCORE_FIELDS

from .test_cli_run import write
from .tiny import write_checkpoint

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "records.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


def rows(section: str, head: str = "| field |") -> list[str]:
    """The rows of a section's table whose first line begins with ``head``."""
    table = SECTIONS[section][SECTIONS[section].index(head) :].split("\n\n")[0]
    return table.splitlines()[2:]


def fields(section: str, head: str = "| field |") -> set[str]:
    return {
        name for row in rows(section, head) for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def parts(section: str, field: str) -> set[str]:
    """The names that a field's row gives for what is inside of it."""
    row = next(row for row in rows(section) if row.split("|")[1].strip() == f"`{field}`")
    return set(re.findall(r"`(\w+)`", row.rpartition(" | ")[2]))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """Records of every kind and the statistics, written by the commands."""
    folder = tmp_path_factory.mktemp("records")
    write_checkpoint(folder / "model")
    long = {"id": "long", "prompt": [1] * 300, "n": 2}
    write(folder / "in.jsonl", [{"id": "a", "prompt": [1, 2], "n": 2}, long, {"id": "b"}])
    write(folder / "more.jsonl", [{"id": "c", "prompt": [3, 4], "exit_depths": [3, 1, 1, 1]}])

    def command(*arguments: str) -> None:
        model = ["-m", str(folder / "model"), "-q"]
        assert CliRunner().invoke(app, [*arguments, *model]).exit_code == 1  # some have failed

    inputs = [str(folder / "in.jsonl"), str(folder / "more.jsonl")]
    options = ["--logprobs", "2", "--token-ids", "--on-too-long", "truncate-left"]
    output, scores = str(folder / "out"), str(folder / "scores")
    command("run", *inputs, "-o", output, "--max-tokens", "4", "--ignore-eos", *options)
    command("score", *inputs, "--answers", output, "-o", scores)
    records = {
        name: [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]
        for name, path in (("run", output), ("score", scores))
    }
    return records | {"statistics": orjson.loads(Path(output + ".stats.json").read_bytes())}


def names(records: list[dict]) -> set[str]:
    return {name for record in records for name in record}


def test_input():
    assert fields("Input of `run`") == set(FIELDS)
    assert fields("Input of `score`") == set(SCORE_FIELDS)


@pytest.mark.parametrize("command", ["run", "score"])
def test_output(written, command):
    results = [record for record in written[command] if "error" not in record]
    assert fields(f"Output of `{command}`") == names(results)


def test_what_is_inside_of_an_output(written):
    (record, *_) = written["run"]
    for name in ("usage", "timing"):
        assert parts("Output of `run`", name) == record[name].keys()
    # "with `logprobs`: ..., and `top`"
    entry = record["logprobs"][0]
    assert parts("Output of `run`", "logprobs") - {"logprobs"} == entry.keys()
    assert {"token", "token_id", "logprob"} == entry["top"][0].keys()


def test_errors(written):
    errors = [record for kind in ("run", "score") for record in written[kind] if "error" in record]
    assert fields("Error records") == names(errors)
    (inside,) = {frozenset(record["error"]) for record in errors}
    assert parts("Error records", "error") == inside
    types = {record["error"]["type"] for record in errors}
    assert types <= fields("Error records", "| error type |")
    assert raised_types() == fields("Error records", "| error type |")


def raised_types() -> set[str]:
    """The types that the package's source gives to errors of requests."""
    types = {RequestError("").type}
    for path in (ROOT / "ouro_batch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("RequestError", "RecordError"):
                continue
            types |= {given.value for given in node.args[1:2] if isinstance(given, ast.Constant)}
    return types


def test_statistics(written):
    statistics = written["statistics"]
    assert fields("Statistics of a job") == statistics.keys()
    section = SECTIONS["Statistics of a job"]
    for name in ("requests", "tokens", "seconds", "tokens_per_second", "exit_depth"):
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", section, flags=re.MULTILINE)
        assert statistics[name].keys() == set(re.findall(r"`(\w+)`", row))
