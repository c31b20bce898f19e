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
    """Squared differences from FP32 of one loop: of each token, the mean over its values."""

    def __init__(self) -> None:
        self._squares: dict[str, list[Tensor]] = {name: [] for name in PARTS}

    def add(self, name: str, ours: Tensor, exact: Tensor) -> None:
        difference = ours.double() - exact.double()
        self._squares[name].append(difference.square().view(len(exact), -1).mean(1).cpu())

    def squares(self, name: str) -> Tensor:
        """[S], all tokens."""
        return torch.cat(self._squares[name])

    def rms(self, name: str) -> float:
        return math.sqrt(float(self.squares(name).mean()))


class Comparison:
    """One implementation's errors, loop by loop."""

    def __init__(self, loops: int):
        self.loops = [Errors() for _ in range(loops)]
        self.exits_that_differ = 0
        self.exits = 0

    def add(self, ours: list[LoopStates], exact: list[LoopStates]) -> None:
        for errors, mine, reference in zip(self.loops, ours, exact, strict=True):
            errors.add("hidden", mine.hidden, reference.hidden)
            errors.add("gate", mine.gate, reference.gate)
            errors.add("logits", mine.logits, reference.logits)
        mine, reference = exits(ours), exits(exact)
        self.exits_that_differ += int((mine != reference).sum())
        self.exits += reference.numel()

    @property
    def share(self) -> float:
        """Of exit decisions, over all tokens and thresholds, those that differ from FP32's."""
        return self.exits_that_differ / self.exits


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
        rows, passed = _table(ours, theirs, enough=ours.exits >= FULL_TOKENS * len(THRESHOLDS))
        result.numbers[attention] = rows
        result.numbers["tokens"] = ours.exits // len(THRESHOLDS)
        result.passed &= passed
    if result.numbers["tokens"] < FULL_TOKENS:
        result.note = (
            f"{result.numbers['tokens']:,} tokens; with fewer than {FULL_TOKENS:,} an error may be"
            f" above its limit by {STANDARD_ERRORS:g} standard errors"
        )
    return result


def _table(ours: Comparison, theirs: Comparison, *, enough: bool) -> tuple[dict[str, Any], bool]:
    passed, loops = True, []
    for index, (mine, released) in enumerate(zip(ours.loops, theirs.loops, strict=True)):
        row: dict[str, Any] = {"loop": index + 1}
        for name in PARTS:
            error, limit = mine.rms(name), released.rms(name)
            row[name] = {"rms": error, "released": limit, "ratio": _ratio(error, limit)}
            passed &= within(mine.squares(name), released.squares(name), enough)
        loops.append(row)
    # Tokens decide at many thresholds, so decisions are not independent; tokens are.
    tokens = ours.exits / len(THRESHOLDS)
    slack = 0.0 if enough else STANDARD_ERRORS * math.sqrt(theirs.share / tokens)
    passed &= ours.share <= LIMIT * theirs.share + slack
    shares = {
        "engine": ours.share,
        "released": theirs.share,
        "ratio": _ratio(ours.share, theirs.share),
    }
    return {"loops": loops, "exits_that_differ": shares}, passed


def within(ours: Tensor, theirs: Tensor, enough: bool) -> bool:
    """Whether squared errors of the same tokens keep to the limit, or may be above it by chance."""
    above = ours - LIMIT**2 * theirs
    slack = 0.0 if enough else STANDARD_ERRORS * float(above.std()) / math.sqrt(len(above))
    return float(above.mean()) <= slack


def _ratio(error: float, limit: float) -> float | None:
    return error / limit if limit else None
