"""What becomes of a line before the engine sees it: parsed, checked for its id, tokenized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ouro_batch.errors import RequestError
from ouro_batch.jobs.duplicates import SeenIds
from ouro_batch.jobs.reader import Line
from ouro_batch.jobs.records import InputFormat, Record, RecordError, input_hash, parse_record
from ouro_batch.params import SamplingParams

TAKEN_ID = 0x9E3779B97F4A7C15  # tells the hash of a line whose id is taken from that of the line

if TYPE_CHECKING:
    from ouro_batch.intake import EncodedPrompt


@dataclass(frozen=True)
class Prepared:
    """A line with either its record or what is wrong with it.

    ``prompt`` is None where there is an error, and where the line need not run.
    """

    line: Line
    input_hash: int
    record: Record | None = None
    prompt: EncodedPrompt | None = None
    error: RecordError | None = None


class Preparer:
    """Prepares lines in the order in which they come.

    Args:
        defaults: what lines sample with, but for the fields that they name.
        format: how lines are read.
        encode: tokenizes a record's prompt or messages.
        done: whether the line of an index has a record already.
        unique_ids: whether a line with the id of an earlier line is an error.
    """

    def __init__(
        self,
        *,
        defaults: SamplingParams,
        format: InputFormat,
        encode: Callable[[Record], EncodedPrompt],
        done: Callable[[int], bool],
        unique_ids: bool,
    ):
        self._defaults = defaults
        self._format = format
        self._encode = encode
        self._done = done
        self._seen = SeenIds() if unique_ids else None

    def __call__(self, line: Line) -> Prepared:
        try:
            record = parse_record(line, self._defaults, self._format)
        except RecordError as error:
            return Prepared(line, input_hash(line, None), error=error)
        line_hash = input_hash(line, record)
        try:
            if self._seen is not None and record.has_own_id:
                self._check_id(record)
        except RequestError as error:
            # Its lines before say so, not the line itself: another verdict is another input.
            return self._refused(line, line_hash ^ TAKEN_ID, record, error)
        try:
            prompt = None if self._done(line.index) else self._encode(record)
        except RequestError as error:
            return self._refused(line, line_hash, record, error)
        return Prepared(line, line_hash, record, prompt)

    @staticmethod
    def _refused(line: Line, line_hash: int, record: Record, error: RequestError) -> Prepared:
        wrong = RecordError(str(error), error.type, record.id, record.openai)
        return Prepared(line, line_hash, error=wrong)

    def _check_id(self, record: Record) -> None:
        first = self._seen.first(record.id, record.line, record.source)
        if first is not None:
            where = f"line {first.line}"
            if first.source != record.source:
                where += f" of {first.source}"
            raise RequestError(
                f"id {record.id!r} is the id of {where} already (make ids unique, or give"
                " --on-duplicate keep)",
                "duplicate_id",
            )
