"""Reference attention in plain torch: gathers the slots it needs, softmax in FP32."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.attention.base import Attention, KVCache, PrefillSegment, SlotTables

GROUP_KEYS = 256  # that one call of several segments reads at most: more leave a CPU's cache


@dataclass(frozen=True)
class DecodePlan:
    slots: Tensor  # int64 [M, K], K the longest context; past its own end a row repeats its last
    hidden: Tensor  # bool [M, K], True where an entry must not look


@dataclass(frozen=True)
class PrefillGroup:
    """Segments of one start and one length, which attend in one call."""

    tokens: Tensor  # int64 [S, T], where the packed prompt tokens have them
    slots: Tensor  # int64 [L, S, K], K = their start + T
    hidden: Tensor  # bool [1, T, K], True where a query must not look


class ReferenceAttention(Attention):
    """Runs on any device; the yardstick for the kernels."""

    def plan_decode(
        self, tables: SlotTables, rows: Tensor, planes: Tensor, contexts: Tensor
    ) -> DecodePlan:
        positions = torch.arange(int(contexts.max()), device=rows.device)[None, :]
        last = contexts[:, None] - 1
        # A slot past the end may hold anything, NaN included, and 0 * NaN is NaN: hidden positions
        # point at the entry's own last slot, which is always written.
        slots = tables.lookup(rows[:, None], planes[:, None], torch.minimum(positions, last))
        return DecodePlan(slots, positions > last)

    def decode(
        self, plan: DecodePlan, queries: Tensor, out: Tensor, cache: KVCache, layer: int
    ) -> None:
        keys, values = cache.read(layer, plan.slots)  # [M, K, G, D]
        out.copy_(_attend(queries[:, None], keys, values, plan.hidden[:, None, :])[:, 0])

    def plan_prefill(
        self, tables: SlotTables, segments: list[PrefillSegment]
    ) -> list[PrefillGroup]:
        device = tables.prompt_lengths.device
        planes = torch.arange(tables.prompt_blocks.shape[1], device=device)[:, None, None]
        alike: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        begin = 0
        for segment in segments:
            alike[segment.start, segment.length].append((segment.row, begin))
            begin += segment.length
        groups = []
        for (start, length), members in alike.items():
            positions = torch.arange(start + length, device=device)
            queries = torch.arange(length, device=device)
            hidden = (positions[None, :] > start + queries[:, None])[None]
            size = max(1, GROUP_KEYS // len(positions))
            for first in range(0, len(members), size):
                rows, begins = torch.tensor(members[first : first + size], device=device).unbind(1)
                slots = tables.lookup(rows[:, None], planes, positions)
                groups.append(PrefillGroup(begins[:, None] + queries, slots, hidden))
        return groups

    def prefill(
        self,
        plan: list[PrefillGroup],
        plane: int,
        queries: Tensor,
        out: Tensor,
        cache: KVCache,
        layer: int,
    ) -> None:
        for group in plan:
            keys, values = cache.read(layer, group.slots[plane])
            out[group.tokens] = _attend(queries[group.tokens], keys, values, group.hidden)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """``queries`` [R, T, H, D], ``keys``/``values`` [R, K, G, D], ``hidden`` [R, T, K]."""
    rows, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    q = queries.float().view(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("rtgmd,rkgd->rgmtk", q, keys.float()) / math.sqrt(head_dim)
    scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    out = torch.einsum("rgmtk,rkgd->rtgmd", scores.softmax(-1), values.float())
    return out.reshape(queries.shape).to(queries.dtype)
