"""The floor: the least time that decoding can take on this machine, from two measured ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ouro_batch.model.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """``bandwidth``: bytes/s of a large copy, read and written together; ``matrix_rate``:
    operations/s of a large matrix product (a multiplication and an addition are two)."""

    bandwidth: float
    matrix_rate: float

    def as_json(self) -> dict[str, float]:
        return {"bandwidth_bytes_s": self.bandwidth, "matrix_rate_ops_s": self.matrix_rate}


@dataclass(frozen=True)
class Costs:
    """Bytes that decoding must read: layer weights a loop, the head's weights, and keys and
    values a token of context and loop; ``itemsize`` is that of a weight."""

    loop_weights: int
    head_weights: int
    context_token: int
    itemsize: int

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int) -> Costs:
        c = config
        attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
        layer = attention + 3 * c.hidden_size * c.intermediate_size
        return cls(
            loop_weights=c.num_layers * layer * itemsize,
            head_weights=c.vocab_size * c.hidden_size * itemsize,
            context_token=2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize,
            itemsize=itemsize,
        )


def floor_tok_s(
    costs: Costs,
    ceilings: Ceilings,
    *,
    rows: int,
    context: float,
    depth: float,
    lockstep: bool,
) -> float:
    """Decode tokens/s that no schedule can exceed with ``rows`` rows always in use.

    A loop step of R rows at a mean ``context`` of C tokens (IN + OUT / 2), where tokens run
    ``depth`` m loops on average, takes at least

        max(weights / bandwidth, 2 * parameters * R / matrix rate)       the layers, once
        + R * C * (keys and values of a token and loop) / bandwidth      attention
        + p * max(head / bandwidth, 2 * head parameters * E / matrix rate)   where tokens exit

    and gives R / m tokens. p is the share of loop steps in which a token exits and E = R / m / p
    the tokens exiting then: 1 / m where rows run in ``lockstep`` (fixed depth), otherwise
    1 - (1 - 1 / m) ** R (each row exits in a step with probability 1 / m). Rows are what fits the
    cache at once; the floor is the work's, the same for every schedule.

    At 4.28 TB/s, 665 TFLOP/s and fixed depth 4 of ouro-1.4b: 417 for 1x128/256, 4,581 for
    128x1024/128, 16,083 for 256x128/256, where the products are bound by arithmetic.
    """
    bandwidth, rate = ceilings.bandwidth, ceilings.matrix_rate

    def product(weight_bytes: int, tokens: float) -> float:
        operations = 2 * weight_bytes / costs.itemsize * tokens
        return max(weight_bytes / bandwidth, operations / rate)

    exiting = 1 / depth if lockstep else 1 - (1 - 1 / depth) ** rows
    step = product(costs.loop_weights, rows)
    step += rows * context * costs.context_token / bandwidth
    step += exiting * product(costs.head_weights, rows / depth / exiting)
    return rows / depth / step


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of several copies and matrix products, by CUDA events or the host's clock."""
    ceilings = Ceilings(_bandwidth(device, dtype), _matrix_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    size = (2**30 if device.type == "cuda" else 2**25) // dtype.itemsize
    source = torch.ones(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return 2 * size * dtype.itemsize / seconds


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = _best_seconds(lambda: torch.mm(a, b, out=out), device)
    return 2 * side**3 / seconds


def _best_seconds(work: Callable[[], object], device: torch.device, repetitions: int = 10) -> float:
    for _ in range(3):
        work()
    best = float("inf")
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - started)
    return best
