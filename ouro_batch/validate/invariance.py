"""Check 8: batch invariance, bit for bit, in BF16."""

from __future__ import annotations

import random
from typing import Any

import torch

from ouro_batch import memory
from ouro_batch.llm import LLM
from ouro_batch.params import RequestOutput
from ouro_batch.validate.check import Context, Result
from ouro_batch.validate.requests import Asked, mixed

OUTPUT_TOKENS = 12
LONGEST_PROMPT = 400  # of a request of this check
# Every eighth request is long: its context has several parts in a decode step's attention.
LONG_EVERY, LONG_GPU, LONG_CPU, SHORT = 8, (260, LONGEST_PROMPT), (66, 80), (1, 96)
# Requests and batchings, and of the requests those that also run alone.
QUICK = (8, 2, 3)
FULL_CPU = (48, 5, 12)
FULL_GPU = (10_000, 20, 50)
FULL_GPU_LARGE = (500, 10, 16)
LARGE_WIDTH = 1024
WIDTHS = (2, 3, 7, 24, 64, 100, 129, 200, 256)  # rows of a batching
MOST_ROUNDS = 420  # requests that follow each other in a row
CACHE_BYTES = 12 * 2**30  # at most: a small GPU has a share in its memory for that


def check(context: Context) -> Result:
    """The same requests in other orders, rows, chunks and schedules, arriving at other times."""
    count, batchings, alone = QUICK
    if context.full and context.device.type != "cuda":
        count, batchings, alone = FULL_CPU
    elif context.full:
        large = context.config.hidden_size >= LARGE_WIDTH
        count, batchings, alone = FULL_GPU_LARGE if large else FULL_GPU
    asked = _requests(context, count)
    result = Result(
        "invariance",
        "Batch invariance: the same bits alone, in any batch, order, schedule and chunks (BF16)",
        True,
        {"requests": count},
        {"requests with other bits": 0},
    )
    # The eager runner on a GPU is for checks alone; the one that users run is judged here.
    attention = context.attentions[0]
    expected: dict[int, Any] | None = None
    rows = []
    for number, (options, some) in enumerate(_batchings(batchings, count, alone)):
        chosen = list(range(some))
        draw = random.Random(number)
        draw.shuffle(chosen)
        with _engine(context, attention, options) as llm:
            found = _run(llm, asked, chosen, draw)
        if expected is None:
            expected = found
        differ = [i for i in chosen if found[i] != expected[i]]
        rows.append(options | {"requests": len(chosen), "differ": len(differ)})
        result.passed &= not differ
        if differ and "first" not in result.numbers:
            result.numbers["first"] = {"batching": number, "request": differ[0]}
    result.numbers["batchings"] = len(rows)
    result.numbers["attention"] = attention
    result.numbers["by_batching"] = rows
    return result


def _engine(context: Context, attention: str, options: dict[str, Any]):
    longest = min(LONGEST_PROMPT + OUTPUT_TOKENS, context.config.max_position_embeddings)
    token_bytes = context.config.loops * memory.block_bytes(context.config, torch.bfloat16, 1)
    return context.engine(
        attention=attention,
        dtype="bfloat16",
        batch_invariant=True,
        max_model_len=longest,
        kv_tokens=max(longest, min(longest * options["max_rows"], CACHE_BYTES // token_bytes)),
        **options,
    )


def _requests(context: Context, count: int) -> list[Asked]:
    draw = random.Random(0)
    longest = context.config.max_position_embeddings - OUTPUT_TOKENS
    long = LONG_GPU if context.device.type == "cuda" else LONG_CPU
    prompts = []
    for index in range(count):
        source = context.prompts[index % len(context.prompts)]
        begin = draw.randrange(len(source))
        length = min(draw.randint(*(SHORT if index % LONG_EVERY else long)), longest)
        prompts.append([source[(begin + i) % len(source)] for i in range(length)])
    return mixed(prompts, context.config.loops, OUTPUT_TOKENS, logprobs=2)


def _batchings(count: int, requests: int, alone: int) -> list[tuple[dict[str, Any], int]]:
    """Options of each, and how many requests it runs.

    The first is the reference, ``count`` run all requests, few rows in which they would wait long
    some of them, and the last one ``alone`` requests one by one.
    """
    draw = random.Random(1)
    widest = min(256, requests)
    widths = [rows for rows in WIDTHS if rows <= widest]
    narrow = [rows for rows in widths if rows * MOST_ROUNDS < requests]

    def batching(rows: int, schedule: str) -> dict[str, Any]:
        tokens = rows + draw.choice([1, 5, 17, 64, 300, 2000, 5000])
        return {"schedule": schedule, "max_rows": rows, "max_batched_tokens": tokens}

    found = [
        ({"schedule": "refill", "max_rows": widest, "max_batched_tokens": widest + 512}, requests)
    ]
    while len(found) < count:
        rows = draw.choice([rows for rows in widths if rows not in narrow])
        schedule = draw.choice(["refill", "refill", "no-refill"])
        found.append((batching(rows, schedule), requests))
    found += [(batching(rows, "refill"), rows * MOST_ROUNDS) for rows in narrow]
    return [*found, ({"schedule": "serial", "max_rows": 1, "max_batched_tokens": 1 + 16}, alone)]


def _run(llm: LLM, asked: list[Asked], chosen: list[int], draw: random.Random) -> dict[int, Any]:
    """What requests give, by their place in ``asked``; they arrive a few at a time."""
    found: dict[int, Any] = {}
    waiting = chosen[::-1]
    while waiting or llm.has_unfinished:
        for _ in range(min(len(waiting), draw.choice([0, 1, 3, llm.max_rows, 4 * llm.max_rows]))):
            index = waiting.pop()
            prompt, params = asked[index]
            llm.add_request(prompt, params, index=index)
        for output in llm.step():
            found[output.index] = _bits(output)
    return found


def _bits(output: RequestOutput) -> Any:
    """What must be the same; floats compare as they are."""
    logprobs = [(entry.logprob, tuple(entry.top)) for entry in output.logprobs]
    return output.token_ids, output.exit_depths, logprobs
