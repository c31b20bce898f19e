"""Check 3: the schedule and the attention change no token and no depth."""

from __future__ import annotations

from dataclasses import dataclass

from ouro_batch.options import SCHEDULES
from ouro_batch.params import RequestOutput
from ouro_batch.validate.check import MARGIN, Context, Result, token_margin
from ouro_batch.validate.requests import TOKENS, Asked, mixed


@dataclass(frozen=True)
class _Run:
    name: str
    outputs: list[RequestOutput]


def check(context: Context) -> Result:
    """serial, refill, no-refill with every attention, FP32, few rows so that they change hands."""
    asked = mixed(context.prompts, context.config.loops, context.room(TOKENS))
    runs = []
    for attention in context.attentions:
        for schedule in SCHEDULES:
            options = {} if schedule == "serial" else {"max_rows": 4}
            with context.engine(attention=attention, schedule=schedule, **options) as llm:
                prompts, params = zip(*asked, strict=True)
                runs.append(_Run(f"{schedule}, {attention}", llm.generate(prompts, params)))
    first, *others = runs
    result = Result(
        "schedules",
        "Schedules: the same tokens and depths in every schedule and attention",
        True,
        {"requests": len(asked), "reference": first.name, "tokens": _tokens(first)},
        {"requests that differ": 0},
    )
    for run in others:
        differ, rounding = _differences(context, asked, first, run)
        result.numbers[run.name] = {"differ": differ, "decided_by_rounding": rounding}
        result.passed &= not differ
    return result


def _tokens(run: _Run) -> int:
    return sum(len(output.token_ids) for output in run.outputs)


def _differences(context: Context, asked: list[Asked], first: _Run, run: _Run) -> tuple[int, int]:
    """Requests that differ, and of greedy ones those that a rounding may have decided."""
    differ, doubtful = 0, []
    for (prompt, params), mine, theirs in zip(asked, run.outputs, first.outputs, strict=True):
        ours = list(zip(mine.token_ids, mine.exit_depths, strict=True))
        wanted = list(zip(theirs.token_ids, theirs.exit_depths, strict=True))
        if ours == wanted:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b), None
        )
        if place is None or params.temperature > 0:
            differ += 1
        else:
            doubtful.append((prompt, theirs.token_ids, params, place))
    rounding = 0
    if doubtful:
        with context.engine(attention="torch") as llm:
            for prompt, tokens, params, place in doubtful:
                (score,) = llm.score([prompt], [tokens], params=params)
                token = score.margins[place] < token_margin(score, place)
                rounding += token or score.exit_margins[place] < MARGIN
    return differ + len(doubtful) - rounding, rounding
