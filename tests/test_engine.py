"""The life of a request: admission, order, fairness, stops, aborts and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import Model, Unigram, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from ouro_batch import LLM, SamplingParams
from ouro_batch.engine import scheduler as scheduler_module
from ouro_batch.errors import EngineError, RequestError

from .tiny import CONFIG, write_checkpoint

LOOPS = CONFIG["total_ut_steps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def drain(llm: LLM) -> list:
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    return outputs


def full_depth(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, exit_threshold=1.0, ignore_eos=True, **fields)


def test_nobody_is_told_to_raise_a_limit_that_is_as_high_as_it_can_be(folder):
    for limit, advice in ((64, "lower max_tokens or raise max_model_len"), (256, "max_tokens")):
        with LLM(folder, max_model_len=limit) as llm, pytest.raises(RequestError) as error:
            llm.add_request([1] * limit, SamplingParams(max_tokens=1))
        assert str(error.value).endswith(f"{advice})")


def test_results_come_in_input_order_with_their_own_params(folder):
    llm = LLM(folder, max_rows=3)
    params = [full_depth(n) for n in (9, 1, 5, 3)]
    outputs = llm.generate([[n] for n in range(1, 5)], params)
    assert [len(o.token_ids) for o in outputs] == [9, 1, 5, 3]
    assert [o.usage.prompt_tokens for o in outputs] == [1] * 4
    assert outputs[1].mean_exit_depth is None
    assert outputs[1].usage.loops == 0
    assert outputs[0].mean_exit_depth == LOOPS
    assert all(o.timing.total_s >= o.timing.decode_s >= 0 for o in outputs)


@pytest.mark.parametrize("steps", range(8))
def test_abort_at_every_moment_frees_everything(folder, steps):
    """Waiting, in prefill (one chunk a step), decoding: neighbours are not disturbed."""
    llm = LLM(folder, max_rows=2, max_batched_tokens=4, block_size=2)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    alone = [llm.generate([p], full_depth(6))[0].token_ids for p in prompts]
    ids = [llm.add_request(p, full_depth(6)) for p in prompts]
    for _ in range(steps):
        llm.step()
    aborted = llm.abort(ids[0])
    assert aborted.finish_reason == "abort"
    assert aborted.token_ids == alone[0][: len(aborted.token_ids)]
    assert llm.abort(ids[0]) is None
    by_id = {output.request_id: output.token_ids for output in drain(llm)}
    assert by_id == {ids[1]: alone[1], ids[2]: alone[2]}
    assert llm.blocks.in_use == 0


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_failing_device_frees_everything_and_the_engine_goes_on(folder, monkeypatch, steps):
    """Whatever the step before it had produced and nobody has read yet."""
    llm = LLM(folder, max_rows=4)
    expected = llm.generate([[1, 2]], full_depth(5))[0].token_ids
    for index in range(6):
        llm.add_request([index + 1], full_depth(10))
    for _ in range(steps):
        llm.step()
    model = llm.engine.runner.model

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "loop", fail)
        with pytest.raises(EngineError, match=r"out of memory.*lower max_rows"):
            llm.step()
    assert llm.blocks.in_use == 0
    assert not llm.has_unfinished
    assert llm.generate([[1, 2]], full_depth(5))[0].token_ids == expected


@pytest.mark.parametrize("phase", ["embed", "loop", "logits", "gate"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("device lost")], ids=repr)
def test_whatever_breaks_a_step_nothing_is_left_running(folder, monkeypatch, phase, error):
    llm = LLM(folder, max_rows=2)
    expected = llm.generate([[1, 2]], full_depth(5))[0].token_ids
    for index in range(4):
        llm.add_request([index + 1], full_depth(10))
    for _ in range(3):
        llm.step()

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, phase, fail)
        with pytest.raises((KeyboardInterrupt, EngineError)):
            drain(llm)
    assert llm.blocks.in_use == 0
    assert not llm.has_unfinished
    assert llm.generate([[1, 2]], full_depth(5))[0].token_ids == expected


def test_a_small_request_passes_a_large_one_that_waits_for_memory(folder):
    llm = LLM(folder, max_rows=4, block_size=4, kv_tokens=40, max_model_len=64)
    first = llm.add_request([1] * 8, full_depth(20))
    large = llm.add_request([2] * 20, full_depth(16))
    small = llm.add_request([3] * 2, full_depth(4))
    order = [output.request_id for output in drain(llm)]
    assert order == [small, first, large]


def test_bypass_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_BYPASS", 3)
    llm = LLM(folder, max_rows=2, block_size=4, kv_tokens=40, max_model_len=64)
    llm.add_request([1] * 8, full_depth(8))
    large = llm.add_request([2] * 20, full_depth(20))
    small = [llm.add_request([3] * 2, full_depth(4)) for _ in range(12)]
    order = [output.request_id for output in drain(llm)]
    ahead = [request for request in order[: order.index(large)] if request in small]
    assert len(ahead) <= 3 + 1  # those that passed it; one may already have run beside the first


def test_a_step_never_holds_more_tokens_than_allowed(folder, monkeypatch):
    llm = LLM(folder, max_rows=3, max_batched_tokens=6)
    launch, steps = llm.engine.runner.launch, []

    def count(plan):
        steps.append((plan.decode_rows, sum(len(chunk.tokens) for chunk in plan.chunks)))
        launch(plan)

    monkeypatch.setattr(llm.engine.runner, "launch", count)
    llm.generate([[1] * length for length in (5, 30, 9, 17, 2)], full_depth(8))
    assert max(decode + prefill for decode, prefill in steps) == 6
    assert any(decode and prefill for decode, prefill in steps)


def test_decode_goes_on_while_a_long_prompt_is_prefilled(folder):
    llm = LLM(folder, max_rows=2, max_batched_tokens=6)
    short = llm.add_request([1], full_depth(8))
    long = llm.add_request([2] * 200, full_depth(2))
    outputs = drain(llm)
    assert [o.request_id for o in outputs] == [short, long]
    # and the long prompt was not starved either: it ran beside the short one's decode steps
    assert llm.statistics()["steps"] < 200 / 4 + 8 * LOOPS


def test_serial_runs_one_request_at_a_time(folder):
    llm = LLM(folder, schedule="serial", max_rows=8)
    llm.generate([[i + 1] for i in range(5)], full_depth(3))
    statistics = llm.statistics()
    assert statistics["peak_requests"] == 1
    assert statistics["rows_in_use"]["max"] == 1


@pytest.mark.parametrize(
    ("schedule", "steps_by_rows"),
    [
        ("refill", {"2": 6 * LOOPS}),
        # In each cohort the shallow row runs one loop and waits for the deep one's others.
        ("no-refill", {"2": 6, "1": 6 * (LOOPS - 1) + 6 * LOOPS - 6}),
        ("serial", {"1": 12 * LOOPS}),
    ],
)
def test_a_row_whose_token_has_exited_goes_on_or_waits(folder, schedule, steps_by_rows):
    """One request of shallow tokens and one of deep tokens, of as many loops together."""
    llm = LLM(folder, schedule=schedule, max_rows=2)
    shallow, deep = 6 * LOOPS, 6
    params = [
        SamplingParams(
            max_tokens=tokens + 1, ignore_eos=True, exit_depths=[LOOPS] + [depth] * tokens
        )
        for tokens, depth in [(shallow, 1), (deep, LOOPS)]
    ]
    outputs = llm.generate([[1, 2], [3, 4]], params)
    assert [o.usage.loops for o in outputs] == [shallow, shallow]
    assert llm.statistics()["rows_in_use"]["steps_by_rows"] == steps_by_rows


def test_rows_in_use_counts_what_ran(folder):
    """no-refill: four rows start each token together; one of them leaves after loop 1."""
    llm = LLM(folder, schedule="no-refill", max_rows=4)
    depths = [[LOOPS, 1, 1, 1]] + [[LOOPS] * 4] * 3
    llm.generate([[1]] * 4, [SamplingParams(4, ignore_eos=True, exit_depths=d) for d in depths])
    rows = llm.statistics()["rows_in_use"]["steps_by_rows"]
    assert rows == {"3": 3 * (LOOPS - 1), "4": 3}


def test_stop_token_stays_in_token_ids(folder):
    llm = LLM(folder)
    tokens = llm.generate([[1, 2, 3]], full_depth(12))[0].token_ids
    cut = tokens.index(tokens[6])
    (output,) = llm.generate([[1, 2, 3]], full_depth(12, stop_token_ids=[tokens[6]]))
    assert output.token_ids == tokens[: cut + 1]
    assert output.finish_reason == "stop"


def test_the_checkpoint_threshold_is_the_default(tmp_path):
    early = write_checkpoint(tmp_path / "early", early_exit_threshold=0.0)
    llm = LLM(early)
    prompt = [[5, 6, 7]]
    assert llm.generate(prompt, SamplingParams(5, ignore_eos=True))[0].exit_depths[1:] == [1] * 4
    assert llm.generate(prompt, full_depth(5))[0].exit_depths == [LOOPS] * 5
    limited = SamplingParams(5, ignore_eos=True, min_loops=2)
    assert llm.generate(prompt, limited)[0].exit_depths[1:] == [2] * 4


def test_replay_follows_the_given_depths(folder):
    llm = LLM(folder)
    depths = [LOOPS, 1, 3, 2, 1, 3]
    (output,) = llm.generate([[4, 4]], SamplingParams(6, exit_depths=depths, ignore_eos=True))
    assert output.exit_depths == depths
    gated = SamplingParams(6, exit_threshold=0.5, ignore_eos=True)
    (live,) = llm.generate([[4, 4]], gated)
    replay = SamplingParams(6, exit_depths=live.exit_depths, ignore_eos=True)
    assert llm.generate([[4, 4]], replay)[0].token_ids == live.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        (7, {}, "a prompt must be text or a list of token ids, got 7"),
        (b"ab", {}, "a prompt must be text or a list of token ids, got b'ab'"),
        (bytearray(b"ab"), {}, "a prompt must be text or a list of token ids, got bytearray"),
        ({1, 2}, {}, "a prompt must be text or a list of token ids, got {1, 2}"),
        ({1: 2}, {}, "a prompt must be text or a list of token ids, got {1: 2}"),
        ([48], {}, "token id 48 is outside the vocabulary of 48"),
        ([-1], {}, "token id -1 is outside"),
        ([True], {}, "token ids must be integers, got True"),
        ([1] * 250, {"max_tokens": 10}, "250 prompt tokens and max_tokens 10 make 260"),
        ([1], {"max_tokens": 200}, "needs .* tokens of cache; this cache holds 96"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"stop_token_ids": [48]}, "stop token id 48 is outside"),
        ([1], {"max_tokens": 2, "exit_depths": [1, 2]}, r"exit_depths\[0\] is 1"),
        ([1], {"max_tokens": 2, "exit_depths": [3, 4]}, "exit_depths holds 4; at most 3"),
        ("text", {}, "only prompts of token ids"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_nothing_is_queued(
    folder, prompt, params, message
):
    llm = LLM(folder, kv_tokens=96, block_size=4)
    with pytest.raises(RequestError, match=message):
        llm.add_request(prompt, SamplingParams(**params))
    assert not llm.has_unfinished


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**63, 10**400, 1e39, 1e300, 5e-324])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "top_k", "seed", "exit_threshold", "min_loops", "max_loops"],
)
def test_no_value_of_one_request_stops_the_engine(folder, name, value):
    """A value that a row on the device cannot hold is refused before it gets there."""
    llm = LLM(folder)
    llm.add_request([1, 2], full_depth(3))
    fields = {"temperature": 1.0, "exit_threshold": 0.5, name: value}
    with contextlib.suppress(RequestError):
        llm.add_request([1], SamplingParams(max_tokens=3, ignore_eos=True, **fields))
    assert {len(output.token_ids) for output in drain(llm)} == {3}


@pytest.mark.parametrize(
    ("options", "length", "kept"),
    [
        ({}, 260, 246),  # positions
        ({"kv_tokens": 40, "block_size": 4}, 100, 28),  # cache
        ({"max_model_len": 20}, 30, 10),
    ],
)
def test_a_prompt_that_is_too_long_loses_one_end(folder, options, length, kept):
    llm = LLM(folder, **options)
    prompt = [1 + i % 40 for i in range(length)]
    for too_long, rest in [("truncate-left", prompt[-kept:]), ("truncate-right", prompt[:kept])]:
        expected = llm.generate([rest], full_depth(10))[0]
        llm.add_request(prompt, full_depth(10), too_long=too_long)
        (output,) = drain(llm)
        assert output.usage.prompt_tokens == kept
        assert output.truncated_tokens == length - kept
        assert output.token_ids == expected.token_ids
        assert expected.truncated_tokens == 0
        with pytest.raises(RequestError):  # one more does not fit
            llm.add_request(prompt[: kept + 1], full_depth(10))
    with pytest.raises(RequestError, match="max_tokens"):  # nothing of the prompt would be left
        llm.add_request(prompt, full_depth(400), too_long="truncate-left")
    assert llm.blocks.in_use == 0


def spell(folder: Path, model: Model, added: Sequence[str] = ()) -> None:
    """Give a checkpoint a tokenizer of whole words."""
    tokenizer = Backend(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))


WORDS = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("model", "added", "message"),
    [
        (WordLevel(WORDS | {f"<{i}>": i for i in [0, *range(3, 48)]}), ["<48>"], "token id 48"),
        (WordLevel(WORDS | {"<unk>": 99}, unk_token="<unk>"), [], "token id 99"),
        (WordLevel(WORDS), [], "the tokenizer cannot encode the text"),
        (Unigram([("a", -1.0), ("b", -1.0)], None), [], "the tokenizer cannot encode the text"),
    ],
    ids=["added-token", "unknown-token", "no-unknown-token", "unigram"],
)
@pytest.mark.parametrize("chat", [False, True], ids=["prompt", "messages"])
def test_no_text_of_one_request_stops_the_engine(tmp_path, model, added, message, chat):
    """A tokenizer may know more tokens than the model, or not know what to do with a text."""
    folder = write_checkpoint(tmp_path)
    spell(folder, model, added)
    template = "{% for message in messages %}{{ message.content }} <48>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    llm = LLM(folder)
    llm.add_request("a", full_depth(3))
    messages = [{"role": "user", "content": "a"}]
    request = {"messages": messages} if chat else {"prompt": "a <48>"}
    with pytest.raises(RequestError, match=message):
        llm.add_request(params=full_depth(3), **request)
    (output,) = drain(llm)
    assert len(output.token_ids) == 3


@pytest.mark.parametrize("schedule", ["refill", "no-refill", "serial"])
@pytest.mark.parametrize("rows", [2, 3], ids=["row-taken-over", "row-left-free"])
def test_a_stop_string_ends_a_request_and_nothing_else(tmp_path, schedule, rows):
    """What the device has run beyond it is dropped: its row goes to others undisturbed."""
    folder = write_checkpoint(tmp_path)
    spell(folder, WordLevel({f"w{i}": i for i in range(48)}))
    llm = LLM(folder, schedule=schedule, max_rows=rows)
    shallow = {"exit_threshold": 0.0, "ignore_eos": True}  # a token a step
    params = [SamplingParams(n, **shallow) for n in (12, 30, 9)]
    prompts = [[1, 2], [3, 4], [5, 6]]
    whole, *others = [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    texts = llm.token_texts(whole.token_ids)
    stop = "".join(texts[3:5])[1:-1]  # across the border of two tokens
    cut = whole.text.index(stop)
    seen = next(i for i in range(12) if stop in "".join(texts[: i + 1]))
    before = llm.statistics()

    stopped, *rest = llm.generate(
        prompts, [SamplingParams(12, stop=[stop], **shallow), *params[1:]]
    )
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[:cut]
    assert stopped.token_ids == whole.token_ids[: seen + 1]
    assert len(stopped.exit_depths) == seen + 1
    assert [(o.token_ids, o.text) for o in rest] == [(o.token_ids, o.text) for o in others]
    after = llm.statistics()
    assert after["dropped_tokens"] - before["dropped_tokens"] == 1
    assert after["completion_tokens"] - before["completion_tokens"] == seen + 1 + 30 + 9


def test_the_end_of_turn_token_ends_chat_requests_alone(tmp_path):
    folder = write_checkpoint(tmp_path)
    tokens = LLM(folder).generate([[1, 2]], full_depth(12))[0].token_ids
    end = tokens[5]
    spell(folder, WordLevel({f"w{i}": i for i in range(48)}), [f"w{end}"])
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}"
        f"{{% if message.role == 'assistant' %}} w{end}{{% endif %}}{{% endfor %}}"
    )
    llm = LLM(folder)
    params = SamplingParams(12, exit_threshold=1.0)
    conversation = [{"role": "user", "content": "w1 w2"}]
    (chat,) = llm.chat([conversation], params)
    assert chat.token_ids == tokens[: tokens.index(end) + 1]
    assert chat.finish_reason == "stop"
    assert f"w{end}" not in chat.text.split()
    assert llm.generate(["w1 w2"], params)[0].token_ids == tokens
    assert llm.chat([conversation], full_depth(12))[0].token_ids == tokens  # ignore_eos


@pytest.mark.parametrize("eos", [48, 2**40, [*range(48, 99)]], ids=["48", "2**40", "many"])
def test_an_eos_token_that_the_model_cannot_produce_ends_nothing(tmp_path, eos):
    llm = LLM(write_checkpoint(tmp_path, eos_token_id=eos))
    (output,) = llm.generate([[1, 2]], SamplingParams(4))
    assert output.finish_reason == "length"
    assert output.token_ids == llm.generate([[1, 2]], full_depth(4))[0].token_ids


def test_generate_names_the_prompt_it_refuses_and_runs_none(folder):
    llm = LLM(folder)
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.generate([[1], []])
    assert not llm.has_unfinished
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        llm.generate([[1]], [SamplingParams()] * 2)


def test_requests_beside_a_generate_call_keep_running(folder):
    """A request added by hand is finished by ``step``, never swallowed by ``generate``."""
    llm = LLM(folder)
    mine = llm.add_request([1, 2], full_depth(3))
    expected = llm.generate([[1, 2]], full_depth(9))
    assert len(expected[0].token_ids) == 9
    assert [o.request_id for o in drain(llm)] == [mine]


def test_a_closed_llm_says_so(folder):
    with LLM(folder) as llm:
        llm.generate([[1]], full_depth(1))
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1]])
