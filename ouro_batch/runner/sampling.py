"""Counter-based sampling: the token depends on logits, seed and output position alone.

Random numbers are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), keyed by the request's seed and counted by (vocabulary id // 4, output position), so a
request samples the same token in any batch, in any row and after any restart. The sample itself
is the Gumbel-max trick: argmax of logits / temperature + Gumbel noise over the kept tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox4x32-10: four counter words and two key words (uint32 in int64, broadcastable).

    Returns int64 [..., 4] with values below 2**32.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap around in int64; only their bits matter.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, FP32 [R, V], for seeds and output positions, each int64 [R]."""
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    words = philox(
        (groups, positions[:, None], zero, zero),
        (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK),
    )
    # 23 bits, centred: strictly inside (0, 1) in FP32, so both logarithms are finite.
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform)).flatten(1)[:, :vocab_size]


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits [R, V] outside top-k, then outside top-p, to -inf. Ties go to the lower id.

    ``top_k`` int [R] (0 keeps all); ``top_p`` FP32 [R]: the smallest set of most likely tokens
    whose probability among the top-k reaches it is kept.
    """
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    drop = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    probabilities = ordered.masked_fill(drop, -math.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    drop |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, ids, drop), -math.inf)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Next tokens, int64 [R], from FP32 logits [R, V]; all parameters [R].

    Temperature 0 is greedy. ``positions`` are output positions: token i of the output has i.
    """
    greedy = logits.argmax(-1)
    random = temperature > 0
    if not bool(random.any()):
        return greedy
    # Shifted by the maximum first: a tiny temperature then gives -inf, never inf - inf.
    scaled = logits[random]
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[random, None]
    k, p = top_k[random], top_p[random]
    if bool(((k > 0) | (p < 1)).any()):
        scaled = keep_top(scaled, k, p)
    noise = gumbel_noise(seeds[random], positions[random], logits.shape[-1])
    greedy[random] = (scaled + noise).argmax(-1)
    return greedy


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of FP32 logits [R, V] at ``tokens`` int64 [R], and at the k largest.

    Returns FP32 [R], FP32 [R, k] and their ids, int64 [R, k]: descending, ties to the lower id.
    """
    logprobs = logits.log_softmax(-1)
    top = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    return logprobs.gather(1, tokens[:, None])[:, 0], logprobs.gather(1, top), top
