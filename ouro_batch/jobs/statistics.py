"""What a job counts while it runs, and the ``OUT.stats.json`` made of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ouro_batch.params import RequestOutput

if TYPE_CHECKING:
    from ouro_batch.llm import LLM, EngineSnapshot

TIMELINE_SAMPLES = 256
TIMELINE_INTERVAL_S = 0.1


class Timeline:
    """The course of a job in a bounded number of samples.

    When they are full, every second one goes and the interval doubles. Counts are totals, so a
    rate between any two samples is exact.
    """

    def __init__(self, limit: int = TIMELINE_SAMPLES, interval_s: float = TIMELINE_INTERVAL_S):
        self.samples: list[dict[str, float]] = []
        self._limit = limit
        self._interval_s = interval_s
        self._last: dict[str, float] = {}

    def observe(self, t_s: float, requests_done: int, engine: EngineSnapshot) -> None:
        """Take the state ``t_s`` seconds after the start, unless it follows too soon."""
        self._last = {
            "t_s": round(t_s, 3),
            "requests_done": requests_done,
            "prompt_tokens": engine.prompt_tokens,
            "completion_tokens": engine.completion_tokens,
            "rows_in_use": engine.rows_in_use,
            "waiting": engine.waiting,
            "kv_blocks_in_use": engine.kv_blocks_in_use,
        }
        if self.samples and t_s - self.samples[-1]["t_s"] < self._interval_s:
            return
        self.samples.append(self._last)
        if len(self.samples) >= self._limit:
            del self.samples[1::2]
            self._interval_s *= 2

    def to_list(self) -> list[dict[str, float]]:
        """The samples in order; the last is the end, however soon after the one before."""
        if not self.samples or self._last is self.samples[-1]:
            return list(self.samples)
        return [*self.samples, self._last]


@dataclass
class JobCounts:
    """Totals of the finished records. ``exit_depths`` counts decode runs (output index >= 1)."""

    ok: int = 0
    failed: int = 0
    resumed: JobCounts | None = None  # those of them that an earlier run has made
    prompt_tokens: int = 0
    completion_tokens: int = 0
    exit_depths: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def done(self) -> int:
        return self.ok + self.failed

    @property
    def decode_tokens(self) -> int:
        return sum(self.exit_depths.values())

    @property
    def decode_loops(self) -> int:
        return sum(depth * tokens for depth, tokens in self.exit_depths.items())

    @property
    def mean_exit_depth(self) -> float | None:
        return self.decode_loops / self.decode_tokens if self.decode_tokens else None

    def add_output(self, output: RequestOutput) -> None:
        self.ok += 1
        self.prompt_tokens += output.usage.prompt_tokens
        self.completion_tokens += output.usage.completion_tokens
        self.exit_depths.update(output.exit_depths[1:])
        self.finish_reasons[output.finish_reason] += 1
        self._tick()

    def add_record(self, record: Mapping[str, Any]) -> None:
        """An output record that an earlier run has made."""
        if self.resumed is None:
            self.resumed = JobCounts()
        for counts in (self, self.resumed):
            if "error" in record:
                counts.failed += 1
                counts.errors[record["error"]["type"]] += 1
                continue
            counts.ok += 1
            counts.prompt_tokens += record["usage"]["prompt_tokens"]
            counts.completion_tokens += record["usage"]["completion_tokens"]
            counts.exit_depths.update(record["exit_depths"][1:])
            counts.finish_reasons[record["finish_reason"]] += 1

    def add_error(self, kind: str) -> None:
        self.failed += 1
        self.errors[kind] += 1
        self._tick()

    def sample(self, engine: EngineSnapshot) -> None:
        """Note where the job stands; called at every step, cheap."""
        self.timeline.observe(time.perf_counter() - self.started, self.done, engine)

    def per_second(self, name: str) -> float:
        """A count of this run's own records, over the time from the start to the last of them."""
        count = getattr(self, name) - (getattr(self.resumed, name) if self.resumed else 0)
        return count / self.seconds if self.seconds > 0 else 0.0

    def _tick(self) -> None:
        self.seconds = time.perf_counter() - self.started


def job_statistics(
    llm: LLM,
    counts: JobCounts,
    *,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    load_s: float,
) -> dict[str, Any]:
    """The statistics of a job that has ended, ready for JSON.

    ``options`` is what the job was asked for, ``settings`` what of it decided the results,
    ``load_s`` the seconds until the model was ready.
    Rows in use, cache and memory are the engine's own numbers, under ``engine``.
    """
    return {
        **llm.describe(),
        "options": dict(options),
        "settings": dict(settings),
        "finished_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "requests": {
            "total": counts.done,
            "ok": counts.ok,
            "failed": counts.failed,
            "resumed": counts.resumed.done if counts.resumed else 0,
            "finish_reasons": dict(counts.finish_reasons),
            "errors": dict(counts.errors),
        },
        "tokens": {
            "prompt": counts.prompt_tokens,
            "completion": counts.completion_tokens,
            "decode": counts.decode_tokens,
        },
        "loops_decoded": counts.decode_loops,
        "seconds": {"load": load_s, "run": counts.seconds},
        "tokens_per_second": {
            "prompt": counts.per_second("prompt_tokens"),
            "completion": counts.per_second("completion_tokens"),
        },
        "exit_depth": {
            "mean": counts.mean_exit_depth,
            "histogram": {str(depth): n for depth, n in sorted(counts.exit_depths.items())},
        },
        "timeline": counts.timeline.to_list(),
        "engine": llm.statistics(),
    }


def settings_of(path: str) -> dict[str, Any] | None:
    """The settings that decided the results of a finished job; None where its file tells none."""
    try:
        settings = orjson.loads(Path(path).read_bytes())["settings"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return settings if isinstance(settings, dict) else None
