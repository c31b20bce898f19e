"""Log-probabilities and several samples a prompt, through the engine."""

from __future__ import annotations

import pytest
import torch

from ouro_batch import LLM, SamplingParams
from ouro_batch.errors import RequestError
from ouro_batch.intake import sample_seed

from .conftest import load_oracle
from .tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_log_probabilities_are_those_of_the_golden_logits():
    """Greedy and sampled alike: of the logits as they are."""
    oracle = load_oracle("mha-4loop")
    with LLM(oracle.folder, dtype="float32", max_rows=4) as llm:
        for case in oracle.cases[:6]:
            params = oracle.params(case)
            fields = {name: getattr(params, name) for name in SamplingParams.names()}
            plain = llm.generate([case["prompt"]], params)[0]
            with_them = llm.generate([case["prompt"]], SamplingParams(**fields | {"logprobs": 5}))
            assert with_them[0].token_ids == plain.token_ids == case["tokens"]
            assert plain.logprobs is None
            assert len(with_them[0].logprobs) == len(case["tokens"])
            for token, entry in zip(case["tokens"], with_them[0].logprobs, strict=True):
                assert len(entry.top) == 5
                values = [value for _, value in entry.top]
                assert values == sorted(values, reverse=True)
                if params.temperature == 0:
                    assert entry.top[0] == (token, entry.logprob)
                for id, value in entry.top:
                    if id == token:
                        assert value == entry.logprob


def test_log_probabilities_of_a_first_token_against_the_model_itself(folder):
    llm = LLM(folder, max_rows=2)
    model = llm.engine.runner.model
    prompt = [1, 5, 9, 2]
    params = SamplingParams(
        max_tokens=1, temperature=1.5, top_k=3, seed=4, logprobs=20, ignore_eos=True
    )
    output = llm.generate([prompt], params)[0]
    positions = torch.arange(len(prompt))
    hidden = model.embed(torch.tensor(prompt))

    def attend(layer, q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        for _ in range(model.config.loops):
            hidden = model.loop(hidden, model.rope(positions), attend)
        want = model.logits(hidden[-1:])[0].log_softmax(-1)
    entry = output.logprobs[0]
    assert entry.logprob == pytest.approx(float(want[output.token_ids[0]]), abs=1e-5)
    top = want.topk(20)
    assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_each_request_gets_as_many_as_it_asked_for(folder):
    llm = LLM(folder, max_rows=4)
    asked = [None, 0, 3, 20, None, 1]
    params = [SamplingParams(max_tokens=5, ignore_eos=True, logprobs=k) for k in asked]
    for k, output in zip(asked, llm.generate([[n + 1] for n in range(6)], params), strict=True):
        if k is None:
            assert output.logprobs is None
        else:
            assert [len(entry.top) for entry in output.logprobs] == [k] * 5


def test_more_than_the_vocabulary_cannot_be_asked_for(tmp_path):
    folder = write_checkpoint(tmp_path, vocab_size=12)
    with pytest.raises(RequestError, match="logprobs 13 asks for more tokens than the 12"):
        LLM(folder).generate([[1]], SamplingParams(logprobs=13))


@pytest.mark.parametrize("fields", [{"logprobs": -1}, {"logprobs": 21}, {"logprobs": True}])
def test_bad_values_are_named(fields):
    with pytest.raises(RequestError, match="logprobs must be"):
        SamplingParams(**fields)


def random_params(**fields) -> SamplingParams:
    return SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, **fields)


def test_samples_come_one_after_another_each_with_its_seed(folder):
    llm = LLM(folder, max_rows=3, seed=7)
    outputs = llm.generate([[1, 2], [3], [4, 5, 6]], [random_params(n=n) for n in (3, 1, 2)])
    assert [(o.index, o.sample) for o in outputs] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert len({o.seed for o in outputs}) == 6
    assert outputs[0].token_ids != outputs[1].token_ids
    single = llm.generate([[1, 2], [3], [4, 5, 6]], random_params())
    assert [o.token_ids for o in single] == [outputs[at].token_ids for at in (0, 3, 4)]


def test_a_sample_is_the_same_alone_and_in_any_batch(folder):
    params = random_params(n=4, seed=11)
    together = LLM(folder, max_rows=4).generate([[1, 2]] * 2, params)
    assert [o.seed for o in together[:4]] == [11, *(sample_seed(11, j) for j in (1, 2, 3))]
    assert [o.token_ids for o in together[:4]] == [o.token_ids for o in together[4:]]
    llm = LLM(folder, max_rows=1)
    for sample in (3, 1):
        alone = llm.generate([[1, 2]], random_params(seed=sample_seed(11, sample)))[0]
        assert alone.token_ids == together[sample].token_ids
        llm.add_request([1, 2], params, sample=sample)
        [output] = [o for _ in range(200) if llm.has_unfinished for o in llm.step()]
        assert (output.sample, output.token_ids) == (sample, alone.token_ids)


def test_one_request_of_several_samples_must_say_which(folder):
    llm = LLM(folder)
    with pytest.raises(RequestError, match=r"say which \(sample=0 to 3\)"):
        llm.add_request([1], random_params(n=4))
    for sample in (4, -1, True, "1"):
        with pytest.raises(RequestError, match="sample must be from 0 to 3"):
            llm.add_request([1], random_params(n=4), sample=sample)
    assert not llm.has_unfinished


@pytest.mark.parametrize("n", [0, -1, 1025, 1.5, True])
def test_bad_numbers_of_samples_are_named(n):
    with pytest.raises(RequestError, match="n must be"):
        SamplingParams(n=n)
