"""Shows a running job on standard error: a live display, plain log lines, or nothing."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ouro_batch.jobs.preview import counted, depth_bar, depth_shares, duration, has_colour
from ouro_batch.jobs.statistics import JobCounts

if TYPE_CHECKING:
    from ouro_batch.llm import EngineSnapshot

WIDE = 100  # columns from which on there is room for long bars
RATE_WINDOW_S = 5.0


@dataclass(frozen=True)
class JobTitle:
    """What runs: the words of the display that do not change."""

    model: str
    device: str
    schedule: str
    loops: int
    total: int | None  # records, None where unknown


class Progress(Protocol):
    """Told of every step; shows what it likes of it."""

    def update(self, counts: JobCounts, engine: EngineSnapshot) -> None: ...

    def close(self) -> None: ...


class QuietProgress:
    """Shows nothing."""

    def update(self, counts: JobCounts, engine: EngineSnapshot) -> None:
        pass

    def close(self) -> None:
        pass


class _Rates:
    """Tokens a second of prefill and decode over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque([(time.perf_counter(), 0, 0)])

    def observe(self, engine: EngineSnapshot) -> None:
        now = time.perf_counter()
        if now - self._seen[-1][0] >= 0.1:
            self._seen.append((now, engine.completion_tokens, engine.prompt_tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def completion(self) -> float:
        return self._rate(1)

    @property
    def prompt(self) -> float:
        return self._rate(2)

    def _rate(self, column: int) -> float:
        first, last = self._seen[0], self._seen[-1]
        passed = last[0] - first[0]
        return (last[column] - first[column]) / passed if passed else 0.0


class LogProgress:
    """One plain line every ``every_s`` seconds."""

    def __init__(self, console: Console, title: JobTitle, every_s: float = 5.0):
        self._console = console
        self._title = title
        self._every_s = every_s
        self._rates = _Rates()
        self._next = time.perf_counter() + every_s
        total = "" if title.total is None else f"{title.total:,} "
        self._print(
            f"running {total}requests: {title.model} on {title.device}, {title.schedule},"
            f" {title.loops} loops"
        )

    def update(self, counts: JobCounts, engine: EngineSnapshot) -> None:
        self._rates.observe(engine)
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._every_s
        parts = [f"{_of(counts.done, self._title.total)} requests"]
        if counts.failed:
            parts.append(f"{counts.failed:,} failed")
        left = _time_left(counts, self._title.total)
        if left is not None:
            parts.append(f"{duration(left)} left")
        parts.append(f"{self._rates.completion:,.0f} tokens/s")
        mean = _mean_depth(engine)
        if mean is not None:
            parts.append(f"mean exit depth {mean:.2f}")
        parts.append(f"rows {_of(engine.rows_in_use, engine.max_rows)}")
        parts.append(f"cache {_of(engine.kv_blocks_in_use, engine.kv_blocks)} blocks")
        self._print(", ".join(parts))

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveProgress:
    """A display that redraws itself in place, and is gone when the job has ended."""

    def __init__(self, console: Console, title: JobTitle):
        self._console = console
        self._title = title
        self._rates = _Rates()
        self._counts: JobCounts | None = None
        self._engine: EngineSnapshot | None = None
        self._live = Live(
            self,
            console=console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,  # standard output carries records
        )
        self._live.start()

    def update(self, counts: JobCounts, engine: EngineSnapshot) -> None:
        self._counts, self._engine = counts, engine
        self._rates.observe(engine)

    def close(self) -> None:
        self._live.stop()

    def __rich__(self) -> Table:
        title, counts, engine = self._title, self._counts, self._engine
        outer = Table.grid()
        heading = Text.assemble(
            (title.model, "bold"),
            (f"  {title.device}, {title.schedule}, {title.loops} loops", "dim"),
        )
        outer.add_row(heading)
        if counts is None or engine is None:
            return outer
        width = _bar_width(self._console)
        grid = Table.grid(padding=(0, 2, 0, 0))
        left = _time_left(counts, title.total)
        note = Text("" if left is None else f"{duration(left)} left", "bold")
        if counts.failed:
            note.append(f"  {counts.failed:,} failed", "bold red")
        grid.add_row(
            "requests",
            _bar(counts.done, title.total, width),
            Text.assemble(_of(counts.done, title.total), "  ", note),
        )
        grid.add_row(
            "rows",
            _bar(engine.rows_in_use, engine.max_rows, width),
            f"{_of(engine.rows_in_use, engine.max_rows)}  {engine.waiting:,} waiting",
        )
        grid.add_row(
            "cache",
            _bar(engine.kv_blocks_in_use, engine.kv_blocks, width),
            f"{_of(engine.kv_blocks_in_use, engine.kv_blocks)} blocks",
        )
        mean = _mean_depth(engine)
        depth = Text("" if mean is None else f"mean {mean:.2f}   ")
        if counts.decode_tokens:
            coloured = has_colour(self._console)
            depth.append_text(depth_shares(counts.exit_depths, title.loops, coloured=coloured))
            bar = depth_bar(counts.exit_depths, title.loops, width if coloured else 0)
        else:
            bar = Text("─" * width, "dim")
        grid.add_row("exit depth", bar, depth)
        grid.add_row(
            "tokens/s",
            Text(f"{self._rates.completion:,.0f}", "bold"),
            Text(f"prefill {self._rates.prompt:,.0f}", "dim"),
        )
        outer.add_row(grid)
        return outer


def open_progress(
    console: Console, title: JobTitle, *, quiet: bool, records_shown: bool
) -> Progress:
    """The display that suits: log lines where there is no terminal or records scroll through it."""
    if quiet:
        return QuietProgress()
    if console.is_terminal and not console.is_dumb_terminal and not records_shown:
        return LiveProgress(console, title)
    return LogProgress(console, title)


def print_summary(
    console: Console, counts: JobCounts, loops: int, places: list[tuple[str, str]]
) -> None:
    """What came out of a job that ended: numbers, exit depths, and (name, file) of its results."""
    records = Text(f"{counts.ok:,} done", "bold green")
    if counts.failed:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in counts.errors.most_common())
        records.append(f", {counts.failed:,} failed ({kinds})", "bold red")
    records.append(f" in {duration(counts.seconds)}", "not bold default")
    lines = [("requests", records)]
    if counts.ok:
        rate = Text(f"{counts.per_second('completion_tokens'):,.0f} tokens/s", "bold")
        rate.append(
            f"  {counts.completion_tokens:,} tokens generated, {counts.prompt_tokens:,} in prompts",
            "not bold",
        )
        if counts.resumed is not None:
            made = counts.done - counts.resumed.done
            rate.append(f"; the speed is that of {counted(made, 'record')} of this run", "not bold")
        lines.append(("speed", rate))
    if counts.mean_exit_depth is not None:
        depth = Text(f"mean {counts.mean_exit_depth:.2f} of {loops}  ")
        coloured = has_colour(console)
        if coloured:
            width = _bar_width(console)
            depth.append_text(depth_bar(counts.exit_depths, loops, width)).append("  ")
        depth.append_text(depth_shares(counts.exit_depths, loops, coloured=coloured))
        lines.append(("exit depth", depth))
    lines += [(name, Text(place)) for name, place in places]
    for name, value in lines:
        # Never wrapped: a long path must stay in one piece to be copied.
        console.print(Text(f"{name:<10}  ").append_text(value), soft_wrap=True)


def _bar_width(console: Console) -> int:
    return 32 if console.width >= WIDE else 14


def _of(part: int, whole: int | None) -> str:
    return f"{part:,}" if whole is None else f"{part:,} of {whole:,}"


def _bar(part: int, whole: int | None, width: int) -> ProgressBar:
    return ProgressBar(
        total=whole,
        completed=part,
        width=width,
        pulse=whole is None,
        complete_style="cyan",
        finished_style="cyan",
    )


def _time_left(counts: JobCounts, total: int | None) -> float | None:
    if not total or not counts.done:
        return None
    passed = time.perf_counter() - counts.started
    return max(total - counts.done, 0) * passed / counts.done


def _mean_depth(engine: EngineSnapshot) -> float | None:
    return engine.decode_loops / engine.decode_tokens if engine.decode_tokens else None
