"""``ouro-batch score``: log-probabilities and exit depths of completions that are given."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import EXIT as EXIT_PANEL
from ouro_batch.cli.shared import (
    FILES,
    Config,
    Device,
    Dtype,
    DtypeOption,
    ExitThreshold,
    Format,
    IdField,
    InputFormatOption,
    Inputs,
    Loops,
    MaxLoops,
    MinLoops,
    Model,
    Overwrite,
    PromptField,
    Quiet,
    Resume,
    ResumeOption,
    Revision,
    input_format,
    option,
)
from ouro_batch.errors import EngineError, ModelError, RequestError
from ouro_batch.jobs.answers import Answers
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.jobs.errors import FileError, OutputClosed, UsageError
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.preview import counted
from ouro_batch.jobs.reader import check_inputs, expand_inputs
from ouro_batch.jobs.score import ScoreCounts, ScoreJob
from ouro_batch.jobs.writer import (
    STDOUT,
    Writer,
    check_apart,
    check_writable,
    is_stream,
    open_writer,
)
from ouro_batch.params import SamplingParams


def score(
    inputs: Inputs,
    model: Model,
    revision: Revision = None,
    format: InputFormatOption = Format.json,
    prompt_field: PromptField = None,
    id_field: IdField = None,
    answers: Annotated[
        str | None,
        option(
            FILES,
            "--answers",
            metavar="FILE",
            help="Output of run --token-ids over the same inputs: its tokens are scored, all"
            " samples, at the depths that they ran.",
            show_default="each line's completion",
        ),
    ] = None,
    output: Annotated[
        str,
        option(
            FILES,
            "--output",
            "-o",
            metavar="OUTPUT",
            help="File for the records, in input order; - writes them to standard output.",
        ),
    ] = STDOUT,
    overwrite: Overwrite = False,
    resume: ResumeOption = Resume.auto,
    quiet: Quiet = False,
    ignore_depths: Annotated[
        bool,
        option(
            EXIT_PANEL,
            "--ignore-depths",
            help="Let the gate decide where tokens leave, whatever exit_depths are given.",
        ),
    ] = False,
    exit_threshold: ExitThreshold = None,
    min_loops: MinLoops = SamplingParams.min_loops,
    max_loops: MaxLoops = None,
    loops: Loops = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    config: Config = None,
) -> None:
    """Score given completions, each in one pass: log-probabilities and exit depths.

    A line has a prompt or messages, and completion: text or token ids. exit_depths, where it has
    them, say where its tokens leave; else the gate decides. Exit status: 0 all done, 1 some records
    failed, 2 wrong use, 3 the engine could not run, 130 interrupted.
    """
    console = Messages()
    settings = {
        "exit_threshold": exit_threshold,
        "min_loops": min_loops,
        "max_loops": max_loops,
    }
    try:
        params = SamplingParams(**settings)
        form = input_format(format, prompt_field, id_field)
        if format is Format.text and answers is None:
            raise UsageError("--format text has no completions: give --answers too")
        inputs = expand_inputs(inputs, output)
        files = inputs if answers is None else [*inputs, answers]
        check_inputs(files, text=format is Format.text)
        check_apart(files, output, None)
        if not is_stream(output):
            check_writable(output)
        made = None if answers is None else Answers(answers)
        writer = open_writer(output, overwrite=overwrite, resume=resume.value)
    except FileError as error:
        _say(console, f"error: {error}", "bold red")
        raise typer.Exit(ExitStatus.ENGINE) from None
    except (UsageError, RequestError) as error:
        _say(console, f"error: {error}", "bold red")
        raise typer.Exit(ExitStatus.USAGE) from None
    for note in () if quiet else form.without_effect:
        _say(console, f"note: {note}", "yellow")
    progress = Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    bar = progress.add_task("loading", total=None)

    def show(counts: ScoreCounts) -> None:
        progress.update(
            bar,
            description=f"{counted(counts.records, 'record')} scored, {counts.tokens:,} tokens",
        )

    with Interrupt() as interrupt:
        try:
            from ouro_batch.llm import LLM

            # Nothing is decoded: the smallest cache and work space.
            with (
                progress,
                LLM(
                    model,
                    revision=revision,
                    device=device,
                    dtype=dtype.value,
                    attention="torch",
                    loops=loops,
                    max_rows=1,
                    max_batched_tokens=2,
                    kv_tokens=16,
                ) as llm,
            ):
                about = llm.describe()
                writer.begin(
                    {
                        "command": "score",
                        "model": about["model"]["name"],
                        "checkpoint": about["model"]["fingerprint"],
                        "dtype": about["dtype"],
                        "loops": about["loops"],
                        "depths": "ignored" if ignore_depths else "given",
                        "format": format.value,
                        "prompt_field": prompt_field,
                        "id_field": id_field,
                        **settings,
                    }
                )
                job = ScoreJob(
                    llm,
                    inputs,
                    writer,
                    answers=made,
                    params=params,
                    format=form,
                    use_depths=not ignore_depths,
                    interrupt=interrupt,
                    on_record=show,
                )
                interrupt.immediately = False
                counts = job.run()
                writer.complete(job.lines)
                writer.finish()
        except KeyboardInterrupt:
            raise typer.Exit(_stopped(console, "interrupted", writer, 130)) from None
        except OutputClosed as error:
            raise typer.Exit(_stopped(console, f"stopped: {error}", writer, 130)) from None
        except UsageError as error:
            raise typer.Exit(_stopped(console, f"error: {error}", writer, 2)) from None
        except (ModelError, EngineError, FileError) as error:
            raise typer.Exit(_stopped(console, f"error: {error}", writer, 3)) from None
        except BaseException:
            writer.keep()
            raise
    if not quiet:
        _summary(console, counts, output)
    raise typer.Exit(ExitStatus.SOME_FAILED if counts.failed else ExitStatus.DONE)


def _stopped(console: Console, why: str, writer: Writer, status: int) -> int:
    place = writer.keep()
    if place is not None:
        why += f"; {counted(writer.written, 'finished record')} in {place}"
        if place.endswith(".part"):
            again = "the same command goes on from there"
            why += f", {'--resume never drops them' if status == ExitStatus.USAGE else again}"
    _say(console, why, "bold red" if status in (2, 3) else "bold")
    return status


def _say(console: Console, message: str, style: str) -> None:
    console.print(Text(message, style), soft_wrap=True)


def _summary(console: Console, counts: ScoreCounts, output: str) -> None:
    words = f"{counts.records - counts.failed:,} of {counted(counts.records, 'record')} scored"
    if counts.tokens:
        words += f", {counts.tokens:,} tokens, mean log-probability"
        words += f" {counts.logprob / counts.tokens:.4g}"
    if counts.decoded:
        words += f", mean depth {counts.loops / counts.decoded:.2f}"
    if not is_stream(output):
        words += f"; in {os.fspath(output)}"
    _say(console, words, "yellow" if counts.failed else "green")
