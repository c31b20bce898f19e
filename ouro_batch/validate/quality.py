"""Check 7: what leaving early costs, over prompts whose answers are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ouro_batch.llm import LLM
from ouro_batch.params import SamplingParams
from ouro_batch.validate.check import Context, Question, Result

THRESHOLDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
QUICK_THRESHOLDS = (0.2, 0.5, 0.9)
QUICK_QUESTIONS = 60
Z = 1.959964  # of a two-sided 95% interval
SLACK = 0.02  # loops that a lower threshold may cost more, since answers then differ
STANDARD_ERRORS = 3.0  # that they may be above it by


@dataclass(frozen=True)
class _Answers:
    right: list[bool]
    depths: list[float | None]  # mean of each answer, None of one token, which prefill gives
    mean_depth: float | None  # of all tokens


def check(context: Context) -> Result:
    """Greedy answers at full depth and over thresholds, question by question.

    Red where the checkpoint's own threshold loses answers beyond chance, or where a lower threshold
    does not lower the depth.
    """
    result = Result(
        "quality",
        "Adaptive quality: accuracy and depth over thresholds, paired with full depth",
        limits={"upper end of the 95% interval at the checkpoint's threshold, at least": 0.0},
    )
    questions = context.questions
    if not context.full:
        questions = questions[:: max(1, len(questions) // QUICK_QUESTIONS)]
    if not questions:
        result.note = "no prompts with a known answer (metadata.answer)"
        return result
    own = context.config.exit_threshold
    chosen = THRESHOLDS if context.full else QUICK_THRESHOLDS
    thresholds = sorted({*chosen, *([own] if own < 1 else [])})
    with context.engine(
        dtype="auto",
        attention="auto",
        max_rows=min(len(questions), 64),
        max_model_len=context.config.max_position_embeddings,
    ) as llm:
        full = _ask(llm, questions, 1.0)
        sweep = [_ask(llm, questions, threshold) for threshold in thresholds]
    rows = []
    for threshold, answers in zip(thresholds, sweep, strict=True):
        low, high = paired_interval(full.right, answers.right)
        rows.append(
            {
                "threshold": threshold,
                "accuracy": sum(answers.right) / len(questions),
                "mean_depth": answers.mean_depth,
                "difference": (sum(answers.right) - sum(full.right)) / len(questions),
                "interval": [low, high],
            }
        )
    falls = not any(costs_more(a.depths, b.depths) for a, b in pairwise([*sweep, full]))
    if full.mean_depth is None:
        result.note = "answers of one token: no token whose depth a threshold could change"
    kept = all(row["interval"][1] >= 0 for row in rows if row["threshold"] == own)
    result.passed = falls and kept
    result.numbers = {
        "questions": len(questions),
        "checkpoint_threshold": own,
        "full_depth": {
            "accuracy": sum(full.right) / len(questions),
            "mean_depth": full.mean_depth,
        },
        "sweep": rows,
    }
    return result


def _ask(llm: LLM, questions: list[Question], threshold: float) -> _Answers:
    ids = {}
    for index, question in enumerate(questions):
        own = question.params
        params = SamplingParams(
            own.max_tokens,
            exit_threshold=threshold,
            stop=own.stop,
            stop_token_ids=own.stop_token_ids,
            ignore_eos=own.ignore_eos,
        )
        ids[llm.add_request(params=params, index=index, **question.given)] = index
    right = [False] * len(questions)
    depths: list[float | None] = [None] * len(questions)
    loops = tokens = 0
    while llm.has_unfinished:
        for output in llm.step():
            index = ids[output.request_id]
            right[index] = is_right(output.text, questions[index].answer)
            depths[index] = output.mean_exit_depth
            loops += output.usage.loops
            tokens += len(output.token_ids) - 1
    return _Answers(right, depths, loops / tokens if tokens else None)


def costs_more(low: list[float | None], high: list[float | None]) -> bool:
    """Whether a lower threshold's depths are above a higher one's beyond chance, paired."""
    more = [a - b for a, b in zip(low, high, strict=True) if a is not None and b is not None]
    if not more:
        return False
    mean = sum(more) / len(more)
    error = math.sqrt(sum((gap - mean) ** 2 for gap in more)) / len(more)
    return mean > SLACK + STANDARD_ERRORS * error


def is_right(text: str, answer: str) -> bool:
    """Whether a text is the answer, spaces at either end aside."""
    return text.strip() == answer.strip()


def paired_interval(before: list[bool], after: list[bool]) -> tuple[float, float]:
    """95% interval of the difference in accuracy of paired answers.

    Wald's with half a pair added to each kind of disagreement (Agresti and Min, 2005), so that it
    has a width where none disagree.
    """
    lost = sum(b and not a for b, a in zip(before, after, strict=True)) + 0.5
    won = sum(a and not b for b, a in zip(before, after, strict=True)) + 0.5
    count = len(before) + 2
    middle = (won - lost) / count
    half = Z * math.sqrt(lost + won - (won - lost) ** 2 / count) / count
    return middle - half, middle + half
