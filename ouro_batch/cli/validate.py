"""``ouro-batch validate``: are the numbers right, on this machine, with this checkpoint?"""

from __future__ import annotations

import os
import shlex
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import ENGINE, FILES, Config, Device, Model, Overwrite, Revision, option
from ouro_batch.errors import EngineError, ModelError, RequestError
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.reader import check_inputs
from ouro_batch.jobs.writer import check_apart, check_writable, is_stream, write_atomically
from ouro_batch.validate.part import KeptRecord, as_json

if TYPE_CHECKING:
    from ouro_batch.validate.check import Result

STYLES = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("not run", "yellow")}


class Level(str, Enum):
    quick = "quick"
    full = "full"


class Check(str, Enum):
    equations = "equations"
    history = "history"
    schedules = "schedules"
    replay = "replay"
    resources = "resources"
    precision = "precision"
    quality = "quality"
    invariance = "invariance"
    sampling = "sampling"


def validate(
    model: Model,
    revision: Revision = None,
    prompts: Annotated[
        str | None,
        option(
            FILES,
            "--prompts",
            metavar="FILE",
            help="Input of a job to take prompts from; with metadata.answer, quality is measured.",
            show_default="random tokens",
        ),
    ] = None,
    level: Annotated[
        Level,
        option(ENGINE, "--level", help="quick: a minute for a small model; full: more of all."),
    ] = Level.quick,
    only: Annotated[
        list[Check] | None,
        option(
            ENGINE,
            "--only",
            metavar="CHECK",
            help="Run this check alone; may be given several times: equations, history, schedules,"
            " replay, resources, precision, quality, invariance, sampling.",
            show_default="all",
        ),
    ] = None,
    output: Annotated[
        str,
        option(
            FILES,
            "--output",
            "-o",
            metavar="FILE",
            help="Where the record goes, as JSON; beside it, as Markdown, with the suffix .md."
            " Checks that are done are in FILE.part until all are.",
        ),
    ] = "validation.json",
    overwrite: Overwrite = False,
    device: Device = "auto",
    config: Config = None,
) -> None:
    """Check this checkpoint on this machine: equations, history, schedules, BF16, quality.

    Exit status: 0 no check failed, 1 one did or none could run, 2 wrong use, 3 a file, the model
    or the device could not be used, 130 interrupted.
    """
    messages = Messages()
    part: KeptRecord | None = None
    try:
        markdown = _check_output(output, prompts, overwrite)
        if prompts is not None:
            check_inputs([prompts], text=False)
        part = KeptRecord(Path(f"{os.path.realpath(output)}.part"))
        record = _run(
            model,
            revision,
            prompts,
            full=level is Level.full,
            names=list(dict.fromkeys(check.value for check in (only or Check))),
            device=device,
            console=messages,
            part=part,
        )
        from ouro_batch.validate.record import as_markdown

        write_atomically(Path(os.path.realpath(output)), [as_json(record)])
        write_atomically(Path(os.path.realpath(markdown)), [as_markdown(record).encode()])
        part.close(remove=True)
        part = None
    except (UsageError, RequestError) as error:
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(ExitStatus.USAGE) from None
    except (FileError, ModelError, EngineError, OSError) as error:
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(ExitStatus.ENGINE) from None
    except KeyboardInterrupt:
        kept = "no check was done"
        if part is not None and part.used:
            kept = f"{part.path} has the checks that were done; the same command begins anew"
        messages.print(Text(f"interrupted; {kept}", "bold yellow"), soft_wrap=True)
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    finally:
        if part is not None:
            part.close()
    failed = any(check["passed"] is False for check in record["checks"])
    words = "no check failed" if record["passed"] else "nothing could be checked"
    if failed:
        words = "a check FAILED"
    messages.print(
        Text.assemble(
            (words, "bold green" if record["passed"] else "bold red"),
            f"; the record is in {output} and {markdown}",
        ),
        soft_wrap=True,
    )
    raise typer.Exit(ExitStatus.DONE if record["passed"] else ExitStatus.SOME_FAILED)


def _check_output(output: str, prompts: str | None, overwrite: bool) -> str:
    """Where the Markdown goes; UsageError where either cannot be written."""
    check_writable(output)
    stem, suffix = os.path.splitext(output)
    markdown = f"{stem}.md"
    if suffix == ".md":
        raise UsageError(f"--output {output} is the JSON record: its suffix cannot be .md")
    for path in (output, markdown):
        check_writable(path)
        check_apart([] if prompts is None else [prompts], path, None)
        if os.path.exists(path) and not overwrite:
            raise UsageError(f"{path} exists (--overwrite replaces it, --output names another)")
        if is_stream(path):
            raise UsageError(f"cannot write {path}: it is no file")
    return markdown


def _run(
    model: str,
    revision: str | None,
    prompts: str | None,
    *,
    full: bool,
    names: list[str],
    device: str,
    console: Console,
    part: KeptRecord,
) -> dict[str, Any]:
    """The record; ``part`` gets it after every check, for a run that is killed."""
    # torch and the tokenizer take seconds to import.
    from ouro_batch.model.files import fingerprint
    from ouro_batch.model.source import CheckpointSource
    from ouro_batch.options import resolve_device
    from ouro_batch.validate.check import Context
    from ouro_batch.validate.prompts import random_prompts, read_prompts
    from ouro_batch.validate.record import Done, make_record, run_checks

    where = resolve_device(device)
    source = CheckpointSource(model, revision)
    if prompts is None:
        tokens, questions = random_prompts(source.config, full=full), []
    else:
        tokens, questions = read_prompts(prompts, source, full=full)
    context = Context(
        str(source.folder), source.folder, source.config, where, full, tokens, questions
    )
    about = {
        "name": source.name,
        "revision": source.revision,
        "fingerprint": fingerprint(source.folder),
    }
    command = shlex.join(["ouro-batch", *sys.argv[1:]])

    def keep(done: Done) -> None:
        try:
            part.keep(make_record(context, about, command, done, names[len(done) :]))
        except OSError as error:
            text = f"cannot keep what is done in {part.path}: {error.strerror or error}"
            console.print(Text(text, "yellow"), soft_wrap=True)

    if console.is_terminal:
        display = _Display(names)
        with Live(display, console=console, refresh_per_second=8):
            done = run_checks(context, names, display.change, keep)
    else:
        done = run_checks(context, names, partial(_print_verdict, console), keep)
    return make_record(context, about, command, done)


def _print_verdict(console: Console, name: str, result: Result | None) -> None:
    """A line for a log as soon as a check is done."""
    if result is not None:
        verdict = Text(*STYLES[result.passed])
        console.print(Text.assemble(f"{name}  ", verdict, f"  {_about(result)}"), soft_wrap=True)


class _Display:
    """The checks as a table that fills."""

    def __init__(self, names: list[str]):
        self._rows: dict[str, Result | None] = dict.fromkeys(names)
        self._spinner = Spinner("dots", style="cyan")
        self._running: str | None = None

    def change(self, name: str, result: Result | None) -> None:
        """A check has begun, or is done."""
        self._rows[name] = result
        self._running = name if result is None else None

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, result in self._rows.items():
            if result is None:
                table.add_row(name, self._spinner if name == self._running else "", "")
                continue
            table.add_row(name, Text(*STYLES[result.passed]), Text(_about(result), "dim"))
        return table


def _about(result: Result) -> str:
    """The title, and what there is to say."""
    return f"{result.title}. {result.note}" if result.note else result.title
