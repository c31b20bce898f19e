"""The command line: one module a command; parses, prints, exits."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer

from ouro_batch import __version__
from ouro_batch.cli.bench import bench
from ouro_batch.cli.check import check
from ouro_batch.cli.command import Command
from ouro_batch.cli.fetch import fetch
from ouro_batch.cli.info import info
from ouro_batch.cli.messages import Results
from ouro_batch.cli.report import report
from ouro_batch.cli.run import run
from ouro_batch.cli.score import score
from ouro_batch.cli.settings import PREFIX
from ouro_batch.cli.validate import validate
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.jobs.errors import FileError

app = typer.Typer(
    name="ouro-batch",
    help="Batch inference for looped language models: every loop is scheduled, every early exit"
    " makes room at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)
for _function in (run, score, check, report, fetch, info, validate, bench):
    app.command(cls=Command)(_function)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ouro-batch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    print_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its status."""
    _fill_standard_files()
    _check_text()
    sys.stdout = Results(sys.stdout)
    status = _run()
    try:
        sys.stdout.flush()
    except FileError as error:
        if status in (ExitStatus.DONE, ExitStatus.SOME_FAILED):  # others have said what is wrong
            status = _fail(str(error))
    sys.exit(status)


def _run() -> int:
    try:
        app(prog_name="ouro-batch")
    except SystemExit as end:
        return end.code or ExitStatus.DONE
    except FileError as error:  # of standard output
        return _fail(str(error))
    except Exception:
        # Python's own status for this is 1, which here says that single records failed.
        traceback.print_exc()
        return ExitStatus.ENGINE
    return ExitStatus.DONE


def _fail(why: str, status: ExitStatus = ExitStatus.ENGINE) -> ExitStatus:
    with suppress(OSError):
        print(f"error: {why}", file=sys.stderr)
    return status


def _fill_standard_files() -> None:
    """Keep the numbers of standard files that are closed from the files of a job.

    What is read or written there fails as a closed file does; messages go nowhere.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is free
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _check_text() -> None:
    """Refuse arguments and variables that are no text: they could not be written into results."""
    given = [("argument", argument) for argument in sys.argv[1:]]
    own = [variable for variable in os.environ if variable.startswith(f"{PREFIX}_")]
    given += [("the variable", variable) for variable in own]
    given += [(f"what {variable} says,", os.environ[variable]) for variable in own]
    for what, shown in given:
        try:
            shown.encode()
        except UnicodeEncodeError:
            sys.exit(_fail(f"{what} {shown!a} is not UTF-8", ExitStatus.USAGE))
