"""Reference attention in plain torch: gathers the slots it needs, softmax in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.attention.base import Attention, KVCache, PrefillSegment, SlotTables


@dataclass(frozen=True)
class DecodePlan:
    slots: Tensor  # int64 [R, K], K the longest context; past its own end a row repeats its last
    hidden: Tensor  # bool [R, K], True where a row must not look


@dataclass(frozen=True)
class PrefillPlan:
    segments: list[PrefillSegment]
    slots: list[Tensor]  # int64 [context] a segment


class ReferenceAttention(Attention):
    """Runs on any device; the yardstick for the kernels."""

    def plan_decode(
        self, tables: SlotTables, rows: Tensor, planes: Tensor, positions: Tensor
    ) -> DecodePlan:
        longest = int(positions.max()) + 1
        keys = torch.arange(longest, device=rows.device)
        # A slot past the end may hold anything, NaN included, and 0 * NaN is NaN: hidden keys
        # point at the row's own last slot, which is always written.
        at = torch.minimum(keys[None, :], positions[:, None])
        slots = tables.lookup(rows[:, None], planes[:, None], at)
        return DecodePlan(slots, keys[None, :] > positions[:, None])

    def decode(self, plan: DecodePlan, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        keys, values = cache.read(layer, plan.slots)  # [R, K, G, D]
        out = _attend(queries[:, None], keys, values, plan.hidden[:, None, :])
        return out[:, 0]

    def plan_prefill(
        self, tables: SlotTables, segments: list[PrefillSegment], plane: int
    ) -> PrefillPlan:
        device = tables.prompt_lengths.device
        slots = []
        for segment in segments:
            positions = torch.arange(segment.start + segment.length, device=device)
            row = torch.tensor(segment.row, device=device)
            slots.append(tables.lookup(row, torch.tensor(plane, device=device), positions))
        return PrefillPlan(segments, slots)

    def prefill(self, plan: PrefillPlan, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        out = torch.empty_like(queries)
        begin = 0
        for segment, slots in zip(plan.segments, plan.slots, strict=True):
            end = begin + segment.length
            position = torch.arange(segment.start, segment.start + segment.length)
            key = torch.arange(len(slots))
            hidden = (key[None, :] > position[:, None]).to(queries.device)
            keys, values = cache.read(layer, slots)
            out[begin:end] = _attend(
                queries[None, begin:end], keys[None], values[None], hidden[None]
            )[0]
            begin = end
        return out


def _attend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """``queries`` [R, T, H, D], ``keys``/``values`` [R, K, G, D], ``hidden`` [R, T, K]."""
    rows, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    q = queries.float().view(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("rtgmd,rkgd->rgmtk", q, keys.float()) / math.sqrt(head_dim)
    scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    out = torch.einsum("rgmtk,rkgd->rtgmd", scores.softmax(-1), values.float())
    return out.reshape(queries.shape).to(queries.dtype)
