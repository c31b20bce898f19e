"""One request from arrival to finish, as the host knows it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from ouro_batch.engine.kv import RequestBlocks
from ouro_batch.engine.text import OutputText
from ouro_batch.params import SamplingParams, TokenLogprobs


class Status(enum.Enum):
    WAITING = "waiting"  # for a row and for blocks
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """What was asked, what it owns, and what the host has seen of it.

    ``loops`` is the model's; ``exit_threshold`` and ``stop_ids`` are the resolved values. Times
    are of ``time.perf_counter``.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    loops: int
    exit_threshold: float
    stop_ids: tuple[int, ...]
    arrived: float
    text: OutputText | None = None  # None without a tokenizer
    index: int = 0  # in the job
    sample: int = 0

    truncated: int = 0  # prompt tokens dropped because the prompt was too long
    status: Status = Status.WAITING
    row: int = -1
    blocks: RequestBlocks | None = None
    prefilled: int = 0  # prompt tokens launched
    bypassed: int = 0  # later requests admitted while this one waited at the head
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # where asked for
    finish_reason: str | None = None
    admitted: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan

    def __post_init__(self) -> None:
        self._slots_used = 0

    @property
    def max_loops(self) -> int:
        """Loops a decoded token runs at most."""
        return min(self.loops, self.params.max_loops or self.loops)

    def add_token(self, token: int, depth: int) -> None:
        """An output token, by a run that exited at ``depth``."""
        if self.token_ids:
            self._slots_used += depth
        self.token_ids.append(token)
        self.exit_depths.append(depth)

    def decode_slots(self) -> int:
        """Slots for generated tokens it can still come to own, those in use included.

        The tokens that have exited used one slot a loop; every other token that may run takes at
        most ``max_loops`` (its given depth under replay). The last token never runs. Each token
        seen can only lower the sum, so an old observation is always safe.
        """
        runs = max(len(self.token_ids) - 1, 0)
        if self.params.exit_depths is not None:
            coming = sum(self.params.exit_depths[runs + 1 : self.params.max_tokens])
        else:
            coming = self.max_loops * (self.params.max_tokens - 1 - runs)
        return self._slots_used + coming
