"""Log-probabilities of sampled tokens and of the likeliest ones, from the logits as they are.

For entry e of row r, whose ``wanted[r]`` is k >= 0: the log-softmax in FP32 of its logits at the
sampled token, and at the k largest logits, in descending order, ties to the lower id. A program an
entry; the sum of exponentials has one order, and each further token takes one more pass over logits
that stay in L2. Rows that want none cost a read.

| tile | warps | why (not measured) |
|---|---|---|
| 2,048 | 16 | as ``sampling.py``'s search: one program reads all logits of an entry |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _next_best(logits, value, id, vocab, TILE: tl.constexpr):
    """The token that follows (``value``, ``id``) in descending order, ties by ascending id."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], _NO_ID, tl.int32)
    for begin in range(0, vocab, TILE):
        ids = begin + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        follows = (ids < vocab) & ((x < value) | ((x == value) & (ids > id)))
        better = follows & ((x > best) | (best_id == _NO_ID))
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, best_id, _NO_ID), axis=0)


@triton.jit
def _log_sum(logits, top, vocab, TILE: tl.constexpr):
    """The logarithm of the sum of ``exp(logit - top)``."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for begin in range(0, vocab, TILE):
        ids = begin + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - top)
    return tl.log(tl.sum(sums, axis=0))


@triton.jit
def _logprobs(
    chosen, top_values, top_ids, logits, tokens, wanted, rows, count,
    vocab, stride, chosen_stride, top_stride, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    if entry >= tl.load(count):
        return
    row = tl.load(rows + entry).to(tl.int64)
    k = tl.load(wanted + row)
    if k < 0:
        return
    at = logits + entry * stride
    top, id = _next_best(at, float("inf"), -1, vocab, TILE)
    log_sum = _log_sum(at, top, vocab, TILE)
    x = tl.load(at + tl.load(tokens + entry)).to(tl.float32)
    tl.store(chosen + row * chosen_stride, x - top - log_sum)
    value = top
    for rank in range(0, k):
        tl.store(top_values + row * top_stride + rank, value - top - log_sum)
        tl.store(top_ids + row * top_stride + rank, id)
        if rank + 1 < k:
            value, id = _next_best(at, value, id, vocab, TILE)


def token_logprobs(
    chosen: Tensor,
    top_values: Tensor,
    top_ids: Tensor,
    logits: Tensor,
    tokens: Tensor,
    *,
    wanted: Tensor,
    rows: Tensor,
    count: Tensor,
    tile: int = 2048,
    num_warps: int = 16,
    overlap: bool = False,
) -> None:
    """Log-probabilities of entries' sampled ``tokens`` (int32 [E]) under ``logits`` [E, V].

    Entry e, the first ``count`` (int32 [1]) of them, is row ``rows[e]`` (int32 [E]). Its
    ``wanted`` (int32 [R]) is the number of likeliest tokens to name, V at most, or negative for
    nothing at all. Written by row: ``chosen`` FP32 [R], ``top_values`` FP32 and ``top_ids`` int32
    [R, at least the largest number wanted], both of one row stride. Allocates nothing and never
    waits for the device.
    """
    entries, vocab = logits.shape
    if top_values.stride(0) != top_ids.stride(0):
        raise ValueError("top_values and top_ids must have one row stride")
    _logprobs[(entries,)](
        chosen, top_values, top_ids, logits, tokens, wanted, rows, count,
        vocab, logits.stride(0), chosen.stride(0), top_ids.stride(0),
        TILE=max(16, min(tile, triton.next_power_of_2(vocab))),
        num_warps=num_warps,
        **overlapped(overlap),
    )  # fmt: skip
