"""Who owns which blocks of key/value slots.

A request is admitted with every block its worst case can need, so it always finishes; blocks
that an early exit made unnecessary go back while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RequestBlocks:
    """``prompt[plane]`` holds the prompt in position order; ``decode`` is filled front to back."""

    prompt: list[list[int]]
    decode: list[int]

    def all(self) -> list[int]:
        return [block for plane in self.prompt for block in plane] + self.decode


class CacheShape:
    """A cache of ``blocks`` blocks of ``block_size`` slots, for a model of ``loops`` loops."""

    def __init__(self, blocks: int, block_size: int, loops: int):
        self.blocks = blocks
        self.block_size = block_size
        self.loops = loops

    def needed(self, prompt_tokens: int, decode_slots: int) -> int:
        """Blocks of a request's worst case."""
        return self.loops * self._ceil(prompt_tokens) + self._ceil(decode_slots)

    def _ceil(self, slots: int) -> int:
        return -(-slots // self.block_size)


class BlockManager(CacheShape):
    """A pool of a cache's blocks."""

    def __init__(self, blocks: int, block_size: int, loops: int):
        super().__init__(blocks, block_size, loops)
        self._free = list(range(blocks - 1, -1, -1))
        self._owned = [False] * blocks

    @property
    def in_use(self) -> int:
        return self.blocks - len(self._free)

    def can_allocate(self, prompt_tokens: int, decode_slots: int) -> bool:
        return self.needed(prompt_tokens, decode_slots) <= len(self._free)

    def allocate(self, prompt_tokens: int, decode_slots: int) -> RequestBlocks:
        """Take the whole worst case; the caller has asked ``can_allocate``."""
        prompt = [self._take(self._ceil(prompt_tokens)) for _ in range(self.loops)]
        return RequestBlocks(prompt, self._take(self._ceil(decode_slots)))

    def trim(self, owned: RequestBlocks, decode_slots: int) -> int:
        """Give back the decode blocks beyond ``decode_slots``; returns how many."""
        keep = self._ceil(decode_slots)
        surplus = owned.decode[keep:]
        del owned.decode[keep:]
        self._give(surplus)
        return len(surplus)

    def release(self, owned: RequestBlocks) -> None:
        """Give back everything."""
        self._give(owned.all())
        owned.prompt, owned.decode = [], []

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owned[block] = True
        return taken

    def _give(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self._owned[block]:
                raise AssertionError(f"block {block} is given back twice")
            self._owned[block] = False
        self._free.extend(blocks)
