"""The bookkeeping of a loop step: who runs, who exits, what an exit publishes.

Entries are the compacted rows of one step: entry e stands for row ``rows[e]``. R rows of state,
M entries, L loops. All launchers write into given tensors, allocate nothing and never wait for the
device. ``active`` and other flags are uint8; ``overlap`` is that of ``overlap.py``.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .overlap import join, overlapped

# Row fields of a packed start, in order; the kernel and ``pack_start`` share this list.
HEADER = (
    "row",
    "prompt_length",
    "max_tokens",
    "min_loops",
    "max_loops",
    "replay",
    "top_k",
    "temperature",
    "top_p",
    "exit_threshold",
    "seed_low",
    "seed_high",
    "prompt_blocks",  # blocks of one plane
    "decode_blocks",
    "depths",
    "logprobs",
)


def float_bits(value: float) -> int:
    """The bits of an FP32 number as an int32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def pack_start(start: Any, stop_ids: int) -> list[int]:
    """A request's part of ``start_rows``' packed integers; ``stop_ids`` is their fixed number.

    ``start`` has ``row``, ``prompt_length``, ``prompt_blocks`` (a list a plane),
    ``decode_blocks``, ``max_tokens``, ``min_loops``, ``max_loops``, ``exit_depths`` (or None),
    ``top_k``, ``temperature``, ``top_p``, ``exit_threshold``, ``seed``, ``logprobs`` and
    ``stop_ids``.
    """
    depths = start.exit_depths
    low = start.seed & 0xFFFFFFFF
    fields = {
        "row": start.row,
        "prompt_length": start.prompt_length,
        "max_tokens": start.max_tokens,
        "min_loops": start.min_loops,
        "max_loops": start.max_loops,
        "replay": int(depths is not None),
        "top_k": start.top_k,
        "temperature": float_bits(start.temperature),
        "top_p": float_bits(start.top_p),
        "exit_threshold": float_bits(start.exit_threshold),
        "seed_low": low - (low >> 31 << 32),
        "seed_high": start.seed >> 32,
        "prompt_blocks": len(start.prompt_blocks[0]),
        "decode_blocks": len(start.decode_blocks),
        "depths": len(depths or ()),
        "logprobs": start.logprobs,
    }
    packed = [fields[name] for name in HEADER]
    packed += [*start.stop_ids, *[-1] * (stop_ids - len(start.stop_ids))]
    for blocks in start.prompt_blocks:
        packed += blocks
    return [*packed, *start.decode_blocks, *(depths or ())]


@triton.jit
def _begin_step(
    active, depth, position, generated, slots_taken, decode_blocks, decode_slots, results,
    rows, planes, positions, contexts, slots, fresh, count,
    num_rows, entries, block_size, decode_blocks_stride, slots_row_stride, slots_plane_stride,
    REFILL: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    row = tl.arange(0, ROWS)
    real = row < num_rows
    run = tl.load(active + row, mask=real, other=0) != 0
    plane = tl.load(depth + row, mask=real, other=0)
    if not REFILL:
        midway = (run & (plane > 0)).to(tl.int32)
        waits = tl.max(midway, axis=0) * (1 - midway)
        run = run & (waits == 0)
    tl.store(results + row, -1, mask=real)
    rank = tl.cumsum(run.to(tl.int32), axis=0) - 1
    total = tl.sum(run.to(tl.int32), axis=0)
    tl.store(count, total)

    at = tl.load(position + row, mask=run, other=0)
    cursor = tl.load(slots_taken + row, mask=run, other=0)
    block = tl.load(
        decode_blocks + row * decode_blocks_stride + cursor // block_size, mask=run, other=0
    )
    slot = block * block_size + cursor % block_size
    tl.store(slots_taken + row, cursor + 1, mask=run)
    token = tl.load(generated + row, mask=run, other=1) - 1
    place = row.to(tl.int64) * slots_row_stride + plane * slots_plane_stride + token
    tl.store(decode_slots + place, slot, mask=run)

    tl.store(rows + rank, row, mask=run)
    tl.store(planes + rank, plane, mask=run)
    tl.store(positions + rank, at, mask=run)
    tl.store(contexts + rank, at + 1, mask=run)
    tl.store(slots + rank, slot, mask=run)
    tl.store(fresh + rank, (plane == 0).to(tl.uint8), mask=run)
    entry = tl.arange(0, ENTRIES)
    unused = (entry >= total) & (entry < entries)
    tl.store(rows + entry, 0, mask=unused)
    tl.store(planes + entry, 0, mask=unused)
    tl.store(positions + entry, 0, mask=unused)
    tl.store(contexts + entry, 0, mask=unused)
    tl.store(slots + entry, -1, mask=unused)
    tl.store(fresh + entry, 1, mask=unused)


def begin_step(
    *,
    active: Tensor,
    depth: Tensor,
    position: Tensor,
    generated: Tensor,
    slots_taken: Tensor,
    decode_blocks: Tensor,
    decode_slots: Tensor,
    results: Tensor,
    rows: Tensor,
    planes: Tensor,
    positions: Tensor,
    contexts: Tensor,
    slots: Tensor,
    fresh: Tensor,
    count: Tensor,
    block_size: int,
    refill: bool,
    overlap: bool = False,
) -> None:
    """Choose the rows that run a loop, in row order, and take a slot for each.

    State, read: ``active`` uint8, ``depth``, ``position``, ``generated`` int32 [R],
    ``decode_blocks`` int32 [R, blocks]; written: ``slots_taken`` int32 [R], ``decode_slots``
    int32 [R, L, positions], and ``results`` int32 [3, R], whose first row becomes -1 (no token).
    Entries, written: ``rows``, ``planes``, ``positions``, ``contexts``, ``slots`` int32 [M],
    ``fresh`` uint8 [M] (the token starts), ``count`` int32 [1]. Unused entries get row 0,
    context 0, slot -1 and count as fresh. Without ``refill`` no token starts while another is
    midway. M must be at least the number of active rows.
    """
    num_rows, entries = active.shape[0], rows.shape[0]
    _begin_step[(1,)](
        active, depth, position, generated, slots_taken, decode_blocks, decode_slots, results,
        rows, planes, positions, contexts, slots, fresh, count,
        num_rows, entries, block_size,
        decode_blocks.stride(0), decode_slots.stride(0), decode_slots.stride(1),
        REFILL=refill,
        ROWS=triton.next_power_of_2(num_rows),
        ENTRIES=triton.next_power_of_2(entries),
        **overlapped(overlap),
    )  # fmt: skip


@triton.jit
def _end_loop(
    hidden, gate_weight, gate_bias, rows, fresh, count,
    depth, survival, carried, generated, exit_threshold, min_loops, max_loops, replay,
    replay_depths, exits,
    width, replay_stride,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0)
    if entry >= tl.load(count):
        tl.store(exits + entry, 0)
        return
    row = tl.load(rows + entry)
    column = tl.arange(0, WIDTH)
    inside = column < width
    h = tl.load(hidden + entry.to(tl.int64) * width + column, mask=inside, other=0.0)
    weight = tl.load(gate_weight + column, mask=inside, other=0.0)
    gate = tl.sum(h.to(tl.float32) * weight, axis=0) + tl.load(gate_bias)
    stay = 1.0 / (1.0 + tl.exp(gate))
    before = tl.load(survival + row)
    if tl.load(fresh + entry) != 0:
        before = 1.0
    after = before * stay
    ran = tl.load(depth + row) + 1
    leave = (ran >= tl.load(min_loops + row)) & (1.0 - after >= tl.load(exit_threshold + row))
    if tl.load(replay + row) != 0:
        token = tl.load(generated + row)
        leave = ran >= tl.load(replay_depths + row.to(tl.int64) * replay_stride + token)
    leave = leave | (ran >= tl.load(max_loops + row))
    tl.store(depth + row, ran)
    tl.store(survival + row, after)
    tl.store(carried + row.to(tl.int64) * width + column, h, mask=inside)
    tl.store(exits + entry, leave.to(tl.int32))


def end_loop(
    *,
    hidden: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    rows: Tensor,
    fresh: Tensor,
    count: Tensor,
    depth: Tensor,
    survival: Tensor,
    carried: Tensor,
    generated: Tensor,
    exit_threshold: Tensor,
    min_loops: Tensor,
    max_loops: Tensor,
    replay: Tensor,
    replay_depths: Tensor,
    exits: Tensor,
    overlap: bool = False,
) -> None:
    """Gate, survival and exit decision of every entry, after its loop's final norm.

    ``hidden`` [M, hidden]; ``gate_weight`` FP32 [1, hidden], ``gate_bias`` FP32 [1]; entries as
    ``begin_step`` made them. State, updated at the entries' rows: ``depth``, ``survival``,
    ``carried`` [R, hidden] (what the next loop starts from). ``exits`` int32 [M] is 1 where the
    token leaves, 0 elsewhere and past ``count``.
    """
    width = hidden.shape[1]
    _end_loop[(rows.shape[0],)](
        hidden, gate_weight, gate_bias, rows, fresh, count,
        depth, survival, carried, generated, exit_threshold, min_loops, max_loops, replay,
        replay_depths, exits,
        width, replay_depths.stride(0),
        WIDTH=triton.next_power_of_2(width),
        num_warps=4,
        **overlapped(overlap),
    )  # fmt: skip


@triton.jit
def _gather_exits(
    exits, rows, hidden, exit_rows, exit_hidden, exit_count,
    entries, width,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0)
    other = tl.arange(0, ENTRIES)
    flags = tl.load(exits + other, mask=other < entries, other=0)
    if entry == 0:
        tl.store(exit_count, tl.sum(flags, axis=0))
    if tl.load(exits + entry) == 0:
        return
    rank = tl.sum(tl.where(other < entry, flags, 0), axis=0)
    tl.store(exit_rows + rank, tl.load(rows + entry))
    column = tl.arange(0, WIDTH)
    inside = column < width
    h = tl.load(hidden + entry.to(tl.int64) * width + column, mask=inside)
    tl.store(exit_hidden + rank.to(tl.int64) * width + column, h, mask=inside)


def gather_exits(
    *,
    exits: Tensor,
    rows: Tensor,
    hidden: Tensor,
    exit_rows: Tensor,
    exit_hidden: Tensor,
    exit_count: Tensor,
    overlap: bool = False,
) -> None:
    """Put the entries that leave together, in entry order, for ``lm_head`` and sampling.

    ``exits``, ``rows`` int32 [M], ``hidden`` [M, hidden] -> ``exit_rows`` int32 [M],
    ``exit_hidden`` [M, hidden], ``exit_count`` int32 [1]; what lies past the count stays.
    """
    entries, width = hidden.shape
    _gather_exits[(entries,)](
        exits, rows, hidden, exit_rows, exit_hidden, exit_count,
        entries, width,
        ENTRIES=triton.next_power_of_2(entries),
        WIDTH=triton.next_power_of_2(width),
        **overlapped(overlap),
    )  # fmt: skip


@triton.jit
def _emit_tokens(
    exit_rows, exit_count, tokens,
    active, token, position, depth, generated, max_tokens, stop_ids, prompt_lengths,
    decode_slots, results,
    num_rows, loops, slots_row_stride, slots_plane_stride,
    LOOPS: tl.constexpr, STOP_IDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    join(OVERLAP)
    entry = tl.program_id(0)
    if entry >= tl.load(exit_count):
        return
    row = tl.load(exit_rows + entry)
    new = tl.load(tokens + entry)
    produced = tl.load(generated + row)
    ran = loops
    at = tl.load(prompt_lengths + row)
    if produced > 0:
        ran = tl.load(depth + row)
        at = tl.load(position + row) + 1
        plane = tl.arange(0, LOOPS)
        place = row.to(tl.int64) * slots_row_stride + (produced - 1)
        last = tl.load(decode_slots + place + (ran - 1) * slots_plane_stride)
        skipped = (plane >= ran) & (plane < loops)
        tl.store(decode_slots + place + plane * slots_plane_stride, last, mask=skipped)
    stop = tl.load(stop_ids + row * STOP_IDS + tl.arange(0, STOP_IDS))
    stopped = tl.max((stop == new).to(tl.int32), axis=0)
    done = (stopped > 0) | (produced + 1 >= tl.load(max_tokens + row))
    tl.store(token + row, new)
    tl.store(position + row, at)
    tl.store(depth + row, 0)
    tl.store(generated + row, produced + 1)
    tl.store(active + row, (done == 0).to(tl.uint8))
    tl.store(results + row, new)
    tl.store(results + num_rows + row, ran)
    tl.store(results + 2 * num_rows + row, done.to(tl.int32))


def emit_tokens(
    *,
    exit_rows: Tensor,
    exit_count: Tensor,
    tokens: Tensor,
    active: Tensor,
    token: Tensor,
    position: Tensor,
    depth: Tensor,
    generated: Tensor,
    max_tokens: Tensor,
    stop_ids: Tensor,
    prompt_lengths: Tensor,
    decode_slots: Tensor,
    results: Tensor,
    overlap: bool = False,
) -> None:
    """Make each sampled token its row's running one, or end the row.

    ``exit_rows``, ``tokens`` int32 [M], the first ``exit_count`` valid. A row with no output
    token yet is at the end of its prompt, which ran all loops; any other row's token has exited at
    ``depth``, and the planes it skipped are made to name its last slot (last-exited).
    ``stop_ids`` int32 [R, a power of two], -1 where unused. ``results`` int32 [3, R]: token, depth
    of the run, finished.
    """
    num_rows, loops, _ = decode_slots.shape
    _emit_tokens[(exit_rows.shape[0],)](
        exit_rows, exit_count, tokens,
        active, token, position, depth, generated, max_tokens, stop_ids, prompt_lengths,
        decode_slots, results,
        num_rows, loops, decode_slots.stride(0), decode_slots.stride(1),
        LOOPS=triton.next_power_of_2(loops),
        STOP_IDS=stop_ids.shape[1],
        num_warps=1,
        **overlapped(overlap),
    )  # fmt: skip


@triton.jit
def _copy(target, source, length, BLOCK: tl.constexpr):
    for begin in range(0, length, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < length
        values = tl.load(source + index, mask=inside)
        tl.store(target + index, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _start_rows(
    packed, offsets,
    active, depth, generated, slots_taken, prompt_lengths, max_tokens, min_loops, max_loops,
    replay, top_k, temperature, top_p, exit_threshold, seed, logprobs, stop_ids,
    prompt_blocks, decode_blocks, replay_depths,
    loops, prompt_row_stride, prompt_plane_stride, decode_blocks_stride, replay_stride,
    STOP_IDS: tl.constexpr, HEADER_LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = packed + tl.load(offsets + tl.program_id(0))
    row = tl.load(start).to(tl.int64)
    tl.store(active + row, 0)
    tl.store(depth + row, 0)
    tl.store(generated + row, 0)
    tl.store(slots_taken + row, 0)
    tl.store(prompt_lengths + row, tl.load(start + 1))
    tl.store(max_tokens + row, tl.load(start + 2))
    tl.store(min_loops + row, tl.load(start + 3))
    tl.store(max_loops + row, tl.load(start + 4))
    tl.store(replay + row, tl.load(start + 5).to(tl.uint8))
    tl.store(top_k + row, tl.load(start + 6))
    tl.store(temperature + row, tl.load(start + 7).to(tl.float32, bitcast=True))
    tl.store(top_p + row, tl.load(start + 8).to(tl.float32, bitcast=True))
    tl.store(exit_threshold + row, tl.load(start + 9).to(tl.float32, bitcast=True))
    low = tl.load(start + 10).to(tl.int64) & 0xFFFFFFFF
    tl.store(seed + row, (tl.load(start + 11).to(tl.int64) << 32) | low)
    plane_blocks, own_blocks = tl.load(start + 12), tl.load(start + 13)
    depths = tl.load(start + 14)
    tl.store(logprobs + row, tl.load(start + 15))
    start += HEADER_LENGTH
    lane = tl.arange(0, STOP_IDS)
    tl.store(stop_ids + row * STOP_IDS + lane, tl.load(start + lane))
    start += STOP_IDS
    for plane in range(0, loops):
        target = prompt_blocks + row * prompt_row_stride + plane * prompt_plane_stride
        _copy(target, start, plane_blocks, BLOCK)
        start += plane_blocks
    _copy(decode_blocks + row * decode_blocks_stride, start, own_blocks, BLOCK)
    start += own_blocks
    _copy(replay_depths + row * replay_stride, start, depths, BLOCK)


def start_rows(
    *,
    packed: Tensor,
    offsets: Tensor,
    active: Tensor,
    depth: Tensor,
    generated: Tensor,
    slots_taken: Tensor,
    prompt_lengths: Tensor,
    max_tokens: Tensor,
    min_loops: Tensor,
    max_loops: Tensor,
    replay: Tensor,
    top_k: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    exit_threshold: Tensor,
    seed: Tensor,
    logprobs: Tensor,
    stop_ids: Tensor,
    prompt_blocks: Tensor,
    decode_blocks: Tensor,
    replay_depths: Tensor,
) -> None:
    """Put requests into their rows, inactive until their first token.

    ``packed`` int32: for each request, from ``offsets[i]`` (int32 [requests]) on, the fields of
    ``HEADER`` (floats by their bits), its stop ids, its prompt blocks plane by plane, its decode
    blocks, its replay depths. The rest is state, as in ``begin_step``.
    """
    _start_rows[(offsets.shape[0],)](
        packed, offsets,
        active, depth, generated, slots_taken, prompt_lengths, max_tokens, min_loops, max_loops,
        replay, top_k, temperature, top_p, exit_threshold, seed, logprobs, stop_ids,
        prompt_blocks, decode_blocks, replay_depths,
        prompt_blocks.shape[1], prompt_blocks.stride(0), prompt_blocks.stride(1),
        decode_blocks.stride(0), replay_depths.stride(0),
        STOP_IDS=stop_ids.shape[1],
        HEADER_LENGTH=len(HEADER),
        BLOCK=128,
    )  # fmt: skip
