"""Check 4: every finished generation again, in one depth-masked pass."""

from __future__ import annotations

import math
from typing import Any

from ouro_batch.llm import LLM
from ouro_batch.params import RequestOutput, Score, TokenLogprobs
from ouro_batch.validate.check import MARGIN, TOLERANCE, Context, Result, token_margin
from ouro_batch.validate.requests import TOKENS, Asked, mixed

TOP_LOGPROBS = 8


def check(context: Context) -> Result:
    """With the depths given, log-probabilities and tokens; with a live gate, the depths too."""
    top = min(TOP_LOGPROBS, context.config.vocab_size)
    asked = mixed(context.prompts, context.config.loops, context.room(TOKENS), logprobs=top)
    result = Result(
        "replay",
        "Replay: generations recomputed in one depth-masked pass",
        True,
        {},
        {
            "log-probability error, of the largest logit": TOLERANCE,
            "tokens that differ": 0,
            "depths that differ": 0,
            "lists of the likeliest tokens that are wrong": 0,
        },
    )
    prompts, params = zip(*asked, strict=True)
    for attention in context.attentions:
        with context.engine(attention=attention) as llm:
            found = _compare(llm, asked, llm.generate(prompts, params))
        result.numbers[attention] = found
        result.passed &= (
            found["logprob_error"] <= TOLERANCE * max(found["largest_logit"], 1.0)
            and not found["tokens"]
            and not found["depths"]
            and not found["lists"]
        )
    return result


def _compare(llm: LLM, asked: list[Asked], outputs: list[RequestOutput]) -> dict[str, Any]:
    error, scale, tokens, depths, lists, count = 0.0, 0.0, 0, 0, 0, 0
    for (prompt, params), output in zip(asked, outputs, strict=True):
        completion = output.token_ids
        (given,) = llm.score([prompt], [completion], [output.exit_depths])
        (decided,) = llm.score([prompt], [completion], params=params)
        for ours, entry in zip(given.logprobs, output.logprobs, strict=True):
            gap = abs(ours - entry.logprob)
            error = max(error, math.inf if math.isnan(gap) else gap)
        lists += sum(
            not _is_sound(given, params.logprobs, *entry) for entry in enumerate(output.logprobs)
        )
        scale = max(scale, *given.logit_scales)
        count += len(completion)
        if params.temperature == 0:
            tokens += sum(
                best != token and given.margins[place] > token_margin(given, place)
                for place, (best, token) in enumerate(zip(given.best, completion, strict=True))
            )
        for ours, theirs, margin in zip(
            decided.exit_depths, output.exit_depths, decided.exit_margins, strict=True
        ):
            if ours != theirs:
                depths += margin > MARGIN
                break  # the tokens after it see another history
    return {
        "requests": len(asked),
        "tokens_compared": count,
        "logprob_error": error,
        "largest_logit": scale,
        "tokens": tokens,
        "depths": depths,
        "lists": lists,
    }


def _is_sound(score: Score, wanted: int, place: int, entry: TokenLogprobs) -> bool:
    """Whether an output token's list has ``wanted`` tokens, the likeliest first, in order."""
    ids, values = zip(*entry.top, strict=True)
    token = score.token_ids[place]
    first = ids[0] == score.best[place] or score.margins[place] <= token_margin(score, place)
    known = token not in ids or abs(values[ids.index(token)] - entry.logprob) <= TOLERANCE
    return (
        first and known and len(set(ids)) == wanted and list(values) == sorted(values, reverse=True)
    )
