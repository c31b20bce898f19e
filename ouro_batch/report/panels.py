"""The page's panels: one run's depths, course, lengths, errors and slowest requests."""

from __future__ import annotations

import itertools
from html import escape
from typing import Any

from ouro_batch.report import charts, text
from ouro_batch.report.build import RunReport


def depth_panel(run: RunReport) -> str:
    depth = run.numbers["exit_depth"]
    histogram = {int(d): n for d, n in depth["histogram"].items()}
    total = sum(histogram.values())
    if not total:
        return card(run, "<p>No tokens were decoded.</p>")
    bar = "".join(
        f'<span class="d{d}" style="flex:{n}" title="loop {d}: {n:,} tokens,'
        f' {text.share(n, total)}">{d if n / total > 0.05 else ""}</span>'
        for d, n in histogram.items()
        if n
    )
    keys = "".join(
        f'<li><span class="key d{d}">{d}</span> {text.share(n, total)} <small>{n:,}</small></li>'
        for d, n in histogram.items()
    )
    return card(
        run,
        f'<div class="share" aria-hidden="true">{bar}</div>'
        f'<ul class="legend" aria-label="Tokens by exit depth">{keys}</ul>{_by_position(depth)}',
    )


def _by_position(depth: dict[str, Any]) -> str:
    table = depth["by_position"]
    bins, width = table["tokens_by_depth"], table["positions_per_bin"]
    titles, totals = [], []
    for place, counts in enumerate(bins):
        total = sum(counts)
        first = table["first"] + 1 + place * width  # the first token of an answer is token 1
        where = f"token {first}" if width == 1 else f"tokens {first} to {first + width - 1}"
        mean = sum(d * n for d, n in enumerate(counts, 1)) / total if total else None
        shares = ", ".join(f"{d}: {text.share(n, total)}" for d, n in enumerate(counts, 1))
        titles.append(f"{where}: mean depth {text.depth(mean)} ({shares}), {total:,} tokens")
        totals.append(total)
    last = table["first"] + len(bins) * width
    return figure(
        "<b>Exit depth by position</b> share of tokens, depth 1 at the top",
        charts.stacked(bins, titles, "Share of exit depths by position in the answer"),
    ) + figure(
        f"<b>Tokens at that position</b> up to {max(totals):,}",
        charts.columns(totals, titles, "Tokens at each position in the answer"),
        [f"token {table['first'] + 1}", f"token {last:,}"],
        low=True,
    )


def time_panel(run: RunReport) -> str:
    samples = run.numbers["timeline"]
    pairs = [(a, b) for a, b in itertools.pairwise(samples) if b["t_s"] > a["t_s"]]
    if not pairs:
        return card(run, '<p class="soft">No timeline was recorded for this output.</p>')
    edges = [pairs[0][0]["t_s"], *(b["t_s"] for _, b in pairs)]
    when = [f"{text.seconds(a['t_s'])} to {text.seconds(b['t_s'])}" for a, b in pairs]
    axis = [text.seconds(edges[0]), text.seconds(edges[-1])]

    def rate(name: str) -> list[float]:
        return [(b[name] - a[name]) / (b["t_s"] - a["t_s"]) for a, b in pairs]

    def plot(words: str, unit: str, values: list[float], top: float) -> str:
        titles = [f"{w}: {v:,.0f} {unit}" for w, v in zip(when, values, strict=True)]
        return figure(words, charts.steps(edges, values, top, titles, unit), axis)

    decode, prompt = rate("completion_tokens"), rate("prompt_tokens")
    rows = [b["rows_in_use"] for _, b in pairs]
    most = run.numbers["max_rows"] or max(rows)
    done = [b["requests_done"] for _, b in pairs]
    return card(
        run,
        plot(
            f"<b>Tokens generated per second</b> up to {max(decode):,.0f}",
            "tokens per second",
            decode,
            max(decode),
        )
        + plot(f"<b>Rows in use</b> up to {max(rows):,.0f} of {most:,}", "rows in use", rows, most)
        + plot(
            f"<b>Prompt tokens per second</b> up to {max(prompt):,.0f}",
            "prompt tokens per second",
            prompt,
            max(prompt),
        )
        + plot(f"<b>Records done</b> {max(done):,.0f}", "records done", done, max(done)),
        "figures",
    )


def length_panel(run: RunReport) -> str:
    lengths = run.numbers["lengths"]
    return card(
        run,
        _lengths("Prompts", lengths["prompt"]) + _lengths("Answers", lengths["completion"]),
        "figures",
    )


def _lengths(name: str, lengths: dict[str, Any]) -> str:
    bins = lengths["bins"]
    if not bins:
        return f"<p>{name}: none.</p>"
    if lengths["min"] == lengths["max"]:
        return f"<p><b>{name}</b> All have {lengths['max']:,}.</p>"
    first, width, counts = bins["first"], bins["width"], bins["counts"]
    starts = [first + place * width for place in range(len(counts))]
    titles = [
        f"{start if width == 1 else f'{start} to {start + width - 1}'} tokens: {n:,}"
        for start, n in zip(starts, counts, strict=True)
    ]
    return figure(
        f"<b>{name}</b> median {lengths['median']:,}, 95% up to {lengths['p95']:,},"
        f" longest {lengths['max']:,}",
        charts.columns(counts, titles, f"{name} by length in tokens"),
        [f"{starts[0]:,}", f"{starts[-1] + width - 1:,} tokens"],
    )


def error_panel(run: RunReport) -> str:
    numbers = run.numbers
    ends = "".join(
        f'<tr><td class="name">{escape(text.one_line(reason, 60))}</td><td>{n:,}</td>'
        f"<td>{text.share(n, numbers['requests']['ok'])}</td></tr>"
        for reason, n in numbers["requests"]["finish_reasons"].items()
    )
    reasons = (
        '<table><thead><tr><th scope="col">answers that ended with</th><th scope="col">answers</th>'
        f'<th scope="col">share</th></tr></thead><tbody>{ends}</tbody></table>'
        if ends
        else "<p>No answers.</p>"
    )
    if not numbers["errors"]:
        return card(run, f'{reasons}<p class="soft">No record failed.</p>')
    rows = "".join(
        f'<tr><td class="name bad"><code>{escape(text.one_line(error["type"], 60))}</code></td>'
        f'<td>{error["count"]:,}</td><td class="text">{_example(error["first"])}</td></tr>'
        for error in numbers["errors"]
    )
    return card(
        run,
        f'{reasons}<div class="scroll" tabindex="0" role="region" aria-label="Errors by kind">'
        '<table><thead><tr><th scope="col">errors</th><th scope="col">records</th>'
        f'<th scope="col" class="text">the first</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    )


def _example(first: dict[str, Any]) -> str:
    line = f" <small>line {first['line']:,}</small>" if first["line"] is not None else ""
    if first["file"]:
        line += f" <small>of {escape(text.one_line(first['file']))}</small>"
    return escape(text.one_line(first["message"])) + line


def slow_panel(run: RunReport) -> str:
    slowest = run.numbers["slowest"]
    if not slowest:
        return card(run, '<p class="soft">The records hold no times.</p>')
    latency = run.numbers["latency_s"]
    rows = "".join(
        f'<tr><td class="name">{escape(text.request_name(slow["id"], slow["sample"], 60))}</td>'
        f"<td><b>{text.seconds(slow['total_s'])}</b></td>"
        f'<td class="bars">{_split(slow, slowest[0])}</td>'
        + "".join(f"<td>{text.seconds(slow[n])}</td>" for n in ("queue_s", "prefill_s", "decode_s"))
        + f"<td>{slow['tokens']:,}</td><td>{text.depth(slow['mean_exit_depth'])}</td></tr>"
        for slow in slowest
    )
    head = "".join(
        f'<th scope="col"{"" if name else " class=bars"}>{name}</th>'
        for name in ("id", "total", "", "queue", "prefill", "decode", "tokens", "mean depth")
    )
    return card(
        run,
        f'<p class="soft">Median {text.seconds(latency["median"])}, 95% within'
        f" {text.seconds(latency['p95'])}, 99% within {text.seconds(latency['p99'])}.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Slowest requests"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>",
    )


def _split(slow: dict[str, Any], slowest: dict[str, Any]) -> str:
    """A bar as long as the request took beside the slowest, divided into its times."""
    whole = slowest["total_s"] or 1.0
    parts = zip("qfd", ("queue_s", "prefill_s", "decode_s"), strict=True)
    bars = "".join(
        f'<i class="{kind}" style="flex:{slow[name] / whole:.4f}"></i>' for kind, name in parts
    )
    return f'<span class="split" aria-hidden="true">{bars}</span>'


def card(run: RunReport, content: str, kind: str = "") -> str:
    """A panel; its run's label and output stand on top where there are several."""
    name = escape(text.visible(run.output.name))
    return (
        f'<article class="card"><h3 class="of"><span class="tag">{run.label}</span> {name}</h3>'
        f'<div class="{kind}">{content}</div></article>'
    )


def figure(words: str, svg: str, axis: list[str] | None = None, *, low: bool = False) -> str:
    """A chart with its caption and the words at the ends of its horizontal axis."""
    title, _, rest = words.partition("</b>")
    ends = "".join(f"<span>{word}</span>" for word in axis or [])
    return (
        f"<figure><figcaption>{title}</b><span>{rest.strip()}</span></figcaption>"
        f'<div class="plot{" low" if low else ""}">{svg}</div>'
        + (f'<div class="axis">{ends}</div>' if axis else "")
        + "</figure>"
    )
