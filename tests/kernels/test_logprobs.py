"""Log-probabilities against FP64 torch: ties, ragged vocabularies, rows that want none."""

from __future__ import annotations

import pytest
import torch
from ouro_batch.kernels.logprobs import token_logprobs
from torch import Tensor

from ouro_batch.runner import sampling as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 20
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def run(
    logits: Tensor, tokens: list[int], wanted: list[int], rows: list[int], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = torch.full((len(wanted),), float("nan"), device=DEVICE)
    values = torch.full((len(wanted), K), float("nan"), device=DEVICE)
    ids = torch.full((len(wanted), K), -7, dtype=torch.int32, device=DEVICE)
    token_logprobs(
        chosen,
        values,
        ids,
        logits,
        int32(tokens),
        wanted=int32(wanted),
        rows=int32(rows),
        count=int32([count]),
    )
    return chosen.cpu(), values.cpu(), ids.cpu()


def check(logits: Tensor, wanted: list[int], seed: int = 0) -> None:
    """Entries in another order than rows, one row without an entry, one entry beyond count."""
    draw = torch.Generator().manual_seed(seed)
    entries, vocab = logits.shape
    tokens = torch.randint(0, vocab, (entries,), generator=draw).tolist()
    rows = torch.randperm(entries + 1, generator=draw)[:entries].tolist()
    wanted_by_row = [5] * (entries + 1)
    for row, k in zip(rows, wanted, strict=True):
        wanted_by_row[row] = k
    chosen, values, ids = run(logits, tokens, wanted_by_row, rows, entries - 1)
    exact = logits.double().cpu().log_softmax(-1)
    ordered, order = torch.sort(exact, dim=-1, descending=True, stable=True)
    written = set()
    for entry in range(entries - 1):
        row, k = rows[entry], wanted[entry]
        if k < 0:
            continue
        written.add(row)
        assert abs(chosen[row] - exact[entry, tokens[entry]]) < 2e-6 * (1 + abs(chosen[row]))
        assert ids[row, :k].tolist() == order[entry, :k].tolist()
        torch.testing.assert_close(
            values[row, :k].double(), ordered[entry, :k], rtol=2e-6, atol=2e-6
        )
        assert (ids[row, k:] == -7).all()
        assert values[row, k:].isnan().all()
    for row in set(range(entries + 1)) - written:
        assert chosen[row].isnan()
        assert (ids[row] == -7).all()


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [20, 64, 1000, 2048, 5001])
def test_random_logits(vocab, dtype):
    draw = torch.Generator().manual_seed(vocab)
    logits = (8 * torch.randn(6, vocab, generator=draw)).to(DEVICE, dtype)
    check(logits, [0, 1, 20, -1, 5, 3], seed=vocab)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_id(dtype):
    logits = torch.tensor([3.0, 1.0, 3.0, 2.0, 2.0, 3.0, 0.0] * 4, device=DEVICE).to(dtype)
    check(torch.stack([logits, logits.flip(0), torch.zeros_like(logits)]), [9, 20, 20])


def test_logits_far_apart_and_infinite():
    logits = torch.full((2, 100), -1e30, device=DEVICE)
    logits[0, 7], logits[0, 3], logits[1, 9] = 1e4, 1e4 - 2, float("-inf")
    chosen, values, ids = run(logits, [7, 0], [3, 20], [0, 1], 2)
    assert ids[0, :3].tolist() == [7, 3, 0]
    assert values[0, 0] == pytest.approx(-0.126928, abs=1e-6)
    assert chosen[0] == values[0, 0]
    assert 9 not in ids[1].tolist()


def test_a_row_has_the_same_bits_whichever_rows_there_are():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 3000, generator=draw).to(DEVICE)
    together = run(logits, [1, 2, 3, 4, 5], [4] * 5, [3, 0, 4, 1, 2], 5)
    for entry, row in enumerate([3, 0, 4, 1, 2]):
        alone = run(logits[entry : entry + 1], [entry + 1], [4], [0], 1)
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours[row].nan_to_num(), theirs[0].nan_to_num())


def test_the_torch_reference_agrees():
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 777, generator=draw).round(decimals=1)
    tokens = [5, 6, 7, 8]
    chosen, values, ids = run(logits.to(DEVICE), tokens, [20] * 4, [0, 1, 2, 3], 4)
    want = reference.log_probabilities(logits, torch.tensor(tokens), 20)
    torch.testing.assert_close(chosen, want[0])
    torch.testing.assert_close(values, want[1])
    assert torch.equal(ids.long(), want[2])


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in DTYPES])
def test_full_vocabulary(dtype):
    logits = (4 * torch.randn(64, 49_152, device=DEVICE)).to(dtype)
    check(logits, [k % 22 - 1 for k in range(64)])
