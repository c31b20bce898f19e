"""Attention in plain torch: prompts that attend together, against each query by itself in FP64."""

from __future__ import annotations

import pytest
import torch

from ouro_batch.attention import reference
from ouro_batch.attention.base import KVCache, PrefillSegment, SlotTables
from ouro_batch.attention.reference import ReferenceAttention

ROWS, LOOPS, BLOCK, POSITIONS, HEADS, GROUPS, DIM = 9, 2, 4, 40, 6, 2, 16
SEGMENTS = [  # of one start and length, of one but not the other, of neither, and out of order
    *(PrefillSegment(row, 0, 7) for row in (3, 0, 8)),
    PrefillSegment(1, 20, 7),
    PrefillSegment(2, 0, 20),
    PrefillSegment(4, 20, 7),
    PrefillSegment(5, 39, 1),
    PrefillSegment(7, 0, 7),
    PrefillSegment(6, 0, 1),
]


@pytest.mark.parametrize("keys_a_call", [1, 20, reference.GROUP_KEYS])
@pytest.mark.parametrize("plane", range(LOOPS))
def test_prefill_of_many_prompts(monkeypatch, keys_a_call, plane):
    """However many share a call: each query sees its own row up to itself, in its own plane."""
    monkeypatch.setattr(reference, "GROUP_KEYS", keys_a_call)
    torch.manual_seed(0)
    blocks = POSITIONS // BLOCK
    shape = (1, ROWS * LOOPS * blocks, BLOCK, GROUPS, DIM)
    cache = KVCache(torch.randn(shape), torch.randn(shape))
    tables = SlotTables(
        torch.randperm(shape[1]).int().view(ROWS, LOOPS, blocks),
        torch.zeros(ROWS, LOOPS, 1, dtype=torch.int32),
        torch.full((ROWS,), POSITIONS, dtype=torch.int32),
        BLOCK,
    )
    attention = ReferenceAttention()
    queries = torch.randn(sum(segment.length for segment in SEGMENTS), HEADS, DIM)
    out = torch.full_like(queries, float("nan"))
    plan = attention.plan_prefill(tables, SEGMENTS)
    attention.prefill(plan, plane, queries, out, cache, 0)

    keys, values = (x[0].flatten(0, 1).double() for x in (cache.keys, cache.values))
    wanted = []
    for segment in SEGMENTS:
        for position in range(segment.start, segment.start + segment.length):
            seen = torch.arange(position + 1)
            slots = tables.prompt_blocks[segment.row, plane][seen // BLOCK] * BLOCK + seen % BLOCK
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                query = queries[len(wanted) // HEADS, head].double()
                weights = (keys[slots, group] @ query / DIM**0.5).softmax(0)
                wanted.append(weights @ values[slots, group])
    torch.testing.assert_close(out, torch.stack(wanted).view_as(out).float())
