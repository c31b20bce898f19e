"""``ouro-batch report``: what came back, in the terminal, as a page, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import Config
from ouro_batch.errors import ModelError
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.writer import check_writable, write_atomically

ANSWERS = 200


def report(
    outputs: Annotated[
        list[str],
        typer.Argument(
            metavar="OUT...",
            help="Output files of ouro-batch run, also OUT.part of an unfinished job; - is standard"
            " input. Several are set side by side.",
        ),
    ],
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            show_envvar=False,
            help="File for the report as one self-contained page; an earlier report is replaced.",
            show_default="no page",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=0, help="Answers of each output that the page shows."
        ),
    ] = ANSWERS,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Folder or Hugging Face hub id whose tokenizer cuts answers into tokens; a hub id"
            " is downloaded if need be.",
            show_default="each output's own, if it is on this machine",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON instead of the report.")
    ] = False,
    config: Config = None,
) -> None:
    """Show what came back: exit depths, speed, lengths, errors, and answers token by token.

    Exit status: 0 reported, 2 wrong use, 3 a file or model could not be read or written.
    """
    from ouro_batch.report.build import build_report
    from ouro_batch.report.page import page
    from ouro_batch.report.terminal import print_report

    messages = Messages()
    try:
        if html is not None:
            _check_page(html)
        made = build_report(outputs, answers=limit if html is not None else 0, model=model)
        if html is not None:
            _write(Path(html).resolve(), (part.encode() for part in page(made)))
        if json:
            numbers = orjson.dumps(made.to_json(), option=orjson.OPT_INDENT_2)
            sys.stdout.write(numbers.decode() + "\n")
        else:
            print_report(Console(highlight=False), made)
        if html is not None:
            messages.print(Text(f"page: {html}"), soft_wrap=True)
    except UsageError as error:
        status = ExitStatus.USAGE
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
    except (FileError, ModelError) as error:
        status = ExitStatus.ENGINE
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
    else:
        status = ExitStatus.DONE
    raise typer.Exit(status)


def _check_page(html: str) -> None:
    """Refuse to replace anything but an earlier page."""
    from ouro_batch.report.page import MARK

    check_writable(html, streams=False)
    path = Path(html)
    if path.exists():
        with open(path, "rb") as file:
            start = file.read(len(MARK))
        if start and start != MARK.encode():
            raise UsageError(f"{html} exists and is no page of this command (give another file)")


def _write(path: Path, parts: Iterable[bytes]) -> None:
    try:
        write_atomically(path, parts)
    except OSError as error:
        raise FileError(f"writing {path} failed: {error.strerror}") from error
