"""Who runs: admission, rows, prefill chunks. It plans steps and never touches a tensor."""

from __future__ import annotations

from collections import deque
from itertools import islice

from ouro_batch.engine.kv import BlockManager
from ouro_batch.engine.request import Request, Status
from ouro_batch.runner.base import PrefillChunk, RowStart, StepPlan

# Requests that may be admitted ahead of one that waits for memory, before it must be next.
MAX_BYPASS = 64
# Prompt tokens that make a prefill step worth its launches and its reading of all weights.
ENOUGH_TOKENS = 512
# How far behind the head of the queue a request is looked for that fits the free blocks.
BYPASS_WINDOW = 64


class Scheduler:
    """Admits requests to rows and shares each step's tokens between decode and prefill.

    Args:
        blocks: the pool that admission reserves from.
        rows: requests that can run at once; 1 gives the serial schedule.
        max_batched_tokens: tokens of one step; every decoding row counts one, prefill takes the
            rest. Above ``rows``, so that neither starves.
        gather: while rows decode, free rows that short prompts wait for, so that several are
            prefilled in one step.
    """

    def __init__(
        self, blocks: BlockManager, *, rows: int, max_batched_tokens: int, gather: int = 1
    ):
        self.blocks = blocks
        self.max_batched_tokens = max_batched_tokens
        self._gather = gather
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by row
        self._prefilling: deque[Request] = deque()
        self._free_rows = list(range(rows - 1, -1, -1))
        self._stopped_rows: list[int] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def plan(self) -> StepPlan:
        """The next step; what it returns must be launched."""
        stop_rows, self._stopped_rows = self._stopped_rows, []
        start_rows = [self._start(request) for request in self._admit()]
        decoding = sum(r.status is Status.DECODE for r in self.running.values())
        chunks = self._chunks(self.max_batched_tokens - decoding)
        logprobs = any(r.params.logprobs is not None for r in self.running.values())
        return StepPlan(stop_rows, start_rows, chunks, decoding, logprobs)

    def trim(self, request: Request) -> None:
        """Give back what ``request`` can no longer need."""
        if request.blocks is not None:
            self.blocks.trim(request.blocks, request.decode_slots())

    def finish(self, request: Request, *, stop_row: bool) -> None:
        """Take ``request`` out, wherever it is; ``stop_row`` where the device would run on."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request.row]
            self._free_rows.append(request.row)
            if request in self._prefilling:
                self._prefilling.remove(request)
            if stop_row:
                self._stopped_rows.append(request.row)
            self.blocks.release(request.blocks)
        request.status = Status.FINISHED

    def _admit(self) -> list[Request]:
        admitted = []
        if not self._enough_to_prefill():
            return admitted
        while self.waiting and self._free_rows:
            request = self._next_that_fits()
            if request is None:
                break
            request.blocks = self.blocks.allocate(len(request.prompt), request.decode_slots())
            request.row = self._free_rows.pop()
            request.status = Status.PREFILL
            self.running[request.row] = request
            self._prefilling.append(request)
            admitted.append(request)
        return admitted

    def _enough_to_prefill(self) -> bool:
        free = len(self._free_rows)
        if self._prefilling or not self.running or free >= min(self._gather, len(self.waiting)):
            return True
        return sum(len(r.prompt) for r in islice(self.waiting, free)) >= ENOUGH_TOKENS

    def _next_that_fits(self) -> Request | None:
        """The head of the queue, or one that may pass it while it waits for memory."""
        head = self.waiting[0]
        window = 1 if head.bypassed >= MAX_BYPASS else BYPASS_WINDOW
        for place, request in enumerate(self.waiting):
            if place >= window:
                return None
            if self.blocks.can_allocate(len(request.prompt), request.decode_slots()):
                del self.waiting[place]
                if place:
                    head.bypassed += 1
                return request
        return None

    def _start(self, request: Request) -> RowStart:
        params = request.params
        return RowStart(
            row=request.row,
            prompt_length=len(request.prompt),
            prompt_blocks=[list(plane) for plane in request.blocks.prompt],
            decode_blocks=list(request.blocks.decode),
            max_tokens=params.max_tokens,
            stop_ids=request.stop_ids,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=request.seed,
            exit_threshold=request.exit_threshold,
            min_loops=params.min_loops,
            max_loops=request.max_loops,
            exit_depths=params.exit_depths and params.exit_depths[: params.max_tokens],
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )

    def _chunks(self, budget: int) -> list[PrefillChunk]:
        chunks = []
        while self._prefilling and budget > 0:
            request = self._prefilling[0]
            start = request.prefilled
            tokens = request.prompt[start : start + budget]
            request.prefilled += len(tokens)
            budget -= len(tokens)
            last = request.prefilled == len(request.prompt)
            chunks.append(PrefillChunk(request.row, start, tokens, last))
            if last:
                self._prefilling.popleft()
                request.status = Status.DECODE
        return chunks
