"""The device's memory of every row: decode state, slot tables, results of the current step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.attention.base import SlotTables
from ouro_batch.model.config import ModelConfig
from ouro_batch.runner.base import MAX_STOP_IDS, RowStart


@dataclass
class RowState:
    """One entry a row (R rows). A row is active from its first output token to its last."""

    active: Tensor  # bool [R]
    token: Tensor  # int32 [R], the token that runs now
    position: Tensor  # int32 [R], its position
    depth: Tensor  # int32 [R], loops it has completed
    survival: Tensor  # float32 [R], product of (1 - lambda) over them
    hidden: Tensor  # dtype [R, hidden], the output of the last one
    generated: Tensor  # int32 [R], output tokens so far
    max_tokens: Tensor  # int32 [R]
    stop_ids: Tensor  # int32 [R, MAX_STOP_IDS], -1 where unused
    temperature: Tensor  # float32 [R]
    top_k: Tensor  # int32 [R]
    top_p: Tensor  # float32 [R]
    seed: Tensor  # int64 [R]
    logprobs: Tensor  # int32 [R], -1 where none are wanted
    exit_threshold: Tensor  # float32 [R], infinite at fixed depth
    min_loops: Tensor  # int32 [R]
    max_loops: Tensor  # int32 [R]
    replay: Tensor  # bool [R]
    replay_depths: Tensor  # int16 [R, output tokens]
    decode_blocks: Tensor  # int32 [R, blocks], the row's reserved blocks
    slots_taken: Tensor  # int32 [R], cursor into them
    tables: SlotTables

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> RowState:
        def zeros(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=kind, device=device)

        int32, float32 = torch.int32, torch.float32
        blocks = -(-max_model_len // block_size)
        return cls(
            active=zeros(torch.bool),
            token=zeros(int32),
            position=zeros(int32),
            depth=zeros(int32),
            survival=zeros(float32),
            hidden=zeros(dtype, config.hidden_size),
            generated=zeros(int32),
            max_tokens=zeros(int32),
            stop_ids=zeros(int32, MAX_STOP_IDS),
            temperature=zeros(float32),
            top_k=zeros(int32),
            top_p=zeros(float32),
            seed=zeros(torch.int64),
            logprobs=zeros(int32),
            exit_threshold=zeros(float32),
            min_loops=zeros(int32),
            max_loops=zeros(int32),
            replay=zeros(torch.bool),
            replay_depths=zeros(torch.int16, max_model_len),
            decode_blocks=zeros(int32, -(-max_model_len * config.loops // block_size)),
            slots_taken=zeros(int32),
            tables=SlotTables(
                prompt_blocks=zeros(int32, config.loops, blocks),
                decode_slots=zeros(int32, config.loops, max_model_len),
                prompt_lengths=zeros(int32),
                block_size=block_size,
            ),
        )

    def start(self, start: RowStart) -> None:
        """Put a request into its row; the row becomes active with its first output token."""
        row, device = start.row, self.active.device

        def put(target: Tensor, values: object) -> None:
            source = torch.as_tensor(values, dtype=target.dtype, device=device)
            target[row, ..., : source.shape[-1]] = source

        self.active[row] = False
        self.depth[row] = 0
        self.generated[row] = 0
        self.slots_taken[row] = 0
        self.max_tokens[row] = start.max_tokens
        self.stop_ids[row] = -1
        put(self.stop_ids, list(start.stop_ids))
        self.temperature[row] = start.temperature
        self.top_k[row] = start.top_k
        self.top_p[row] = start.top_p
        self.seed[row] = start.seed
        self.logprobs[row] = start.logprobs
        self.exit_threshold[row] = start.exit_threshold
        self.min_loops[row] = start.min_loops
        self.max_loops[row] = start.max_loops
        self.replay[row] = start.exit_depths is not None
        put(self.replay_depths, list(start.exit_depths or ()))
        put(self.decode_blocks, list(start.decode_blocks))
        put(self.tables.prompt_blocks, [list(blocks) for blocks in start.prompt_blocks])
        self.tables.prompt_lengths[row] = start.prompt_length

    def take_slots(self, rows: Tensor, planes: Tensor) -> Tensor:
        """Take the next reserved slot of each row [R'] for its plane; returns slots, int64."""
        block_size = self.tables.block_size
        cursor = self.slots_taken[rows].long()
        block = self.decode_blocks[rows, cursor // block_size].long()
        slots = block * block_size + cursor % block_size
        self.slots_taken[rows] += 1
        self.tables.decode_slots[rows, planes, self._running(rows)] = slots.int()
        return slots

    def publish_last_exited(self, rows: Tensor, planes: Tensor) -> None:
        """Let the planes beyond the exit ``planes`` [R'] of each row's token name its last slot."""
        token = self._running(rows)
        slots = self.tables.decode_slots[rows, :, token]  # [R', L]
        last = slots.gather(1, planes[:, None])
        loops = torch.arange(slots.shape[1], device=slots.device)
        self.tables.decode_slots[rows, :, token] = torch.where(
            loops[None, :] > planes[:, None], last, slots
        )

    def _running(self, rows: Tensor) -> Tensor:
        """The output index of the token that runs: its successor will be ``generated``."""
        return self.generated[rows].long() - 1
