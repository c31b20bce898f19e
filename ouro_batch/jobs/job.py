"""The loop of a job: lines in, requests through the LLM, finished records out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ouro_batch.errors import OuroBatchError, RequestError
from ouro_batch.jobs.errors import TooManyErrors
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.preview import Answer
from ouro_batch.jobs.progress import Progress, QuietProgress
from ouro_batch.jobs.reader import Line, LineReader
from ouro_batch.jobs.records import (
    InputFormat,
    Record,
    RecordError,
    error_record,
    input_hash,
    parse_record,
    result_record,
)
from ouro_batch.jobs.statistics import JobCounts
from ouro_batch.jobs.writer import Writer
from ouro_batch.params import RequestOutput

if TYPE_CHECKING:
    from ouro_batch.llm import LLM

IDLE_WAIT_S = 0.1
MIN_WAITING = 64


class Job:
    """Runs every line of a reader through an LLM and gives each record to a writer.

    Args:
        llm: the LLM, or anything with its surface.
        reader: where lines come from.
        writer: where records go; the caller ends it with ``finish`` or ``keep``.
        defaults: sampling fields for lines that do not name them.
        format: how lines are read.
        too_long: what becomes of prompts that do not fit, as ``LLM.add_request`` has it.
        token_ids: whether output records carry ``token_ids``.
        name_files: whether error records name their input file.
        progress: told of every step.
        interrupt: asked before every step.
        stopping: told how many requests still run, once the interrupt was requested.
        max_errors: failed records that end the job; None: it goes on whatever fails.
        keep_first: how many of the job's first answers stay in ``answers``, for a preview.
    """

    def __init__(
        self,
        llm: LLM,
        reader: LineReader,
        writer: Writer,
        *,
        defaults: Mapping[str, Any] | None = None,
        format: InputFormat | None = None,
        too_long: str = "error",
        token_ids: bool = False,
        name_files: bool = False,
        progress: Progress | None = None,
        interrupt: Interrupt | None = None,
        stopping: Callable[[int], None] = lambda running: None,
        max_errors: int | None = None,
        keep_first: int = 0,
    ):
        self.counts = JobCounts()
        self.answers: dict[int, Answer] = {}
        self._llm = llm
        self._reader = reader
        self._writer = writer
        self._defaults = defaults or {}
        self._format = format
        self._too_long = too_long
        self._token_ids = token_ids
        self._name_files = name_files
        self._progress = progress or QuietProgress()
        self._interrupt = interrupt or Interrupt()
        self._stopping = stopping
        self._winding_down = False
        self._max_errors = max_errors
        self._failed = 0  # in this run
        self._keep_first = keep_first
        self.lines = 0  # of the input so far
        self._running: dict[int, tuple[Record, int]] = {}

    def run(self) -> JobCounts:
        """Run to the end of the input.

        Raises:
            KeyboardInterrupt: the interrupt was requested. Requests that ran were finished, unless
                there was no time for it or a second one came; the others are aborted.
            EngineError: the engine stopped.
            TooManyErrors: ``max_errors`` records have failed.
            FileError, OutputClosed: a record cannot be read or written.
        """
        try:
            while True:
                if self._interrupt.requested:
                    self._wind_down()
                else:
                    self._feed()
                if self._running:
                    for output in self._llm.step():
                        self._finish(output)
                elif self._reader.ended:
                    break
                engine = self._llm.snapshot()
                self.counts.sample(engine)
                self._progress.update(self.counts, engine)
            return self.counts
        except BaseException:
            self._abort()
            raise

    def _wind_down(self) -> None:
        """Nothing new begins; what runs may finish."""
        for request_id in self._llm.waiting_requests():
            self._llm.abort(request_id)
            self._running.pop(request_id, None)
        if not self._running or self._interrupt.up:
            raise KeyboardInterrupt
        if not self._winding_down:
            self._winding_down = True
            self._stopping(len(self._running))

    def _feed(self) -> None:
        """Queue lines until enough requests wait; with nothing to run, wait a little for one."""
        engine = self._llm.snapshot()
        room = max(2 * engine.max_rows, MIN_WAITING) - engine.waiting
        while room > 0:
            line = self._reader.poll(0.0 if self._running else IDLE_WAIT_S)
            if line is None:
                return
            self._add(line)
            room -= 1

    def _add(self, line: Line) -> None:
        self.lines += 1
        try:
            record = parse_record(line, self._defaults, self._format)
        except RecordError as error:
            line_hash = input_hash(line, None)
            if not self._keep(line, line_hash):
                self._fail(line, error.id, error, line_hash)
            return
        line_hash = input_hash(line, record)
        if self._keep(line, line_hash):
            return
        try:
            if record.messages is None:
                request_id = self._llm.add_request(
                    record.prompt, record.params, index=record.index, too_long=self._too_long
                )
            else:
                request_id = self._llm.add_request(
                    params=record.params,
                    messages=record.messages,
                    chat_template_kwargs=record.chat_template_kwargs,
                    index=record.index,
                    too_long=self._too_long,
                )
        except RequestError as error:
            self._fail(line, record.id, error, line_hash)
            return
        self._running[request_id] = record, line_hash

    def _keep(self, line: Line, line_hash: int) -> bool:
        """Count what an earlier run has made of a line, if it has."""
        kept = self._writer.kept(line, line_hash)
        if kept is None:
            return False
        self.counts.add_record(kept)
        return True

    def _finish(self, output: RequestOutput) -> None:
        record, line_hash = self._running.pop(output.request_id)
        self._writer.write(result_record(record, output, token_ids=self._token_ids), line_hash)
        self.counts.add_output(output)
        if record.index < self._keep_first:
            self.answers[record.index] = Answer(record, output)

    def _fail(self, line: Line, record_id: Any, error: RequestError, line_hash: int) -> None:
        record = error_record(line, record_id, error, name_file=self._name_files)
        self._writer.write(record, line_hash)
        self.counts.add_error(error.type)
        self._failed += 1
        if self._failed == self._max_errors:
            where = f"line {line.number} of {line.source}: {error}"
            failed = "a record" if self._failed == 1 else f"{self._failed:,} records"
            raise TooManyErrors(f"{failed} failed, the last in {where}")

    def _abort(self) -> None:
        for request_id in self._running:
            # An engine that has failed may refuse this too; its own error is the one to report.
            with suppress(OuroBatchError):
                self._llm.abort(request_id)
        self._running.clear()
