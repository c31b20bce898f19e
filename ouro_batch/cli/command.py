"""A command of the command line: its numbers are such as a machine can hold."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand

from ouro_batch.cli.messages import Messages
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.params import MAX_FLOAT, MAX_GIB, MAX_INT, MAX_SEED


class Command(TyperCommand):
    """Refuses, by name, numbers of its options that are too large, or none."""

    def invoke(self, ctx: typer.Context) -> Any:
        for parameter in self.params:
            values = ctx.params.get(parameter.name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                limit = _limit(parameter, value)
                if limit is not None and not value <= limit:  # nor is nan
                    unit = " GiB" if parameter.metavar == "GIB" else ""
                    most = f"{limit:g}" if limit == MAX_FLOAT else f"{limit:,}"
                    why = f"{parameter.opts[0]} must be at most {most}{unit}, got {value}"
                    Messages().print(Text(f"error: {why}", "bold red"), soft_wrap=True)
                    raise typer.Exit(ExitStatus.USAGE)
        return super().invoke(ctx)


def _limit(parameter: Any, value: Any) -> float | None:
    """The largest number that an option takes; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if parameter.metavar == "GIB":
        return MAX_GIB
    if isinstance(value, float):
        return MAX_FLOAT
    return MAX_SEED if parameter.name == "seed" else MAX_INT
