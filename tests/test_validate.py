"""``validate``: green on what is right, red with the right name on what is broken on purpose."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ouro_batch import intake
from ouro_batch.attention.fixed import FixedAttention
from ouro_batch.attention.reference import ReferenceAttention
from ouro_batch.cli import app
from ouro_batch.engine.kv import BlockManager
from ouro_batch.intake import Intake
from ouro_batch.model.config import ModelConfig
from ouro_batch.params import SamplingParams
from ouro_batch.runner import eager, sampling
from ouro_batch.runner.row_blocks import RowBlocks
from ouro_batch.runner.state import RowState
from ouro_batch.validate import history, quality
from ouro_batch.validate.check import Context, Question
from ouro_batch.validate.precision import allowed, within
from ouro_batch.validate.prompts import random_prompts
from ouro_batch.validate.record import CHECKS, as_markdown, make_record, run_checks

from .tiny import write_checkpoint

ROOT = Path(__file__).parents[1]
TINY_OURO = ROOT / "samples" / "tiny-ouro"
SMALL = [name for name in CHECKS if name != "quality"]


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = ModelConfig.from_folder(folder)
    prompts = random_prompts(config, full=False)
    return Context(str(folder), folder, config, torch.device("cpu"), False, prompts, [])


def verdicts(context: Context, *names: str) -> dict[str, bool | None]:
    done = run_checks(context, names or SMALL, lambda name, result: None)
    for result, _ in done:
        assert not result.note.startswith(("TypeError", "AttributeError", "KeyError")), result
    return {result.name: result.passed for result, _ in done}


def test_every_check_of_a_small_model(context):
    assert verdicts(context) == dict.fromkeys(SMALL, True)


@pytest.mark.slow
def test_quick_level_on_the_sample_model(tmp_path):
    """Through the command line, as a user would; its record in both forms."""
    record = tmp_path / "validation.json"
    command = [
        *(sys.executable, "-m", "ouro_batch", "validate", "--model", str(TINY_OURO)),
        *("--prompts", str(ROOT / "samples" / "prompts.jsonl"), "--output", str(record)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(record.read_bytes())
    assert found["passed"]
    assert found["level"] == "quick"
    assert {check["name"]: check["passed"] for check in found["checks"]} == dict.fromkeys(
        CHECKS, True
    )
    for name in ("machine", "versions", "commit", "date", "command", "model"):
        assert name in found
    page = record.with_suffix(".md").read_text()
    for check in found["checks"]:
        assert f"## {check['name']}: passed" in page
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "validation.json exists (--overwrite" in again.stderr


def break_norm(patch):
    """The norm after the MLP is left out."""
    loop = eager.Ouro._norm

    def skip(self, x: Tensor, weight: Tensor) -> Tensor:
        skipped = any(weight is layer.post_norm_2 for layer in self.weights.layers)
        return x if skipped else loop(self, x, weight)

    patch.setattr(eager.Ouro, "_norm", skip)


def break_precision_of_products(patch):
    """TF32 left on: products see 10 bits of each number's fraction."""
    linear = torch.nn.functional.linear

    def tf32(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    patch.setattr(
        "ouro_batch.model.ouro.F.linear",
        lambda x, weight, bias=None: linear(tf32(x), tf32(weight), bias),
    )


def break_plane(patch):
    """A token that leaves early is seen through the plane before its last."""
    publish = RowState.publish_last_exited

    def wrong(self, rows: Tensor, planes: Tensor) -> None:
        last = self.tables.decode_slots.shape[1] - 1
        publish(self, rows, torch.where(planes < last, (planes - 1).clamp(min=0), planes))

    patch.setattr(RowState, "publish_last_exited", wrong)


def break_block(patch):
    """A block goes back while its tokens are still read, and another request fills it."""
    trim = BlockManager.trim
    patch.setattr(
        BlockManager,
        "trim",
        lambda self, owned, slots: trim(self, owned, max(0, slots - self.block_size)),
    )


def break_release(patch):
    """A block is forgotten each time."""
    give = BlockManager._give
    patch.setattr(BlockManager, "_give", lambda self, blocks: give(self, blocks[1:]))


def break_seed(patch):
    """Samples depend on the row that a request happens to have."""

    def sample(self, rows: Tensor, logits: Tensor) -> Tensor:
        state = self.state
        return eager.sample(
            logits,
            state.temperature[rows],
            state.top_k[rows],
            state.top_p[rows],
            rows,
            state.generated[rows].long(),
        )

    patch.setattr(eager.EagerRunner, "_sample", sample)


def break_logprobs(patch):
    """Log-probabilities after the temperature."""
    whole = eager.log_probabilities
    patch.setattr(
        eager, "log_probabilities", lambda logits, tokens, k: whole(logits / 1.01, tokens, k)
    )


def break_rounding(patch):
    """What norms give loses two bits more than BF16 does."""
    norm = eager.Ouro._norm

    def coarse(self, x: Tensor, weight: Tensor) -> Tensor:
        y = norm(self, x, weight)
        return (y * 64).round() / 64 if self.dtype == torch.bfloat16 else y

    patch.setattr(eager.Ouro, "_norm", coarse)


def break_split(patch):
    """Products of few rows are split in two sums, as where a library fills a GPU with them."""
    linear = torch.nn.functional.linear

    def split(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        half = x.shape[1] // 2
        if len(x) > 3 or bias is not None:
            return linear(x, weight, bias)
        return linear(x[:, :half], weight[:, :half]) + linear(x[:, half:], weight[:, half:])

    patch.setattr("ouro_batch.model.ouro.F.linear", split)
    patch.setattr(RowBlocks, "parts", lambda self, count, size=None: [slice(0, count)])
    patch.setattr(RowBlocks, "_fill", lambda self, x: x)


def break_history_of_many_rows(patch):
    """Tokens of rows beyond the first few are not seen through their last plane."""
    publish = RowState.publish_last_exited

    def few(self, rows: Tensor, planes: Tensor) -> None:
        publish(self, rows[rows < 8], planes[rows < 8])

    patch.setattr(RowState, "publish_last_exited", few)


def break_one_depth(patch):
    """Tokens that leave before the last loop but one are right, those that leave after it not."""
    publish = RowState.publish_last_exited

    def wrong(self, rows: Tensor, planes: Tensor) -> None:
        last = self.tables.decode_slots.shape[1] - 2
        publish(self, rows, torch.where(planes == last, planes - 1, planes))

    patch.setattr(RowState, "publish_last_exited", wrong)


def break_own_threshold(patch):
    """The checkpoint's own threshold counts for nothing."""
    threshold = Intake.exit_threshold

    def other(self, params: SamplingParams) -> float:
        return 0.3 if params.exit_threshold is None else threshold(self, params)

    patch.setattr(Intake, "exit_threshold", other)


def break_end(patch):
    """Stop tokens end nothing."""
    patch.setattr(Intake, "_stop_ids", lambda self, params, chat: ())


def break_window(patch):
    """A token sees only the keys right before it."""
    plan = ReferenceAttention.plan_decode

    def near(self, tables, rows: Tensor, planes: Tensor, contexts: Tensor):
        made = plan(self, tables, rows, planes, contexts)
        places = torch.arange(made.slots.shape[1])
        return replace(made, hidden=made.hidden | (places < contexts[:, None] - 129))

    patch.setattr(ReferenceAttention, "plan_decode", near)


def break_far_positions(patch):
    """Positions far from the beginning are all one."""
    rope = eager.Ouro.rope
    patch.setattr(eager.Ouro, "rope", lambda self, positions: rope(self, positions.clamp(max=200)))


def break_top_p(patch):
    keep = sampling.keep_top
    patch.setattr(sampling, "keep_top", lambda x, k, p: keep(x, k, torch.ones_like(p)))


def break_top_k(patch):
    """One token more than asked for."""
    keep = sampling.keep_top
    patch.setattr(sampling, "keep_top", lambda x, k, p: keep(x, k + (k > 0).to(k.dtype), p))


def break_noise(patch):
    """Too little of it: draws favour the likeliest."""
    noise = sampling.gumbel_noise
    patch.setattr(sampling, "gumbel_noise", lambda *given: noise(*given) / 2)


def break_seeds(patch):
    """All requests draw the same."""
    noise = sampling.gumbel_noise
    patch.setattr(
        sampling, "gumbel_noise", lambda seeds, *given: noise(torch.zeros_like(seeds), *given)
    )


def break_places(patch):
    """The second token is drawn with the first one's noise."""
    noise = sampling.gumbel_noise
    patch.setattr(
        sampling, "gumbel_noise", lambda seeds, at, size: noise(seeds, torch.zeros_like(at), size)
    )


def break_likeliest(patch):
    """The likeliest token is left out of those that are named."""
    whole = eager.log_probabilities

    def shifted(logits: Tensor, tokens: Tensor, k: int):
        logprob, top, ids = whole(logits, tokens, k + 1)
        return logprob, top[:, 1:], ids[:, 1:]

    patch.setattr(eager, "log_probabilities", shifted)


def break_unseeded(patch):
    """Requests without a seed of their own all have the job's."""
    derive = intake.derive_seed
    patch.setattr(intake, "derive_seed", lambda seed, index, sample: derive(seed, 0, 0))


def break_high_bits_of_seeds(patch):
    noise = sampling.gumbel_noise
    patch.setattr(sampling, "gumbel_noise", lambda seeds, *given: noise(seeds & 0xFFFF, *given))


def break_late_places(patch):
    """Tokens after the second are drawn with its noise."""
    noise = sampling.gumbel_noise
    patch.setattr(
        sampling, "gumbel_noise", lambda seeds, at, size: noise(seeds, at.clamp(max=1), size)
    )


def break_late_top_p(patch):
    """Only the first token is drawn with top-p."""
    draw = eager.sample

    def first(logits, temperature, top_k, top_p, seeds, positions):
        top_p = torch.where(positions > 0, torch.ones_like(top_p), top_p)
        return draw(logits, temperature, top_k, top_p, seeds, positions)

    patch.setattr(eager, "sample", first)


def break_late_lists(patch):
    """The likeliest tokens come in the wrong order where there are many."""
    whole = eager.log_probabilities

    def reversed_(logits: Tensor, tokens: Tensor, k: int):
        logprob, top, ids = whole(logits, tokens, k)
        return logprob, top.flip(1), ids.flip(1)

    def maybe(logits: Tensor, tokens: Tensor, k: int):
        return (reversed_ if k > 5 else whole)(logits, tokens, k)

    patch.setattr(eager, "log_probabilities", maybe)


def break_late_history(patch):
    """Tokens far into an answer are not seen through their last plane."""
    publish = RowState.publish_last_exited

    def early(self, rows: Tensor, planes: Tensor) -> None:
        soon = self.generated[rows] < 26
        publish(self, rows[soon], planes[soon])

    patch.setattr(RowState, "publish_last_exited", early)


def break_least_loops(patch):
    """No more than one loop is asked for."""
    exits = eager.EagerRunner._exits

    def soon(self, *given: Tensor) -> Tensor:
        self.state.min_loops.clamp_(max=1)
        return exits(self, *given)

    patch.setattr(eager.EagerRunner, "_exits", soon)


def break_high_thresholds(patch):
    """Thresholds near 1 are taken for 1."""
    threshold = Intake.exit_threshold

    def other(self, params: SamplingParams) -> float:
        own = threshold(self, params)
        return own if own < 0.96 else float("inf")

    patch.setattr(Intake, "exit_threshold", other)


def break_many_stops(patch):
    stop_ids = Intake._stop_ids
    patch.setattr(
        Intake, "_stop_ids", lambda self, params, chat: stop_ids(self, params, chat=chat)[:2]
    )


def break_later_chunks(patch):
    """A chunk of a prompt does not see what came before it, where that is long."""
    plan = ReferenceAttention.plan_prefill

    def short(self, tables, segments):
        made = plan(self, tables, segments)
        for segment, slots in zip(made.segments, made.slots, strict=True):
            if segment.start >= 64:
                slots[:, : segment.start] = slots[:, segment.start : segment.start + 1]
        return made

    patch.setattr(ReferenceAttention, "plan_prefill", short)


def break_invariant_attention(patch):
    """Scores of the arithmetic of batch invariance are of another size."""
    attend = FixedAttention._attend
    patch.setattr(FixedAttention, "_attend", lambda self, q, *given: attend(self, q * 0.9, *given))


@pytest.mark.parametrize(
    ("broken", "red", "green"),
    [
        (break_history_of_many_rows, "history", "schedules"),
        (break_one_depth, "history", "schedules"),
        (break_own_threshold, "history", "schedules"),
        (break_end, "history", "equations"),
        (break_window, "equations", "schedules"),
        (break_far_positions, "equations", "schedules"),
        (break_top_p, "sampling", "equations"),
        (break_top_k, "sampling", "equations"),
        (break_noise, "sampling", "equations"),
        (break_seeds, "sampling", "equations"),
        (break_places, "sampling", "equations"),
        (break_likeliest, "sampling", "schedules"),
        pytest.param(break_unseeded, "sampling", "equations", marks=pytest.mark.slow),
        pytest.param(break_high_bits_of_seeds, "sampling", "equations", marks=pytest.mark.slow),
        pytest.param(break_late_places, "sampling", "equations", marks=pytest.mark.slow),
        pytest.param(break_late_top_p, "sampling", "equations", marks=pytest.mark.slow),
        pytest.param(break_late_lists, "replay", "equations", marks=pytest.mark.slow),
        pytest.param(break_late_history, "history", "equations", marks=pytest.mark.slow),
        pytest.param(break_least_loops, "history", "equations", marks=pytest.mark.slow),
        pytest.param(break_high_thresholds, "history", "equations", marks=pytest.mark.slow),
        pytest.param(break_many_stops, "history", "equations", marks=pytest.mark.slow),
        pytest.param(break_later_chunks, "equations", "sampling", marks=pytest.mark.slow),
        pytest.param(break_invariant_attention, "equations", "sampling", marks=pytest.mark.slow),
        (break_norm, "equations", "schedules"),
        (break_precision_of_products, "equations", "schedules"),
        (break_plane, "history", "equations"),
        (break_block, "history", "equations"),
        (break_seed, "schedules", "equations"),
        (break_logprobs, "replay", "schedules"),
        (break_release, "resources", "equations"),
        (break_rounding, "precision", "equations"),
        (break_split, "invariance", "equations"),
    ],
)
def test_what_is_broken_turns_its_check_red(context, monkeypatch, broken, red, green):
    broken(monkeypatch)
    assert verdicts(context, red, green) == {red: False, green: True}


def sample_questions(monkeypatch) -> Context:
    """Questions that the sample model answers, at one threshold."""
    monkeypatch.setattr(quality, "QUICK_THRESHOLDS", (0.5,))
    lines = (ROOT / "samples" / "prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[::2]]
    questions = [
        Question(
            {name: r[name] for name in ("prompt", "messages") if name in r},
            r["metadata"]["answer"],
            SamplingParams(r["max_tokens"]),
        )
        for r in records
    ]
    config = ModelConfig.from_folder(TINY_OURO)
    device = torch.device("cpu")
    return Context(str(TINY_OURO), TINY_OURO, config, device, False, [[5]], questions)


def test_a_gate_that_leaves_too_early_turns_quality_red(monkeypatch):
    context = sample_questions(monkeypatch)
    monkeypatch.setattr(
        "ouro_batch.intake.Intake.exit_threshold",
        lambda self, params: 0.0 if params.exit_threshold < 1 else float("inf"),
    )
    assert verdicts(context, "quality") == {"quality": False}


def test_a_threshold_that_does_not_lower_depth_turns_quality_red(monkeypatch):
    context = sample_questions(monkeypatch)
    monkeypatch.setattr(
        "ouro_batch.intake.Intake.exit_threshold",
        lambda self, params: 1 - params.exit_threshold if params.exit_threshold < 1 else 0.0,
    )
    assert verdicts(context, "quality") == {"quality": False}


@pytest.mark.parametrize("dims", [1, 64])
def test_few_tokens_may_be_above_the_limit_by_chance_only(dims):
    """606 tokens of random errors: the same size passes, 1.6 times it does not, whatever is
    drawn; with 10,000 tokens the limit is exact."""
    generator = torch.Generator().manual_seed(0)

    def squares(tokens: int, size: float) -> list[Tensor]:
        errors = size * torch.randn(tokens, dims, generator=generator, dtype=torch.float64)
        return list(errors.square().mean(1).tensor_split(8))

    for _ in range(50):
        assert within(squares(606, 1.0), squares(606, 1.0), 1.21)
        assert not within(squares(606, 1.6), squares(606, 1.0), 1.21)
    theirs = squares(10_000, 1.0)
    assert within([1.2 * text for text in theirs], theirs, 1.21)
    assert not within([1.22 * text for text in theirs], theirs, 1.21)


def test_texts_that_repeat_themselves_are_few_errors_counted_often():
    """Eight errors, 75 times each, are no worse than others of the same kind."""
    generator = torch.Generator().manual_seed(0)

    def squares(size: float) -> list[Tensor]:
        errors = size * torch.randn(8, 1, generator=generator, dtype=torch.float64)
        return list(errors.square().expand(8, 75))

    assert sum(within(squares(1.0), squares(1.0), 1.21) for _ in range(200)) >= 195


@pytest.mark.parametrize("tokens", [606, 10_000])
def test_the_ratio_that_the_record_calls_allowed_is_the_one_that_passes(tokens):
    generator = torch.Generator().manual_seed(0)
    verdicts = set()
    for size in torch.linspace(0.9, 1.6, 50):
        ours, theirs = (torch.randn(8, tokens // 8, generator=generator).square() for _ in range(2))
        ours *= size
        ratio = float(ours.mean() / theirs.mean())
        passed = within(list(ours), list(theirs), 1.1)
        assert passed == (ratio <= allowed(list(ours), list(theirs), 1.1))
        verdicts.add(passed)
    assert verdicts == {True, False}
    assert allowed([torch.ones(3)], [torch.zeros(3)], 1.1) is None


def test_a_model_too_large_for_the_oracle_is_said_and_is_no_failure(context, monkeypatch):
    monkeypatch.setattr(history, "CPU_PARAMETERS", 10_000)
    ((result, _),) = run_checks(context, ["history"], lambda name, result: None)
    assert result.passed is None
    assert "10,000 parameters" in result.note


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "default", "factor": 4.0}},
        {"early_exit_threshold": None, "tie_word_embeddings": None},
        {"early_exit_threshold": 0.5, "eos_token_id": [3, 5, 7, 9]},
        {"max_position_embeddings": 20},
        {"max_position_embeddings": 56, "total_ut_steps": 1},
        {"vocab_size": 2},
        {"vocab_size": 3},
        {"lm_head": 0.0},
        {"lm_head": 1e4},
        {"old": True},
    ],
    ids=str,
)
def test_no_false_red_of_a_model_that_is_unusual(tmp_path, change):
    folder = write_checkpoint(tmp_path)
    change = dict(change)
    tensors = load_file(folder / "model.safetensors")
    if change.pop("old", False):
        save_file({name: t + 1 for name, t in tensors.items()}, folder / "zz-old.safetensors")
    if "lm_head" in change:
        tensors["lm_head.weight"] *= change.pop("lm_head")
        save_file(tensors, folder / "model.safetensors")
    if "vocab_size" in change:
        write_checkpoint(tmp_path, **change)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    if "rope_parameters" in change:
        del config["rope_theta"]
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    config = ModelConfig.from_folder(folder)
    prompts = random_prompts(config, full=False)
    context = Context(str(folder), folder, config, torch.device("cpu"), False, prompts, [])
    names = ("equations", "history", "schedules", "replay", "resources", "sampling")
    for result, _ in run_checks(context, names, lambda name, result: None):
        assert result.passed is not False, result


def test_a_lower_threshold_may_cost_more_by_chance_only():
    draw = random.Random(0)
    red = 0
    for _ in range(200):
        low, high = ([1 + draw.random() for _ in range(12)] for _ in range(2))
        red += quality.costs_more(low, high)
    assert red <= 10
    assert quality.costs_more([2.0 + draw.random() for _ in range(60)], [1.0] * 60)
    assert not quality.costs_more([None, 1.0], [2.0, None])
    assert not quality.costs_more([1.0], [1.0])


def test_what_cannot_run_is_said_and_is_no_failure(context):
    ((result, _),) = run_checks(context, ["quality"], lambda name, result: None)
    assert result.passed is None
    assert "metadata.answer" in result.note
    record = make_record(context, {"name": "tiny"}, "ouro-batch validate", [(result, 0.1)])
    assert not record["passed"]  # nothing was checked
    done = run_checks(context, ["quality", "resources"], lambda name, result: None)
    assert make_record(context, {"name": "tiny"}, "ouro-batch validate", done)["passed"]
    assert "## quality: not run" in as_markdown(record)


def test_a_check_that_cannot_run_for_an_error_has_failed(context):
    gone = replace(context, model="/nowhere")
    ((result, _),) = run_checks(gone, ["replay"], lambda name, result: None)
    assert result.passed is False
    assert "ModelError" in result.note
    assert "/nowhere" in result.note


def test_an_interval_of_paired_answers():
    low, high = quality.paired_interval([True] * 100, [True] * 100)
    assert low < 0 < high < 0.03
    low, high = quality.paired_interval([True] * 100, [False] * 20 + [True] * 80)
    assert low < -0.2 < high < 0


def test_the_page_says_what_the_records_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from make_validation import TARGET, reference

    assert TARGET.read_text() == reference(), (
        "docs/validation.md is old: python docs/make_validation.py"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["-o", ""], 2, "the name of a file to write is empty"),
        (["-o", "."], 2, "it is a folder"),
        (["-o", "nowhere/v.json"], 2, "there is no folder"),
        (["-o", "v.md"], 2, "cannot be .md"),
        (["--prompts", "p.json", "-o", "p.json", "--overwrite"], 2, "is an input too"),
        (["--prompts", "p.md", "-o", "p.json", "--overwrite"], 2, "is an input too"),
        (["--prompts", "p.json", "-o", "v.json"], 3, "p.json, line 1: "),
        (["--prompts", "bad.json", "-o", "v.json"], 3, "bad.json, line 1: the line is not valid"),
        (["--prompts", "empty.json", "-o", "v.json"], 3, "empty.json has no prompts"),
    ],
)
def test_wrong_use(tmp_path, monkeypatch, arguments, status, words):
    long = {"prompt": "1 + 1 =", "max_tokens": 9999, "metadata": {"answer": "2"}}
    for name, text in (
        ("p.json", json.dumps(long)),
        ("p.md", "{}"),
        ("bad.json", "{"),
        ("empty.json", ""),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(
        app, ["validate", "-m", str(TINY_OURO), "--only", "quality", *arguments]
    )
    assert result.exit_code == status, result.stderr
    assert words in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
