"""The sampling kernels against the torch reference, and both against FP64."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from ouro_batch.kernels import sampling as kernels
from torch import Tensor

from ouro_batch.runner import sampling as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -7
ON_GPU = DEVICE.type == "cuda"

# Tiny temperatures overflow to -inf, as they should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def parameters(
    temperature: list[float], top_k: list[int], top_p: list[float], seed: int = 0
) -> dict[str, Tensor]:
    rows = len(temperature)
    generator = torch.Generator().manual_seed(seed)
    return dict(
        temperature=torch.tensor(temperature, dtype=torch.float32, device=DEVICE),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=DEVICE),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(DEVICE),
        position=torch.randint(0, 70_000, (rows,), generator=generator).int().to(DEVICE),
    )


def run(logits: Tensor, given_parameters: dict[str, Tensor], **options: object) -> Tensor:
    tokens = torch.full((len(logits),), POISON, dtype=torch.int32, device=DEVICE)
    size = kernels.workspace_size(len(logits))
    workspace = torch.randint(-(2**31), 2**31 - 1, (size,), device=DEVICE).int()
    kernels.sample(tokens, logits, **given_parameters, workspace=workspace, **options)
    return tokens


def torch_sample(logits: Tensor, p: dict[str, Tensor]) -> Tensor:
    return reference.sample(
        logits.float(), p["temperature"], p["top_k"], p["top_p"], p["seed"], p["position"].long()
    )


def noise64(p: dict[str, Tensor], row: int, vocab: int) -> Tensor:
    """The reference's uniform numbers, their logarithms in FP64."""
    mask = 0xFFFFFFFF
    seed, zero = p["seed"][row].cpu(), torch.zeros((), dtype=torch.int64)
    words = reference.philox(
        (torch.arange((vocab + 3) // 4), p["position"][row].long().cpu(), zero, zero),
        (seed & mask, (seed >> 32) & mask),
    )
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform)).flatten()[:vocab]


def check_row(got: int, want: int, logits: Tensor, p: dict[str, Tensor], row: int) -> None:
    """The same token, or two that no FP32 evaluation can tell apart: by score or by border."""
    if got == want:
        return
    x = logits[row].double().cpu()
    heat = float(p["temperature"][row])
    assert heat > 0, (row, got, want)
    scaled = (x - x.max()) / heat
    scores = scaled + noise64(p, row, len(x))
    if abs(scores[got] - scores[want]) <= 1e-5 * (1 + abs(scores[got])):
        return
    # Otherwise the border of top-p passes between them within the rounding of a sum.
    top_p, top_k = float(p["top_p"][row]), int(p["top_k"][row])
    assert top_p < 1, (row, got, want)
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if top_k > 0:
        ordered = ordered[:top_k]
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    slack = (before - top_p).abs()
    near = ids[: len(ordered)][slack < 1e-5].tolist()
    assert got in near or want in near, (row, got, want)


def check(logits: Tensor, p: dict[str, Tensor], **options: object) -> None:
    got, want = run(logits, p, **options), torch_sample(logits, p)
    for row, (a, b) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
        check_row(a, b, logits, p, row)


MIX = [
    (0.0, 0, 1.0),
    (0.0, 5, 0.5),
    (1.0, 0, 1.0),
    (0.7, 40, 1.0),
    (1.3, 0, 0.9),
    (0.9, 20, 0.8),
    (1.0, 1, 1.0),
    (1.0, 0, 0.0),
    (2.0, 0, 0.999),
    (1.0, 10**6, 0.3),
    (1e-30, 0, 1.0),
    (1e-42, 3, 0.5),
    (50.0, 0, 0.5),
]


def mixed(seed: int) -> dict[str, Tensor]:
    return parameters(*map(list, zip(*MIX, strict=True)), seed=seed)


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 17, 64, 1000, 4099, 60_000])
def test_tokens_are_the_references(vocab: int) -> None:
    torch.manual_seed(vocab)
    rows = slice(None) if ON_GPU or vocab < 60_000 else slice(3, 6)
    p = {name: value[rows] for name, value in mixed(vocab).items()}
    check(3 * torch.randn(len(p["seed"]), vocab, device=DEVICE), p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_logits(dtype: torch.dtype) -> None:
    """Many ties: 16 bits hold few distinct values."""
    torch.manual_seed(1)
    check((2 * torch.randn(len(MIX), 3001, device=DEVICE)).to(dtype), mixed(1))


@settings(max_examples=200 if ON_GPU else 10, deadline=None)
@given(
    vocab=st.integers(1, 700),
    levels=st.sampled_from([2, 7, 10**6]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
    heat=st.sampled_from([0.0, 1e-20, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.0, 0.2, 0.5, 0.93, 1.0]),
    infinities=st.booleans(),
)
def test_random_parameters(
    vocab: int, levels: int, scale: float, seed: int,
    heat: float, top_k: int, top_p: float, infinities: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (2, vocab), generator=generator) / levels * scale
    if infinities:
        keep = int(torch.randint(0, vocab, (), generator=generator))
        drop = torch.rand(2, vocab, generator=generator) < 0.5
        drop[:, keep] = False
        logits[drop] = -math.inf
    p = parameters([heat] * 2, [top_k] * 2, [top_p] * 2, seed)
    check(logits.to(DEVICE), p, tile=64)


def test_result_does_not_depend_on_chunks_tiles_or_neighbours() -> None:
    logits = 3 * torch.randn(len(MIX), 20_000 if ON_GPU else 500, device=DEVICE)
    p = mixed(2)
    want = run(logits, p)
    for options in (dict(chunks=1), dict(chunks=7, tile=128), dict(chunks=3, tile=512)):
        if "tile" not in options:
            assert torch.equal(run(logits, p, **options), want)
        else:  # other tiles add probabilities in another order
            check(logits, p, **options)
    for row in range(0, len(MIX), 3):
        alone = {name: value[row : row + 1] for name, value in p.items()}
        assert torch.equal(run(logits[row : row + 1], alone), want[row : row + 1])


def test_rows_and_count() -> None:
    logits = 3 * torch.randn(4, 333, device=DEVICE)
    p = mixed(3)
    rows = torch.tensor([5, 2, 0, 4], dtype=torch.int32, device=DEVICE)
    gathered = {name: value[rows.long()] for name, value in p.items()}
    want = run(logits, gathered)
    for count in (0, 3):
        on_device = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        for chunks in (1, 4):
            got = run(logits, p, rows=rows, count=on_device, chunks=chunks, tile=64)
            assert torch.equal(got[:count], want[:count])
            assert (got[count:] == POISON).all()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[1, [7, 120, 299]] = 1
    logits[2] = -math.inf
    logits[2, 131] = -5
    p = parameters([0.0] * 3, [0] * 3, [1.0] * 3)
    for chunks in (1, 5):
        for random in (True, False):
            got = run(logits, p, chunks=chunks, tile=64, random=random)
            assert got.tolist() == [0, 7, 131]


def test_equal_logits_are_kept_by_id() -> None:
    """With all logits equal, top-k 3 leaves ids 0..2, and top-p 0.25 of 8 leaves 0 and 1."""
    rows = 2000 if ON_GPU else 16
    p = parameters([1.0] * rows, [3] * rows, [1.0] * rows)
    got = run(torch.zeros(rows, 100, device=DEVICE), p, tile=64)
    assert set(got.tolist()) == {0, 1, 2}
    p = parameters([1.0] * rows, [0] * rows, [0.25] * rows)
    got = run(torch.zeros(rows, 8, device=DEVICE), p)
    assert set(got.tolist()) == {0, 1}
    p = parameters([1.0] * rows, [6] * rows, [0.5] * rows)
    got = run(torch.zeros(rows, 8, device=DEVICE), p)
    assert set(got.tolist()) == {0, 1, 2}


def test_strided_logits() -> None:
    whole = 3 * torch.randn(len(MIX), 400, device=DEVICE)
    p = mixed(4)
    assert torch.equal(run(whole[:, 8:303], p), run(whole[:, 8:303].contiguous(), p))


@triton.jit
def _words(out, counter, key):
    lane = tl.arange(0, 1)
    group = tl.load(counter + lane).to(tl.uint32)
    position = tl.load(counter + 1).to(tl.uint32)
    key0, key1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    w0, w1, w2, w3 = kernels._philox(group, position, key0, key1)
    tl.store(out + lane, w0.to(tl.int64))
    tl.store(out + 1 + lane, w1.to(tl.int64))
    tl.store(out + 2 + lane, w2.to(tl.int64))
    tl.store(out + 3 + lane, w3.to(tl.int64))


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        # The first is of Random123's known answers; its others count in words that are 0 here.
        ((0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((12_287, 65_535), (0xFFFFFFFF, 0x80000000), None),
        ((1, 2), (0xDEADBEEF, 0x12345678), None),
    ],
)
def test_philox(
    counter: tuple[int, int], key: tuple[int, int], want: tuple[int, ...] | None
) -> None:
    """Known words, and the reference's, which its own tests hold to Random123's answers."""
    as_tensors = [torch.tensor(c) for c in (*counter, 0, 0)]
    ours = reference.philox(tuple(as_tensors), tuple(torch.tensor(k) for k in key))
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _words[(1,)](out, torch.tensor(counter, device=DEVICE), torch.tensor(key, device=DEVICE))
    assert out.tolist() == ours.tolist()
    if want is not None:
        assert tuple(out.tolist()) == want


def test_frequencies_are_the_softmax() -> None:
    """Chi-square over many seeds; the bound is its 0.9999 quantile at 11 degrees of freedom."""
    draws, vocab = 20_000 if ON_GPU else 150, 12
    logits = torch.randn(vocab, device=DEVICE)
    p = parameters([0.8] * draws, [0] * draws, [1.0] * draws)
    p["seed"] = torch.arange(draws, device=DEVICE)
    p["position"] = torch.full((draws,), 9, dtype=torch.int32, device=DEVICE)
    got = run(logits.expand(draws, -1).contiguous(), p)
    counts = torch.bincount(got.long(), minlength=vocab).double().cpu()
    expected = (logits.double() / 0.8).softmax(-1).cpu() * draws
    assert ((counts - expected).square() / expected).sum() < 37.4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("entries", [1, 13, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_size(entries: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(entries, 49_152, device=DEVICE)).to(dtype)
    mix = [MIX[i % len(MIX)] for i in range(entries)]
    check(logits, parameters(*map(list, zip(*mix, strict=True)), seed=entries))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_a_graph() -> None:
    logits, p = 3 * torch.randn(len(MIX), 49_152, device=DEVICE), mixed(6)
    want = run(logits, p)  # compiles
    tokens = torch.full_like(want, POISON)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sample(tokens, logits, **p)
    for _ in range(3):
        tokens.fill_(POISON)
        graph.replay()
        assert torch.equal(tokens, want)
