"""Random paged caches for the attention kernels' tests, and their attention in FP64.

Everything a kernel must not use is poisoned: slots that nobody owns hold NaN, unused table entries
point far outside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WILD = 2**30
GUARD = 7.0
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Cache:
    """Rows with prompts and generated tokens in every plane of one layer."""

    keys: Tensor  # [blocks, B, G, D]
    values: Tensor  # [blocks, B, G, D]
    prompt_blocks: Tensor  # int32 [R, L, blocks of a row]
    decode_slots: Tensor  # int32 [R, L, generated positions]
    prompt_lengths: Tensor  # int32 [R]
    slots: list[list[Tensor]]  # int64 [length] a row and plane, where its positions lie

    def attend(self, query: Tensor, row: int, plane: int, context: int) -> Tensor:
        """FP64 attention of one query [H, D] over positions 0..context-1 -> [H, D]."""
        kv_heads, head_dim = self.keys.shape[2:]
        slots = self.slots[row][plane][:context]
        block_size = self.keys.shape[1]
        keys = self.keys[slots // block_size, slots % block_size].double()  # [context, G, D]
        values = self.values[slots // block_size, slots % block_size].double()
        q = query.double().view(kv_heads, -1, head_dim)
        scores = torch.einsum("gmd,kgd->gmk", q, keys) * head_dim**-0.5
        return torch.einsum("gmk,kgd->gmd", scores.softmax(-1), values).reshape(query.shape)


def make_cache(
    lengths: list[tuple[int, int]],
    *,
    loops: int = 3,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    head_major: bool = False,
    seed: int = 0,
) -> Cache:
    """A cache of rows with ``lengths`` (prompt, generated); blocks and slots lie in random order.

    A generated token exits at a random loop; later planes share the slot of its last one.
    """
    random = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    wide = max(prompt for prompt, _ in lengths)
    blocks_of = [-(-prompt // block_size) for prompt, _ in lengths]
    prompt_total = loops * sum(blocks_of)
    decode_total = -(-loops * sum(generated for _, generated in lengths) // block_size)
    pool = torch.randperm(prompt_total + decode_total + 2, generator=random)
    free = pool[:prompt_total].tolist()
    # Generated tokens scatter over the slots of their blocks without any order.
    decode = pool[prompt_total : prompt_total + decode_total, None] * block_size
    decode = (decode + torch.arange(block_size)).flatten()
    decode = decode[torch.randperm(len(decode), generator=random)].tolist()

    prompt_blocks = torch.full((rows, loops, -(-wide // block_size) + 2), WILD, dtype=torch.int32)
    longest = max(generated for _, generated in lengths)
    decode_slots = torch.full((rows, loops, longest + 3), WILD, dtype=torch.int32)
    slots: list[list[Tensor]] = []
    for row, (prompt, generated) in enumerate(lengths):
        exits = torch.randint(0, loops, (generated,), generator=random)
        planes: list[Tensor] = []
        for plane in range(loops):
            own = torch.tensor([free.pop() for _ in range(blocks_of[row])], dtype=torch.int64)
            prompt_blocks[row, plane, : len(own)] = own
            at = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:prompt]
            fresh = torch.tensor([decode.pop() for _ in range(generated)], dtype=torch.int64)
            if plane:
                fresh = torch.where(exits < plane, planes[-1][prompt:], fresh)
            decode_slots[row, plane, :generated] = fresh
            planes.append(torch.cat((at, fresh)))
        slots.append(planes)

    owned = torch.cat([plane for planes in slots for plane in planes]).unique()
    shape = (len(pool), block_size, kv_heads, head_dim)
    if head_major:
        shape = (len(pool), kv_heads, block_size, head_dim)
    pair = []
    for _ in range(2):
        tensor = torch.full(shape, float("nan"), dtype=dtype)
        view = tensor.transpose(1, 2) if head_major else tensor
        data = torch.randn(len(owned), kv_heads, head_dim, generator=random).to(dtype)
        view[owned // block_size, owned % block_size] = data
        tensor = tensor.to(DEVICE)
        pair.append(tensor.transpose(1, 2) if head_major else tensor)
    return Cache(
        *pair,
        prompt_blocks.to(DEVICE),
        decode_slots.to(DEVICE),
        torch.tensor([prompt for prompt, _ in lengths], dtype=torch.int32, device=DEVICE),
        [[plane.to(DEVICE) for plane in planes] for planes in slots],
    )


def random_queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[T, H, D], a part of wider rows as a fused projection makes them."""
    random = torch.Generator().manual_seed(seed + 1)
    fused = 2.0 * torch.randn(tokens, heads * 3, head_dim, generator=random)
    return fused.to(DEVICE, dtype)[:, heads : 2 * heads]


class GuardedOut:
    """``out`` [T, H, D], all NaN, inside a larger buffer that must keep its value."""

    def __init__(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        shape = (tokens + 2, heads + 2, head_dim + 8)
        self._buffer = torch.full(shape, GUARD, dtype=dtype, device=DEVICE)
        self.out = self._buffer[1:-1, 1:-1, :head_dim]
        self.out.fill_(float("nan"))

    def check(self) -> None:
        around = self._buffer.clone()
        around[1:-1, 1:-1, : self.out.shape[-1]] = GUARD
        assert bool((around == GUARD).all()), "written outside of out"


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
