"""Every check of ``validate`` is broken on purpose, and turns red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ouro_batch import intake
from ouro_batch.attention.fixed import FixedAttention
from ouro_batch.attention.reference import ReferenceAttention
from ouro_batch.engine.kv import BlockManager
from ouro_batch.intake import Intake
from ouro_batch.params import SamplingParams
from ouro_batch.runner import eager, sampling
from ouro_batch.runner.row_blocks import RowBlocks
from ouro_batch.runner.state import RowState
from ouro_batch.validate.check import Context

from .tiny import write_checkpoint
from .validation import context_of, verdicts


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    return context_of(write_checkpoint(tmp_path_factory.mktemp("tiny")))


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
        for group in made:
            slots, start = group.slots, group.slots.shape[2] - group.tokens.shape[1]
            if start >= 64:
                slots[..., :start] = slots[..., start : start + 1]
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
