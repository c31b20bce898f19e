"""``ouro-batch fetch``: a checkpoint on this machine ahead of time, and whole."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import FILES, Config, Revision, option
from ouro_batch.environment import as_text
from ouro_batch.errors import ModelError
from ouro_batch.jobs.batch import ExitStatus


def fetch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face hub id to download, or a folder to check.",
            show_envvar=False,
        ),
    ],
    revision: Revision = None,
    json: Annotated[bool, option(FILES, "--json", help="Print what was found as JSON.")] = False,
    config: Config = None,
) -> None:
    """Download a checkpoint and check its files: later runs need no network.

    Weights, configuration and tokenizer alone are downloaded, no code. Exit status: 0 it is there
    and whole, 3 it is not.
    """
    messages = Messages()
    from ouro_batch.model.hub import resolve
    from ouro_batch.model.verify import verify

    try:
        found = verify(resolve(model, revision))
    except ModelError as error:
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(ExitStatus.ENGINE) from None
    checkpoint, shape = found.checkpoint, found.config
    facts = {
        "model": checkpoint.name,
        "commit": checkpoint.revision,
        "folder": as_text(checkpoint.folder),
        "weights": {
            "files": [path.name for path in found.weight_files],
            "bytes": found.weight_bytes,
            "dtype": shape.dtype,
            "parameters": found.parameters,
        },
        "layers": shape.num_layers,
        "loops": shape.loops,
        "tokenizer": found.tokenizer is None,
        "chat_template": found.chat_template is None,
    }
    if json:
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", checkpoint.name)
    table.add_row("commit", checkpoint.revision or "none: a local folder")
    table.add_row("folder", facts["folder"])
    files = len(found.weight_files)
    table.add_row(
        "weights",
        f"{found.parameters:,} parameters in {shape.dtype}, {found.weight_bytes / 2**20:,.1f} MiB"
        f" in {files} file{'s' if files > 1 else ''}, every tensor there",
    )
    table.add_row("shape", f"{shape.num_layers} layers, {shape.loops} loops")
    table.add_row("tokenizer", found.tokenizer or "there")
    table.add_row("chat template", found.chat_template or "there")
    Console(highlight=False).print(table)
