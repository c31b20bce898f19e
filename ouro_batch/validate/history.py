"""Check 2: last-exited history, against the serial oracle that copies keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ouro_batch.llm import LLM
from ouro_batch.params import RequestOutput, SamplingParams
from ouro_batch.validate.check import MARGIN, TOLERANCE, Context, Result, token_margin
from ouro_batch.validate.dense import read_config, read_tensors
from ouro_batch.validate.oracle import OracleOutput, SerialOracle
from ouro_batch.validate.requests import TOKENS, Asked, bordering

CPU_PARAMETERS = 50_000_000  # the oracle runs in FP64, one token at a time
LONGEST = 56  # positions of a request
QUICK_ROWS, FULL_ROWS = 24, 64


def check(context: Context) -> Result:
    """Tokens, depths and every plane: in few rows, with an aborted neighbour whose blocks are used
    again, and in many rows, each request in several of them."""
    result = Result(
        "history",
        "Last-exited history: tokens, depths and planes against a serial oracle",
        limits={"requests that differ": 0, "plane error, of the largest value": TOLERANCE},
    )
    positions = context.config.max_position_embeddings
    if positions < LONGEST:
        result.note = f"its requests take up to {LONGEST} positions, this model has {positions}"
        return result
    tensors = read_tensors(context.folder)
    result.note = _too_large(sum(t.numel() for t in tensors.values()), context.device)
    if result.note:
        return result
    asked, expected = _with_the_oracle(context, tensors)
    copies = -(-(FULL_ROWS if context.full else QUICK_ROWS) // len(asked))
    rows = copies * len(asked)
    result.passed = True
    for attention in context.attentions:
        # A cache that three requests fill, so that blocks go from one to the next.
        with context.engine(
            attention=attention, max_rows=3, max_batched_tokens=3 + 16, kv_tokens=176
        ) as llm:
            few = _compare(_run(llm, asked, abort=True), expected)
        with context.engine(attention=attention, max_rows=rows, kv_tokens=rows * 4 * 16) as llm:
            many = _compare(_run(llm, asked * copies, abort=False), expected * copies)
        found = {name: few[name] + many[name] for name in few}
        found["plane_error"] = max(few["plane_error"], many["plane_error"])
        result.numbers[attention] = {"rows": [3, rows]} | found
        result.passed &= found["differ"] == 0 and found["plane_error"] <= TOLERANCE
    return result


def _too_large(parameters: int, device: torch.device) -> str:
    """Why the oracle does not run here; empty where it does."""
    if device.type != "cuda":
        if parameters <= CPU_PARAMETERS:
            return ""
        return (
            f"on a CPU the oracle runs up to {CPU_PARAMETERS:,} parameters, this model has"
            f" {parameters:,}"
        )
    torch.cuda.empty_cache()
    needed, (free, _) = 8 * parameters, torch.cuda.mem_get_info(device)
    if needed < 0.9 * free:
        return ""
    return (
        f"the oracle needs {needed / 2**30:.1f} GiB (FP64), the device has {free / 2**30:.1f} free"
    )


def _with_the_oracle(
    context: Context, tensors: dict[str, Tensor]
) -> tuple[list[Asked], list[OracleOutput]]:
    """Requests and what the oracle makes of them; its weights leave the memory with it."""
    oracle = SerialOracle(read_config(context.folder), tensors, context.device)
    loops, eos = context.config.loops, context.config.eos_token_ids

    def generate(prompt: list[int], params: SamplingParams) -> OracleOutput:
        ends = () if params.ignore_eos else eos
        return oracle.generate(prompt, params, (*ends, *params.stop_token_ids))

    longest, shortest = (pick(context.prompts, key=len) for pick in (max, min))
    asked = bordering((longest * (1 + 31 // len(longest)))[:31], loops)
    asked.append((shortest[:24], SamplingParams(TOKENS)))  # where it is real, it may reach its end
    expected = [generate(*request) for request in asked]
    # What the first one says in the middle is where another one stops.
    prompt, params = asked[0]
    stop = expected[0].tokens[len(expected[0].tokens) // 2]
    others = [
        token for token in range(context.config.vocab_size) if token not in expected[0].tokens
    ]
    asked.append((prompt, replace(params, stop_token_ids=(*others[:4], stop))))
    return asked, [*expected, generate(*asked[-1])]


@dataclass
class _Finished:
    output: RequestOutput
    keys: Tensor  # [L, N, positions, G, D], right after the last step
    values: Tensor


def _run(llm: LLM, asked: list[Asked], *, abort: bool) -> list[_Finished]:
    """All requests; with ``abort`` one more is among them, which leaves amid its tokens."""
    if abort:
        more = SamplingParams(40, ignore_eos=True)
        aborted = llm.add_request(asked[0][0], more, index=len(asked))
    for index, (prompt, params) in enumerate(asked):
        llm.add_request(prompt, params, index=index)
    finished: dict[int, _Finished] = {}
    steps = 0
    while llm.has_unfinished:
        rows = {r.index: row for row, r in llm.engine.scheduler.running.items()}
        outputs = llm.step()
        # A row's slots are its own until the next step is launched.
        for row, request in llm.engine.scheduler.running.items():
            rows[request.index] = row
        for output in outputs:
            length = output.usage.prompt_tokens + len(output.token_ids) - 1
            planes = llm.engine.runner.read_planes(rows[output.index], length)
            finished[output.index] = _Finished(output, *(plane.cpu() for plane in planes))
        steps += 1
        if abort and steps == 10:
            llm.abort(aborted)
    return [finished[index] for index in range(len(asked))]


def _compare(finished: list[_Finished], expected: list[OracleOutput]) -> dict[str, Any]:
    differ, rounding, tokens, error = 0, 0, 0, 0.0
    for have, want in zip(finished, expected, strict=True):
        mine = list(zip(have.output.token_ids, have.output.exit_depths, strict=True))
        theirs = list(zip(want.tokens, want.depths, strict=True))
        same = 0
        while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
            same += 1
        tokens += same
        positions = have.keys.shape[2]
        if mine != theirs:
            if same < len(want.tokens) and (
                want.margins[same] < token_margin(want, same) or want.exit_margins[same] < MARGIN
            ):
                rounding += 1
            else:
                differ += 1
            # The run that gave the first other token or depth is the first that may differ.
            positions = have.output.usage.prompt_tokens + max(same - 1, 0)
        for ours, exact in ((have.keys, want.keys), (have.values, want.values)):
            gap = (ours[:, :, :positions].double() - exact[:, :, :positions]).abs().max()
            gap = torch.nan_to_num(gap, nan=float("inf"))
            error = max(error, float(gap / exact.abs().max()))
    return {
        "requests": len(finished),
        "differ": differ,
        "decided_by_rounding": rounding,
        "tokens_compared": tokens,
        "plane_error": error,
    }
