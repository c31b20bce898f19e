"""The report in the terminal: tables and bars."""

from __future__ import annotations

import itertools
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ouro_batch.jobs.preview import depth_colour, depth_style, has_colour
from ouro_batch.report import text
from ouro_batch.report.build import Report, RunReport
from ouro_batch.report.page import run_facts

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = " ▁▂▃▄▅▆▇█"
SHOWN_ERRORS = 10
NAME = 14  # columns of the names at the left


def print_report(console: Console, report: Report) -> None:
    for run in report.runs:
        _print_run(console, run, labelled=len(report.runs) > 1)
    if report.comparisons:
        console.print(_heading("Side by side"))
        console.print(_comparison(report))
        console.print()


def _print_run(console: Console, run: RunReport, *, labelled: bool) -> None:
    numbers = run.numbers
    title = Text(f"{run.label}  " if labelled else "", "bold cyan")
    console.print(title.append(text.one_line(run.output.name), "bold"), soft_wrap=True)
    facts = [numbers["model"], *run_facts(numbers)]
    if any(facts):
        console.print(Text(", ".join(fact for fact in facts if fact), "dim"))
    for note in run.output.notes:
        console.print(Text(f"note: {text.one_line(note)}", "yellow"))
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=NAME)
    grid.add_column()
    for name, value in _numbers(numbers):
        grid.add_row(Text(name, "dim"), value)
    console.print(grid)
    console.print()
    if numbers["tokens"]["decode"]:
        console.print(_heading("Exit depth"))
        console.print(_depths(numbers, _bar_width(console)))
        console.print(_positions(numbers, console))
        console.print()
    if len(numbers["timeline"]) > 1:
        console.print(_heading("Over time"))
        console.print(_course(numbers, console.width - NAME - 26))
        console.print()
    if numbers["requests"]["ok"]:
        console.print(_heading("Lengths in tokens"))
        console.print(_lengths(numbers, console.width - NAME - 44))
        console.print()
    if numbers["errors"]:
        console.print(_heading("Errors"))
        console.print(_errors(numbers["errors"]))
        console.print()
    if numbers["slowest"]:
        console.print(_heading("Slowest requests"))
        console.print(_slowest(numbers["slowest"][:5]))
        console.print()


def _numbers(numbers: dict[str, Any]) -> list[tuple[str, Text]]:
    requests, tokens = numbers["requests"], numbers["tokens"]
    answered = Text(f"{requests['ok']:,} answered", "bold green")
    if requests["failed"]:
        answered.append(", ", "not bold default")
        answered.append(f"{requests['failed']:,} failed", "bold red")
    if requests["finish_reasons"]:
        reasons = (f"{text.one_line(r)} {n:,}" for r, n in requests["finish_reasons"].items())
        answered.append(f"  ended by {', '.join(reasons)}", "not bold default")
    rows = [("requests", answered)]
    made = Text(f"{tokens['completion']:,} generated", "bold")
    rows.append(("tokens", made.append(f", {tokens['prompt']:,} in prompts", "not bold")))
    if numbers["seconds"] and numbers["tokens_per_second"] is not None:
        speed = Text(f"{numbers['tokens_per_second']:,.0f} tokens/s", "bold")
        rows.append(("speed", speed.append(f" in {text.seconds(numbers['seconds'])}", "not bold")))
    depth = numbers["exit_depth"]
    if depth["mean"] is not None:
        mean = Text(f"mean {depth['mean']:.2f} of {depth['loops']}", "bold")
        saved = text.share(max(depth["loops_saved"], 0), 1)
        rows.append(("exit depth", mean.append(f", {saved} of the loops not run", "not bold")))
    latency = numbers["latency_s"]
    if latency["median"] is not None:
        words = (
            f"median {text.seconds(latency['median'])}, 95% within {text.seconds(latency['p95'])}"
        )
        rows.append(("latency", Text(words)))
    return rows


def _depths(numbers: dict[str, Any], width: int) -> Table:
    depth = numbers["exit_depth"]
    histogram = {int(d): n for d, n in depth["histogram"].items()}
    total, highest = sum(histogram.values()), max(histogram.values())
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=NAME)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    for d, n in histogram.items():
        bar = Text(bar_of(n / highest, width), depth_colour(d, depth["loops"]))
        grid.add_row(_loop(d, depth["loops"]), bar, text.share(n, total), Text(f"{n:,}", "dim"))
    return grid


def _loop(depth: int, loops: int) -> Text:
    return Text("loop ").append(f" {depth} ", depth_style(depth, loops))


def _positions(numbers: dict[str, Any], console: Console) -> Table:
    """One row for each group of positions: where tokens there left, as one divided bar."""
    depth = numbers["exit_depth"]
    loops = depth["loops"]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=NAME)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_row("", "", "", "")
    grid.add_row(Text("by position", "dim"), "", Text("mean", "dim"), Text("tokens", "dim"))
    for first, last, counts in _groups(depth["by_position"]):
        total = sum(counts)
        if not total:
            continue
        mean = sum(d * n for d, n in enumerate(counts, 1)) / total
        # Output index 1 is an answer's second token.
        name = f"token {first + 1:,}" if first == last else f"{first + 1:,} to {last + 1:,}"
        grid.add_row(
            name, _divided(counts, loops, console), f"{mean:.2f}", Text(f"{total:,}", "dim")
        )
    return grid


def _groups(table: dict[str, Any]) -> list[tuple[int, int, list[int]]]:
    """Positions in groups that double in size: 1, 2 to 3, 4 to 7, ... in whole bins."""
    bins, width = table["tokens_by_depth"], table["positions_per_bin"]
    groups, place, size = [], 0, 1
    while place < len(bins):
        end = min(place + size, len(bins))
        counts = [sum(column) for column in zip(*bins[place:end], strict=True)]
        groups.append((table["first"] + place * width, table["first"] + end * width - 1, counts))
        place, size = end, 2 * size
    return groups


def _divided(counts: list[int], loops: int, console: Console) -> Text:
    width, total, seen, filled = _bar_width(console), sum(counts), 0, 0
    bar = Text()
    for depth, count in enumerate(counts, 1):
        seen += count
        cells = round(width * seen / total) - filled
        filled += cells
        if has_colour(console):
            digit = str(depth).center(cells) if cells > len(str(depth)) else " " * cells
            bar.append(digit, depth_style(depth, loops))
        else:
            bar.append((str(depth) * cells)[:cells])
    return bar


def _course(numbers: dict[str, Any], width: int) -> Table:
    samples = numbers["timeline"]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=NAME)
    grid.add_column()
    grid.add_column()
    width = max(min(width, 60), 10)
    start, end = samples[0]["t_s"], samples[-1]["t_s"]
    times = [start + (end - start) * place / width for place in range(width + 1)]
    totals = [_at(samples, "completion_tokens", time) for time in times]
    cell_s = (end - start) / width or 1.0
    rates = [max(b - a, 0) / cell_s for a, b in itertools.pairwise(totals)]
    times[-1] = end  # which rounding may have passed
    rows = [next(s for s in samples if s["t_s"] >= time)["rows_in_use"] for time in times[1:]]
    most = numbers["max_rows"] or max(rows)
    grid.add_row(
        Text("tokens/s", "dim"),
        Text(line_of(rates, max(rates)), "cyan"),
        f"up to {max(rates):,.0f}",
    )
    grid.add_row("", "", "")
    grid.add_row(
        Text("rows in use", "dim"),
        Text(line_of(rows, most), "cyan"),
        f"up to {max(rows):,.0f} of {most:,}",
    )
    span = text.seconds(end)
    grid.add_row(
        "", Text(text.seconds(start) + span.rjust(width - len(text.seconds(start))), "dim")
    )
    return grid


def _at(samples: list[dict[str, float]], name: str, time: float) -> float:
    """A total at a time, between samples on the straight line."""
    before = samples[0]
    for sample in samples:
        if sample["t_s"] >= time:
            span = sample["t_s"] - before["t_s"]
            part = (time - before["t_s"]) / span if span else 1.0
            return before[name] + part * (sample[name] - before[name])
        before = sample
    return before[name]


def _lengths(numbers: dict[str, Any], width: int) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=NAME)
    for _ in range(4):
        grid.add_column(justify="right")
    grid.add_column()
    words = ("", "min", "median", "95%", "max", "")
    grid.add_row(*(Text(word, "dim") for word in words))
    for name, key in (("prompts", "prompt"), ("answers", "completion")):
        lengths = numbers["lengths"][key]
        values = (lengths["min"], lengths["median"], lengths["p95"], lengths["max"])
        counts = lengths["bins"]["counts"]
        shape = line_of(counts, max(counts)) if len(counts) <= width else ""
        grid.add_row(Text(name, "dim"), *(f"{v:,}" for v in values), Text(shape, "cyan"))
    return grid


def _errors(errors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("kind", style="red", no_wrap=True)
    table.add_column("records", justify="right")
    table.add_column("the first", overflow="fold")
    for error in errors[:SHOWN_ERRORS]:
        first = error["first"]
        where = f"line {first['line']:,}: " if first["line"] is not None else ""
        words = Text(where, "dim").append(text.one_line(first["message"], 160), "not dim")
        table.add_row(Text(text.one_line(error["type"], 30)), f"{error['count']:,}", words)
    if len(errors) > SHOWN_ERRORS:
        table.add_row(f"and {len(errors) - SHOWN_ERRORS} more kinds", "", "")
    return table


def _slowest(slowest: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("id", no_wrap=True, overflow="ellipsis", max_width=32)
    for name in ("total", "queue", "prefill", "decode", "tokens", "depth"):
        table.add_column(name, justify="right", no_wrap=True)
    for slow in slowest:
        table.add_row(
            Text(text.request_name(slow["id"], slow["sample"], 40)),
            Text(text.seconds(slow["total_s"]), "bold"),
            *(text.seconds(slow[name]) for name in ("queue_s", "prefill_s", "decode_s")),
            f"{slow['tokens']:,}",
            text.depth(slow["mean_exit_depth"]),
        )
    return table


def _comparison(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    first = report.runs[0].label
    table.add_column("run", no_wrap=True, style="bold cyan")
    for name in (
        "answered",
        "tokens",
        "tokens/s",
        "mean depth",
        f"shared with {first}",
        "same text",
    ):
        table.add_column(name, justify="right")
    for place, run in enumerate(report.runs):
        numbers = run.numbers
        compared = report.comparisons[place - 1] if place else None
        table.add_row(
            run.label,
            text.count(numbers["requests"]["ok"]),
            text.count(numbers["tokens"]["completion"]),
            text.count(numbers["tokens_per_second"]),
            text.depth(numbers["exit_depth"]["mean"]),
            text.count(compared.joined) if compared else "",
            text.share(compared.same_text, compared.joined) if compared else "",
        )
    return table


def _heading(words: str) -> Text:
    return Text(words, "bold")


def _bar_width(console: Console) -> int:
    return max(min(console.width - NAME - 22, 64), 12)


def bar_of(share: float, width: int) -> str:
    """A bar of up to ``width`` cells, to an eighth of one."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).strip().ljust(width)


def line_of(values: list[float], highest: float) -> str:
    """One cell a value, as high as it is; what is not 0 is seen."""
    return "".join(
        LEVELS[max(round(8 * value / highest), 1) if value > 0 else 0] if highest else " "
        for value in values
    )
