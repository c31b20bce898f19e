"""Check 5: nothing is kept, whatever happened."""

from __future__ import annotations

import gc
from typing import Any

import torch

from ouro_batch.errors import EngineError
from ouro_batch.llm import LLM
from ouro_batch.validate.check import Context, Result
from ouro_batch.validate.requests import TOKENS, mixed

# What the libraries keep once they have been used (cuBLAS work space, of a fixed size a stream).
WORK_SPACE_BYTES = 64 * 2**20


def check(context: Context) -> Result:
    """Blocks after success, abort and failure; device memory after each LLM is closed."""
    result = Result(
        "resources",
        "Resources: blocks free and device memory back, after success, abort and failure",
        True,
        {},
        {"blocks in use": 0, "device bytes kept": WORK_SPACE_BYTES},
    )
    for attention in context.attentions:
        if context.device.type == "cuda":  # what libraries take once
            with context.engine(attention=attention) as llm:
                _succeed(llm, context)
            del llm
        before = _allocated(context.device)
        found: dict[str, Any] = {}
        with context.engine(attention=attention) as llm:
            for name, run in (("success", _succeed), ("abort", _abort), ("failure", _break)):
                run(llm, context)
                found[f"blocks_after_{name}"] = llm.blocks.in_use
                result.passed &= llm.blocks.in_use == 0 and not llm.has_unfinished
            found["blocks"] = llm.blocks.blocks
            found["device_bytes_in_use"] = _allocated(context.device) - before
        del llm
        found["device_bytes_kept"] = max(0, _allocated(context.device) - before)
        result.passed &= found["device_bytes_kept"] <= WORK_SPACE_BYTES
        result.numbers[attention] = found
    return result


def _allocated(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _succeed(llm: LLM, context: Context) -> None:
    prompts, params = zip(
        *mixed(context.prompts, context.config.loops, context.room(TOKENS)), strict=True
    )
    llm.generate(prompts, params)


def _abort(llm: LLM, context: Context) -> None:
    """Each request at another moment: waiting, in its prompt, at one depth or another."""
    ids = [
        llm.add_request(*asked)
        for asked in mixed(context.prompts, context.config.loops, context.room(TOKENS))
    ]
    for request_id in ids:
        llm.step()
        llm.abort(request_id)
    while llm.has_unfinished:
        llm.step()


class _Broken(RuntimeError):
    pass


def _break(llm: LLM, context: Context) -> None:
    """A device that fails in the middle of requests; the engine must run on afterwards."""
    for asked in mixed(context.prompts, context.config.loops, context.room(TOKENS)):
        llm.add_request(*asked)
    for _ in range(3):
        llm.step()
    runner = llm.engine.runner
    launch = runner.launch

    def fail(plan: object) -> None:
        raise _Broken

    runner.launch = fail
    try:
        llm.step()
    except EngineError as error:
        if not isinstance(error.__cause__, _Broken):
            raise
    finally:
        runner.launch = launch
    while llm.has_unfinished:
        llm.step()
    _succeed(llm, context)
