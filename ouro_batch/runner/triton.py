"""The Triton runner: the same step as the eager runner's, in kernels that never wait for the host.

On a GPU a whole decode loop step is one CUDA graph a bucket of rows; results come back through
pinned memory one step behind. On a CPU, under Triton's interpreter, the same kernels run without
graphs, for tests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from ouro_batch.attention.base import KVCache, PrefillSegment
from ouro_batch.attention.triton import PrefillPlan, TritonAttention
from ouro_batch.kernels import norm, rope, sampling, step
from ouro_batch.kernels.logprobs import token_logprobs
from ouro_batch.kernels.overlap import can_overlap
from ouro_batch.kernels.prefill_attention import prefill_config
from ouro_batch.memory import upload
from ouro_batch.model.ouro import Ouro
from ouro_batch.params import MAX_LOGPROBS
from ouro_batch.runner.base import (
    MAX_STOP_IDS,
    PrefillChunk,
    RowStart,
    Runner,
    StepPlan,
    StepResult,
)
from ouro_batch.runner.graphs import StepGraphs, bucket_sizes
from ouro_batch.runner.invariant import InvariantProjections, invariant_projections
from ouro_batch.runner.projections import Projections
from ouro_batch.runner.prompts import MAX_PADDED, PromptBuffer
from ouro_batch.runner.results import PinnedResults
from ouro_batch.runner.state import RowState
from ouro_batch.runner.work_space import Activations, Entries

# Parts of a row of logits that are sampled side by side, where batch invariance is asked for.
SAMPLING_CHUNKS = 4
# Rows of the smaller batch whose kernels are compiled at the start.
REHEARSED_ROWS = 64

# Called with a layer: from ``qkv`` to ``attended``, keys and values being stored on the way.
Attend = Callable[[int], None]


class TritonRunner(Runner):
    """Runs plans in fixed launches: what depends on the data is decided on the device.

    Args:
        model: weights and shapes; its torch arithmetic is not used.
        rows: rows of the decode state, R.
        block_size: slots of a block.
        max_model_len: positions a request may have.
        max_prefill_tokens: prompt tokens of one step at most.
        refill: False makes rows wait, once their token has exited, until every running token has.
        batch_invariant: every product, sum and maximum in one order, whatever shares the step.
    """

    def __init__(
        self,
        model: Ouro,
        *,
        rows: int,
        block_size: int,
        max_model_len: int,
        max_prefill_tokens: int,
        refill: bool = True,
        batch_invariant: bool = False,
    ):
        config, device = model.config, model.device
        self.model = model
        self.refill = refill
        self._overlap = can_overlap(device)
        self.state = RowState.allocate(config, rows, max_model_len, block_size, device, model.dtype)
        self._batch_invariant = batch_invariant
        prompt_tokens = max(max_prefill_tokens, MAX_PADDED)
        decode_capacity, prefill_capacity = rows, prompt_tokens
        self._products: Projections | InvariantProjections
        self._prompt_products: Projections | InvariantProjections
        if batch_invariant:
            self._products, self._prompt_products = invariant_projections(
                model.weights, rows, prompt_tokens, overlap=self._overlap
            )
            decode_capacity = self._products.capacity
            prefill_capacity = self._prompt_products.capacity
        else:
            self._products = Projections(model.weights, overlap=self._overlap)
            self._prompt_products = self._products
        # One number of warps, where the number of rows would choose it, and of parts of a row.
        self._norm_warps = norm.row_warps(config.hidden_size) if batch_invariant else None
        self._sampling_chunks = SAMPLING_CHUNKS if batch_invariant else None
        self._entries = Entries.allocate(model, decode_capacity)
        self._decode_space = Activations.allocate(model, decode_capacity)
        self._prefill_space = Activations.allocate(model, prefill_capacity)
        block_m = prefill_config(model.dtype, config.head_dim).block_m
        # Every row's tokens may end with a tile that is not full.
        max_tiles = max_prefill_tokens // block_m + rows
        self._prompts = PromptBuffer(max_prefill_tokens, max_tiles, device)
        self._exit_count = torch.zeros(1, dtype=torch.int32, device=device)
        self._sampling_space = torch.empty(
            sampling.workspace_size(rows), dtype=torch.int32, device=device
        )
        self._results = torch.full((3 * rows + 1,), -1, dtype=torch.int32, device=device)
        self._table = self._results[:-1].view(3, rows)
        self._count = self._results[-1:]  # rows that run
        # By row: the log-probability of its token, then those of the likeliest, then their ids.
        self._logprobs = torch.zeros(rows, 1 + 2 * MAX_LOGPROBS, dtype=torch.int32, device=device)
        self._wanted: dict[int, int] = {}  # likeliest tokens by row, where log-probabilities are
        cos, sin = model.rope(torch.arange(max_model_len, device=device))
        self._cos_sin = torch.cat((cos, sin), dim=1)  # FP32 [positions, D]
        self._buckets = bucket_sizes(rows)
        self._decode_graphs = StepGraphs(self._decode, device)
        self._prefill_graphs = StepGraphs(self._prefill_loops, device)
        self._spare = deque(PinnedResults(device, rows) for _ in range(3))
        self._launched: deque[PinnedResults] = deque()
        self._prompt_tokens = max_prefill_tokens

    def rehearse(self) -> None:
        """Run the parts of a first step side by side, without a row: each compiles its kernels.

        One after another they take more than ten seconds with an empty Triton cache. cuBLAS takes
        its work space here too. Triton's interpreter is not made for threads.
        """
        self.allocate_cache(1)
        device = self.model.device
        on_gpu = device.type == "cuda"

        def play(part: Callable[[], None]) -> None:
            with torch.inference_mode(), torch.cuda.device(device) if on_gpu else nullcontext():
                if on_gpu:
                    torch.cuda.synchronize()  # the thread has its context: cuBLAS warns otherwise
                part()

        parts = (self._rehearse_prompts, self._rehearse_decode, self._rehearse_sampling)
        with ThreadPoolExecutor(len(parts) if on_gpu else 1) as threads:
            list(threads.map(play, parts))
        if on_gpu:
            torch.cuda.synchronize(device)
        del self.cache, self.attention

    def _rehearse_prompts(self) -> None:
        blocks: list[list[int]] = [[] for _ in range(self.model.config.loops)]
        self._start([RowStart(0, 1, blocks, [], 1, [], 0.0, 0, 1.0, 0, math.inf, 1, 1, None)])
        size, tiles = self._prompts.fill([], [], least=min(self._prompt_tokens, MAX_PADDED))
        self._prefill_loops(size, tiles)

    def _rehearse_decode(self) -> None:
        """A small batch and the largest take different kernels."""
        for bucket in sorted(
            {self._bucket(min(REHEARSED_ROWS, self._buckets[-1])), self._buckets[-1]}
        ):
            self._decode(bucket, False)

    def _rehearse_sampling(self) -> None:
        self._emit(self._entries.first(min(REHEARSED_ROWS, self._buckets[-1])), False)

    def allocate_cache(self, blocks: int) -> None:
        model, block_size = self.model, self.state.tables.block_size
        config, device, dtype = model.config, model.device, model.dtype
        self.cache = KVCache.allocate(config, blocks, block_size, device, dtype)
        self.attention = TritonAttention(
            config,
            dtype,
            device,
            entries=len(self.state.active),
            slots=blocks * block_size,
            overlap=self._overlap,
            batch_invariant=self._batch_invariant,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        if plan.stop_rows:
            self.state.active[self._upload(plan.stop_rows, torch.int64)] = False
        if plan.start_rows:
            self._start(plan.start_rows)
        if plan.decode_rows:
            self._decode_graphs.run(self._bucket(plan.decode_rows), plan.logprobs)
            if self.trace is not None:
                self._trace_decode()
        else:
            self._table[0].fill_(-1)
            self._count.zero_()
        if plan.chunks:
            self._prefill(plan.chunks, plan.logprobs)
        pinned = self._spare.popleft()
        pinned.fetch(self._results, self._logprobs, dict(self._wanted) if plan.logprobs else {})
        self._launched.append(pinned)

    def collect(self) -> StepResult:
        pinned = self._launched.popleft()
        result = pinned.read()
        self._spare.append(pinned)
        return result

    def reset(self) -> None:
        self.state.active.fill_(False)
        self._spare.extend(self._launched)
        self._launched.clear()

    @torch.inference_mode()
    def read_planes(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cache.read_planes(self.state.tables, row, length)

    def _bucket(self, rows: int) -> int:
        """The smallest bucket with room for ``rows``."""
        return next(size for size in self._buckets if size >= rows)

    def _upload(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return upload(values, dtype, self.model.device)

    def _start(self, starts: list[RowStart]) -> None:
        state, packed, offsets = self.state, [], []
        for start in starts:
            self._wanted.pop(start.row, None)
            if start.logprobs >= 0:
                self._wanted[start.row] = start.logprobs
            offsets.append(len(packed))
            packed += step.pack_start(start, MAX_STOP_IDS)
        step.start_rows(
            packed=self._upload(packed),
            offsets=self._upload(offsets),
            active=state.active.view(torch.uint8),
            depth=state.depth,
            generated=state.generated,
            slots_taken=state.slots_taken,
            prompt_lengths=state.tables.prompt_lengths,
            max_tokens=state.max_tokens,
            min_loops=state.min_loops,
            max_loops=state.max_loops,
            replay=state.replay.view(torch.uint8),
            top_k=state.top_k,
            temperature=state.temperature,
            top_p=state.top_p,
            exit_threshold=state.exit_threshold,
            seed=state.seed,
            logprobs=state.logprobs,
            stop_ids=state.stop_ids,
            prompt_blocks=state.tables.prompt_blocks,
            decode_blocks=state.decode_blocks,
            replay_depths=state.replay_depths,
        )

    def _decode(self, bucket: int, logprobs: bool) -> None:
        """One loop for the running rows, of which there are at most ``bucket``."""
        state, weights = self.state, self.model.weights
        entries, space = self._entries.first(bucket), self._decode_space.first(bucket)
        step.begin_step(
            active=state.active.view(torch.uint8),
            depth=state.depth,
            position=state.position,
            generated=state.generated,
            slots_taken=state.slots_taken,
            decode_blocks=state.decode_blocks,
            decode_slots=state.tables.decode_slots,
            results=self._table,
            rows=entries.rows,
            planes=entries.planes,
            positions=entries.positions,
            contexts=entries.contexts,
            slots=entries.slots,
            fresh=entries.fresh,
            count=self._count,
            block_size=state.tables.block_size,
            refill=self.refill,
            overlap=self._overlap,
        )
        plan = self.attention.plan_decode(
            state.tables, entries.rows, entries.planes, entries.contexts
        )
        norm.embed_norm(
            space.hidden,
            space.normed,
            embed=weights.embed,
            token=state.token,
            carried=state.hidden,
            rows=entries.rows,
            fresh=entries.fresh,
            weight=weights.layers[0].input_norm,
            eps=self.model.config.rms_norm_eps,
            num_warps=self._norm_warps,
            overlap=self._overlap,
        )

        def attend(layer: int) -> None:
            if self.attention.fuses_rope(bucket):
                self.attention.decode_qkv(
                    plan, space.qkv, space.attended, self.cache, layer, self._cos_sin
                )
                return
            self._rope_store(space, layer, entries.slots, entries.positions)
            self.attention.decode(plan, space.queries, space.attended, self.cache, layer)

        self._loop(space, attend, self._products)
        step.end_loop(
            hidden=space.normed,
            gate_weight=weights.exit_gate_weight,
            gate_bias=weights.exit_gate_bias,
            rows=entries.rows,
            fresh=entries.fresh,
            count=self._count,
            depth=state.depth,
            survival=state.survival,
            carried=state.hidden,
            generated=state.generated,
            exit_threshold=state.exit_threshold,
            min_loops=state.min_loops,
            max_loops=state.max_loops,
            replay=state.replay.view(torch.uint8),
            replay_depths=state.replay_depths,
            exits=entries.exits,
            overlap=self._overlap,
        )
        step.gather_exits(
            exits=entries.exits,
            rows=entries.rows,
            hidden=space.normed,
            exit_rows=entries.exit_rows,
            exit_hidden=entries.exit_hidden,
            exit_count=self._exit_count,
            overlap=self._overlap,
        )
        self._emit(entries, logprobs)

    def _prefill(self, chunks: list[PrefillChunk], logprobs: bool) -> None:
        """Run prompt tokens of several rows through all loops, packed."""
        segments = [PrefillSegment(c.row, c.start, len(c.tokens)) for c in chunks]
        size, tiles = self._prompts.fill(chunks, self.attention.tiles(segments))
        if size <= MAX_PADDED and self.trace is None:
            self._prefill_graphs.run(size, tiles)
        else:
            self._prefill_loops(size, tiles)

        lasts, end = [], 0
        for chunk in chunks:
            end += len(chunk.tokens)
            if chunk.last:
                lasts.append((chunk.row, end - 1))
        if lasts:
            entries = self._entries.first(len(lasts))
            entries.exit_rows.copy_(self._upload([row for row, _ in lasts]))
            at = self._upload([place for _, place in lasts], torch.int64)
            torch.index_select(self._prefill_space.normed, 0, at, out=entries.exit_hidden)
            self._exit_count.fill_(len(lasts))
            self._emit(entries, logprobs)

    def _prefill_loops(self, size: int, tiles: int) -> None:
        """All loops of ``size`` prompt tokens; ends with the final norm in ``normed``."""
        weights, eps = self.model.weights, self.model.config.rms_norm_eps
        prompts, space = self._prompts.read(size, tiles), self._prefill_space.first(size)
        plan = PrefillPlan(self.state.tables, prompts.tiles)
        planes = torch.arange(self.model.config.loops, device=self.model.device)
        slots = self.state.tables.lookup(prompts.rows.long(), planes[:, None], prompts.positions)
        slots = torch.where(prompts.positions >= 0, slots, -1)
        space.normed.copy_(self.model.embed(prompts.tokens))
        for plane in range(self.model.config.loops):
            space.hidden.copy_(space.normed)
            norm.rms_norm(
                space.normed,
                space.hidden,
                weights.layers[0].input_norm,
                eps,
                num_warps=self._norm_warps,
            )

            def attend(layer: int, plane: int = plane) -> None:
                self._rope_store(space, layer, slots[plane], prompts.positions)
                self.attention.prefill(
                    plan, plane, space.queries, space.attended, self.cache, layer
                )

            self._loop(space, attend, self._prompt_products)
            if self.trace is not None:
                real = prompts.positions >= 0
                rows = prompts.rows[real]
                places = torch.full_like(rows, plane)
                self.trace(rows, prompts.positions[real], places, space.normed[real])

    def _trace_decode(self) -> None:
        count = int(self._count)
        entries, hidden = self._entries.first(count), self._decode_space.normed[:count]
        self.trace(entries.rows, entries.positions, entries.planes, hidden)

    def _rope_store(self, space: Activations, layer: int, slots: Tensor, positions: Tensor) -> None:
        """``slots``, ``positions`` int32 [T]: where keys and values go, and each token's place."""
        rope.rope_store(
            space.queries,
            space.qkv,
            self.cache.keys[layer],
            self.cache.values[layer],
            slots,
            positions,
            self._cos_sin,
            overlap=self._overlap,
        )

    def _loop(
        self,
        space: Activations,
        attend: Attend,
        products: Projections | InvariantProjections,
    ) -> None:
        """All layers once, from ``hidden`` and its first norm; ends with the final norm."""
        weights, eps = self.model.weights, self.model.config.rms_norm_eps
        layers = weights.layers
        following = [*(layer.input_norm for layer in layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            products.qkv(index, space.normed, space.qkv)
            attend(index)
            update = products.o(index, space.attended.flatten(1), space.projected)
            norm.add_rms_norm(
                space.hidden,
                update,
                layer.input_norm_2,
                space.normed,
                layer.post_norm,
                eps,
                num_warps=self._norm_warps,
                overlap=self._overlap,
            )
            products.mlp(index, space.normed, space.gate_up, space.mlp)
            update = products.down(index, space.mlp, space.projected)
            norm.add_rms_norm(
                space.hidden,
                update,
                layer.post_norm_2,
                space.normed,
                next_norm,
                eps,
                num_warps=self._norm_warps,
                overlap=self._overlap,
            )

    def _emit(self, entries: Entries, logprobs: bool) -> None:
        """Logits and a sampled token for every row that exits or ends its prompt."""
        state = self.state
        self._products.lm_head(entries.exit_hidden, entries.logits, self._exit_count)
        sampling.sample(
            entries.tokens,
            entries.logits,
            rows=entries.exit_rows,
            count=self._exit_count,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            seed=state.seed,
            position=state.generated,
            workspace=self._sampling_space,
            chunks=self._sampling_chunks,
            overlap=self._overlap,
        )
        if logprobs:
            self._emit_logprobs(entries)
        step.emit_tokens(
            exit_rows=entries.exit_rows,
            exit_count=self._exit_count,
            tokens=entries.tokens,
            active=state.active.view(torch.uint8),
            token=state.token,
            position=state.position,
            depth=state.depth,
            generated=state.generated,
            max_tokens=state.max_tokens,
            stop_ids=state.stop_ids,
            prompt_lengths=state.tables.prompt_lengths,
            decode_slots=state.tables.decode_slots,
            results=self._table,
            overlap=self._overlap,
        )

    def _emit_logprobs(self, entries: Entries) -> None:
        floats = self._logprobs.view(torch.float32)
        token_logprobs(
            floats[:, 0],
            floats[:, 1 : 1 + MAX_LOGPROBS],
            self._logprobs[:, 1 + MAX_LOGPROBS :],
            entries.logits,
            entries.tokens,
            wanted=self.state.logprobs,
            rows=entries.exit_rows,
            count=self._exit_count,
            overlap=self._overlap,
        )
