"""The bookkeeping kernels against the same bookkeeping in plain torch."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ouro_batch.kernels import step as kernels

from ouro_batch.model.config import ModelConfig
from ouro_batch.runner.base import MAX_STOP_IDS, RowStart
from ouro_batch.runner.state import RowState

from ..tiny import CONFIG

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOOPS, LENGTH, BLOCK = CONFIG["total_ut_steps"], 24, 4


def random_state(rows: int, seed: int) -> RowState:
    """Rows in the middle of their lives, each with its own blocks."""
    random = torch.Generator().manual_seed(seed)
    config = ModelConfig.from_dict(CONFIG, "test")
    state = RowState.allocate(config, rows, LENGTH, BLOCK, DEVICE, torch.float32)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, *shape), generator=random).to(DEVICE)

    state.active.copy_(ints(0, 4) > 0)
    state.token.copy_(ints(0, 48))
    state.tables.prompt_lengths.copy_(ints(1, 9))
    state.generated.copy_(ints(1, 6))
    state.position.copy_(state.tables.prompt_lengths + state.generated - 1)
    state.depth.copy_(ints(0, LOOPS))
    state.survival.uniform_(0.2, 1.0)
    state.hidden.normal_()
    state.max_tokens.copy_(state.generated + ints(0, 4))
    state.stop_ids.fill_(-1)
    state.stop_ids[:, :2] = ints(0, 48, 2).int()
    state.exit_threshold.copy_(torch.tensor([0.3, 0.6, math.inf], device=DEVICE)[ints(0, 3)])
    state.min_loops.copy_(ints(1, LOOPS + 1))
    state.max_loops.copy_(torch.maximum(state.min_loops, ints(1, LOOPS + 1)))
    state.replay.copy_(ints(0, 3) == 0)
    state.replay_depths.copy_(ints(1, LOOPS + 1, LENGTH))
    state.decode_blocks.copy_(
        torch.randperm(state.decode_blocks.numel(), generator=random).view_as(state.decode_blocks)
    )
    state.slots_taken.copy_(ints(0, 20))
    state.tables.decode_slots.copy_(ints(0, 1000, LOOPS, LENGTH))
    return state


def int32(*shape: int, value: int = -7) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=DEVICE)


def begin(state: RowState, entries: int, refill: bool) -> dict[str, torch.Tensor]:
    out = {
        name: int32(entries) for name in ("rows", "planes", "positions", "contexts", "slots")
    } | {"fresh": int32(entries).to(torch.uint8), "count": int32(1)}
    kernels.begin_step(
        active=state.active.view(torch.uint8),
        depth=state.depth,
        position=state.position,
        generated=state.generated,
        slots_taken=state.slots_taken,
        decode_blocks=state.decode_blocks,
        decode_slots=state.tables.decode_slots,
        results=int32(3, len(state.active)),
        block_size=BLOCK,
        refill=refill,
        **out,
    )
    return out


@given(rows=st.integers(1, 9), spare=st.integers(0, 3), seed=st.integers(0, 999), refill=...)
@settings(deadline=None, max_examples=25)
def test_begin_step_chooses_rows_and_takes_their_slots(
    rows: int, spare: int, seed: int, refill: bool
):
    ours, expected = random_state(rows, seed), random_state(rows, seed)
    out = begin(ours, rows + spare, refill)
    run = expected.active
    midway = run & (expected.depth > 0)
    if not refill and midway.any():
        run = midway
    ids = run.nonzero().squeeze(1)
    planes = expected.depth[ids].long()
    count = len(ids)
    slots = expected.take_slots(ids, planes)
    assert out["count"].item() == count
    for name, values in {
        "rows": ids,
        "planes": planes,
        "positions": expected.position[ids],
        "contexts": expected.position[ids] + 1,
        "slots": slots,
        "fresh": planes == 0,
    }.items():
        assert out[name][:count].tolist() == values.int().tolist()
    assert (out["contexts"][count:] == 0).all()
    assert (out["slots"][count:] == -1).all()
    assert torch.equal(ours.slots_taken, expected.slots_taken)
    assert torch.equal(ours.tables.decode_slots, expected.tables.decode_slots)


@given(rows=st.integers(1, 9), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=25)
def test_a_loop_ends_as_in_plain_torch(rows: int, seed: int):
    """Gate, exits, gathered exits, emitted tokens, published slots: one step's second half."""
    ours, expected = random_state(rows, seed), random_state(rows, seed)
    expected.survival.copy_(ours.survival)
    entries = begin(ours, rows, refill=True)
    begin(expected, rows, refill=True)
    count = int(entries["count"])
    ids = entries["rows"][:count].long()
    width = ours.hidden.shape[1]
    hidden = torch.randn(rows, width, device=DEVICE)
    weight, bias = torch.randn(1, width, device=DEVICE), torch.randn(1, device=DEVICE)
    weight *= width**-0.5
    exits = int32(rows)
    kernels.end_loop(
        hidden=hidden,
        gate_weight=weight,
        gate_bias=bias,
        rows=entries["rows"],
        fresh=entries["fresh"],
        count=entries["count"],
        depth=ours.depth,
        survival=ours.survival,
        carried=ours.hidden,
        generated=ours.generated,
        exit_threshold=ours.exit_threshold,
        min_loops=ours.min_loops,
        max_loops=ours.max_loops,
        replay=ours.replay.view(torch.uint8),
        replay_depths=ours.replay_depths,
        exits=exits,
    )
    fresh = expected.depth[ids] == 0
    gate = (hidden[:count].double() @ weight.double().T + bias.double()).squeeze(1)
    survival = torch.where(fresh, 1.0, expected.survival[ids].double()) * torch.sigmoid(-gate)
    depth = expected.depth[ids] + 1
    leave = (depth >= expected.min_loops[ids]) & (1 - survival >= expected.exit_threshold[ids])
    replayed = depth >= expected.replay_depths[ids, expected.generated[ids].long()]
    leave = torch.where(expected.replay[ids], replayed, leave) | (depth >= expected.max_loops[ids])
    assert exits[:count].tolist() == leave.int().tolist()
    assert (exits[count:] == 0).all()
    torch.testing.assert_close(ours.survival[ids], survival.float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.hidden[ids], hidden[:count])
    assert torch.equal(ours.depth[ids], depth)

    exit_rows, exit_count = int32(rows), int32(1)
    exit_hidden = torch.full_like(hidden, math.nan)
    kernels.gather_exits(
        exits=exits,
        rows=entries["rows"],
        hidden=hidden,
        exit_rows=exit_rows,
        exit_hidden=exit_hidden,
        exit_count=exit_count,
    )
    leaving = ids[leave]
    number = len(leaving)
    assert exit_count.item() == number
    assert exit_rows[:number].tolist() == leaving.tolist()
    assert torch.equal(exit_hidden[:number], hidden[:count][leave])
    assert exit_hidden[number:].isnan().all()

    tokens, results = int32(rows), int32(3, rows, value=-1)
    tokens[:number] = torch.randint(0, 48, (number,)).int().to(DEVICE)
    emit(ours, exit_rows, exit_count, tokens, results)
    new, depths = tokens[:number], depth[leave]
    expected.publish_last_exited(leaving, depths.long() - 1)
    assert torch.equal(ours.tables.decode_slots, expected.tables.decode_slots)
    assert torch.equal(ours.token[leaving], new)
    assert torch.equal(ours.position[leaving], expected.position[leaving] + 1)
    assert (ours.depth[leaving] == 0).all()
    assert torch.equal(ours.generated[leaving], expected.generated[leaving] + 1)
    stopped = (expected.stop_ids[leaving] == new[:, None]).any(1)
    done = stopped | (expected.generated[leaving] + 1 >= expected.max_tokens[leaving])
    assert torch.equal(ours.active[leaving], ~done)
    assert torch.equal(results[:, leaving], torch.stack((new, depths, done.int())))
    others = [row for row in range(rows) if row not in leaving.tolist()]
    assert (results[0, others] == -1).all()
    assert torch.equal(ours.active[others], expected.active[others])


def emit(state, exit_rows, exit_count, tokens, results) -> None:
    kernels.emit_tokens(
        exit_rows=exit_rows,
        exit_count=exit_count,
        tokens=tokens,
        active=state.active.view(torch.uint8),
        token=state.token,
        position=state.position,
        depth=state.depth,
        generated=state.generated,
        max_tokens=state.max_tokens,
        stop_ids=state.stop_ids,
        prompt_lengths=state.tables.prompt_lengths,
        decode_slots=state.tables.decode_slots,
        results=results,
    )


def test_the_first_token_follows_the_prompt_and_publishes_nothing():
    state = random_state(3, 0)
    state.generated[1] = 0
    state.active[1] = False
    state.max_tokens[1] = 5
    slots = state.tables.decode_slots.clone()
    results = int32(3, 3, value=-1)
    rows = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    emit(state, rows, one, one * 47, results)
    assert results[:2, 1].tolist() == [47, LOOPS]
    assert state.position[1] == state.tables.prompt_lengths[1]
    assert state.generated[1] == 1
    assert torch.equal(state.tables.decode_slots, slots)


@pytest.mark.parametrize("depths", [None, [3, 1, 2, 3, 1]])
def test_start_rows_fills_a_row_as_plain_torch_does(depths):
    ours, expected = random_state(4, 1), random_state(4, 1)
    starts = [
        RowStart(
            row=row,
            prompt_length=5,
            prompt_blocks=[[row * 10 + k, row * 10 + k + 5] for k in range(LOOPS)],
            decode_blocks=list(range(100 * row, 100 * row + 3 + row)),
            max_tokens=5,
            stop_ids=[0, 2 + row],
            temperature=0.7,
            top_k=3,
            top_p=0.9,
            seed=2**62 + 2**33 + row,
            exit_threshold=math.inf if row == 3 else 0.45,
            min_loops=1,
            max_loops=2,
            exit_depths=depths,
            logprobs=row - 1,
        )
        for row in (3, 0)
    ]
    offsets, packed = [], []
    for start in starts:
        offsets.append(len(packed))
        packed += kernels.pack_start(start, MAX_STOP_IDS)
        expected.start(start)
    kernels.start_rows(
        packed=torch.tensor(packed, dtype=torch.int32, device=DEVICE),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=DEVICE),
        active=ours.active.view(torch.uint8),
        depth=ours.depth,
        generated=ours.generated,
        slots_taken=ours.slots_taken,
        prompt_lengths=ours.tables.prompt_lengths,
        max_tokens=ours.max_tokens,
        min_loops=ours.min_loops,
        max_loops=ours.max_loops,
        replay=ours.replay.view(torch.uint8),
        top_k=ours.top_k,
        temperature=ours.temperature,
        top_p=ours.top_p,
        exit_threshold=ours.exit_threshold,
        seed=ours.seed,
        logprobs=ours.logprobs,
        stop_ids=ours.stop_ids,
        prompt_blocks=ours.tables.prompt_blocks,
        decode_blocks=ours.decode_blocks,
        replay_depths=ours.replay_depths,
    )
    names = (
        "active depth generated slots_taken max_tokens min_loops max_loops replay top_k"
        " temperature top_p exit_threshold seed logprobs stop_ids decode_blocks replay_depths"
    )
    for name in names.split():
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(ours.tables.prompt_blocks, expected.tables.prompt_blocks)
    assert torch.equal(ours.tables.prompt_lengths, expected.tables.prompt_lengths)


def test_packed_floats_keep_their_bits():
    assert struct.unpack("<f", struct.pack("<i", kernels.float_bits(0.1)))[0] == pytest.approx(0.1)
    assert kernels.float_bits(math.inf) == 0x7F800000
