"""What the options of several commands share: panels, choices, and how one is declared."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer

ENGINE = "Engine"
MEMORY = "Memory"


class Schedule(str, Enum):
    refill = "refill"
    no_refill = "no-refill"
    serial = "serial"


class Attention(str, Enum):
    auto = "auto"
    torch = "torch"
    triton = "triton"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def option(panel: str, *names: str, **settings: Any) -> Any:
    """An option in a panel of the command's help."""
    return typer.Option(*names, rich_help_panel=panel, **settings)
