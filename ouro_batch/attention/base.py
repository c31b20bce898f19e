"""The attention interface: paged, depth-aware keys and values behind two calls.

Shapes: R rows, L loops, N layers, G key/value heads, H query heads, D head dimension,
B slots a block, T packed prompt tokens. Slot s is place ``s % B`` of block ``s // B``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ouro_batch.model.config import ModelConfig


@dataclass
class KVCache:
    """One pool of slots; a slot holds all layers' keys and values of one (token, loop)."""

    keys: Tensor  # [N, blocks, B, G, D]
    values: Tensor  # [N, blocks, B, G, D]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> KVCache:
        shape = (config.num_layers, blocks, block_size, config.num_kv_heads, config.head_dim)
        return cls(
            torch.empty(shape, device=device, dtype=dtype),
            torch.empty(shape, device=device, dtype=dtype),
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys``, ``values`` [T, G, D] of one layer in ``slots``, int64 [T]."""
        place = self._place(slots)
        self.keys[layer][place] = keys
        self.values[layer][place] = values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [*slots.shape, G, D], of ``slots``, int64."""
        place = self._place(slots)
        return self.keys[layer][place], self.values[layer][place]

    def read_planes(self, tables: SlotTables, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's first ``length`` positions as later queries see them.

        Each is [L, N, length, G, D], for checks.
        """
        device = self.keys.device
        planes = torch.arange(tables.prompt_blocks.shape[1], device=device)[:, None]
        positions = torch.arange(length, device=device)[None, :]
        slots = tables.lookup(torch.tensor(row, device=device), planes, positions)
        layers = [self.read(layer, slots) for layer in range(len(self.keys))]
        keys, values = zip(*layers, strict=True)
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)

    def _place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        block_size = self.keys.shape[2]
        return slots // block_size, slots % block_size


@dataclass
class SlotTables:
    """Which slot a query of a given row and loop reads at a given position.

    Prompt positions go through ``prompt_blocks``, generated ones through ``decode_slots``.
    """

    prompt_blocks: Tensor  # int32 [R, L, blocks]
    decode_slots: Tensor  # int32 [R, L, generated positions]
    prompt_lengths: Tensor  # int32 [R]
    block_size: int

    def lookup(self, rows: Tensor, planes: Tensor, positions: Tensor) -> Tensor:
        """Slots, int64, at ``positions`` of planes (0-based loops); all three broadcast."""
        generated = positions - self.prompt_lengths[rows]
        last_block = self.prompt_blocks.shape[2] - 1
        block = self.prompt_blocks[
            rows, planes, (positions // self.block_size).clamp(max=last_block)
        ]
        prompt_slot = block.long() * self.block_size + positions % self.block_size
        decode_slot = self.decode_slots[rows, planes, generated.clamp(min=0)].long()
        return torch.where(generated < 0, prompt_slot, decode_slot)


@dataclass(frozen=True)
class PrefillSegment:
    """``length`` consecutive prompt tokens of one row, from position ``start`` on."""

    row: int
    start: int
    length: int


class Attention(ABC):
    """Scaled dot-product attention over the slots of each query's own plane.

    A plan serves every layer. Results go into ``out``, so that a graph can hold the calls.
    """

    @abstractmethod
    def plan_decode(
        self, tables: SlotTables, rows: Tensor, planes: Tensor, contexts: Tensor
    ) -> Any:
        """Plan for one query an entry: row, plane and number of positions it sees, integers [M]."""

    @abstractmethod
    def decode(self, plan: Any, queries: Tensor, out: Tensor, cache: KVCache, layer: int) -> None:
        """``queries``, ``out`` [M, H, D]: each over positions 0..context-1 of its plane."""

    @abstractmethod
    def plan_prefill(self, tables: SlotTables, segments: list[PrefillSegment]) -> Any:
        """Plan for packed segments, in any plane."""

    @abstractmethod
    def prefill(
        self, plan: Any, plane: int, queries: Tensor, out: Tensor, cache: KVCache, layer: int
    ) -> None:
        """Causal attention of ``queries`` [T, H, D], packed by segment, into ``out``."""
