"""Greedy and seeded sampling with top-k and top-p, without sorting the vocabulary.

The semantics and random numbers are those of the torch reference: Philox4x32-10 (Salmon et al.,
2011) keyed by the seed, counted by (id // 4, output position), one word a token; the sample is the
argmax of ``(logits - max) / temperature`` plus Gumbel noise over the kept tokens, ties to the lower
id. Launches, for E entries:

1. maxima: the largest logit and its id, a program an entry and vocabulary chunk;
2. borders: merges the maxima, which ends greedy entries; finds what top-k and top-p keep, a program
   an entry, in a few passes over logits that stay in L2;
3. noise: the best noisy score of a chunk (also of the entry, where there is one chunk);
4. merge: the best chunk.

A kept set is a border: a token stays if its *distance*, the bits of ``max - logit`` (an order-
preserving integer), is below the border's, or equal with an id up to ``last``. The border is the
largest distance whose strictly closer tokens weigh less than a limit: in tokens, k; in
probability, top_p of what top-k keeps. Each pass compares against 8 distances at once and clips the
search to the distances that occur, so it ends in 6 to 8 passes rather than 31. Sums have one order
whatever the number of entries and chunks, and so has the result.

| part | tile | warps | why (not measured) |
|---|---|---|---|
| maxima | 2,048 | 4 | up to 1,056 programs, 8 a multiprocessor, hide each other's waits |
| borders | 2,048 | 16 | 8 sums of 4 values a thread; one program reads 196 kB a pass |
| noise | 2,048 | 8 | Philox and two logarithms a token: arithmetic, not bandwidth |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

MAX_CHUNKS = 64
_PROGRAMS = 1056

_WAYS = tl.constexpr(8)
_INFINITE = tl.constexpr(0x7F800000)  # the distance of a logit of -inf
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _distance(logits, top):
    """Order-preserving bits of ``top - logits`` >= 0 as int32: 0 is the maximum's."""
    return (logits - top).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _probability(distance, scale):
    """``exp((logit - max) / temperature)``; ``scale`` is log2(e) / temperature, finite."""
    return tl.exp2(-distance.to(tl.float32, bitcast=True) * scale)


@triton.jit
def _search(
    logits, top, scale, limit, high, vocab, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest distance up to ``high`` whose closer tokens weigh less than ``limit`` in sum.

    Weights are 1 (COUNT) or probabilities. Nothing is closer than distance 0.
    """
    low = 0
    way = tl.arange(0, _WAYS)
    lane = tl.arange(0, TILE)
    while low < high:
        span = (high - low).to(tl.int64)
        marks = (low + (span * (way + 1) // _WAYS)).to(tl.int32)  # the last one is ``high``
        sums = tl.zeros([_WAYS, TILE], tl.int32 if COUNT else tl.float32)
        nearest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
        farthest = tl.full([TILE], -1, tl.int32)
        for begin in range(0, vocab, TILE):
            ids = begin + lane
            x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            distance = _distance(x, top)
            closer = distance[None, :] < marks[:, None]
            if COUNT:
                sums += closer.to(tl.int32)
            else:
                sums += tl.where(closer, _probability(distance, scale)[None, :], 0.0)
            inside = (distance >= low) & (distance <= high) & (ids < vocab)
            nearest = tl.minimum(nearest, tl.where(inside, distance, 0x7FFFFFFF))
            farthest = tl.maximum(farthest, tl.where(inside, distance, -1))
        light = tl.sum(sums, axis=1) < limit
        # Sums grow with the mark, so the light marks come first.
        last_light = tl.max(tl.where(light, marks, low), axis=0)
        first_heavy = tl.min(tl.where(light, 0x7FFFFFFF, marks), axis=0)
        low = tl.maximum(last_light, tl.min(nearest, axis=0))
        high = tl.minimum(tl.minimum(high, first_heavy - 1), tl.max(farthest, axis=0))
    return low


@triton.jit
def _weigh(logits, top, scale, border, vocab, TILE: tl.constexpr):
    """Tokens closer than ``border``, their probabilities' sum, and the tokens at it."""
    lane = tl.arange(0, TILE)
    closer = tl.zeros([TILE], tl.int32)
    weight = tl.zeros([TILE], tl.float32)
    equal = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab, TILE):
        ids = begin + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        distance = _distance(x, top)
        inside = (distance < border) & (ids < vocab)
        closer += inside.to(tl.int32)
        weight += tl.where(inside, _probability(distance, scale), 0.0)
        equal += ((distance == border) & (ids < vocab)).to(tl.int32)
    return tl.sum(closer, axis=0), tl.sum(weight, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _nth_equal(logits, top, border, number, vocab, TILE: tl.constexpr):
    """The id of the ``number``-th token, in order of ids, at distance ``border``."""
    lane = tl.arange(0, TILE)
    seen = 0
    found = -1
    for begin in range(0, vocab, TILE):
        ids = begin + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        equal = ((_distance(x, top) == border) & (ids < vocab)).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        kept = (equal > 0) & (rank <= number)
        found = tl.maximum(found, tl.max(tl.where(kept, ids, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def _best_chunk(values, ids, entry, chunks, CHUNKS: tl.constexpr):
    """The largest of an entry's chunk winners and its id, the lowest among equals."""
    chunk = tl.arange(0, CHUNKS)
    real = chunk < chunks
    value = tl.load(values + entry * chunks + chunk, mask=real, other=float("-inf"))
    id = tl.load(ids + entry * chunks + chunk, mask=real, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, id, 0x7FFFFFFF), axis=0)


@triton.jit
def _maxima(
    logits, values, ids, count, vocab, stride, chunk_size, chunks,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    if entry >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    chunk = tl.program_id(1)
    first = chunk * chunk_size
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = first + lane
    for begin in range(first, tl.minimum(first + chunk_size, vocab), TILE):
        id = begin + lane
        x = tl.load(logits + entry * stride + id, mask=id < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        better = x > best  # not for equals: the earlier tile has the lower id
        best = tl.where(better, x, best)
        best_id = tl.where(better, id, best_id)
    top = tl.max(best, axis=0)
    tl.store(values + entry * chunks + chunk, top)
    winner = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0)
    tl.store(ids + entry * chunks + chunk, winner)


@triton.jit
def _borders(
    tokens, logits, values, ids, tops, borders, lasts,
    rows, count, temperature, top_k, top_p,
    vocab, stride, chunks, CHUNKS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    if entry >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    row = entry if rows is None else tl.load(rows + entry)
    top, winner = _best_chunk(values, ids, entry, chunks, CHUNKS)
    heat = tl.load(temperature + row)
    tl.store(tops + entry, top)
    if heat <= 0:
        tl.store(tokens + entry, winner)
    else:
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        # At the largest FP32 number a tiny temperature leaves the maximum alone with weight 1.
        scale = tl.minimum(tl.div_rn(_LOG2E, heat), 3.0e38)
        at = logits + entry * stride
        border = _INFINITE
        last = vocab
        by_k = (k > 0) & (k < vocab)
        by_p = p < 1.0
        kept = vocab  # of those at the border
        if by_k:
            border = _search(at, top, scale, k, border, vocab, COUNT=True, TILE=TILE)
        if by_k | by_p:
            closer, weight, equal = _weigh(at, top, scale, border, vocab, TILE)
            kept = equal
            if by_k:
                kept = tl.minimum(equal, k - closer)
            if by_p:
                total = weight + kept.to(tl.float32) * _probability(border, scale)
                limit = p * total
                inner = _search(at, top, scale, limit, border, vocab, COUNT=False, TILE=TILE)
                closer, weight, equal = _weigh(at, top, scale, inner, vocab, TILE)
                kept = tl.where(inner == border, kept, equal)
                border = inner
                each = _probability(border, scale)
                wanted = tl.ceil(tl.div_rn(limit - weight, tl.maximum(each, 1.2e-38)))
                wanted = tl.minimum(tl.maximum(wanted, 1.0), vocab).to(tl.int32)
                kept = tl.minimum(kept, tl.where(each > 0, wanted, vocab))
            if kept < equal:
                last = _nth_equal(at, top, border, kept, vocab, TILE)
        tl.store(borders + entry, border)
        tl.store(lasts + entry, last)


@triton.jit
def _philox(group, position, key0, key1):
    """Philox4x32-10 of the counter (group, position, 0, 0): four uint32 words a group."""
    c0, c1 = group, tl.zeros_like(group) + position
    c2, c3 = tl.zeros_like(group), tl.zeros_like(group)
    for _ in tl.static_range(10):
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(first_id, position, key0, key1, TILE: tl.constexpr):
    """Standard Gumbel noise of TILE ids from ``first_id``, a multiple of 4, on."""
    group = (first_id // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _philox(group, position, key0, key1)
    # [group, 2, 2] in the order of ids.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE])
    # 23 bits, centred: strictly inside (0, 1), so both logarithms are finite.
    uniform = ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise(
    tokens, logits, values, ids, tops, borders, lasts,
    rows, count, temperature, seed, position,
    vocab, stride, chunk_size, chunks, TILE: tl.constexpr, SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    if entry >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    row = entry if rows is None else tl.load(rows + entry)
    heat = tl.load(temperature + row)
    if heat <= 0:
        return
    chunk = tl.program_id(1)
    first = chunk * chunk_size
    key = tl.load(seed + row).to(tl.int64)
    key0 = (key & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    at = tl.load(position + row).to(tl.uint32)
    top = tl.load(tops + entry)
    border = tl.load(borders + entry)
    last = tl.load(lasts + entry)
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = first + lane
    for begin in range(first, tl.minimum(first + chunk_size, vocab), TILE):
        id = begin + lane
        x = tl.load(logits + entry * stride + id, mask=id < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        distance = _distance(x, top)
        kept = (id < vocab) & ((distance < border) | ((distance == border) & (id <= last)))
        score = tl.div_rn(x - top, heat) + _gumbel(begin, at, key0, key1, TILE)
        score = tl.where(kept, score, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, id, best_id)
    top_score = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top_score, best_id, 0x7FFFFFFF), axis=0)
    if SINGLE:
        tl.store(tokens + entry, winner)
    else:
        tl.store(values + entry * chunks + chunk, top_score)
        tl.store(ids + entry * chunks + chunk, winner)


@triton.jit
def _merge(
    tokens, values, ids, rows, count, temperature, chunks,
    CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    if entry >= (tl.num_programs(0) if count is None else tl.load(count)):
        return
    row = entry if rows is None else tl.load(rows + entry)
    if tl.load(temperature + row) <= 0:
        return
    _, winner = _best_chunk(values, ids, entry, chunks, CHUNKS)
    tl.store(tokens + entry, winner)


def workspace_size(entries: int) -> int:
    """Int32 words of work space that ``sample`` needs for E entries."""
    return entries * (2 * MAX_CHUNKS + 3)


def sample(
    tokens: Tensor,
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    rows: Tensor | None = None,
    count: Tensor | None = None,
    workspace: Tensor | None = None,
    random: bool = True,
    chunks: int | None = None,
    tile: int = 2048,
    maxima_warps: int = 4,
    borders_warps: int = 16,
    noise_warps: int = 8,
    overlap: bool = False,
) -> None:
    """Next tokens, int32 [E], from logits [E, V] of any float type.

    ``temperature`` FP32, ``top_k`` int32, ``top_p`` FP32, ``seed`` int64 and ``position`` int32
    (the output position of the token to be sampled) are [R]; entry e is row ``rows[e]`` (int32
    [E]), or row e where ``rows`` is None. Temperature 0 is greedy; top_k 0 and top_p 1 keep all.
    Entries from ``count`` (int32 [1], on the device) on are left alone. ``workspace`` is int32
    [``workspace_size(E)``], made here where None (inside a graph: of the graph's memory).
    ``random=False`` promises that all rows are greedy and saves two launches. Ties in top-k and
    top-p are judged before the division by the temperature.
    """
    entries, vocab = logits.shape
    if workspace is None:
        workspace = torch.empty(workspace_size(entries), dtype=torch.int32, device=logits.device)
    if chunks is None:
        chunks = max(1, min(MAX_CHUNKS, _PROGRAMS // entries))
    tile = max(16, min(tile, triton.next_power_of_2(vocab)))
    chunk_size = triton.cdiv(triton.cdiv(vocab, chunks), tile) * tile
    chunks = triton.cdiv(vocab, chunk_size)
    padded = triton.next_power_of_2(chunks)
    values = workspace[: entries * MAX_CHUNKS].view(torch.float32)
    ids = workspace[entries * MAX_CHUNKS :]
    tops = workspace[entries * 2 * MAX_CHUNKS :].view(torch.float32)
    borders = workspace[entries * (2 * MAX_CHUNKS + 1) :]
    lasts = workspace[entries * (2 * MAX_CHUNKS + 2) :]
    stride = logits.stride(0)

    _maxima[(entries, chunks)](
        logits, values, ids, count, vocab, stride, chunk_size, chunks,
        TILE=tile, num_warps=maxima_warps,
        **overlapped(overlap),
    )  # fmt: skip
    _borders[(entries,)](
        tokens, logits, values, ids, tops, borders, lasts,
        rows, count, temperature, top_k, top_p, vocab, stride, chunks,
        CHUNKS=padded, TILE=tile, num_warps=borders_warps,
        **overlapped(overlap),
    )  # fmt: skip
    if not random:
        return
    _noise[(entries, chunks)](
        tokens, logits, values, ids, tops, borders, lasts,
        rows, count, temperature, seed, position, vocab, stride, chunk_size, chunks,
        TILE=tile, SINGLE=chunks == 1, num_warps=noise_warps,
        **overlapped(overlap),
    )  # fmt: skip
    if chunks > 1:
        _merge[(entries,)](
            tokens, values, ids, rows, count, temperature, chunks, CHUNKS=padded, num_warps=1,
            **overlapped(overlap),
        )  # fmt: skip
