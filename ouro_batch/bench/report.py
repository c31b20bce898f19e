"""What a benchmark leaves behind: a JSON document, written after every row, and its tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ouro_batch.bench.workload import BenchError

STDOUT = "-"
SHOWN_KERNELS = 20


class Document:
    """The JSON document of a run. With a file it is replaced as a whole at every ``write``."""

    def __init__(self, output: str | None, head: dict[str, Any]):
        self.values: dict[str, Any] = {**head, "results": []}
        self._path = None if output in (None, STDOUT) else Path(output)
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise BenchError(f"--output {output}: there is no folder {self._path.parent}")
        if self._path is not None and self._path.exists():
            self._check_replaceable()

    def _check_replaceable(self) -> None:
        """Only an earlier document may go."""
        if not self._path.is_file():
            raise BenchError(f"--output {self._path} is no file")
        try:
            old = json.loads(self._path.read_bytes() or b'{"results":[]}')
        except ValueError:
            old = None
        if not isinstance(old, dict) or "results" not in old:
            raise BenchError(f"--output {self._path} exists and is no output of bench")

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.values["results"]

    def text(self) -> str:
        return json.dumps(self.values, indent=1, allow_nan=False) + "\n"

    def write(self) -> None:
        """A reader sees the old document or the new one, never a part."""
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(self.text())
        temporary.replace(self._path)


def row_line(row: dict[str, Any]) -> str:
    """One row in words, for a log."""
    name = f"{row['n']}x{row['input']}/{row['output']} {row['exit']} {row['schedule']}"
    if "error" in row:
        return f"{name}: error: {row['error']}"
    return (
        f"{name}: decode {_rate(row['decode_tok_s'])} tok/s ({_share(row['floor_share'])} of the"
        f" floor), end to end {_rate(row['end_to_end_tok_s'])}, mean depth {row['mean_depth']:.2f}"
    )


def print_results(console: Console, values: dict[str, Any]) -> None:
    """Tables of the rows, of the comparison and of the profiles, as far as there are any."""
    table = _table("Rates in tokens/s, medians; times in ms")
    headings = "n x in/out|exit|schedule|decode|steady|floor|share|prefill|end to end|depth|rows"
    for heading in f"{headings}|TTFT p50|p99|TPOT p50|p99".split("|"):
        table.add_column(heading, justify="left" if heading in _WORDS else "right")
    for row in values["results"]:
        name = f"{row['n']}x{row['input']}/{row['output']}"
        if "error" in row:
            table.add_row(name, row["exit"], row["schedule"], Text("error", "bold red"))
            continue
        table.add_row(
            name,
            row["exit"],
            row["schedule"],
            Text(_rate(row["decode_tok_s"]), "bold"),
            _rate(row["steady_decode_tok_s"]),
            _rate(row["floor_tok_s"]),
            _share(row["floor_share"]),
            _rate(row["prefill_tok_s"]),
            _rate(row["end_to_end_tok_s"]),
            f"{row['mean_depth']:.2f}",
            f"{row['rows_in_use']['mean']:.1f}",
            *(f"{1e3 * row[k][p]:,.1f}" for k in ("ttft_s", "tpot_s") for p in ("p50", "p99")),
        )
    console.print(table)
    for row in values["results"]:
        if "error" in row:
            console.print(Text(row_line(row), "red"), soft_wrap=True)
    if "comparison" in values:
        _print_comparison(console, values["comparison"])
    for row in values["results"]:
        if "profile" in row:
            _print_profile(console, row)


_WORDS = ("n x in/out", "exit", "schedule")


def _print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    table = _table(f"B / A, A: {comparison['a']}, B: {comparison['b']}; median (min to max)")
    for heading in ("n x in/out", "exit A, B", "pairs", "decode", "end to end"):
        table.add_column(heading)
    for row in comparison["rows"]:
        table.add_row(
            f"{row['n']}x{row['input']}/{row['output']}",
            ", ".join(row["exit"]),
            str(row["pairs"]),
            *(_spread(row[key]) for key in ("decode", "end_to_end")),
        )
    console.print(table)


def _print_profile(console: Console, row: dict[str, Any]) -> None:
    found = row["profile"]
    name = f"{row['n']}x{row['input']}/{row['output']} {row['exit']} {row['schedule']}"
    table = _table(
        f"{name}: {found['steps']} decode steps, {found['busy_us']:,.0f} us busy of"
        f" {found['wall_us']:,.0f} us under the profiler"
    )
    for heading in ("kernel", "calls", "total us", "share"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for kernel in found["kernels"][:SHOWN_KERNELS]:
        table.add_row(
            Text(kernel["name"][:80]),
            f"{kernel['calls']:,}",
            f"{kernel['total_us']:,.0f}",
            _share(kernel["share"]),
        )
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _spread(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
