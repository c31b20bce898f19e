"""Prompt tokens on their way to the device: packed as they should be, padded to few sizes."""

from __future__ import annotations

import pytest
import torch

from ouro_batch.runner.base import PrefillChunk
from ouro_batch.runner.prompts import MAX_PADDED, PromptBuffer, padded_size


def test_sizes_hold_their_tokens_and_are_few():
    sizes = {tokens: padded_size(tokens) for tokens in range(1, 3000)}
    assert all(size >= tokens for tokens, size in sizes.items())
    assert all(size == tokens for tokens, size in sizes.items() if tokens > MAX_PADDED)
    assert len({size for tokens, size in sizes.items() if tokens <= MAX_PADDED}) <= 12
    assert all(size < 2 * tokens + 16 for tokens, size in sizes.items())


@pytest.mark.parametrize("lengths", [[1], [16], [5, 20, 1], [MAX_PADDED], [MAX_PADDED, 100]])
def test_what_is_filled_in_is_read_back(lengths):
    buffer = PromptBuffer(2 * MAX_PADDED, 64, torch.device("cpu"))
    buffer.fill([PrefillChunk(9, 0, [7] * 2 * MAX_PADDED, True)], [(9, 9, 9, 9)] * 64)  # older
    chunks = [
        PrefillChunk(3 * at + 1, 10 * at, list(range(at, at + length)), True)
        for at, length in enumerate(lengths)
    ]
    tiles = [(at, 2, 3, length) for at, length in enumerate(lengths)]
    size, tiles_size = buffer.fill(chunks, tiles)
    prompts, count = buffer.read(size, tiles_size), sum(lengths)
    assert prompts.tokens[:count].tolist() == [t for chunk in chunks for t in chunk.tokens]
    assert prompts.rows[:count].tolist() == [c.row for c in chunks for _ in c.tokens]
    assert prompts.positions[:count].tolist() == [
        position for c in chunks for position in range(c.start, c.start + len(c.tokens))
    ]
    assert (prompts.positions[count:] == -1).all()
    assert (prompts.rows[count:] == 0).all()
    assert prompts.tiles[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert (prompts.tiles[len(tiles) :] == 0).all()


def test_a_size_lies_always_at_the_same_place():
    """A graph that was captured with it goes on to read the newest step's."""
    buffer = PromptBuffer(100, 8, torch.device("cpu"))
    first = buffer.read(*buffer.fill([PrefillChunk(0, 0, [1, 2, 3], True)], [(0, 0, 0, 3)]))
    buffer.fill([PrefillChunk(0, 0, [5] * 60, True)], [(0, 0, 0, 60)])
    buffer.fill([PrefillChunk(4, 7, [8] * 9, True)], [(4, 0, 7, 9)])
    assert first.tokens[:9].tolist() == [8] * 9
    assert first.positions[:10].tolist() == [*range(7, 16), -1]
    assert first.tiles[0].tolist() == [4, 0, 7, 9]
