"""Reference attention in plain torch: gathers the slots it needs, softmax in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.attention.base import Attention, KVCache, PrefillSegment, SlotTables


@dataclass(frozen=True)
class DecodePlan:
    slots: Tensor  # int64 [M, K], K the longest context; past its own end a row repeats its last
    hidden: Tensor  # bool [M, K], True where an entry must not look


@dataclass(frozen=True)
class PrefillPlan:
    segments: list[PrefillSegment]
    slots: list[Tensor]  # int64 [L, context] a segment


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

    def plan_prefill(self, tables: SlotTables, segments: list[PrefillSegment]) -> PrefillPlan:
        device = tables.prompt_lengths.device
        planes = torch.arange(tables.prompt_blocks.shape[1], device=device)[:, None]
        slots = []
        for segment in segments:
            positions = torch.arange(segment.start + segment.length, device=device)
            row = torch.tensor(segment.row, device=device)
            slots.append(tables.lookup(row, planes, positions))
        return PrefillPlan(segments, slots)

    def prefill(
        self,
        plan: PrefillPlan,
        plane: int,
        queries: Tensor,
        out: Tensor,
        cache: KVCache,
        layer: int,
    ) -> None:
        begin = 0
        for segment, slots in zip(plan.segments, plan.slots, strict=True):
            end = begin + segment.length
            position = torch.arange(segment.start, segment.start + segment.length)
            hidden = torch.arange(slots.shape[1])[None, :] > position[:, None]
            keys, values = cache.read(layer, slots[plane])
            out[begin:end] = _attend(
                queries[None, begin:end], keys[None], values[None], hidden.to(out.device)[None]
            )[0]
            begin = end


def _attend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """``queries`` [R, T, H, D], ``keys``/``values`` [R, K, G, D], ``hidden`` [R, T, K]."""
    rows, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    q = queries.float().view(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("rtgmd,rkgd->rgmtk", q, keys.float()) / math.sqrt(head_dim)
    scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    out = torch.einsum("rgmtk,rkgd->rtgmd", scores.softmax(-1), values.float())
    return out.reshape(queries.shape).to(queries.dtype)
