"""The runner interface: the host plans a step, launches it, and reads results one step behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ouro_batch.params import TokenLogprobs

MAX_STOP_IDS = 32  # a row's stop ids live in a fixed array on the device


@dataclass(frozen=True)
class RowStart:
    """A request takes a row: everything the device needs to run it to its end without the host."""

    row: int
    prompt_length: int
    prompt_blocks: Sequence[Sequence[int]]  # a list of block ids a plane, in position order
    decode_blocks: Sequence[int]  # filled front to back, one slot for every loop that runs
    max_tokens: int
    stop_ids: Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    exit_threshold: float  # infinite: fixed depth
    min_loops: int
    max_loops: int
    exit_depths: Sequence[int] | None  # replay in place of the gate
    logprobs: int = -1  # likeliest tokens to give with each output token; -1: not even its own


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens from position ``start`` on; the last chunk yields the first output token."""

    row: int
    start: int
    tokens: Sequence[int]
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """One engine step, applied in this order: stop rows, start rows, one loop step, prefill."""

    stop_rows: list[int] = field(default_factory=list)
    start_rows: list[RowStart] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    decode_rows: int = 0  # rows that may be active; 0: no loop step
    logprobs: bool = False  # whether any request that runs wants log-probabilities

    def __bool__(self) -> bool:
        return bool(self.stop_rows or self.start_rows or self.chunks or self.decode_rows)


@dataclass(frozen=True)
class TokenEvent:
    """A row produced an output token, by a run that exited at ``depth``."""

    row: int
    token: int
    depth: int
    finished: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """What one step produced; ``rows_run`` counts the rows that ran a decode loop in it."""

    events: list[TokenEvent]
    rows_run: int


class Trace(Protocol):
    """Shown what a loop gave, token by token, while a runner's ``trace`` is set."""

    def __call__(self, rows: Tensor, positions: Tensor, planes: Tensor, hidden: Tensor) -> None:
        """Integers [T]: whose token, where in its request, after which loop (from 0); [T, hidden].

        What it is given is overwritten by the next loop.
        """


class Runner(ABC):
    """Executes plans in order; a step's results can be collected once it was launched.

    The engine keeps one step in flight: it launches step t + 1 before it collects step t.
    """

    trace: Trace | None = None  # for checks; the runner may be slower while it is set

    def rehearse(self) -> None:  # noqa: B027
        """Do what would make the first steps slow: compile kernels, let libraries take memory.

        Before the cache is allocated. Optional; no results change.
        """

    @abstractmethod
    def allocate_cache(self, blocks: int) -> None:
        """Make the pool of ``blocks`` blocks of slots, before the first launch.

        It comes after everything else, so that its size can be what is left.
        """

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Start one step; returns without waiting for the device."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest launched step that was not collected."""

    @abstractmethod
    def reset(self) -> None:
        """Stop every row and forget the launched steps; the runner can be used again."""

    @abstractmethod
    def read_planes(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values as later queries see them, each [L, N, length, G, D] (for checks)."""
