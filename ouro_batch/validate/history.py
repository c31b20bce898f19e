"""Check 2: last-exited history, against the serial oracle that copies keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ouro_batch.llm import LLM
from ouro_batch.params import RequestOutput, SamplingParams
from ouro_batch.validate.check import MARGIN, TOLERANCE, Context, Result, token_margin
from ouro_batch.validate.dense import read_config, read_tensors
from ouro_batch.validate.oracle import OracleOutput, SerialOracle
from ouro_batch.validate.requests import Asked, bordering

CPU_PARAMETERS = 50_000_000  # the oracle runs in FP64, one token at a time


def check(context: Context) -> Result:
    """Tokens, depths and every plane, with an aborted neighbour whose blocks are used again."""
    result = Result(
        "history",
        "Last-exited history: tokens, depths and planes against a serial oracle",
        limits={"requests that differ": 0, "plane error, of the largest value": TOLERANCE},
    )
    tensors = read_tensors(context.folder)
    result.note = _too_large(sum(t.numel() for t in tensors.values()), context.device)
    if result.note:
        return result
    asked = bordering(_long_prompt(context), context.config.loops)
    expected = _oracle_outputs(context, tensors, asked)
    result.passed = True
    for attention in context.attentions:
        # A cache that three requests fill, so that blocks go from one to the next.
        with context.engine(
            attention=attention, max_rows=3, max_batched_tokens=3 + 16, kv_tokens=176
        ) as llm:
            found = _compare(_run(llm, asked), expected)
        result.numbers[attention] = found
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


def _oracle_outputs(
    context: Context, tensors: dict[str, Tensor], asked: list[Asked]
) -> list[OracleOutput]:
    """The oracle's weights leave the device's memory with it."""
    oracle = SerialOracle(read_config(context.folder), tensors, context.device)
    return [oracle.generate(prompt, params) for prompt, params in asked]


def _long_prompt(context: Context) -> list[int]:
    prompt = max(context.prompts, key=len)
    return (prompt * (1 + 31 // len(prompt)))[:31]


@dataclass
class _Finished:
    output: RequestOutput
    keys: Tensor  # [L, N, positions, G, D], right after the last step
    values: Tensor


def _run(llm: LLM, asked: list[Asked]) -> list[_Finished]:
    """All requests, with one more among them that is aborted in the middle of its tokens."""
    aborted = llm.add_request(asked[0][0], SamplingParams(40, ignore_eos=True), index=len(asked))
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
        if steps == 10:
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
