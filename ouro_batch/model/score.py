"""Given text in one pass over the loops: what each token's run gives, each at its own depth.

In loop k only the tokens that have not exited run; the others are seen through the keys and values
of their last loop, which simply stay where they are: one array a layer, overwritten by the tokens
that run. Nothing is sequential, since a token's exit depends on its own loops alone, and those on
earlier tokens' loops up to the same number. Source: docs/design.md, "Replay".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.model.ouro import Ouro

QUERIES = 256  # of one attention at a time


@dataclass(frozen=True)
class ExitPolicy:
    """When a decoded token leaves, as in ``SamplingParams``; an infinite threshold is never."""

    threshold: float
    min_loops: int
    max_loops: int


@dataclass(frozen=True)
class ExitStates:
    """Where S tokens' runs ended."""

    hidden: Tensor  # [S, hidden]
    depths: Tensor  # int64 [S]
    # FP32 [S], how far the exit probability was from the threshold in the loop where it was
    # nearest; infinite where the gate was not asked
    margins: Tensor


@torch.inference_mode()
def exit_states(
    model: Ouro, tokens: Tensor, prompt_tokens: int, exits: list[int] | ExitPolicy
) -> ExitStates:
    """The exit state of each token's run.

    ``tokens`` int64 [S] is a prompt, whose tokens run all loops, and what follows it. ``exits``
    gives the depths of the S - ``prompt_tokens`` following tokens, or how they are decided.
    """
    config, device = model.config, model.device
    size = len(tokens)
    positions = torch.arange(size, device=device)
    prompt = positions < prompt_tokens
    depths = torch.full((size,), config.loops, device=device)
    if not isinstance(exits, ExitPolicy):
        depths[prompt_tokens:] = torch.tensor(exits, dtype=torch.int64, device=device)
    rope = model.rope(positions)
    shape = (config.num_layers, size, config.num_kv_heads, config.head_dim)
    keys = torch.empty(shape, dtype=model.dtype, device=device)
    values = torch.empty_like(keys)
    states = model.embed(tokens)
    survival = torch.ones(size, device=device)
    margins = torch.full((size,), math.inf, device=device)
    running = positions
    for loop in range(1, config.loops + 1):
        running = running[depths[running] >= loop]
        if not len(running):
            break

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor = running) -> Tensor:
            keys[layer, at], values[layer, at] = k, v
            return torch.cat(
                [
                    _attend(q[i : i + QUERIES], keys[layer], values[layer], at[i : i + QUERIES])
                    for i in range(0, len(at), QUERIES)
                ]
            )

        hidden = model.loop(states[running], (rope[0][running], rope[1][running]), attend)
        states[running] = hidden
        if isinstance(exits, ExitPolicy):
            survival[running] *= torch.sigmoid(-model.gate(hidden))
            leave = torch.full_like(running, loop >= exits.max_loops, dtype=torch.bool)
            if exits.min_loops <= loop < exits.max_loops:
                beyond = 1 - survival[running] - exits.threshold
                margins[running] = torch.minimum(margins[running], beyond.abs())
                leave = beyond >= 0
            depths[running[leave & ~prompt[running]]] = loop
    margins[prompt] = math.inf
    return ExitStates(states, depths, margins)


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Queries [T, H, D] at their positions over keys and values [S, G, D], in FP32."""
    tokens, heads, size = q.shape
    end = int(positions.max()) + 1
    k, v = keys[:end].float(), values[:end].float()
    grouped = q.float().view(tokens, k.shape[1], heads // k.shape[1], size)
    scores = torch.einsum("tgmd,kgd->gmtk", grouped, k) / math.sqrt(size)
    later = torch.arange(end, device=q.device)[None, :] > positions[:, None]
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("gmtk,kgd->tgmd", weights, v).reshape(q.shape).to(q.dtype)
