"""Check 1: every loop's hidden states, gate logits and logits, against the dense reference."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ouro_batch.params import SamplingParams
from ouro_batch.validate.check import TOLERANCE, Context, Result, distance, reference_dtype, traced
from ouro_batch.validate.dense import DenseModel, LoopStates

TOKENS = 8
QUICK_POSITIONS, FULL_POSITIONS = 512, 2048  # of one more prompt, which is long
CHUNK = 200  # tokens of a step, so that a long prompt runs in several


def check(context: Context) -> Result:
    """FP32 in prefill and decode, prompts together in one batch, a long one among them."""
    exact = reference_dtype(context.folder)
    reference = DenseModel.from_folder(context.folder, exact, context.device)
    positions = min(
        FULL_POSITIONS if context.full else QUICK_POSITIONS,
        context.config.max_position_embeddings,
    )
    long = [_long_prompt(context, positions - TOKENS)]
    numbers: dict[str, Any] = {
        "reference": str(exact).removeprefix("torch."),
        "tokens": 0,
        "loops": {},
    }
    params = SamplingParams(context.room(TOKENS), exit_threshold=1.0, ignore_eos=True)
    longest = max(positions, context.longest)
    options = {
        "max_rows": len(context.prompts) + 1,
        "max_model_len": min(longest, context.config.max_position_embeddings),
        "max_batched_tokens": len(context.prompts) + 1 + CHUNK,
        "kv_tokens": sum(len(prompt) + TOKENS + 32 for prompt in context.prompts + long),
    }
    passed = True
    for name, kind in _kinds(context).items():
        # Batch invariance is several times as slow on a CPU.
        short = name == "batch-invariant" and not context.full
        prompts = context.prompts if short else context.prompts + long
        with context.engine(**kind, **options) as llm:
            outputs, states = traced(llm, prompts, [params] * len(prompts))
            model = llm.engine.runner.model
            texts = [
                [*prompt, *output.token_ids[:-1]]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]
            wanted = [reference.run(text) for text in texts]
            rows = []
            for loop in range(context.config.loops):
                hidden = torch.cat([state[loop] for state in states])
                with torch.inference_mode():
                    gate, logits = model.gate(hidden), model.logits(hidden)
                    row = _compare(hidden, gate, logits, [w[loop] for w in wanted])
                rows.append({"loop": loop + 1} | row)
                passed &= _fine(row)
        numbers["loops"][name] = rows
        numbers["tokens"] = max(numbers["tokens"], sum(map(len, texts)))
    return Result(
        "equations",
        "Equations: states of every loop against a dense reference",
        passed,
        numbers,
        {"largest error, of the largest value": TOLERANCE, "top-1 agreement beyond ties": 1.0},
    )


def _kinds(context: Context) -> dict[str, dict[str, Any]]:
    """What is compared, the arithmetic of batch invariance, which is another, among it."""
    kinds = {attention: {"attention": attention} for attention in context.attentions}
    invariant = {"attention": context.attentions[0], "batch_invariant": True}
    return kinds | {"batch-invariant": invariant}


def _long_prompt(context: Context, length: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(context.config.vocab_size) for _ in range(max(1, length))]


def _compare(
    hidden: Tensor, gate: Tensor, logits: Tensor, wanted: list[LoopStates]
) -> dict[str, Any]:
    exact = torch.cat([state.logits for state in wanted])
    best = exact.topk(2).values
    # A token whose two best logits are closer than the tolerance has no top-1 to agree on.
    clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE * exact.abs().max()
    agree = (logits.argmax(-1) == exact.argmax(-1)) | ~clear
    return {
        "hidden": distance(hidden, torch.cat([state.hidden for state in wanted])),
        "gate": distance(gate, torch.cat([state.gate for state in wanted])),
        "logits": distance(logits, exact),
        "top1": int(agree.sum()) / len(agree),
    }


def _fine(row: dict[str, Any]) -> bool:
    near = all(
        row[name]["max"] <= TOLERANCE * max(row[name]["scale"], 1.0)
        for name in ("hidden", "gate", "logits")
    )
    return near and row["top1"] == 1.0
