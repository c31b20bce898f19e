"""Makes a report: reads every output once and works out its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ouro_batch.jobs.errors import UsageError
from ouro_batch.report.answers import Pieces, cut, find_prompts, find_tokenizer
from ouro_batch.report.compare import Comparison, compare
from ouro_batch.report.source import STDIN, Output, Row
from ouro_batch.report.tally import Joinable, Tally, quantile


@dataclass(frozen=True)
class Answer:
    """An answer to show; ``pieces`` is None where its text cannot be cut into tokens."""

    row: Row
    pieces: Pieces | None


@dataclass
class RunReport:
    """One run: where it came from, its numbers (ready for JSON), and answers to show."""

    label: str
    output: Output
    numbers: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    @property
    def loops(self) -> int:
        return self.numbers["exit_depth"]["loops"]


@dataclass
class Report:
    """All runs, each later one compared with the first, and the prompts that were found."""

    runs: list[RunReport]
    comparisons: list[Comparison]
    prompts: dict[int, str]

    def to_json(self) -> dict[str, Any]:
        labels = [run.label for run in self.runs]
        compared = [
            {"runs": [labels[0], label], **asdict(comparison)}
            for label, comparison in zip(labels[1:], self.comparisons, strict=True)
        ]
        return {"runs": [run.numbers for run in self.runs], "comparisons": compared}


def build_report(names: Sequence[str], *, answers: int = 0, model: str | None = None) -> Report:
    """Read the outputs ``names``; keep up to ``answers`` of each to show.

    ``model`` names the tokenizer to cut answers with, downloaded if need be; without it each run's
    own model is looked for on this machine.

    Raises:
        UsageError: an output cannot be read or is none.
        FileError: reading failed on the way.
        ModelError: ``model`` cannot be had.
    """
    if list(names).count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once")
    outputs = [Output(name) for name in names]
    named = find_tokenizer(model, None, download=True) if model is not None else None
    runs, joinables = [], []
    for place, output in enumerate(outputs):
        joinable = Joinable() if len(outputs) > 1 else None
        tally = Tally(answers, joinable)
        for row in output.rows():
            tally.add(row)
        run = RunReport(label_of(place), output, {})
        if answers:
            run.answers = _cut_all(tally.sample, output, named)
        run.numbers = run_numbers(run.label, output, tally)
        runs.append(run)
        joinables.append(joinable)
    comparisons = [compare(joinables[0], other) for other in joinables[1:]]
    return Report(runs, comparisons, _prompts(runs))


def label_of(place: int) -> str:
    """A, B, ... Z, A2, B2, ..."""
    turn, letter = divmod(place, 26)
    return chr(ord("A") + letter) + (str(turn + 1) if turn else "")


def run_numbers(label: str, output: Output, tally: Tally) -> dict[str, Any]:
    """All numbers of a run. None where they are not known; seconds, tokens and shares."""
    facts = output.facts
    histogram = tally.depths.depths
    loops = max(facts.loops or 0, tally.deepest, 1)
    decoded = sum(histogram.values())
    mean = sum(d * n for d, n in histogram.items()) / decoded if decoded else None
    completion = _total(tally.completion_lengths)
    seconds = facts.run_s or (facts.timeline[-1]["t_s"] if facts.timeline else None)
    speed = completion / seconds if seconds else None
    if facts.resumed:
        # Records of earlier runs took none of this one's time.
        speed = facts.tokens_per_second
        done = tally.ok + tally.failed
        output.notes.append(
            f"resumed: speed and time are those of the last run, which made"
            f" {max(done - facts.resumed, 0):,} of {done:,} records"
        )
    return {
        "label": label,
        "output": output.name,
        "notes": output.notes,
        "model": facts.model,
        "revision": facts.revision,
        "device": facts.device,
        "dtype": facts.dtype,
        "schedule": facts.schedule,
        "exit_threshold": facts.exit_threshold,
        "max_rows": facts.max_rows,
        "finished_at": facts.finished_at,
        "seconds": seconds,
        "requests": {
            "total": tally.ok + tally.failed,
            "ok": tally.ok,
            "failed": tally.failed,
            "finish_reasons": dict(tally.finish_reasons.most_common()),
        },
        "errors": _errors(tally),
        "tokens": {
            "prompt": _total(tally.prompt_lengths),
            "completion": completion,
            "decode": decoded,
        },
        "tokens_per_second": speed,
        "exit_depth": {
            "loops": loops,
            "mean": mean,
            "loops_saved": 1 - mean / loops if mean else None,
            "histogram": {str(d): histogram.get(d, 0) for d in range(1, loops + 1)},
            "by_position": {
                "first": 1,
                "positions_per_bin": tally.depths.width,
                "tokens_by_depth": tally.depths.by_position(loops),
            },
        },
        "lengths": {
            "prompt": _lengths(tally.prompt_lengths),
            "completion": _lengths(tally.completion_lengths),
        },
        "latency_s": {
            name: tally.latencies.quantile(share)
            for name, share in (("median", 0.5), ("p95", 0.95), ("p99", 0.99))
        },
        "slowest": [_slow(row) for row in tally.slowest],
        "timeline": facts.timeline,
    }


def _errors(tally: Tally) -> list[dict[str, Any]]:
    kinds = sorted(tally.errors.items(), key=lambda item: -item[1].count)
    return [
        {
            "type": kind,
            "count": errors.count,
            "first": {
                "message": errors.first.message,
                "line": errors.first.line,
                "file": errors.first.file,
            },
        }
        for kind, errors in kinds
    ]


def _lengths(counts: Counter[int]) -> dict[str, Any]:
    """Quantiles and at most 24 equal bins of lengths in tokens."""
    if not counts:
        return {"min": None, "median": None, "mean": None, "p95": None, "max": None, "bins": []}
    low, high = min(counts), max(counts)
    width = next(w for w in _round_widths() if high // w - low // w < 24)
    start = low // width * width
    bins = [0] * (high // width - low // width + 1)
    for length, count in counts.items():
        bins[(length - start) // width] += count
    return {
        "min": low,
        "median": quantile(counts, 0.5),
        "mean": _total(counts) / sum(counts.values()),
        "p95": quantile(counts, 0.95),
        "max": high,
        "bins": {"first": start, "width": width, "counts": bins},
    }


def _round_widths():
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def _total(counts: Counter[int]) -> int:
    return sum(value * count for value, count in counts.items())


def _slow(row: Row) -> dict[str, Any]:
    queue, prefill, decode, total = row.seconds or (0.0, 0.0, 0.0, 0.0)
    return {
        "id": row.id,
        "index": row.index,
        "sample": row.sample,
        "queue_s": queue,
        "prefill_s": prefill,
        "decode_s": decode,
        "total_s": total,
        "tokens": len(row.depths),
        "mean_exit_depth": row.mean_depth,
    }


def _cut_all(rows: list[Row], output: Output, named: Any) -> list[Answer]:
    tokenizer, facts = named, output.facts
    if tokenizer is None and facts.model is not None:
        tokenizer = find_tokenizer(facts.model, facts.revision, download=False)
    answers = [Answer(row, cut(row, tokenizer)) for row in rows]
    whole = sum(answer.pieces is None for answer in answers)
    if whole and tokenizer is None:
        of = f" of {facts.model}" if facts.model else ""
        output.notes.append(
            f"no tokenizer{of} on this machine: depths stand below the text (--model names one)"
        )
    elif whole:
        output.notes.append(
            f"{whole:,} answers cannot be told apart into tokens: their depths stand below the"
            " text (run with --token-ids)"
        )
    return answers


def _prompts(runs: list[RunReport]) -> dict[int, str]:
    """The shown prompts, from the inputs of the first run that names any that are still there."""
    ids = {answer.row.index: answer.row.id for run in runs for answer in run.answers}
    for run in runs:
        prompts = find_prompts(run.output.facts.inputs, ids.keys(), ids)
        if prompts:
            return prompts
    return {}
