"""Attention in pieces of a fixed shape: a query's bits depend on its own context alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ouro_batch.attention.base import KVCache, SlotTables
from ouro_batch.attention.reference import DecodePlan, ReferenceAttention

TILE = 64  # positions, counted from 0
ENTRIES = 16
# Elements from which torch divides an operation among threads, wherever that cuts an entry.
SERIAL_ELEMENTS = 32768


class FixedAttention(ReferenceAttention):
    """The reference with an online softmax over tiles, a fixed number of entries at a time.

    Tiles beyond an entry's context change nothing: their weights are exact zeros. For queries that
    are entries alone; prompt tokens run as entries too.
    """

    def __init__(self, heads: int):
        self._entries = ENTRIES
        while self._entries > 1 and self._entries * heads * TILE >= SERIAL_ELEMENTS:
            self._entries //= 2

    def plan_decode(
        self, tables: SlotTables, rows: Tensor, planes: Tensor, contexts: Tensor
    ) -> DecodePlan:
        end = -(-int(contexts.max()) // TILE) * TILE
        positions = torch.arange(end, device=rows.device)[None, :]
        last = contexts[:, None] - 1
        slots = tables.lookup(rows[:, None], planes[:, None], torch.minimum(positions, last))
        return DecodePlan(slots, positions > last)

    def decode(
        self, plan: DecodePlan, queries: Tensor, out: Tensor, cache: KVCache, layer: int
    ) -> None:
        for begin in range(0, len(queries), self._entries):
            part = slice(begin, begin + self._entries)
            out[part] = self._attend(
                queries[part], plan.slots[part], plan.hidden[part], cache, layer
            )

    def _attend(
        self, queries: Tensor, slots: Tensor, hidden: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        """Up to a fixed number of ``queries`` [M, H, D] over slots [M, K] that are not hidden."""
        count, heads, size = queries.shape
        groups = cache.keys.shape[3]
        # Entries that are missing attend to the first one's keys, and are dropped.
        whole = torch.arange(self._entries, device=queries.device)
        whole = torch.where(whole < count, whole, 0)
        slots, hidden = slots[whole], hidden[whole]
        q = queries[whole].float().view(self._entries, groups, heads // groups, size)
        shape = (self._entries, groups, heads // groups)
        top = q.new_full((*shape, 1), -math.inf)
        total = q.new_zeros((*shape, 1))
        acc = q.new_zeros((*shape, size))
        for begin in range(0, slots.shape[1], TILE):
            tile = slice(begin, begin + TILE)
            k, v = cache.read(layer, slots[:, tile])  # [E, TILE, G, D]
            scores = q @ k.float().permute(0, 2, 3, 1).contiguous() / math.sqrt(size)
            scores = scores.masked_fill(hidden[:, None, None, tile], -math.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = (scores - new_top).exp()
            # As wide as a tile, so that no entry's element is left over from a vector.
            keep = (top - new_top).expand(*shape, TILE).contiguous().exp()[..., :1]
            total = total * keep + weights.sum(-1, keepdim=True)
            acc = acc * keep + weights @ v.float().transpose(1, 2).contiguous()
            top = new_top
        return (acc / total)[:count].flatten(1, 2).to(queries.dtype)
