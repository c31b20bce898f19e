"""The report as one HTML page that needs nothing from outside itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources
from typing import Any

from ouro_batch import __version__
from ouro_batch.report import text
from ouro_batch.report.build import Report, RunReport
from ouro_batch.report.palette import depth_css
from ouro_batch.report.panels import depth_panel, error_panel, length_panel, slow_panel, time_panel
from ouro_batch.report.viewer import viewer

MARK = "<!doctype html><!-- ouro-batch report -->"


def page(report: Report) -> Iterator[str]:
    """The page, in pieces."""
    runs = report.runs
    css = _asset("page.css") + depth_css(max(run.loops for run in runs))
    script = _asset("page.js")
    answers = any(run.answers for run in runs)
    title = _title(runs)
    yield (
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(css, script)}">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{_safe(title)} – ouro-batch report</title><link rel="icon" href="data:,">'
        f"<style>{css}</style></head>\n<body{' class=single' if len(runs) == 1 else ''}>"
    )
    yield _header(report, title, answers)
    yield "<main>"
    yield _tiles(runs[0].numbers) if len(runs) == 1 else _side_by_side(report)
    yield _section("depths", "Exit depth", _DEPTH, map(depth_panel, runs), len(runs))
    if answers:
        yield from viewer(report)
    yield _section("time", "Over time", "", map(time_panel, runs), len(runs))
    yield _section("lengths", "Lengths", "In tokens.", map(length_panel, runs), len(runs))
    yield _section("errors", "Errors and ends", "", map(error_panel, runs), len(runs))
    yield _section(
        "slowest", "Slowest requests", _SLOW, map(slow_panel, runs), len(runs), wide=True
    )
    yield (
        f"</main><footer>Made by ouro-batch {__version__}. Nothing on this page comes from"
        ' elsewhere.</footer><p id="script-error" class="bad" role="alert" hidden></p>'
        f'<div id="inspect" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


_DEPTH = (
    "The loop after which a token left the model. An answer’s first token comes from prefill, which"
    " runs every loop, so counting starts with the second."
)
_SLOW = "Seconds in the queue, in prefill and in decode."


def _header(report: Report, title: str, answers: bool) -> str:
    links = [("depths", "Exit depth")]
    links += [("viewer", "Answers")] if answers else []
    links += [("time", "Over time"), ("lengths", "Lengths"), ("errors", "Errors")]
    links += [("slowest", "Slowest")]
    nav = "".join(f'<a href="#{name}">{words}</a>' for name, words in links)
    if len(report.runs) == 1:
        facts = f'<p class="soft">{_safe(_facts(report.runs[0].numbers))}</p>'
    else:
        facts = ""
    labelled = len(report.runs) > 1
    notes = "".join(
        f"<li>{_tag(run) + ' ' if labelled else ''}{_safe(note)}</li>"
        for run in report.runs
        for note in run.output.notes
    )
    return (
        f'<header><p class="kicker">ouro-batch report</p><h1>{_safe(title)}</h1>{facts}'
        f'<nav aria-label="Sections">{nav}</nav></header>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _title(runs: list[RunReport]) -> str:
    models = dict.fromkeys(run.numbers["model"] for run in runs if run.numbers["model"])
    names = [name.rstrip("/").rsplit("/", 1)[-1] for name in models]
    what = ", ".join(names) if names else runs[0].output.name
    return what if len(runs) == 1 else f"{what}: {len(runs)} runs"


def _facts(numbers: dict[str, Any]) -> str:
    parts = [numbers["output"], *run_facts(numbers)]
    if numbers["finished_at"]:
        parts.append(numbers["finished_at"].replace("T", " ").replace("+00:00", " UTC"))
    return ", ".join(parts)


def run_facts(numbers: dict[str, Any]) -> list[str]:
    """How a run was made, in a few words each."""
    threshold = numbers["exit_threshold"]
    facts = [numbers["device"], numbers["dtype"], numbers["schedule"]]
    facts.append(f"{numbers['exit_depth']['loops']} loops")
    if threshold is not None:
        facts.append("fixed depth" if threshold >= 1 else f"exit threshold {threshold:g}")
    return [fact for fact in facts if fact]


def _tiles(numbers: dict[str, Any]) -> str:
    requests, depth, tokens = numbers["requests"], numbers["exit_depth"], numbers["tokens"]
    failed = f"{requests['failed']:,} failed" if requests["failed"] else "none failed"
    bad = ' class="bad"' if requests["failed"] else ""
    saved = depth["loops_saved"]
    seconds = numbers["seconds"]
    took = "time not known" if seconds is None else f"in {text.seconds(seconds)}"
    tiles = [
        ("answered", text.count(requests["ok"]), f"<small{bad}>{failed}</small>"),
        (
            "mean exit depth",
            text.depth(depth["mean"]),
            f"<small>of {depth['loops']} loops</small>",
        ),
        (
            "loops not run",
            "–" if saved is None else text.share(saved, 1),
            "<small>of the decode loops at full depth</small>",
        ),
        (
            "tokens generated",
            text.count(tokens["completion"]),
            f"<small>{tokens['prompt']:,} in prompts</small>",
        ),
        (
            "tokens per second",
            text.count(numbers["tokens_per_second"]),
            f"<small>{took}</small>",
        ),
    ]
    cells = "".join(f"<div><dt>{n}</dt><dd>{value}{more}</dd></div>" for n, value, more in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _side_by_side(report: Report) -> str:
    runs, joined = report.runs, report.comparisons
    numbers = [run.numbers for run in runs]
    first = runs[0].label
    depths = [_change(c.mean_depth, "{:+.2f}") for c in joined]
    tokens = [_change(c.tokens, "{:+,}") for c in joined]
    rows = [
        ("answered", [text.count(n["requests"]["ok"]) for n in numbers]),
        ("failed", [text.count(n["requests"]["failed"]) for n in numbers]),
        ("mean exit depth", [text.depth(n["exit_depth"]["mean"]) for n in numbers]),
        ("tokens generated", [text.count(n["tokens"]["completion"]) for n in numbers]),
        ("tokens per second", [text.count(n["tokens_per_second"]) for n in numbers]),
        ("time", [text.seconds(n["seconds"]) for n in numbers]),
        ("median latency", [text.seconds(n["latency_s"]["median"]) for n in numbers]),
        (f"prompts shared with {first}", ["", *(text.count(c.joined) for c in joined)]),
        ("of them with the same text", ["", *(text.share(c.same_text, c.joined) for c in joined)]),
        (f"mean depth there, against {first}", ["", *depths]),
        (f"tokens there, against {first}", ["", *tokens]),
    ]
    head = "".join(f'<th scope="col">{_tag(run)}</th>' for run in runs)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in cells)}</tr>'
        for name, cells in rows
    )
    names = "".join(
        f'<li>{_tag(run)} {_safe(run.output.name)} <span class="soft">'
        f"{_safe(', '.join(run_facts(run.numbers)))}</span></li>"
        for run in runs
    )
    return (
        f'<section id="runs"><h2>Side by side</h2><ul class="names">{names}</ul>'
        '<div class="scroll card" tabindex="0" role="region" aria-label="Runs side by side">'
        f'<table class="beside"><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div></section>"
    )


def _change(values: tuple[float | None, float | None], words: str) -> str:
    first, other = values
    return "–" if first is None or other is None else words.format(other - first).replace("-", "−")


def _section(
    name: str, title: str, words: str, panels: Iterable[str], runs: int, *, wide: bool = False
) -> str:
    kind = "wide" if wide else ""
    about = f'<p class="soft">{words}</p>' if words else ""
    return (
        f'<section id="{name}"><h2>{title}</h2>{about}<div class="runs {kind}">'
        f"{''.join(panels)}</div></section>"
    )


def _tag(run: RunReport) -> str:
    return f'<span class="tag">{run.label}</span>'


def _policy(css: str, script: str) -> str:
    """Runs this page's own script alone, and loads nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline';"
        f" script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("ouro_batch.report").joinpath(name).read_text("utf-8")


def _safe(value: str) -> str:
    return escape(text.visible(value))
