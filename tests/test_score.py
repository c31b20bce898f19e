"""Given completions in one pass: the log-probabilities and depths that generating them gave."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from ouro_batch import LLM, SamplingParams
from ouro_batch.errors import RequestError
from ouro_batch.validate.oracle import SerialOracle

from .tiny import CONFIG, write_checkpoint

LOOPS = CONFIG["total_ut_steps"]
PROMPTS = [[1, 2, 3], [4], list(range(5, 40))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_checkpoint(tmp_path_factory.mktemp("tiny")), max_rows=3)


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 1.0])
def test_a_generation_scores_as_it_was_generated(llm, threshold):
    params = SamplingParams(
        14, temperature=0.8, seed=3, exit_threshold=threshold, logprobs=2, ignore_eos=True
    )
    outputs = llm.generate(PROMPTS, params)
    completions = [o.token_ids for o in outputs]
    depths = [o.exit_depths for o in outputs]
    given = llm.score(PROMPTS, completions, depths)
    decided = llm.score(PROMPTS, completions, params=params)
    for output, score, own in zip(outputs, given, decided, strict=True):
        assert score.token_ids == output.token_ids
        assert score.exit_depths == own.exit_depths == output.exit_depths
        logprobs = [entry.logprob for entry in output.logprobs]
        assert score.logprobs == pytest.approx(logprobs, abs=5e-5)
        assert own.logprobs == pytest.approx(logprobs, abs=5e-5)
        for best, margin, entry in zip(score.best, score.margins, output.logprobs, strict=True):
            (first, top), (_, second) = entry.top
            assert best == first
            assert margin == pytest.approx(top - second, abs=1e-4)


def test_depths_that_no_gate_chose(llm, tmp_path):
    """Against the oracle, which copies keys and values one token at a time."""
    oracle = SerialOracle.from_folder(write_checkpoint(tmp_path))
    depths = [LOOPS, 1, 2, 3, 1, 1, 3, 2]
    expected = oracle.generate(PROMPTS[0], SamplingParams(8, exit_depths=depths, ignore_eos=True))
    (score,) = llm.score([PROMPTS[0]], [expected.tokens], [depths])
    assert score.best == expected.tokens
    assert score.margins == pytest.approx(expected.margins, abs=1e-4)
    (other,) = llm.score([PROMPTS[0]], [expected.tokens], [[LOOPS] * 8])
    assert other.logprobs != pytest.approx(score.logprobs, abs=1e-3)


def test_loops_are_kept_between_their_bounds(llm):
    for params, allowed in (
        (SamplingParams(exit_threshold=0.0, min_loops=2), {2}),
        (SamplingParams(exit_threshold=1.0, max_loops=2), {2}),
        (SamplingParams(exit_threshold=0.5, min_loops=9), {LOOPS}),
    ):
        (score,) = llm.score([[1, 2]], [[3, 4, 5, 6]], params=params)
        assert score.exit_depths[0] == LOOPS
        assert set(score.exit_depths[1:]) == allowed


def test_running_requests_are_not_disturbed(llm):
    alone = llm.generate([[9, 8]], SamplingParams(10, ignore_eos=True))[0].token_ids
    request = llm.add_request([9, 8], SamplingParams(10, ignore_eos=True))
    llm.step()
    llm.step()
    llm.score(PROMPTS, [[1, 2, 3]] * 3)
    outputs = [o for _ in range(100) if llm.has_unfinished for o in llm.step()]
    assert [(o.request_id, o.token_ids) for o in outputs] == [(request, alone)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], []), "must be equally many"),
        (([[1]], [[2]], []), "must be equally many"),
        (([[1]], [[]]), "prompt 0: a prompt and a completion need at least one token"),
        (
            ([[1], [2]], [[1], [99]]),
            "prompt 1: the completion: token id 99 is outside the vocabulary",
        ),
        (([[1]], [[2, 3]], [[LOOPS]]), "prompt 0: 1 exit_depths for 2 completion tokens"),
        (([[1]], [[2, 3]], [[1, 1]]), "prefill runs all 3 loops"),
        (([[1]], [[2, 3]], [[LOOPS, 4]]), "integers from 1 to 3, got 4"),
        (
            ([[1] * 250], [[2] * 10]),
            "250 prompt tokens and 10 completion tokens are more than the 256",
        ),
        (("abc", "def"), "prompts must be a list, got 'abc'"),
        ((iter([[1]]), [[2]]), "prompts must be a list"),
        (([[1]], [[2]], 5), "exit_depths must be a list, got 5"),
        (([[1]], [[2]], [5]), "exit_depths must be a list of integers, got 5"),
        (([[1]], [[True]]), "prompt 0: the completion: token ids must be integers, got True"),
        (([[1]], [[2]], None, SamplingParams(1, exit_depths=[LOOPS])), "give them as exit_depths"),
        (([[1]], [[2]], None, [SamplingParams()]), "params must be SamplingParams, got "),
    ],
)
def test_what_cannot_be_scored_is_named(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.score(*arguments)


def test_without_depths_for_one_its_gate_decides(llm):
    given = [[LOOPS, 1, 2], None]
    fixed, free = llm.score([[1], [1]], [[2, 3, 4]] * 2, given)
    assert fixed.exit_depths == [LOOPS, 1, 2]
    assert free == llm.score([[1]], [[2, 3, 4]])[0]


def test_numbers_that_overflow_are_an_error_and_no_score(tmp_path):
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 1e4  # finite itself
    tensors["model.norm.weight"] *= 50
    save_file(tensors, folder / "model.safetensors")
    with LLM(folder, dtype="float16", device="cpu") as llm:
        with pytest.raises(RequestError, match="overflow in float16") as caught:
            llm.score([[1, 2]], [[3, 4]])
        assert caught.value.type == "not_finite"
    with LLM(folder, device="cpu") as llm:
        assert llm.score([[1, 2]], [[3, 4]])


def test_a_vocabulary_of_one_token(tmp_path):
    with LLM(write_checkpoint(tmp_path, vocab_size=1)) as llm:
        (score,) = llm.score([[0]], [[0, 0]])
    assert score.logprobs == [0.0, 0.0]
    assert score.margins == [float("inf")] * 2
