"""The command line: one module a command; parses, prints, exits."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from ouro_batch import __version__
from ouro_batch.cli.bench import bench
from ouro_batch.cli.check import check
from ouro_batch.cli.fetch import fetch
from ouro_batch.cli.info import info
from ouro_batch.cli.report import report
from ouro_batch.cli.run import run
from ouro_batch.cli.score import score
from ouro_batch.cli.settings import PREFIX
from ouro_batch.cli.validate import validate
from ouro_batch.jobs.batch import ExitStatus

app = typer.Typer(
    name="ouro-batch",
    help="Batch inference for looped language models: every loop is scheduled, every early exit"
    " makes room at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)
app.command()(run)
app.command()(score)
app.command()(check)
app.command()(report)
app.command()(fetch)
app.command()(info)
app.command()(validate)
app.command()(bench)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ouro-batch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    # Not OURO_BATCH_VERSION in the environment, which people name a pin of theirs.
    print_version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its status."""
    _fill_standard_files()
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            print(f"error: argument {argument!a} is not UTF-8", file=sys.stderr)
            sys.exit(ExitStatus.USAGE)
    try:
        app(prog_name="ouro-batch")
    except Exception:
        # Python's own status for this is 1, which here says that single records failed.
        traceback.print_exc()
        sys.exit(ExitStatus.ENGINE)
    finally:
        _settle_stdout()


def _fill_standard_files() -> None:
    """Keep the numbers of standard files that are closed from the files of a job.

    What is opened there fails as a closed file does.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is free


def _settle_stdout() -> None:
    """Python flushes standard output once more at exit, and complains where it was closed."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
