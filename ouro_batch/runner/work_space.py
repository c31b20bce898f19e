"""Work space of the Triton runner: activations of tokens, and the entries of a decode loop step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_batch.model.ouro import Ouro


@dataclass
class Activations:
    """Work space of T tokens; ``first(n)`` is the same for the first n of them."""

    hidden: Tensor  # [T, hidden], the residual stream
    normed: Tensor  # [T, hidden], its norm; after a loop, the loop's output
    qkv: Tensor  # [T, (H + 2G) * D]
    queries: Tensor  # [T, H, D]
    attended: Tensor  # [T, H, D]
    projected: Tensor  # [T, hidden]
    gate_up: Tensor  # [T, 2I]
    mlp: Tensor  # [T, I]

    @classmethod
    def allocate(cls, model: Ouro, tokens: int) -> Activations:
        c = model.config

        def empty(*shape: int) -> Tensor:
            return torch.empty((tokens, *shape), dtype=model.dtype, device=model.device)

        return cls(
            hidden=empty(c.hidden_size),
            normed=empty(c.hidden_size),
            qkv=empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
            queries=empty(c.num_heads, c.head_dim),
            attended=empty(c.num_heads, c.head_dim),
            projected=empty(c.hidden_size),
            gate_up=empty(2 * c.intermediate_size),
            mlp=empty(c.intermediate_size),
        )

    def first(self, tokens: int) -> Activations:
        return Activations(**{name: tensor[:tokens] for name, tensor in vars(self).items()})


@dataclass
class Entries:
    """The compacted rows of a decode loop step (M entries), and those of them that exit."""

    rows: Tensor  # int32 [M]
    planes: Tensor  # int32 [M]
    positions: Tensor  # int32 [M]
    contexts: Tensor  # int32 [M]
    slots: Tensor  # int32 [M], -1 where unused
    fresh: Tensor  # uint8 [M]
    exits: Tensor  # int32 [M]
    exit_rows: Tensor  # int32 [M]
    exit_hidden: Tensor  # [M, hidden]
    logits: Tensor  # [M, V]
    tokens: Tensor  # int32 [M]

    @classmethod
    def allocate(cls, model: Ouro, entries: int) -> Entries:
        def int32(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(entries, dtype=dtype, device=model.device)

        def empty(width: int) -> Tensor:
            return torch.empty((entries, width), dtype=model.dtype, device=model.device)

        return cls(
            rows=int32(),
            planes=int32(),
            positions=int32(),
            contexts=int32(),
            slots=int32(),
            fresh=int32(torch.uint8),
            exits=int32(),
            exit_rows=int32(),
            exit_hidden=empty(model.config.hidden_size),
            logits=empty(model.config.vocab_size),
            tokens=int32(),
        )

    def first(self, entries: int) -> Entries:
        return Entries(**{name: tensor[:entries] for name, tensor in vars(self).items()})
