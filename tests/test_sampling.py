"""Counter-based sampling: right distribution, and independent of everything but its counters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_batch import LLM, SamplingParams
from ouro_batch.intake import derive_seed
from ouro_batch.runner.sampling import gumbel_noise, keep_top, philox, sample

from .conftest import ORACLE


def word(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


# Known answers of Philox4x32-10 published with Random123 (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    result = philox(tuple(map(word, counter)), tuple(map(word, key)))
    assert tuple(result.tolist()) == expected


def test_noise_is_finite_and_differs_by_seed_and_position():
    # One that differs in the low word, one in the high word, one in both, one in the position.
    seeds = torch.tensor([0, 1, 2**32, 2**63 - 1, 0])
    noise = gumbel_noise(seeds, torch.tensor([0, 0, 0, 0, 1]), 50_001)
    assert noise.shape == (5, 50_001)
    assert noise.isfinite().all()
    assert len(torch.unique(noise, dim=0)) == 5
    # mean and variance of the standard Gumbel distribution
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def draw(logits, count, temperature=1.0, top_k=0, top_p=1.0):
    logits = logits.expand(count, -1)
    return sample(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), 7),
        torch.arange(count),
    )


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature):
    logits = torch.linspace(-1.5, 1.5, 12)
    counts = torch.bincount(draw(logits, 40_000, temperature), minlength=12)
    # 11 degrees of freedom: 31.3 is the 0.1% point of the chi-square distribution.
    assert chi_square(counts, (logits / temperature).softmax(0)) < 31.3


def test_top_k_and_top_p_follow_the_renormalised_softmax():
    logits = torch.linspace(-2, 2, 10)
    kept = logits.clone()
    kept[:5] = -math.inf  # top_k
    counts = torch.bincount(draw(logits, 40_000, top_k=5), minlength=10)
    assert counts[:5].sum() == 0
    assert chi_square(counts[5:], kept.softmax(0)[5:]) < 18.5  # 4 degrees of freedom, 0.1%
    probabilities = kept.softmax(0)
    reach = float(probabilities[7:].sum()) - 1e-3  # the three best just reach it
    counts = torch.bincount(draw(logits, 20_000, top_k=5, top_p=reach), minlength=10)
    assert counts[:7].sum() == 0
    assert chi_square(counts[7:], probabilities[7:] / probabilities[7:].sum()) < 13.9


@given(
    rows=st.integers(1, 4),
    vocab=st.integers(1, 40),
    k=st.integers(0, 45),
    p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_kept_set_matches_its_definition(rows, vocab, k, p, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    kept = keep_top(logits, torch.full((rows,), k), torch.full((rows,), p)).isfinite()
    for row in range(rows):
        order = logits[row].argsort(descending=True).tolist()
        if k:
            order = order[:k]
        probabilities = logits[row, order].double().softmax(0).tolist()
        total, expected = 0.0, []
        for token, probability in zip(order, probabilities, strict=True):
            if expected and total >= p - 1e-6:
                break
            expected.append(token)
            total += probability
        got = kept[row].nonzero().flatten().tolist()
        # Rounding may move the border by one token where a sum all but equals top_p.
        assert abs(len(got) - len(expected)) <= int(p < 1 and abs(total - p) < 1e-5)
        assert set(got) <= set(order)
        assert order[0] in got


def test_greedy_and_tiny_temperature_take_the_best():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)) * 30
    best = logits.argmax(-1)
    ones, zeros = torch.ones(5), torch.zeros(5, dtype=torch.int64)
    for temperature in (0.0, 1e-6, 1e-38):
        args = (ones * temperature, zeros, ones, zeros, zeros)
        assert torch.equal(sample(logits, *args), best)
    assert torch.equal(sample(logits, ones * 5, zeros + 1, ones, zeros, zeros), best)
    for top_p in (1e-6, 1e-38, 0.0):  # the smallest top_p above 0 is 0 in FP32
        assert torch.equal(sample(logits, ones * 5, zeros, ones * top_p, zeros, zeros), best)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_top_p_counts_probabilities_after_temperature(temperature):
    logits = torch.linspace(-2, 2, 10)
    probabilities = (logits / temperature).softmax(0)
    reach = float(probabilities[6:].sum()) - 1e-3  # the four best just reach it
    counts = torch.bincount(draw(logits, 20_000, temperature, top_p=reach), minlength=10)
    assert counts[:6].sum() == 0
    kept = probabilities[6:] / probabilities[6:].sum()
    assert chi_square(counts[6:], kept) < 16.3  # 3 degrees of freedom, 0.1%


@pytest.fixture(scope="module")
def llm():
    return LLM(ORACLE / "mha-4loop", max_rows=8)


def test_same_tokens_alone_in_a_batch_and_reversed(llm):
    prompts = [[i + 1, 7, 3 * i + 2] for i in range(12)]
    params = [
        SamplingParams(
            max_tokens=12, temperature=0.8, top_p=0.9, top_k=50, seed=i, exit_threshold=0.5
        )
        for i in range(12)
    ]
    together = [o.token_ids for o in llm.generate(prompts, params)]
    reverse = [o.token_ids for o in llm.generate(prompts[::-1], params[::-1])][::-1]
    alone = [llm.generate([q], [s])[0].token_ids for q, s in zip(prompts, params, strict=True)]
    assert together == reverse == alone
    assert len({tuple(t) for t in together}) > 6


def test_seed_is_derived_from_job_seed_and_index_and_recorded(llm):
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    outputs = llm.generate([[5, 6]] * 3, params)
    assert [o.seed for o in outputs] == [derive_seed(0, i) for i in range(3)]
    assert len({tuple(o.token_ids) for o in outputs}) == 3
    again = [
        llm.generate([[5, 6]], SamplingParams(8, temperature=1.0, ignore_eos=True, seed=o.seed))
        for o in outputs
    ]
    assert [o.token_ids for (o,) in again] == [o.token_ids for o in outputs]


def test_derived_seeds_survive_tools_that_know_only_doubles():
    seeds = {derive_seed(job, index) for job in range(20) for index in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert derive_seed(0, 1) != derive_seed(1, 0)
    assert derive_seed(0, 0, 1) != derive_seed(0, 0, 0)
