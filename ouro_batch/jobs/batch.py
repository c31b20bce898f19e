"""One batch from its options to its exit status: checks, model, job, statistics, summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console
from rich.text import Text

from ouro_batch.environment import as_text
from ouro_batch.errors import EngineError, ModelError, OuroBatchError
from ouro_batch.jobs.errors import FileError, OutputClosed, TooManyErrors
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.job import Job
from ouro_batch.jobs.preview import counted, print_answers, token_pieces
from ouro_batch.jobs.progress import JobTitle, open_progress, print_summary
from ouro_batch.jobs.reader import check_inputs, count_records, expand_inputs
from ouro_batch.jobs.records import InputFormat
from ouro_batch.jobs.statistics import JobCounts, job_statistics, settings_of
from ouro_batch.jobs.writer import (
    STDOUT,
    Writer,
    check_apart,
    check_writable,
    is_stream,
    open_writer,
    write_atomically,
)
from ouro_batch.params import SamplingParams

if TYPE_CHECKING:
    from ouro_batch.llm import LLM

PREVIEW_RECORDS = 5


class ExitStatus(IntEnum):
    DONE = 0
    SOME_FAILED = 1
    USAGE = 2
    ENGINE = 3
    INTERRUPTED = 130


@dataclass(frozen=True)
class BatchOptions:
    """What to run, and where its results go.

    ``sampling`` holds sampling fields for records that do not name them, ``recorded`` whatever
    else the statistics should say about how the job was asked for. ``statistics`` None is beside
    a file output, and none for a stream. ``preview`` None shows a few answers on a terminal.
    """

    model: str
    inputs: Sequence[str]
    output: str = STDOUT
    sampling: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    format: InputFormat = field(default_factory=InputFormat)
    unique_ids: bool = True
    ordered: bool = True
    too_long: str = "error"
    token_ids: bool = False
    overwrite: bool = False
    resume: str = "auto"
    retry_errors: bool = False
    max_errors: int | None = None
    quiet: bool = False
    statistics: str | None = None
    preview: int | None = None


def run_batch(options: BatchOptions, load: Callable[[], LLM], console: Console) -> ExitStatus:
    """Run a batch; messages go to ``console``, which must not be standard output.

    Raises:
        UsageError, RequestError: it was asked for in a way that cannot work; nothing was written.
    """
    SamplingParams(**options.sampling)
    options = replace(options, inputs=expand_inputs(options.inputs, options.output))
    stream = is_stream(options.output)
    statistics = options.statistics
    if statistics is None and not stream:
        statistics = f"{options.output}.stats.json"
    check_inputs(options.inputs, text=options.format.text)
    check_apart(options.inputs, options.output, statistics)
    if not stream:
        check_writable(options.output)
    if statistics not in (None, STDOUT):
        check_writable(statistics)
    made_with = None
    if options.retry_errors and statistics is not None and os.path.isfile(statistics):
        made_with = settings_of(statistics)
    writer = open_writer(
        options.output,
        overwrite=options.overwrite,
        resume=options.resume,
        retry_errors=options.retry_errors,
        made_with=made_with,
        ordered=options.ordered,
    )
    unknown = options.retry_errors and made_with is None and os.path.exists(options.output)
    if unknown and not options.quiet:
        note = f"note: {statistics} does not say which settings {options.output} was made with"
        console.print(Text(f"{note}: they are taken to be these", "yellow"), soft_wrap=True)
    with Interrupt() as interrupt:
        try:
            return _Batch(options, statistics, writer, interrupt, console).run(load)
        except KeyboardInterrupt:
            _stopped(console, "interrupted", writer)
            return ExitStatus.INTERRUPTED
        except OutputClosed as error:
            _stopped(console, f"stopped: {error}", writer)
            return ExitStatus.INTERRUPTED
        except TooManyErrors as error:
            advice = "goes on after it, and with --retry-errors runs what failed again"
            _stopped(console, f"stopped: {error}", writer, advice)
            return ExitStatus.SOME_FAILED
        except (ModelError, EngineError, FileError) as error:
            _stopped(console, f"error: {error}", writer)
            return ExitStatus.ENGINE
        except BaseException:
            writer.keep()
            raise


class _Batch:
    def __init__(
        self,
        options: BatchOptions,
        statistics: str | None,
        writer: Writer,
        interrupt: Interrupt,
        console: Console,
    ):
        self._options = options
        self._statistics = statistics
        self._writer = writer
        self._interrupt = interrupt
        self._console = console

    def run(self, load: Callable[[], LLM]) -> ExitStatus:
        options = self._options
        total = None
        if not options.quiet:
            n = options.sampling.get("n", 1)
            total = count_records(options.inputs, n, text=options.format.text)
        if not options.quiet:
            self._console.print(Text(f"loading {options.model}"), soft_wrap=True)
        started = time.perf_counter()
        llm = load()
        load_s = time.perf_counter() - started
        try:
            about = llm.describe()
            loops = about["loops"]
            settings = self._settings(about)
            self._writer.begin(settings)
            if self._writer.written and not options.quiet:
                self._console.print(
                    Text(f"resuming: {counted(self._writer.written, 'record')} done"),
                    soft_wrap=True,
                )
            self._note_without_effect(loops)
            title = JobTitle(options.model, about["device"], about["schedule"], loops, total)
            job = self._run_job(llm, title)
            self._writer.complete(job.lines)
            places = [] if is_stream(options.output) else [("records", options.output)]
            try:
                # First, so that wherever the job is cut off the same command still makes both.
                if self._statistics is not None:
                    self._write_statistics(llm, job.counts, settings, load_s)
                    places.append(("statistics", self._statistics))
            except FileError:
                self._writer.finish()
                raise
            self._writer.finish()
            if not options.quiet:
                self._preview(llm, job, loops)
                print_summary(self._console, job.counts, loops, places)
            self._note_failures(job)
        finally:
            llm.close()
        return ExitStatus.SOME_FAILED if job.counts.failed else ExitStatus.DONE

    def _note_failures(self, job: Job) -> None:
        """What a status of 1, or an output without records, comes from; said with --quiet too."""
        if job.first_failure is not None:
            failed = counted(job.failed, "record")
            why = f"{failed} failed, the first in {job.first_failure}"
            self._console.print(Text(why, "bold red"), soft_wrap=True)
        elif not job.counts.done:
            why = f"no records: there are no lines in {', '.join(self._options.inputs)}"
            self._console.print(Text(why, "bold yellow"), soft_wrap=True)

    def _settings(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What decides results: a job that is resumed must have been begun with the same."""
        model = about["model"]
        named = ("dtype", "loops", "max_model_len", "batch_invariant", "seed")
        return {
            "model": as_text(os.path.realpath(model["name"]))
            if os.path.isdir(model["name"])
            else model["name"],
            "revision": model.get("revision"),
            "checkpoint": model.get("fingerprint"),
            **{name: about.get(name) for name in named},
            **self._options.sampling,
            "on_too_long": self._options.too_long,
            "unique_ids": self._options.unique_ids,
            "token_ids": self._options.token_ids,
        }

    def _note_without_effect(self, loops: int) -> None:
        """Say which settings of the command line change nothing."""
        sampling = SamplingParams(**self._options.sampling)
        notes = self._options.format.without_effect + [
            f"--{name}-loops {value} is above the model's {counted(loops, 'loop')}"
            for name, value in (("min", sampling.min_loops), ("max", sampling.max_loops))
            if value is not None and value > loops
        ]
        if sampling.n > 1 and sampling.temperature == 0:
            notes.append(f"--n {sampling.n} at --temperature 0 gives the same answer every time")
        if not self._options.quiet:
            for note in notes:
                self._console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)

    def _run_job(self, llm: LLM, title: JobTitle) -> Job:
        options = self._options
        shown = options.output == STDOUT and sys.stdout.isatty()
        progress = open_progress(self._console, title, quiet=options.quiet, records_shown=shown)
        job = Job(
            llm,
            options.inputs,
            self._writer,
            defaults=options.sampling,
            format=options.format,
            unique_ids=options.unique_ids,
            too_long=options.too_long,
            token_ids=options.token_ids,
            name_files=len(options.inputs) > 1,
            progress=progress,
            interrupt=self._interrupt,
            stopping=self._say_stopping,
            max_errors=options.max_errors,
            keep_first=self._preview_records(),
        )
        self._interrupt.immediately = False
        try:
            job.run()
        finally:
            progress.close()
        return job

    def _say_stopping(self, running: int) -> None:
        what = counted(running, "running request")
        self._console.print(
            Text(f"finishing {what}; Ctrl-C again stops now", "bold"), soft_wrap=True
        )

    def _preview_records(self) -> int:
        if self._options.preview is not None:
            return self._options.preview
        terminal = self._console.is_terminal and not is_stream(self._options.output)
        return PREVIEW_RECORDS if terminal else 0

    def _preview(self, llm: LLM, job: Job, loops: int) -> None:
        answers = [job.answers[index] for index in sorted(job.answers)]
        try:
            pieces = [token_pieces(llm, answer.output) for answer in answers]
        except OuroBatchError:
            return  # no tokenizer: there are only token ids, nothing to look at
        if answers:
            print_answers(self._console, answers, pieces, loops)
            self._console.print()

    def _write_statistics(
        self, llm: LLM, counts: JobCounts, settings: Mapping[str, Any], load_s: float
    ) -> None:
        options = self._options
        asked = {
            "inputs": list(options.inputs),
            "output": options.output,
            "sampling": dict(options.sampling),
            **options.recorded,
        }
        statistics = job_statistics(llm, counts, options=asked, settings=settings, load_s=load_s)
        text = orjson.dumps(
            statistics, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str
        )
        name = self._statistics or ""
        try:
            if name == STDOUT:
                sys.stdout.buffer.write(text + b"\n")
                sys.stdout.buffer.flush()
            elif is_stream(name):
                Path(name).write_bytes(text + b"\n")
            elif not self._holds_already(Path(name), counts, statistics):
                write_atomically(Path(name).resolve(), [text, b"\n"])
        except OSError as error:
            raise FileError(
                f"writing {name} failed: {error.strerror} (the records are complete)"
            ) from error

    @staticmethod
    def _holds_already(path: Path, counts: JobCounts, statistics: Mapping[str, Any]) -> bool:
        """Whether a run that made nothing would replace the statistics of the one that made all."""
        if counts.resumed is None or counts.resumed.done < counts.done:
            return False
        try:
            old = orjson.loads(path.read_bytes())
            requests = {**statistics["requests"], "resumed": old["requests"]["resumed"]}
            return old["requests"] == requests and all(
                old[name] == statistics[name] for name in ("tokens", "exit_depth")
            )
        except (OSError, ValueError, LookupError, TypeError):
            return False


def _stopped(
    console: Console, why: str, writer: Writer, advice: str = "goes on from there"
) -> None:
    """Say why a job ended early and where its finished records are."""
    console.print(Text(why, "bold red" if why.startswith("error") else "bold"), soft_wrap=True)
    place = writer.keep()
    if place is not None:
        records = f"{counted(writer.written, 'finished record')} in {place}"
        if place.endswith(".part"):
            records += f"; the same command {advice}"
        console.print(Text(records), soft_wrap=True)
