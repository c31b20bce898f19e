"""``ouro-batch info``: what this machine has, what can run on it, and what cannot and why."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ouro_batch.cli.shared import Config
from ouro_batch.jobs.preview import counted


def info(
    json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON.", show_envvar=False)
    ] = False,
    config: Config = None,
) -> None:
    """Show versions, devices, what can run here and what cannot, and the checkpoints at hand."""
    from ouro_batch.diagnosis import diagnose

    found = diagnose()
    if json:
        sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    _print(Console(highlight=False), found)


def _print(console: Console, found: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    versions = [f"{name} {version or 'missing'}" for name, version in found["versions"].items()]
    table.add_row("versions", ", ".join(versions))
    machine = found["machine"]
    table.add_row(
        "machine",
        f"{machine['cpu']}, {counted(machine['threads'], 'thread')},"
        f" {_gib(machine['free_bytes'])} of {_gib(machine['memory_bytes'])} free;"
        f" {machine['system']}",
    )
    for device in found["devices"]:
        table.add_row(
            device["name"],
            f"{device['model']}, {_gib(device['free_bytes'])} of {_gib(device['memory_bytes'])}"
            f" free, compute capability {device['capability']}",
        )
    for ability in found["abilities"]:
        able = ability["why_not"] is None
        says = Text("yes", "green") if able else Text("no: ", "yellow").append(ability["why_not"])
        table.add_row(ability["name"], says)
    for checkpoint in found["checkpoints"]:
        table.add_row(
            "checkpoint",
            f"{checkpoint['model']} at {checkpoint['commit'][:12]}, {_gib(checkpoint['bytes'])}",
        )
    if not found["checkpoints"]:
        table.add_row("checkpoints", f"none in {found['hub_cache']} (see ouro-batch fetch)")
    console.print(table)


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:,.1f} GiB"
