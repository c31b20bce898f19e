"""Kernels that start ahead read nothing early that the kernel before them writes.

What a kernel is given lies there as garbage until it joins. On a CPU joining brings the values; on
a GPU a kernel does that, which lets the next one start and then takes its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from ouro_batch.kernels import matmul, mlp, norm, overlap, rope, sampling, step
from ouro_batch.kernels.decode_attention import decode_attention
from ouro_batch.kernels.decode_work import DecodeWork, build_decode_work
from ouro_batch.kernels.gemv import gemv
from ouro_batch.kernels.logprobs import token_logprobs
from ouro_batch.kernels.overlap import can_overlap, join
from torch import Tensor

from .attention_cases import DEVICE, make_cache
from .test_step import random_state

ON_GPU = DEVICE.type == "cuda"
HIDDEN, WIDE, VOCAB = 64, 96, 160
MICROSECONDS = 5000  # that the kernel before waits; the host has launched the next one by then
# Rows of the decode attention's caches: prompt, generated tokens.
LENGTHS = [(37, 27), (1, 1), (60, 100), (8, 8)]
ENTRIES = [(0, 1, 64), (1, 0, 2), (2, 2, 160), (3, 1, 16)]  # row, plane, context
SPLIT = 32


@dataclass
class Case:
    """A launch (ahead or not), what the kernel before it writes, and what it writes itself.

    ``poison`` puts garbage where the kernel before is yet to write.
    """

    launch: Callable[[bool], None]
    late: list[Tensor]
    out: list[Tensor]
    poison: Callable[[], None] | None = None

    def spoil(self) -> None:
        if self.poison is not None:
            self.poison()
            return
        for tensor in self.late:  # an integer may be an index
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


@triton.jit
def _bring(
    target, source, count, nanoseconds, target1, source1, count1, target2, source2, count2,
    SPINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Let the next kernel start, wait, and then write."""
    join(True)
    if SPINS:
        begin = tl.extra.cuda.globaltimer()
        while tl.extra.cuda.globaltimer() - begin < nanoseconds:
            pass
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
    for start in range(0, count1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target1 + at, tl.load(source1 + at, mask=at < count1), mask=at < count1)
    for start in range(0, count2, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target2 + at, tl.load(source2 + at, mask=at < count2), mask=at < count2)


def bring(late: list[Tensor], values: list[Tensor]) -> None:
    """On a GPU: write values, from a kernel that the next one need not wait for to start."""
    pairs = [(_bytes(t), _bytes(v), t.nbytes) for t, v in zip(late, values, strict=True)]
    pairs += [(*pairs[0][:2], 0)] * (3 - len(pairs))
    first, *others = pairs
    rest = [argument for pair in others for argument in pair]
    _bring[(1,)](
        *first, 1000 * MICROSECONDS, *rest, SPINS=True, BLOCK=1024, num_warps=4, launch_pdl=True
    )


def _bytes(tensor: Tensor) -> Tensor:
    """All of a tensor, whose memory has no holes, as bytes in the order in which they lie."""
    storage = tensor.untyped_storage()
    assert tensor.storage_offset() == 0
    assert storage.nbytes() == tensor.nbytes
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def linear_case(split: int, gated: bool = False) -> Case:
    x, weight = normal(3, HIDDEN), normal(WIDE * (1 + gated), HIDDEN)
    out = torch.zeros(3, WIDE, device=DEVICE)
    partials = torch.zeros(split * 3 * WIDE * (1 + gated), device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tiles = matmul.Tiles(32, split, block_n=32)

    def launch(ahead: bool) -> None:
        matmul.linear(
            out, x, weight, partials=partials, counters=counters, gated=gated, tiles=tiles,
            overlap=ahead,
        )  # fmt: skip

    return Case(launch, [x], [out])


def linear_partials_case() -> Case:
    x, weight = normal(3, HIDDEN), normal(WIDE, HIDDEN)
    split = matmul.choose_tiles(3, WIDE, HIDDEN, False, x.dtype).split_k
    partials = torch.zeros(split, 3, WIDE, device=DEVICE)
    return Case(
        lambda ahead: matmul.linear_partials(partials, x, weight, overlap=ahead), [x], [partials]
    )


def gemv_case(gated: bool = False) -> Case:
    x, weight = normal(1, HIDDEN), normal(WIDE * (1 + gated), HIDDEN)
    out = torch.zeros(1, WIDE, device=DEVICE)
    return Case(lambda ahead: gemv(out, x, weight, gated=gated, overlap=ahead), [x], [out])


def silu_case() -> Case:
    gate_up, out = normal(3, 2 * WIDE), torch.zeros(3, WIDE, device=DEVICE)
    return Case(lambda ahead: mlp.silu_mul(out, gate_up, overlap=ahead), [gate_up], [out])


def rms_norm_case() -> Case:
    x, weight, out = normal(3, HIDDEN), normal(HIDDEN), torch.zeros(3, HIDDEN, device=DEVICE)
    return Case(lambda ahead: norm.rms_norm(out, x, weight, 1e-6, overlap=ahead), [x], [out])


def add_rms_norm_case(split: int) -> Case:
    hidden = normal(3, HIDDEN)
    update = normal(split, 3, HIDDEN) if split > 1 else normal(3, HIDDEN)
    weight, next_weight = normal(HIDDEN), normal(HIDDEN)
    out = torch.zeros(3, HIDDEN, device=DEVICE)

    def launch(ahead: bool) -> None:
        norm.add_rms_norm(hidden, update, weight, out, next_weight, 1e-6, overlap=ahead)

    return Case(launch, [update], [hidden, out])


def embed_norm_case() -> Case:
    hidden, out = torch.zeros(2, 3, HIDDEN, device=DEVICE)
    embed, carried, weight = normal(VOCAB, HIDDEN), normal(4, HIDDEN), normal(HIDDEN)
    token, rows = int32([5, 9, 70, 31]), int32([3, 0, 2])
    fresh = torch.tensor([1, 0, 1], dtype=torch.uint8, device=DEVICE)

    def launch(ahead: bool) -> None:
        norm.embed_norm(
            hidden, out, embed=embed, token=token, carried=carried, rows=rows, fresh=fresh,
            weight=weight, eps=1e-6, overlap=ahead,
        )  # fmt: skip

    return Case(launch, [rows, fresh, carried], [hidden, out])


def rope_case() -> Case:
    heads, dim, block = 2, 16, 4
    qkv = normal(3, 3 * heads * dim)
    queries = torch.zeros(3, heads, dim, device=DEVICE)
    keys, values = torch.zeros(2, 8, block, heads, dim, device=DEVICE)
    angles = normal(32, dim)

    def launch(ahead: bool) -> None:
        rope.rope_store(
            queries, qkv, keys, values, int32([9, 3, 30]), int32([4, 8, 31]), angles, overlap=ahead
        )

    return Case(launch, [qkv], [queries, keys, values])


def work_for(contexts: Tensor, heads: int, kv_heads: int, dim: int) -> DecodeWork:
    items = DecodeWork.max_items(len(contexts), int(contexts.sum()), SPLIT)
    return DecodeWork.allocate(len(contexts), items, heads, kv_heads, dim, DEVICE, SPLIT)


def work_case() -> Case:
    rows, planes, contexts = (int32(list(column)) for column in zip(*ENTRIES, strict=True))
    prompts = int32([prompt for prompt, _ in LENGTHS])
    work = work_for(contexts, 2, 2, 16)

    def launch(ahead: bool) -> None:
        build_decode_work(work, rows, planes, contexts, prompts, overlap=ahead)

    return Case(launch, [contexts, rows, planes], [work.items, work.entries, work.counts])


def decode_case(
    entries: list[tuple[int, int, int]],
    heads: int = 2,
    kind: torch.dtype = torch.float32,
    fused: bool = False,
    tile: int = 16,
) -> Case:
    """Queries and newest keys and values come late; with RoPE inside, the fused product does."""
    dim, kv_heads = 16, 2
    cache = make_cache(LENGTHS, kv_heads=kv_heads, head_dim=dim, dtype=kind)
    rows, planes, contexts = (int32(list(column)) for column in zip(*entries, strict=True))
    work = work_for(contexts, heads, kv_heads, dim)
    build_decode_work(work, rows, planes, contexts, cache.prompt_lengths)
    queries = torch.randn(len(contexts), heads * (3 if fused else 1), dim, device=DEVICE).to(kind)
    out = torch.zeros(len(contexts), heads, dim, dtype=kind, device=DEVICE)
    angles = normal(int(contexts.max()), dim) if fused else None

    def launch(ahead: bool) -> None:
        decode_attention(
            out, queries, cache.keys, cache.values, cache.prompt_blocks, cache.decode_slots, work,
            cos_sin=angles, tile=tile, overlap=ahead,
        )  # fmt: skip

    if fused:
        return Case(launch, [queries], [out, cache.keys, cache.values])

    def poison() -> None:
        queries.fill_(torch.nan)
        for row, plane, context in entries:
            slot = int(cache.slots[row][plane][context - 1])
            block, offset = divmod(slot, cache.keys.shape[1])
            cache.keys[block, offset] = cache.values[block, offset] = torch.nan

    return Case(launch, [queries, cache.keys, cache.values], [out], poison)


def begin_step_case() -> Case:
    state, n = random_state(6, seed=0), 6
    entries = {
        name: torch.zeros(n, dtype=torch.int32, device=DEVICE)
        for name in ("rows", "planes", "positions", "contexts", "slots")
    }
    entries["fresh"] = torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    entries["count"], results = int32([0]), torch.zeros(3, n, dtype=torch.int32, device=DEVICE)
    active = state.active.view(torch.uint8)

    def launch(ahead: bool) -> None:
        step.begin_step(
            active=active, depth=state.depth, position=state.position, generated=state.generated,
            slots_taken=state.slots_taken, decode_blocks=state.decode_blocks,
            decode_slots=state.tables.decode_slots, results=results, block_size=4, refill=True,
            overlap=ahead, **entries,
        )  # fmt: skip

    written = [*entries.values(), state.slots_taken, state.tables.decode_slots]
    return Case(launch, [active, state.depth, state.generated], written)


def end_loop_case() -> Case:
    state, n = random_state(6, seed=1), 4
    width = state.hidden.shape[1]
    hidden, weight, bias = normal(n, width), normal(1, width), normal(1)
    exits = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    rows, count = int32([5, 0, 2, 3]), int32([3])
    fresh = torch.tensor([1, 0, 0, 1], dtype=torch.uint8, device=DEVICE)

    def launch(ahead: bool) -> None:
        step.end_loop(
            hidden=hidden, gate_weight=weight, gate_bias=bias, rows=rows, fresh=fresh, count=count,
            depth=state.depth, survival=state.survival, carried=state.hidden,
            generated=state.generated, exit_threshold=state.exit_threshold,
            min_loops=state.min_loops, max_loops=state.max_loops,
            replay=state.replay.view(torch.uint8), replay_depths=state.replay_depths, exits=exits,
            overlap=ahead,
        )  # fmt: skip

    return Case(launch, [hidden, rows, count], [exits, state.depth, state.survival, state.hidden])


def gather_case() -> Case:
    exits, rows, hidden = int32([0, 1, 1, 0, 1]), int32([4, 0, 2, 3, 1]), normal(5, HIDDEN)
    exit_rows, exit_count = int32([0] * 5), int32([0])
    exit_hidden = torch.zeros(5, HIDDEN, device=DEVICE)

    def launch(ahead: bool) -> None:
        step.gather_exits(
            exits=exits, rows=rows, hidden=hidden, exit_rows=exit_rows, exit_hidden=exit_hidden,
            exit_count=exit_count, overlap=ahead,
        )  # fmt: skip

    return Case(launch, [exits, rows, hidden], [exit_rows, exit_count, exit_hidden])


def emit_case() -> Case:
    state = random_state(6, seed=2)
    rows, count, tokens = int32([5, 0, 2, 3]), int32([3]), int32([7, 8, 9, 1])
    results = torch.zeros(3, 6, dtype=torch.int32, device=DEVICE)

    def launch(ahead: bool) -> None:
        step.emit_tokens(
            exit_rows=rows, exit_count=count, tokens=tokens, active=state.active.view(torch.uint8),
            token=state.token, position=state.position, depth=state.depth,
            generated=state.generated, max_tokens=state.max_tokens, stop_ids=state.stop_ids,
            prompt_lengths=state.tables.prompt_lengths, decode_slots=state.tables.decode_slots,
            results=results, overlap=ahead,
        )  # fmt: skip

    written = [results, state.token, state.position, state.generated, state.depth, state.active]
    return Case(launch, [rows, count, tokens], written)


def sample_case() -> Case:
    logits, tokens = normal(4, VOCAB), int32([-7] * 4)
    temperature = torch.tensor([0.0, 0.9, 1.0, 0.7], device=DEVICE)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5], device=DEVICE)
    seed = torch.arange(4, device=DEVICE)
    top_k, position = int32([0, 0, 7, 0]), int32([1, 2, 3, 4])
    rows, count = int32([2, 0, 3, 1]), int32([4])

    def launch(ahead: bool) -> None:
        sampling.sample(
            tokens, logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            position=position, rows=rows, count=count, chunks=2, tile=64, overlap=ahead,
            workspace=workspace,
        )  # fmt: skip

    workspace = torch.zeros(sampling.workspace_size(4), dtype=torch.int32, device=DEVICE)
    return Case(launch, [logits, rows, count], [tokens])


def logprobs_case() -> Case:
    logits, tokens, rows = normal(3, VOCAB), int32([4, 90, 3]), int32([2, 0, 1])
    chosen, values = torch.zeros(3, device=DEVICE), torch.zeros(3, 5, device=DEVICE)
    ids, wanted, count = torch.zeros_like(values).int(), int32([5, 0, 2]), int32([3])

    def launch(ahead: bool) -> None:
        token_logprobs(
            chosen, values, ids, logits, tokens, wanted=wanted, rows=rows, count=count,
            overlap=ahead,
        )  # fmt: skip

    return Case(launch, [logits, tokens, count], [chosen, values, ids])


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: linear_case(1),
    "linear, split": lambda: linear_case(2),
    "linear, gated": lambda: linear_case(2, gated=True),
    "linear_partials": linear_partials_case,
    "gemv": gemv_case,
    "gemv, gated": lambda: gemv_case(gated=True),
    "silu_mul": silu_case,
    "rms_norm": rms_norm_case,
    "add_rms_norm": lambda: add_rms_norm_case(1),
    "add_rms_norm, sums": lambda: add_rms_norm_case(3),
    "embed_norm": embed_norm_case,
    "rope_store": rope_case,
    "build_decode_work": work_case,
    "decode_attention": lambda: decode_case(ENTRIES),
    "decode_attention, wide tiles": lambda: decode_case(ENTRIES, tile=64),
    "decode_attention, grouped": lambda: decode_case(ENTRIES, heads=4),
    "decode_attention, with RoPE": lambda: decode_case(ENTRIES, fused=True),
    # The interpreter's programs come one after another: the first one alone is early.
    "decode_attention of 1": lambda: decode_case([(1, 0, 1)]),
    "decode_attention of 16": lambda: decode_case([(3, 1, 16)]),
    "decode_attention of 17": lambda: decode_case([(0, 1, 17)]),
    "decode_attention of 15, 16 bits": lambda: decode_case([(3, 1, 15)], kind=torch.bfloat16),
    "decode_attention of 15, with RoPE": lambda: decode_case([(3, 1, 15)], fused=True),
    "begin_step": begin_step_case,
    "end_loop": end_loop_case,
    "gather_exits": gather_case,
    "emit_tokens": emit_case,
    "sample": sample_case,
    "token_logprobs": logprobs_case,
}


def check(case: Case, late_values: Callable[[list[Tensor], list[Tensor]], None]) -> None:
    """Ahead of late inputs as after all inputs; ``late_values`` sees that they come."""
    every = [*case.late, *case.out]
    before = [tensor.clone() for tensor in every]
    case.launch(False)
    expected = [tensor.clone() for tensor in case.out]
    for tensor, value in zip(every, before, strict=True):
        tensor.copy_(value)
    case.spoil()
    late_values(case.late, before[: len(case.late)])
    case.launch(True)
    for found, wanted in zip(case.out, expected, strict=True):
        assert torch.equal(found.nan_to_num(-7.0), wanted.nan_to_num(-7.0))


@pytest.mark.skipif(ON_GPU, reason="stands for a GPU in the interpreter")
@pytest.mark.parametrize("name", CASES)
def test_late_inputs(name, monkeypatch):
    def arrive(late: list[Tensor], values: list[Tensor]) -> None:
        missing = list(zip(late, values, strict=True))

        def wait() -> None:
            while missing:
                tensor, value = missing.pop()
                tensor.copy_(value)

        monkeypatch.setattr(overlap, "gdc_wait", wait)
        monkeypatch.setattr(overlap, "gdc_launch_dependents", lambda: None)

    torch.manual_seed(0)
    check(CASES[name](), arrive)


@pytest.mark.gpu
@pytest.mark.skipif(not can_overlap(DEVICE), reason="needs a Hopper GPU or a later one")
@pytest.mark.parametrize("name", CASES)
def test_late_inputs_on_a_gpu(name):
    torch.manual_seed(0)
    CASES[name]().launch(True)  # compiles
    case = CASES[name]()
    check(case, bring)
