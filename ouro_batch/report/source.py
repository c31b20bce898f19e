"""Reads a job's output leniently: records of OUT or OUT.part, and what its statistics say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.openai import native_records
from ouro_batch.jobs.reader import PACKED, read_lines

STDIN = "-"
PART = ".part"
MAX_DEPTH = 64  # a looped model runs a handful of loops; more is no exit depth
TIMELINE_FIELDS = ("requests_done", "prompt_tokens", "completion_tokens", "rows_in_use", "waiting")


@dataclass(frozen=True)
class Failure:
    """Why a record was not answered."""

    kind: str
    message: str
    line: int | None
    file: str | None


@dataclass(frozen=True)
class Row:
    """One output record, checked. ``seconds`` are of queue, prefill, decode and all together."""

    id: Any
    index: int
    sample: int = 0
    failure: Failure | None = None
    text: str = ""
    finish_reason: str = ""
    depths: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    seconds: tuple[float, float, float, float] | None = None
    token_ids: list[int] | None = None

    @property
    def mean_depth(self) -> float | None:
        """Over the tokens that decode produced; None where there are none."""
        return sum(self.depths[1:]) / (len(self.depths) - 1) if len(self.depths) > 1 else None


@dataclass
class Facts:
    """What is known of a run besides its records; None or empty where nothing says it."""

    model: str | None = None
    revision: str | None = None
    device: str | None = None
    dtype: str | None = None
    schedule: str | None = None
    loops: int | None = None
    max_rows: int | None = None
    exit_threshold: float | None = None
    run_s: float | None = None  # of the last run, where a job was resumed
    tokens_per_second: float | None = None  # that were generated in it
    resumed: int = 0  # records of earlier runs
    finished_at: str | None = None
    inputs: list[str] = field(default_factory=list)
    timeline: list[dict[str, float]] = field(default_factory=list)


class Output:
    """An output to report on.

    Args:
        name: OUT, OUT compressed, OUT.part, or ``-`` for standard input. OUT stands for OUT.part
            where that is all there is.

    Raises:
        UsageError: it cannot be read.
    """

    def __init__(self, name: str):
        self.name = "standard input" if name == STDIN else name
        self.notes: list[str] = []
        self.facts = Facts()
        self.path: Path | None = None
        self._bad = 0
        self._first_bad = 0
        self._torn = False
        if name == STDIN:
            return
        path = Path(name)
        if not path.exists() and Path(name + PART).exists():
            path = Path(name + PART)
            self.notes.append(f"{name} is not there yet: this is {path}")
        try:
            if path.is_dir():
                raise UsageError(f"cannot read {name}: it is a folder")
            open(path, "rb").close()
        except OSError as error:
            raise UsageError(f"cannot read {name}: {error.strerror}") from None
        self.path = path
        if path.name.endswith(PART):
            self.notes.append("the job has not finished: these are its records so far")
        else:
            unpacked = path.with_suffix("") if path.suffix in PACKED else path
            self.facts = self._statistics(Path(f"{unpacked}.stats.json"))

    def rows(self) -> Iterator[Row]:
        """The records, one at a time; what is no record is left out and noted.

        Raises:
            FileError: reading fails.
            UsageError: there are lines, but no record among them.
        """
        count = 0
        try:
            with ExitStack() as stack:
                superseded = self._superseded()
                file = self._open(stack)
                for number, line in enumerate(file, start=1):
                    if not line.strip() or number in superseded:
                        continue
                    for row in self._rows(number, line):
                        count += 1
                        yield row
        except OSError as error:
            raise FileError(f"reading {self.name} failed: {error.strerror}") from error
        if self._bad and not count:
            raise UsageError(f"{self.name} holds no output records of ouro-batch run")
        self._note_bad()

    def _superseded(self) -> set[int]:
        """Lines of OUT.part whose records count no more: of two of one sample the later counts."""
        lines: set[int] = set()
        if self.path is None or not self.path.name.endswith(PART):
            return lines
        counting: dict[int, dict[int, int]] = {}  # by index and sample: the line
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    entry = orjson.loads(line)
                    index, sample = entry["index"], entry.get("sample", 0)
                    if entry.get("dropped") is True:
                        lines.update(counting.pop(index, {}).values())
                    elif "record" in entry:
                        own = counting.setdefault(index, {})
                        if sample in own:
                            lines.add(own[sample])
                        own[sample] = number
                except (ValueError, TypeError, LookupError, AttributeError):
                    continue  # which is noted where the records are read
        return lines

    def _open(self, stack: ExitStack) -> Iterable[bytes]:
        if self.path is None:
            return sys.stdin.buffer
        if self.path.suffix in PACKED:
            return (line.data + b"\n" for line in read_lines([str(self.path)]))
        return stack.enter_context(open(self.path, "rb"))

    def _rows(self, number: int, line: bytes) -> list[Row]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not line.endswith(b"\n"):
                self._torn = True
                return []
            record = None
        if isinstance(record, dict) and "record" in record:  # a line of OUT.part
            record = record["record"]
        elif self._no_record(number, record):
            return []
        if isinstance(record, dict) and "logprob" in record and "finish_reason" not in record:
            raise UsageError(f"{self.name} is output of ouro-batch score; report shows that of run")
        try:
            rows = [parse_row(native) for native in native_records(record)]
        except (ValueError, TypeError, KeyError, LookupError, AttributeError):
            rows = [None]
        if None in rows:
            self._bad += 1
            self._first_bad = self._first_bad or number
        return [row for row in rows if row is not None]

    def _no_record(self, number: int, record: Any) -> bool:
        """Whether a line is one of those that OUT.part has besides records."""
        if not isinstance(record, dict):
            return False
        if number == 1 and self._header(record):
            return True
        return record == {"complete": True} or record.get("dropped") is True

    def _header(self, record: Any) -> bool:
        """Whether a first line is the header of OUT.part, with the job's settings."""
        if "ouro_batch_part" not in record:
            return False
        found = _facts(record.get("settings"))
        if found.model and self.facts.model is None:
            self.facts = found
        return True

    def _note_bad(self) -> None:
        if self._bad:
            lines = "1 line is" if self._bad == 1 else f"{self._bad:,} lines are"
            self.notes.append(f"{lines} no output record, left out (first: line {self._first_bad})")
        if self._torn:
            self.notes.append("the last line is torn, as a job that was cut off leaves it")

    def _statistics(self, path: Path) -> Facts:
        try:
            statistics = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            self.notes.append(f"there is no {path.name}: speed over time is not known")
        except (OSError, orjson.JSONDecodeError) as error:
            self.notes.append(f"{path.name} cannot be read: {error}")
        else:
            return _facts(statistics)
        return Facts()


def parse_row(record: Any) -> Row | None:
    """A record as ``ouro-batch run`` writes it; None for anything else."""
    if not isinstance(record, dict) or not _is_count(record.get("index")):
        return None
    record_id, index = record.get("id"), record["index"]
    sample = record.get("sample")
    sample = sample if _is_count(sample) else 0
    error = record.get("error")
    if isinstance(error, dict):
        failure = Failure(
            str(error.get("type") or "unknown"),
            str(error.get("message") or ""),
            error["line"] if _is_count(error.get("line")) else None,
            error["file"] if isinstance(error.get("file"), str) else None,
        )
        return Row(record_id, index, sample, failure)
    depths, text = record.get("exit_depths"), record.get("text")
    if not isinstance(depths, list) or not isinstance(text, str):
        return None
    if not all(type(depth) is int and 1 <= depth <= MAX_DEPTH for depth in depths):
        return None
    ids = record.get("token_ids")
    fits = isinstance(ids, list) and len(ids) == len(depths)
    return Row(
        record_id,
        index,
        sample,
        text=text,
        finish_reason=str(record.get("finish_reason") or "unknown"),
        depths=depths,
        prompt_tokens=_count(_dict(record, "usage"), "prompt_tokens") or 0,
        seconds=_seconds(_dict(record, "timing")),
        token_ids=ids
        if fits and all(_is_count(token) and token < 2**31 for token in ids)
        else None,
    )


def _facts(statistics: Any) -> Facts:
    """Facts out of a statistics file or a header, whatever is in it."""
    if not isinstance(statistics, dict):
        return Facts()
    model = statistics.get("model")
    options = _dict(statistics, "options")
    named = model if isinstance(model, dict) else {"name": model}
    asked = _number(_dict(options, "sampling"), "exit_threshold")
    own = _number(_dict(named, "config"), "exit_threshold")
    return Facts(
        model=_text(named, "name"),
        revision=_text(named, "revision"),
        device=_text(statistics, "device"),
        dtype=_text(statistics, "dtype"),
        schedule=_text(statistics, "schedule"),
        loops=min(_count(statistics, "loops") or 0, MAX_DEPTH) or None,
        max_rows=_count(statistics, "max_rows"),
        exit_threshold=own if asked is None else asked,
        run_s=_number(_dict(statistics, "seconds"), "run"),
        tokens_per_second=_number(_dict(statistics, "tokens_per_second"), "completion"),
        resumed=_count(_dict(statistics, "requests"), "resumed") or 0,
        finished_at=_text(statistics, "finished_at"),
        inputs=[name for name in _list(options, "inputs") if isinstance(name, str)],
        timeline=_timeline(_list(statistics, "timeline")),
    )


def _timeline(samples: list[Any]) -> list[dict[str, float]]:
    """Samples that hold every number, in order of time, from a start with none of anything.

    Of samples at one time the last says where the job stood.
    """
    found: list[dict[str, float]] = []
    for sample in samples:
        if not isinstance(sample, dict):
            continue
        numbers = {name: _number(sample, name) for name in ("t_s", *TIMELINE_FIELDS)}
        if None in numbers.values() or (found and numbers["t_s"] < found[-1]["t_s"]):
            continue
        if found and numbers["t_s"] == found[-1]["t_s"]:
            found.pop()
        found.append(numbers)  # type: ignore[arg-type]
    if found and found[0]["t_s"] > 0:
        found.insert(0, dict.fromkeys(found[0], 0.0))
    return found


def _seconds(timing: dict[str, Any]) -> tuple[float, float, float, float] | None:
    names = ("queue_s", "prefill_s", "decode_s", "total_s")
    values = [_number(timing, name) for name in names]
    return None if None in values else tuple(values)  # type: ignore[return-value]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if _is_count(value) else None


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return value if type(value) in (int, float) and value >= 0 else None


def _text(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) and value else None


def _dict(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _list(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []
