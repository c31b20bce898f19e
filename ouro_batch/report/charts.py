"""Charts as inline SVG: shapes stretch with the page, all text around them is HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

HEIGHT = 100


def stacked(columns: Sequence[Sequence[float]], titles: Sequence[str], label: str) -> str:
    """Columns that all fill the height, divided by share; part i has class ``d<i+1>``."""
    parts = []
    for place, (column, title) in enumerate(zip(columns, titles, strict=True)):
        total, top = sum(column), 0.0
        rects = []
        for depth, value in enumerate(column, start=1):
            tall = HEIGHT * value / total if total else 0.0
            if value:
                rects.append(
                    f'<rect class="d{depth}" x="{place}" y="{top:.2f}" width="1"'
                    f' height="{tall:.2f}"/>'
                )
            top += tall
        parts.append(f"<g><title>{escape(title)}</title>{''.join(rects)}</g>")
    return _svg(len(columns), label, "".join(parts), "crisp")


def columns(values: Sequence[float], titles: Sequence[str], label: str, gap: float = 0.12) -> str:
    """A histogram; the highest column fills the height."""
    highest = max(values, default=0) or 1
    parts = []
    for place, (value, title) in enumerate(zip(values, titles, strict=True)):
        tall = max(HEIGHT * value / highest, 1.5 if value else 0)
        parts.append(
            f"<g><title>{escape(title)}</title>"
            f'<rect class="hit" x="{place}" y="0" width="1" height="{HEIGHT}"/>'
            f'<rect class="bar" x="{place + gap / 2}" y="{HEIGHT - tall:.2f}"'
            f' width="{1 - gap}" height="{tall:.2f}"/></g>'
        )
    return _svg(len(values), label, "".join(parts))


def steps(
    edges: Sequence[float],
    values: Sequence[float],
    highest: float,
    titles: Sequence[str],
    label: str,
) -> str:
    """A filled step line: value i holds between edges i and i + 1."""
    start, span = edges[0], (edges[-1] - edges[0]) or 1
    places = [1000 * (edge - start) / span for edge in edges]
    line, hits = [], []
    for place, (value, title) in enumerate(zip(values, titles, strict=True)):
        left, right = places[place], places[place + 1]
        high = HEIGHT - (HEIGHT - 2) * value / (highest or 1)
        line.append(f"{left:.1f},{high:.2f} {right:.1f},{high:.2f}")
        hits.append(
            f'<rect class="hit" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{HEIGHT}">'
            f"<title>{escape(title)}</title></rect>"
        )
    path = " ".join(line)
    shape = (
        f'<polygon class="area" points="0,{HEIGHT} {path} 1000,{HEIGHT}"/>'
        f'<polyline class="line" points="{path}"/>'
    )
    return _svg(1000, label, shape + "".join(hits))


def _svg(width: int, label: str, content: str, kind: str = "") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {max(width, 1)} {HEIGHT}" preserveAspectRatio="none"'
        f' role="img" aria-label="{escape(label)}">{content}</svg>'
    )
