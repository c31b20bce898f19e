"""The prompt tokens of a step on the device: packed, and padded to few sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ouro_batch.runner.base import PrefillChunk

# A step is padded to one of few sizes, each of which a graph can serve. Beyond the largest,
# launching the kernels one by one takes less time than they do.
SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_PADDED = SIZES[-1]


def padded_size(tokens: int) -> int:
    """The tokens that a step of ``tokens`` runs."""
    if tokens > MAX_PADDED:
        return tokens
    return next(size for size in SIZES if size >= tokens)


@dataclass(frozen=True)
class Prompts:
    """T tokens and N attention tiles; a token of padding has position -1, a tile no tokens."""

    tokens: Tensor  # int32 [T]
    rows: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    tiles: Tensor  # int32 [N, 4]


class PromptBuffer:
    """Where the prompt tokens of each step lie, at the same place for the same T and N.

    Args:
        max_tokens: of a step, padding not counted.
        max_tiles: of a step.
    """

    def __init__(self, max_tokens: int, max_tiles: int, device: torch.device):
        words = 3 * _aligned(max(max_tokens, MAX_PADDED)) + 4 * _tiles_padded(
            max_tiles + MAX_PADDED // 128 + 8
        )
        self._words = torch.zeros(words, dtype=torch.int32, device=device)

    def fill(
        self,
        chunks: list[PrefillChunk],
        tiles: list[tuple[int, int, int, int]],
        least: int = 1,
    ) -> tuple[int, int]:
        """Put a step's tokens and tiles there; returns T, not below ``least``, and N."""
        count = sum(len(chunk.tokens) for chunk in chunks)
        size = padded_size(max(count, least))
        tiles_size = _tiles_padded(max(len(tiles), _least_tiles(size)))
        room = _aligned(size)
        words = np.zeros(3 * room + 4 * tiles_size, dtype=np.int32)
        tokens, rows, positions = words[: 3 * room].reshape(3, room)
        positions[count:] = -1
        at = 0
        for chunk in chunks:
            end = at + len(chunk.tokens)
            tokens[at:end] = chunk.tokens
            rows[at:end] = chunk.row
            positions[at:end] = np.arange(chunk.start, chunk.start + end - at)
            at = end
        words[3 * room : 3 * room + 4 * len(tiles)] = np.asarray(tiles, dtype=np.int32).ravel()
        source = torch.from_numpy(words)
        if self._words.is_cuda:
            source = source.pin_memory()
        self._words[: len(words)].copy_(source, non_blocking=True)
        return size, tiles_size

    def read(self, size: int, tiles: int) -> Prompts:
        """What ``fill`` put there, of T and N as it returned them."""
        room = _aligned(size)
        tokens, rows, positions = self._words[: 3 * room].view(3, room)[:, :size]
        return Prompts(
            tokens, rows, positions, self._words[3 * room : 3 * room + 4 * tiles].view(tiles, 4)
        )


def _aligned(size: int) -> int:
    """Words from one array to the next: Triton compiles another kernel off 16 bytes."""
    return -(-size // 4) * 4


def _least_tiles(tokens: int) -> int:
    """Room for a few short prompts: as many sizes fewer, and a tile of padding costs little."""
    return tokens // 128 + 8


def _tiles_padded(tiles: int) -> int:
    return 1 << (tiles - 1).bit_length()
