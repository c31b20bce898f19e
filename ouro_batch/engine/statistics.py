"""What the engine counts: tokens, loops, rows and blocks in use."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ouro_batch.engine.scheduler import Scheduler
    from ouro_batch.runner.base import StepPlan


@dataclass
class EngineStatistics:
    """Running totals. Exit depths count decode runs of tokens that were kept."""

    steps: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    dropped_tokens: int = 0
    exit_depths: Counter[int] = field(default_factory=Counter)
    rows_in_use: Counter[int] = field(default_factory=Counter)  # loop steps by rows that ran
    peak_requests: int = 0
    peak_blocks: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def observe_launch(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self.steps += 1
        self.prefill_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        self.peak_requests = max(self.peak_requests, len(scheduler.running))
        self.peak_blocks = max(self.peak_blocks, scheduler.blocks.in_use)

    def observe_rows(self, rows: int) -> None:
        if rows:
            self.rows_in_use[rows] += 1

    def observe_token(self, depth: int, *, first: bool) -> None:
        self.completion_tokens += 1
        if not first:
            self.exit_depths[depth] += 1

    @property
    def decode_tokens(self) -> int:
        return sum(self.exit_depths.values())

    @property
    def decode_loops(self) -> int:
        return sum(depth * count for depth, count in self.exit_depths.items())

    @property
    def mean_exit_depth(self) -> float | None:
        return self.decode_loops / self.decode_tokens if self.decode_tokens else None

    @property
    def mean_rows_in_use(self) -> float | None:
        steps = sum(self.rows_in_use.values())
        return sum(r * n for r, n in self.rows_in_use.items()) / steps if steps else None
