"""One given completion, scored: its texts encoded and checked, its logits read."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence

import torch

from ouro_batch.errors import RequestError
from ouro_batch.intake import EncodedPrompt, Intake
from ouro_batch.model.ouro import Ouro
from ouro_batch.model.score import ExitPolicy, exit_states
from ouro_batch.params import SamplingParams, Score


def score(
    model: Ouro,
    intake: Intake,
    max_model_len: int,
    prompt: str | Sequence[int],
    completion: str | Sequence[int],
    depths: Sequence[int] | None,
    params: SamplingParams,
) -> Score:
    """What the model makes of a completion, at given depths or (None) at the gate's.

    Raises:
        RequestError: it cannot be run.
    """
    start, tokens, exits = prepare(intake, max_model_len, prompt, completion, depths, params)
    # The last token of a completion is never run.
    text = torch.tensor([*start, *tokens[:-1]], device=model.device)
    states = exit_states(model, text, len(start), exits)
    first = len(start) - 1
    with torch.inference_mode():
        logits = model.logits(states.hidden[first:])
        wanted = torch.tensor(tokens, device=model.device)[:, None]
        logprobs = logits.log_softmax(-1).gather(1, wanted)[:, 0]
        best = logits.topk(min(2, logits.shape[-1]))
        second = best.values[:, 1] if logits.shape[-1] > 1 else -math.inf
    for place, logprob in enumerate(logprobs.tolist()):
        if not math.isfinite(logprob):
            raise RequestError(
                f"the model gives no finite log-probability to token {place} of the completion: its"
                f" numbers overflow in {str(model.dtype).removeprefix('torch.')}"
                + ("" if model.dtype == torch.float32 else " (give dtype float32)"),
                "not_finite",
            )
    return Score(
        tokens,
        logprobs.tolist(),
        states.depths[first:].tolist(),
        best.indices[:, 0].tolist(),
        (best.values[:, 0] - second).tolist(),
        states.margins[first:].tolist(),
        logits.abs().amax(-1).tolist(),
    )


def check_lists(given: Mapping[str, object]) -> None:
    """Raise RequestError unless all are lists, equally long."""
    for name, value in given.items():
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise RequestError(f"{name} must be a list, got {reprlib.repr(value)}")
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise RequestError(
            f"prompts, completions and exit_depths must be equally many, got {counts}"
        )


def prepare(
    intake: Intake,
    max_model_len: int,
    prompt: str | Sequence[int] | EncodedPrompt,
    completion: str | Sequence[int],
    depths: Sequence[int] | None,
    params: SamplingParams,
) -> tuple[list[int], list[int], ExitPolicy | list[int]]:
    """Tokens of prompt and completion, and where those that follow the prompt leave.

    Raises:
        RequestError: they cannot be scored.
    """
    start = intake.encode(prompt).tokens
    try:
        tokens = intake.encode(completion).tokens
    except RequestError as error:
        raise RequestError(f"the completion: {error}", error.type) from error
    if not start or not tokens:
        raise RequestError("a prompt and a completion need at least one token")
    if len(start) + len(tokens) > max_model_len:
        raise RequestError(
            f"{len(start)} prompt tokens and {len(tokens)} completion tokens are more than the"
            f" {max_model_len} that the model takes (shorten one of them)",
            "too_long",
        )
    loops = intake.config.loops
    if depths is None:
        deepest = min(loops, params.max_loops or loops)
        exits: ExitPolicy | list[int] = ExitPolicy(
            intake.exit_threshold(params), min(params.min_loops, deepest), deepest
        )
    else:
        _check_depths(depths, len(tokens), loops)
        exits = list(depths[1:])
    return start, tokens, exits


def _check_depths(depths: Sequence[int], tokens: int, loops: int) -> None:
    if not isinstance(depths, Sequence) or isinstance(depths, (str, bytes)):
        raise RequestError(f"exit_depths must be a list of integers, got {reprlib.repr(depths)}")
    if len(depths) != tokens:
        raise RequestError(f"{len(depths)} exit_depths for {tokens} completion tokens")
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= loops:
            raise RequestError(f"exit_depths must be integers from 1 to {loops}, got {depth!r}")
    if depths[0] != loops:
        raise RequestError(f"exit_depths[0] is {depths[0]}; prefill runs all {loops} loops")
