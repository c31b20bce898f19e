"""Attention by the Triton kernels, with work space that keeps its place for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ouro_batch.attention.base import Attention, KVCache, PrefillSegment, SlotTables
from ouro_batch.kernels.decode_attention import decode_attention
from ouro_batch.kernels.decode_work import DecodeWork, build_decode_work, parts_at_once
from ouro_batch.kernels.prefill_attention import (
    prefill_attention,
    prefill_config,
    prefill_tiles,
)
from ouro_batch.memory import upload
from ouro_batch.model.config import ModelConfig

# Positions of a part of the decode attention's work: each step takes what suits its contexts.
SPLIT, MAX_SPLIT = 64, 1024
# Queries of a step up to which RoPE joins the attention's launch. It saves a launch a layer, 4% of
# a step at one query; beyond a few, the registers it takes cost more (3% at 8, 4% at 128).
ROPE_ENTRIES = 2
# Positions of a part where batch invariance is asked for: the same in every step.
FIXED_SPLIT = 256


@dataclass(frozen=True)
class PrefillPlan:
    tables: SlotTables
    tiles: Tensor  # int32, as ``prefill_attention`` takes them


class TritonAttention(Attention):
    """One step at a time: a decode plan holds until the next is made.

    Args:
        config, dtype, device: of the model.
        entries: queries of a decode step at most.
        slots: slots of the whole cache; contexts together cannot be longer.
        overlap: start decode kernels ahead (``kernels/overlap.py``); queries and the newest keys
            and values must come from the kernel right before.
        batch_invariant: cut every context at the same positions, and mask every tile of keys, so
            that a query's bits depend neither on the step nor on the chunk that it is in.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        entries: int,
        slots: int,
        overlap: bool = False,
        batch_invariant: bool = False,
    ):
        self._overlap = overlap
        at_once = parts_at_once(config.num_kv_heads, device)
        split, max_split = (FIXED_SPLIT, None) if batch_invariant else (SPLIT, MAX_SPLIT)
        self._work = DecodeWork.allocate(
            entries,
            DecodeWork.max_items(entries, slots, split, max_split, at_once),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            device,
            split,
            max_split,
            at_once,
        )
        self._fuses_rope = config.num_heads == config.num_kv_heads and not batch_invariant
        self._prefill_config = replace(
            prefill_config(dtype, config.head_dim), masks_all=batch_invariant
        )

    def plan_decode(
        self, tables: SlotTables, rows: Tensor, planes: Tensor, contexts: Tensor
    ) -> SlotTables:
        build_decode_work(
            self._work, rows, planes, contexts, tables.prompt_lengths, overlap=self._overlap
        )
        return tables

    def decode(
        self, plan: SlotTables, queries: Tensor, out: Tensor, cache: KVCache, layer: int
    ) -> None:
        decode_attention(
            out,
            queries,
            cache.keys[layer],
            cache.values[layer],
            plan.prompt_blocks,
            plan.decode_slots,
            self._work,
            overlap=self._overlap,
        )

    def fuses_rope(self, entries: int) -> bool:
        """Whether ``decode_qkv`` is the way for a step of so many queries."""
        return self._fuses_rope and entries <= ROPE_ENTRIES

    def decode_qkv(
        self,
        plan: SlotTables,
        qkv: Tensor,
        out: Tensor,
        cache: KVCache,
        layer: int,
        cos_sin: Tensor,
    ) -> None:
        """``decode`` from the fused product ``qkv`` [M, 3H * D], where ``fuses_rope``.

        Rotates by ``cos_sin`` FP32 [positions, D] and stores the newest keys and values too.
        """
        decode_attention(
            out,
            qkv.unflatten(1, (-1, out.shape[-1])),
            cache.keys[layer],
            cache.values[layer],
            plan.prompt_blocks,
            plan.decode_slots,
            self._work,
            cos_sin=cos_sin,
            overlap=self._overlap,
        )

    def plan_prefill(self, tables: SlotTables, segments: list[PrefillSegment]) -> PrefillPlan:
        device = tables.prompt_lengths.device
        return PrefillPlan(tables, upload(self.tiles(segments), torch.int32, device))

    def tiles(self, segments: list[PrefillSegment]) -> list[tuple[int, int, int, int]]:
        """What the kernel's programs take of packed segments, as ``prefill_attention`` has it."""
        return prefill_tiles(
            [(s.row, s.start, s.length) for s in segments], self._prefill_config.block_m
        )

    def prefill(
        self,
        plan: PrefillPlan,
        plane: int,
        queries: Tensor,
        out: Tensor,
        cache: KVCache,
        layer: int,
    ) -> None:
        prefill_attention(
            out,
            queries,
            cache.keys[layer],
            cache.values[layer],
            plan.tiles,
            plane,
            plan.tables.prompt_blocks,
            config=self._prefill_config,
        )
