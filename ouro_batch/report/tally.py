"""Counts the records of one run in bounded memory: histograms, top lists and a fixed sample."""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import orjson

from ouro_batch.report.source import MAX_DEPTH, Failure, Row

POSITION_BINS = 128
SLOWEST = 10
MAX_KINDS = 50
OTHER = "other"
LATENCY_STEPS = 64  # histogram bins for each doubling of a latency: within 1 %


class DepthTable:
    """Tokens by output position and exit depth.

    A bin covers ``width`` positions; the width doubles where an answer does not fit the bins.
    Position 0 comes from prefill and is not counted.
    """

    def __init__(self, bins: int = POSITION_BINS):
        self.width = 1
        self._table = np.zeros((bins, MAX_DEPTH + 1), np.int64)

    def add(self, depths: list[int]) -> None:
        bins = len(self._table)
        while (len(depths) - 2) // self.width >= bins:
            self._halve()
        values = np.array(depths[1:], np.int64)
        places = np.arange(len(values)) // self.width * (MAX_DEPTH + 1) + values
        if len(values):
            used = np.bincount(places)
            self._table.ravel()[: len(used)] += used

    def _halve(self) -> None:
        bins = len(self._table)
        self._table[: bins // 2] = self._table[0::2] + self._table[1::2]
        self._table[bins // 2 :] = 0
        self.width *= 2

    @property
    def depths(self) -> dict[int, int]:
        """Tokens by exit depth, over all positions."""
        totals = self._table.sum(0)
        return {int(depth): int(totals[depth]) for depth in np.flatnonzero(totals)}

    def by_position(self, loops: int) -> list[list[int]]:
        """For each bin in use, the tokens of depth 1 to ``loops``."""
        used = np.flatnonzero(self._table.sum(1))
        return self._table[: used[-1] + 1, 1 : loops + 1].tolist() if len(used) else []


class Latencies:
    """A histogram of seconds on a logarithmic scale."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._bins[math.floor(math.log2(max(seconds, 1e-6)) * LATENCY_STEPS)] += 1

    def quantile(self, share: float) -> float | None:
        """Within a hundredth of it; None without values."""
        place = quantile(self._bins, share)
        return None if place is None else 2 ** ((place + 0.5) / LATENCY_STEPS)


@dataclass
class ErrorKind:
    """Failures of one kind and the first of them."""

    count: int
    first: Failure


class Joinable:
    """What comparing runs needs of every record: 36 bytes each."""

    def __init__(self) -> None:
        self.keys = array("Q")
        self.indexes = array("q")
        self.texts = array("Q")
        self.tokens = array("I")
        self.loops = array("Q")

    def add(self, row: Row, key: int) -> None:
        self.keys.append(key)
        self.indexes.append(row.index)
        self.texts.append(digest(row.text.encode()))
        self.tokens.append(len(row.depths))
        self.loops.append(sum(row.depths[1:]))


@dataclass
class Tally:
    """The counts of one run.

    ``sample`` holds up to ``sample_size`` answers: those whose ids have the smallest hashes, so
    that runs over the same prompts show the same ones.
    """

    sample_size: int = 0
    joinable: Joinable | None = None
    ok: int = 0
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    completion_lengths: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: dict[str, ErrorKind] = field(default_factory=dict)
    depths: DepthTable = field(default_factory=DepthTable)
    deepest: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    _slowest: list[tuple[float, int, int, int, Row]] = field(default_factory=list)
    _sample: list[tuple[int, int, int, int, Row]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if row.failure is not None:
            self._add_failure(row.failure)
            return
        self.ok += 1
        self.prompt_lengths[row.prompt_tokens] += 1
        self.completion_lengths[len(row.depths)] += 1
        reason = row.finish_reason
        known = reason in self.finish_reasons or len(self.finish_reasons) < MAX_KINDS
        self.finish_reasons[reason if known else OTHER] += 1
        self.depths.add(row.depths)
        self.deepest = max(self.deepest, *row.depths, 0)
        key = key_of(row)
        if self.joinable is not None:
            self.joinable.add(row, key)
        # Negated: a heap drops its smallest, and the sample keeps the smallest hashes. The count is
        # there for records that are there twice: rows have no order.
        _keep(self._sample, (-key, -row.index, -row.sample, self.ok, row), self.sample_size)
        if row.seconds is not None:
            self.latencies.add(row.seconds[3])
            _keep(self._slowest, (row.seconds[3], -row.index, -row.sample, self.ok, row), SLOWEST)

    def _add_failure(self, failure: Failure) -> None:
        kind = failure.kind
        if kind not in self.errors and len(self.errors) >= MAX_KINDS:
            kind = OTHER
        if kind in self.errors:
            self.errors[kind].count += 1
        else:
            self.errors[kind] = ErrorKind(1, failure)

    @property
    def failed(self) -> int:
        return sum(kind.count for kind in self.errors.values())

    @property
    def slowest(self) -> list[Row]:
        return [entry[-1] for entry in sorted(self._slowest, key=lambda entry: entry[:3])][::-1]

    @property
    def sample(self) -> list[Row]:
        rows = [entry[-1] for entry in self._sample]
        return sorted(rows, key=lambda row: (row.index, row.sample))


def key_of(row: Row) -> int:
    """A hash of the record's id and sample number."""
    return digest(orjson.dumps([row.id, row.sample]))


def digest(data: bytes) -> int:
    """The first 8 bytes of a hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def quantile(counts: Counter[int], share: float) -> int | None:
    """The smallest value that at least ``share`` of all counted values do not exceed."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None


def _keep(heap: list, entry: tuple, size: int) -> None:
    if len(heap) < size:
        heapq.heappush(heap, entry)
    elif size and entry[:3] > heap[0][:3]:
        heapq.heapreplace(heap, entry)
