"""The page's answers: each token on the colour of its exit depth."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ouro_batch.report import text
from ouro_batch.report.build import Answer, Report, RunReport
from ouro_batch.report.source import Row

MAX_TOKENS = 2000  # of one answer
MAX_PROMPT = 4000  # characters
Key = tuple[int, int]  # index and sample

_TOOLS = """<div class="tools" id="tools" hidden>
<input type="search" id="search" placeholder="Search" aria-label="Search ids, prompts and answers">
<select id="order" aria-label="Order"><option value="input">in input order</option>
<option value="deep">deepest first</option><option value="shallow">shallowest first</option>
<option value="long">longest first</option></select>
<label><input type="checkbox" id="digits"> depth digits</label>{differ}
<span class="soft" id="found" role="status"></span></div>"""
_DIFFER = '\n<label><input type="checkbox" id="differ"> only where texts differ</label>'


def viewer(report: Report) -> Iterator[str]:
    """The section with legend, search and answers; answers of several runs stand together."""
    runs = report.runs
    loops = max(run.loops for run in runs)
    keys = "".join(
        f'<li><span class="key d{d}">{d}</span>{_words(d, loops)}</li>' for d in range(1, loops + 1)
    )
    answers = _together(runs)
    total = max(run.numbers["requests"]["ok"] for run in runs)
    some = f" A sample of {len(answers):,}, the same in each run." if len(answers) < total else ""
    yield (
        '<section id="viewer"><h2>Answers</h2><p class="soft">Each token on the colour of the loop'
        f" it left after; hover over it or tap it for its depth. Stripes: from prefill.{some}</p>"
        f'<ul class="legend" aria-label="Colours of exit depths">{keys}</ul>'
        + _TOOLS.format(differ=_DIFFER if len(runs) > 1 else "")
        + '<div id="answers">'
    )
    for (index, sample), given in answers:
        yield _answer(index, sample, given, report.prompts.get(index), len(runs) > 1)
    yield '</div><p><button id="more" type="button" hidden>Show more</button></p></section>'


def _words(depth: int, loops: int) -> str:
    if loops == 1:
        return "the only loop"
    return f"ran all {loops}" if depth == loops else f"left after {depth}"


def _together(runs: list[RunReport]) -> list[tuple[Key, list[tuple[str, Answer]]]]:
    """Answers by index and sample, each with its run's label."""
    found: dict[Key, list[tuple[str, Answer]]] = {}
    for run in runs:
        for answer in run.answers:
            key = (answer.row.index, answer.row.sample)
            found.setdefault(key, []).append((run.label, answer))
    return sorted(found.items(), key=lambda item: item[0])


def _answer(
    index: int, sample: int, given: list[tuple[str, Answer]], prompt: str | None, labelled: bool
) -> str:
    rows = [answer.row for _, answer in given]
    means = [row.mean_depth for row in rows if row.mean_depth is not None]
    differ = " data-differ" if len({row.text for row in rows}) > 1 else ""
    number = f"#{index}" + (f", sample {sample}" if sample else "")
    name = "" if rows[0].id == index else f"{escape(text.one_line(rows[0].id))} "
    question = ""
    if prompt is not None:
        more = "…" if len(prompt) > MAX_PROMPT else ""
        shown = escape(text.visible(prompt[:MAX_PROMPT]))
        question = f'<p class="q" dir="auto">{shown}{more}</p>'
    # A single run's facts fit into the heading.
    facts = "" if labelled else f'<span class="meta facts">{_facts(rows[0])}</span>'
    parts = "".join(_given(label if labelled else "", answer) for label, answer in given)
    return (
        f'<article class="card answer" data-depth="{max(means, default=0):.4f}"'
        f' data-tokens="{max(len(row.depths) for row in rows)}"{differ}>'
        f'<h3>{name}<span class="meta">{number}</span>{facts}</h3>{question}'
        f'<div class="all">{parts}</div></article>\n'
    )


def _given(label: str, answer: Answer) -> str:
    about = ""
    if label:
        about = f'<p class="meta"><span class="tag">{label}</span> {_facts(answer.row)}</p>'
    return f'<div class="given">{about}{_text(answer)}</div>'


def _facts(row: Row) -> str:
    facts = [f"{len(row.depths):,} tokens", f"ended by {text.one_line(row.finish_reason)}"]
    if row.mean_depth is not None:
        facts.insert(0, f"mean depth {row.mean_depth:.2f}")
    if row.seconds is not None:
        facts.append(text.seconds(row.seconds[3]))
    return escape(", ".join(facts))


def _text(answer: Answer) -> str:
    row = answer.row
    left = len(row.depths) - MAX_TOKENS
    more = f'<p class="meta">and {left:,} more tokens</p>' if left > 0 else ""
    if answer.pieces is not None:
        tokens = "".join(
            _token(place, piece, depth, last=place == len(row.depths) - 1)
            for place, (piece, depth) in enumerate(answer.pieces[:MAX_TOKENS])
        )
        return f'<p class="tokens" dir="auto">{tokens}</p>{more}'
    blocks = "".join(
        f'<span class="d{depth}{"" if place else " p"}" title="{_title(place, depth)}">'
        f"{depth}</span>"
        for place, depth in enumerate(row.depths[:MAX_TOKENS])
    )
    shown = escape(text.visible(row.text[: 8 * MAX_TOKENS]))
    return f'<p class="plain" dir="auto">{shown}</p><div class="strip">{blocks}</div>{more}'


def _token(place: int, piece: str, depth: int, *, last: bool) -> str:
    kinds = [f"d{depth}"]
    if not place:
        kinds.append("p")
    if not piece:
        kinds.append("e")
        piece = "end" if last else "·"  # no text: an end token, or a part of a character
    elif "\n" in piece:
        kinds.append("n")
    shown = escape(text.visible(piece))
    return f'<span class="{" ".join(kinds)}" title="{_title(place, depth)}">{shown}</span>'


def _title(place: int, depth: int) -> str:
    return f"loop {depth}" if place else f"prefill, {depth} loops"
