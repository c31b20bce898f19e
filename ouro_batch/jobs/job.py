"""The loop of a job: lines in, requests through the LLM, finished records out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ouro_batch.errors import OuroBatchError, RequestError
from ouro_batch.jobs.ahead import ReadAhead
from ouro_batch.jobs.errors import TooManyErrors, UsageError
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.prepare import Prepared, Preparer
from ouro_batch.jobs.preview import Answer
from ouro_batch.jobs.progress import Progress, QuietProgress
from ouro_batch.jobs.reader import Line
from ouro_batch.jobs.records import (
    InputFormat,
    Record,
    RecordError,
    error_record,
    result_record,
)
from ouro_batch.jobs.statistics import JobCounts
from ouro_batch.jobs.writer import Writer
from ouro_batch.params import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ouro_batch.llm import LLM, EncodedPrompt

IDLE_WAIT_S = 0.1
MIN_WAITING = 64


class Job:
    """Runs every line of a reader through an LLM and gives each record to a writer.

    Args:
        llm: the LLM, or anything with its surface.
        inputs: the files that lines come from, as ``read_lines`` takes them.
        writer: where records go; the caller ends it with ``finish`` or ``keep``.
        defaults: sampling fields for lines that do not name them.
        format: how lines are read.
        unique_ids: whether a line with the id of an earlier one is an error.
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
        inputs: Sequence[str],
        writer: Writer,
        *,
        defaults: Mapping[str, Any] | None = None,
        format: InputFormat | None = None,
        unique_ids: bool = True,
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
        preparer = Preparer(
            defaults=SamplingParams(**(defaults or {})),
            format=format or InputFormat(),
            encode=self._encode,
            done=writer.holds,
            unique_ids=unique_ids,
        )
        self._reader = ReadAhead(inputs, preparer)
        self._writer = writer
        self._too_long = too_long
        self._token_ids = token_ids
        self._name_files = name_files
        self._progress = progress or QuietProgress()
        self._interrupt = interrupt or Interrupt()
        self._stopping = stopping
        self._winding_down = False
        self._max_errors = max_errors
        self.failed = 0  # in this run
        self.first_failure: str | None = None  # of this run: where, and why
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
            UsageError: the input or the options are not those of the run that is resumed.
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
        finally:
            self._reader.close()

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
            prepared = self._reader.poll(0.0 if self._running else IDLE_WAIT_S)
            if prepared is None:
                return
            room -= self._add(prepared)

    def _encode(self, record: Record) -> EncodedPrompt:
        return self._llm.encode(record.prompt, record.messages, record.chat_template_kwargs)

    def _add(self, prepared: Prepared) -> int:
        """Queue what a line still needs; returns how much of the window it takes."""
        self.lines += 1
        line, record, line_hash = prepared.line, prepared.record, prepared.input_hash
        if record is None:
            if not self._keep(line, line_hash):
                self._fail(line, prepared.error, line_hash)
            return 1
        queued: list[int] = []
        answered = False  # a sample of the line, by an earlier run
        try:
            for sample in range(record.params.n):
                kept = self._keep(line, line_hash, sample, record.id)
                if kept is not None:
                    if "error" in kept:  # which is that of all samples
                        break
                    answered = True
                    continue
                request_id = self._llm.add_request(
                    prepared.prompt or self._encode(record),
                    record.params,
                    index=record.index,
                    sample=sample,
                    too_long=self._too_long,
                )
                queued.append(request_id)
                self._running[request_id] = record, line_hash
        except RequestError as error:
            for request_id in queued:
                self._llm.abort(request_id)
                del self._running[request_id]
            if answered:
                raise UsageError(
                    f"line {line.number} of {line.source} can no longer be run: {error}; an earlier"
                    " run answered other samples of it (give that run's memory and model options)"
                ) from error
            wrong = RecordError(str(error), error.type, record.id, record.openai)
            self._fail(line, wrong, line_hash)
        return record.params.n

    def _keep(
        self, line: Line, line_hash: int, sample: int = 0, id: Any = None
    ) -> dict[str, Any] | None:
        """Count what an earlier run has made of a line's sample; None where it has not."""
        kept = self._writer.kept(line, line_hash, sample, id)
        if kept is not None:
            self.counts.add_record(kept)
        return kept

    def _finish(self, output: RequestOutput) -> None:
        record, line_hash = self._running.pop(output.request_id)
        result = result_record(
            record, output, token_ids=self._token_ids, token_text=self._llm.token_text
        )
        self._writer.write(result, line_hash)
        self.counts.add_output(output)
        if record.index < self._keep_first and output.sample == 0:
            self.answers[record.index] = Answer(record, output)

    def _fail(self, line: Line, error: RecordError, line_hash: int) -> None:
        record = error_record(line, error, name_file=self._name_files)
        self._writer.write(record, line_hash)
        self.counts.add_error(error.type)
        self.failed += 1
        where = f"line {line.number} of {line.source}: {error}"
        self.first_failure = self.first_failure or where
        if self.failed == self._max_errors:
            failed = "a record" if self.failed == 1 else f"{self.failed:,} records"
            raise TooManyErrors(f"{failed} failed, the last in {where}")

    def _abort(self) -> None:
        for request_id in self._running:
            # An engine that has failed may refuse this too; its own error is the one to report.
            with suppress(OuroBatchError):
                self._llm.abort(request_id)
        self._running.clear()
