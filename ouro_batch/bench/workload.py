"""What is run: named workloads, their prompts, and the exit depths that a trace draws."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ouro_batch.errors import OuroBatchError

TABLE = (
    "1x128/256",
    "8x1024/128",
    "32x1024/128",
    "128x1024/128",
    "256x128/256",
    "256x1024/128",
    "1x16384/128",
    "16x16384/128",
)
DEFAULT_TRACE = "2:0.60,3:0.25,4:0.15"


class BenchError(OuroBatchError):
    """A benchmark that cannot start as it was asked for."""


@dataclass(frozen=True)
class Workload:
    """``n`` requests of ``input`` prompt tokens and ``output`` generated tokens each."""

    n: int
    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.n}x{self.input}/{self.output}"

    @property
    def length(self) -> int:
        """Tokens of one request, prompt and output together."""
        return self.input + self.output

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Random token ids, n lists of ``input``; the same for the same seed and workload."""
        generator = random.Random(f"prompts {seed} {self}")
        return [generator.choices(range(vocabulary), k=self.input) for _ in range(self.n)]


@dataclass(frozen=True)
class Trace:
    """How often a decoded token runs how many loops."""

    depths: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean depth of the distribution, in loops."""
        pairs = zip(self.depths, self.weights, strict=True)
        return sum(d * w for d, w in pairs) / sum(self.weights)

    def draw(self, workload: Workload, loops: int, seed: int) -> list[list[int]]:
        """Depths of each output token, n lists of ``output``; entry 0, prefill's, is ``loops``.

        Raises:
            BenchError: the trace goes deeper than the model.
        """
        if max(self.depths) > loops:
            raise BenchError(
                f"the trace goes to depth {max(self.depths)}, the model has {loops} loops"
                " (give another --trace)"
            )
        generator = random.Random(f"trace {seed} {workload}")
        drawn = []
        for _ in range(workload.n):
            rest = generator.choices(self.depths, self.weights, k=workload.output - 1)
            drawn.append([loops, *rest])
        return drawn


def parse_workloads(texts: Sequence[str]) -> list[Workload]:
    """Workloads of the form NxIN/OUT, or ``table`` for the eight of the project's table.

    Raises:
        BenchError: another form, or a number below 1 (2 for OUT: one token decodes nothing).
    """
    found: list[Workload] = []
    for text in texts:
        for one in TABLE if text == "table" else (text,):
            match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", one)
            if match is None:
                raise BenchError(
                    f"workload {one!r} is not of the form NxIN/OUT, such as 8x1024/128, or table"
                )
            n, tokens_in, tokens_out = map(int, match.groups())
            if n < 1 or tokens_in < 1 or tokens_out < 2:
                raise BenchError(f"workload {one!r}: N and IN must be at least 1, OUT at least 2")
            found.append(Workload(n, tokens_in, tokens_out))
    return list(dict.fromkeys(found))


def parse_trace(text: str) -> Trace:
    """A trace of the form DEPTH:SHARE,DEPTH:SHARE; the shares add up to 1.

    Raises:
        BenchError: another form, or shares that do not add up.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        shares = {int(depth): float(share) for depth, share in pairs}
    except ValueError as error:
        raise BenchError(
            f"trace {text!r} is not of the form DEPTH:SHARE,..., such as {DEFAULT_TRACE}"
        ) from error
    if len(shares) < len(pairs) or min(shares) < 1 or min(shares.values()) < 0:
        raise BenchError(f"trace {text!r}: depths must differ, from 1, with shares of at least 0")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise BenchError(f"trace {text!r}: the shares add up to {sum(shares.values()):g}, not 1")
    return Trace(tuple(shares), tuple(shares.values()))
