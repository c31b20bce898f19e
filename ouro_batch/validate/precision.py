"""Check 6: BF16, measured against FP32 and against the released code's own BF16.

The engine is qualified where, loop by loop, it is no farther from FP32 than the released modeling
code is when it runs in BF16. That code is ``DenseModel``, which rounds where it rounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ouro_batch.params import SamplingParams
from ouro_batch.validate.check import Context, Result, traced
from ouro_batch.validate.dense import DenseModel, LoopStates

LIMIT = 1.1  # times the released code's error
STANDARD_ERRORS = 3.0  # that an error may be above its limit by, where tokens are few
THRESHOLDS = tuple(step / 20 for step in range(1, 20))
QUICK_TOKENS, FULL_TOKENS = 600, 10_000
PARTS = ("hidden", "gate", "logits")


class Errors:
    """Squared differences from FP32 of one loop: of each token, the mean over its values.

    ``squares[part]`` has a tensor [S] of each text.
    """

    def __init__(self) -> None:
        self.squares: dict[str, list[Tensor]] = {name: [] for name in PARTS}

    def add(self, name: str, ours: Tensor, exact: Tensor) -> None:
        difference = ours.double() - exact.double()
        self.squares[name].append(difference.square().view(len(exact), -1).mean(1).cpu())

    def rms(self, name: str) -> float:
        return math.sqrt(float(torch.cat(self.squares[name]).mean()))


class Comparison:
    """One implementation's errors, loop by loop."""

    def __init__(self, loops: int):
        self.loops = [Errors() for _ in range(loops)]
        self.exits_that_differ: list[Tensor] = []  # share of thresholds, [S] of each text

    def add(self, ours: list[LoopStates], exact: list[LoopStates]) -> None:
        for errors, mine, reference in zip(self.loops, ours, exact, strict=True):
            errors.add("hidden", mine.hidden, reference.hidden)
            errors.add("gate", mine.gate, reference.gate)
            errors.add("logits", mine.logits, reference.logits)
        mine, reference = exits(ours), exits(exact)
        self.exits_that_differ.append((mine != reference).double().mean(0).cpu())

    @property
    def share(self) -> float:
        """Of exit decisions, over all tokens and thresholds, those that differ from FP32's."""
        return float(torch.cat(self.exits_that_differ).mean())

    @property
    def tokens(self) -> int:
        return sum(map(len, self.exits_that_differ))


def exits(states: list[LoopStates]) -> Tensor:
    """The loop, from 0, after which each token leaves at each of ``THRESHOLDS``; [19, S]."""
    gates = torch.stack([state.gate.float() for state in states])  # [L, S]
    reached = 1 - torch.sigmoid(-gates).cumprod(0)
    reached[-1] = math.inf
    thresholds = torch.tensor(THRESHOLDS, device=gates.device)
    return (reached >= thresholds[:, None, None]).float().argmax(1)


def check(context: Context) -> Result:
    """Prefill and decode of the engine in BF16, all prompts in one batch, at full depth."""
    wanted = FULL_TOKENS if context.full else QUICK_TOKENS
    prompts = context.prompts
    own = sum(map(len, prompts))
    room = context.config.max_position_embeddings - max(map(len, prompts))
    tokens = min(room, max(16, -(-(wanted - own) // len(prompts)) + 1))
    exact = DenseModel.from_folder(context.folder, torch.float32, context.device)
    released = DenseModel.from_folder(context.folder, torch.bfloat16, context.device)
    result = Result(
        "precision",
        "BF16: no farther from FP32 than the released code's BF16",
        True,
        {"thresholds": list(THRESHOLDS)},
        {"error, times the released code's": LIMIT},
    )
    # Drawn, for greedy text may repeat itself: a few hidden states, counted many times.
    params = [
        SamplingParams(tokens, temperature=1.0, seed=i, exit_threshold=1.0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    for attention in context.attentions:
        ours, theirs = Comparison(context.config.loops), Comparison(context.config.loops)
        options = {"max_model_len": max(map(len, prompts)) + tokens, "max_rows": len(prompts)}
        options["kv_tokens"] = options["max_model_len"] * min(len(prompts), 64)
        with context.engine(attention=attention, dtype="bfloat16", **options) as llm:
            outputs, states = traced(llm, prompts, params)
            model = llm.engine.runner.model
            for prompt, output, state in zip(prompts, outputs, states, strict=True):
                text = [*prompt, *output.token_ids[:-1]]
                reference = exact.run(text)
                with torch.inference_mode():
                    # A loop's output is BF16 in the engine; the trace only holds it in FP32.
                    engine = [
                        LoopStates(hidden, model.gate(hidden), model.logits(hidden))
                        for hidden in state.to(torch.bfloat16)
                    ]
                    ours.add(engine, reference)
                    theirs.add(released.run(text), reference)
        rows, passed = _table(ours, theirs)
        result.numbers[attention] = rows
        result.numbers["tokens"] = ours.tokens
        result.passed &= passed
    if result.numbers["tokens"] < FULL_TOKENS:
        result.note = (
            f"{result.numbers['tokens']:,} tokens; with fewer than {FULL_TOKENS:,} an error may be"
            f" above its limit by {STANDARD_ERRORS:g} standard errors (allowed)"
        )
    return result


def _table(ours: Comparison, theirs: Comparison) -> tuple[dict[str, Any], bool]:
    few, loops = ours.tokens < FULL_TOKENS, []
    exits_that_differ = ours.exits_that_differ, theirs.exits_that_differ
    passed = within(*exits_that_differ, LIMIT)
    for index, (mine, released) in enumerate(zip(ours.loops, theirs.loops, strict=True)):
        row: dict[str, Any] = {"loop": index + 1}
        for name in PARTS:
            error, limit = mine.rms(name), released.rms(name)
            row[name] = {"rms": error, "released": limit, "ratio": _ratio(error, limit)}
            squares = mine.squares[name], released.squares[name]
            passed &= within(*squares, LIMIT**2)
            if few:
                highest = allowed(*squares, LIMIT**2)
                row[name]["allowed"] = highest and math.sqrt(highest)
        loops.append(row)
    shares = {
        "engine": ours.share,
        "released": theirs.share,
        "ratio": _ratio(ours.share, theirs.share),
    }
    if few:
        shares["allowed"] = allowed(*exits_that_differ, LIMIT)
    return {"loops": loops, "exits_that_differ": shares}, passed


def within(ours: list[Tensor], theirs: list[Tensor], limit: float) -> bool:
    """Whether the mean over all tokens of ``ours`` is at most ``limit`` times that of ``theirs``.

    Both have a tensor [S] of each text, the same tokens. With fewer than ``FULL_TOKENS`` tokens
    it may be above by ``STANDARD_ERRORS``.
    """
    return bool(torch.cat(_above(ours, theirs, limit)).mean() <= _slack(ours, theirs, limit))


def allowed(ours: list[Tensor], theirs: list[Tensor], limit: float) -> float | None:
    """The highest ratio of the two means that ``within`` passes; None where theirs is 0."""
    mean = float(torch.cat(theirs).mean())
    return limit + _slack(ours, theirs, limit) / mean if mean else None


def _above(ours: list[Tensor], theirs: list[Tensor], limit: float) -> list[Tensor]:
    return [mine - limit * other for mine, other in zip(ours, theirs, strict=True)]


def _slack(ours: list[Tensor], theirs: list[Tensor], limit: float) -> float:
    """``STANDARD_ERRORS`` of the mean of what ``ours`` is above its limit by; 0 of many tokens.

    The standard error is that of independent tokens or, where it is larger, of independent texts:
    tokens of one text err alike, above all in the gate.
    """
    above = _above(ours, theirs, limit)
    tokens = torch.cat(above)
    count, texts = len(tokens), len(above)
    if count >= FULL_TOKENS:
        return 0.0
    mean = tokens.mean()
    squares = (tokens - mean).square().sum()
    if texts > 1:
        of_texts = torch.stack([(text - mean).sum() for text in above]).square().sum()
        squares = torch.maximum(squares, of_texts * texts / (texts - 1))
    return STANDARD_ERRORS * float(squares.sqrt()) / count


def _ratio(error: float, limit: float) -> float | None:
    return error / limit if limit else None
