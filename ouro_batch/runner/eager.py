"""The eager runner: one loop step at a time in plain torch, on any device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ouro_batch.attention.base import Attention, KVCache, PrefillSegment
from ouro_batch.model.ouro import Ouro
from ouro_batch.params import TokenLogprobs
from ouro_batch.runner.base import PrefillChunk, Runner, StepPlan, StepResult, TokenEvent
from ouro_batch.runner.row_blocks import RowBlocks
from ouro_batch.runner.sampling import log_probabilities, sample
from ouro_batch.runner.state import RowState


class EagerRunner(Runner):
    """Runs plans with data-dependent shapes: rows that do not run cost nothing.

    Args:
        model: the equations and weights.
        attention: how queries read the cache.
        rows: rows of the decode state, R.
        block_size: slots of a block.
        max_model_len: positions a request may have.
        refill: False makes rows wait, once their token has exited, until every running token has.
        fixed_blocks: run all rows in blocks of a fixed size, prompt tokens as entries of
            ``FixedAttention``: a token's bits then depend on its own request alone.
    """

    def __init__(
        self,
        model: Ouro,
        attention: Attention,
        *,
        rows: int,
        block_size: int,
        max_model_len: int,
        refill: bool = True,
        fixed_blocks: bool = False,
    ):
        config = model.config
        self.model = model
        self.attention = attention
        self.refill = refill
        self._blocks = RowBlocks(model, max_model_len, fixed=fixed_blocks)
        self.state = RowState.allocate(
            config, rows, max_model_len, block_size, model.device, model.dtype
        )
        self._launched: deque[StepResult] = deque()

    def allocate_cache(self, blocks: int) -> None:
        model = self.model
        self.cache = KVCache.allocate(
            model.config, blocks, self.state.tables.block_size, model.device, model.dtype
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        state = self.state
        for row in plan.stop_rows:
            state.active[row] = False
        for start in plan.start_rows:
            state.start(start)
        events: list[TokenEvent] = []
        rows_run = self._decode(events) if plan.decode_rows else 0
        if plan.chunks:
            self._prefill(plan.chunks, events)
        self._launched.append(StepResult(events, rows_run))

    def collect(self) -> StepResult:
        return self._launched.popleft()

    def reset(self) -> None:
        self.state.active.fill_(False)
        self._launched.clear()

    @torch.inference_mode()
    def read_planes(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cache.read_planes(self.state.tables, row, length)

    def _rows_to_run(self) -> Tensor:
        """Ids, int64 [R'], of the rows whose token runs a loop in this step."""
        state = self.state
        run = state.active
        if not self.refill:
            midway = run & (state.depth > 0)
            run = torch.where(midway.any(), midway, run)
        return run.nonzero().squeeze(1)

    def _decode(self, events: list[TokenEvent]) -> int:
        """One loop for every running row; returns how many rows ran."""
        state, model = self.state, self.model
        rows = self._rows_to_run()
        if not len(rows):
            return 0
        planes = state.depth[rows].long()  # the loop about to run, counted from 0
        fresh = planes == 0
        hidden = torch.where(
            fresh[:, None], model.embed(state.token[rows].long()), state.hidden[rows]
        )
        positions = state.position[rows].long()
        slots = state.take_slots(rows, planes)
        hidden = self._loop(rows, planes, positions, slots, hidden)
        if self.trace is not None:
            self.trace(rows, positions, planes, hidden)
        survival = torch.where(fresh, 1.0, state.survival[rows])
        survival = survival * self._blocks.apply(lambda h: torch.sigmoid(-model.gate(h)), hidden)
        exits = self._exits(rows, planes + 1, survival)

        state.hidden[rows] = hidden
        state.survival[rows] = survival
        state.depth[rows] += 1
        if exits.any():
            self._emit(rows[exits], hidden[exits], planes[exits] + 1, events)
        return len(rows)

    def _loop(
        self, rows: Tensor, planes: Tensor, positions: Tensor, slots: Tensor, hidden: Tensor
    ) -> Tensor:
        """One loop of tokens [T], each over its row's positions up to its own; their keys and
        values go into ``slots``. Returns [T, hidden]."""
        done = []
        for part in self._blocks.parts(len(rows)):
            plan = self.attention.plan_decode(
                self.state.tables, rows[part], planes[part], positions[part] + 1
            )

            def attend(
                layer: int,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                slots: Tensor = slots[part],
                plan: Any = plan,
            ) -> Tensor:
                self.cache.write(layer, slots, k, v)
                out = torch.empty_like(q)
                self.attention.decode(plan, q, out, self.cache, layer)
                return out

            done.append(self._blocks.loop(hidden[part], positions[part], attend))
        return torch.cat(done)

    def _exits(self, rows: Tensor, depths: Tensor, survival: Tensor) -> Tensor:
        """Which rows' tokens leave after ``depths`` loops, bool [R']."""
        state = self.state
        gate = (depths >= state.min_loops[rows]) & (1 - survival >= state.exit_threshold[rows])
        replayed = depths >= state.replay_depths[rows, state.generated[rows].long()]
        return (depths >= state.max_loops[rows]) | torch.where(state.replay[rows], replayed, gate)

    def _prefill(self, chunks: list[PrefillChunk], events: list[TokenEvent]) -> None:
        """Run prompt tokens of several rows through all loops, packed."""
        model, tables, device = self.model, self.state.tables, self.model.device
        segments = [PrefillSegment(c.row, c.start, len(c.tokens)) for c in chunks]
        lengths = torch.tensor([s.length for s in segments], device=device)
        rows = torch.tensor([s.row for s in segments], device=device).repeat_interleave(lengths)
        positions = torch.cat(
            [torch.arange(s.start, s.start + s.length, device=device) for s in segments]
        )
        tokens = torch.tensor([t for c in chunks for t in c.tokens], device=device)
        hidden = model.embed(tokens)
        fixed = self._blocks.size is not None
        plan = None if fixed else self.attention.plan_prefill(tables, segments)
        for plane in range(model.config.loops):
            planes = torch.full_like(rows, plane)
            slots = tables.lookup(rows, planes, positions)

            def attend(
                layer: int,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                slots: Tensor = slots,
                plane: int = plane,
            ) -> Tensor:
                self.cache.write(layer, slots, k, v)
                out = torch.empty_like(q)
                self.attention.prefill(plan, plane, q, out, self.cache, layer)
                return out

            if fixed:
                hidden = self._loop(rows, planes, positions, slots, hidden)
            else:
                hidden = self._blocks.loop(hidden, positions, attend)
            if self.trace is not None:
                self.trace(rows, positions, planes, hidden)

        last = torch.tensor([c.last for c in chunks], device=device)
        if last.any():
            ends = lengths.cumsum(0)[last] - 1
            depths = torch.full_like(ends, model.config.loops)
            self._emit(rows[ends], hidden[ends], depths, events)

    def _emit(self, rows: Tensor, hidden: Tensor, depths: Tensor, events: list[TokenEvent]) -> None:
        """Sample the next token of each row [R'] from its exit state and make it the running one.

        A row without an output token is at the end of its prompt; any other publishes the keys
        and values of the token that has just exited.
        """
        state = self.state
        logits = self._blocks.apply(self.model.logits, hidden)
        samples = self._blocks.parts(len(rows), size=1)
        tokens = torch.cat([self._sample(rows[part], logits[part]) for part in samples])
        decoded = state.generated[rows] > 0
        state.publish_last_exited(rows[decoded], depths[decoded] - 1)
        state.token[rows] = tokens.int()
        state.position[rows] = torch.where(
            decoded, state.position[rows] + 1, state.tables.prompt_lengths[rows]
        )
        state.depth[rows] = 0
        state.generated[rows] += 1
        stopped = (state.stop_ids[rows] == tokens[:, None]).any(1)
        finished = stopped | (state.generated[rows] >= state.max_tokens[rows])
        state.active[rows] = ~finished
        logprobs = [
            entry
            for part in samples
            for entry in self._logprobs(rows[part], logits[part], tokens[part])
        ]
        events.extend(
            TokenEvent(*event)
            for event in zip(
                rows.tolist(),
                tokens.tolist(),
                depths.tolist(),
                finished.tolist(),
                logprobs,
                strict=True,
            )
        )

    def _sample(self, rows: Tensor, logits: Tensor) -> Tensor:
        state = self.state
        return sample(
            logits,
            state.temperature[rows],
            state.top_k[rows],
            state.top_p[rows],
            state.seed[rows],
            state.generated[rows].long(),
        )

    def _logprobs(
        self, rows: Tensor, logits: Tensor, tokens: Tensor
    ) -> Sequence[TokenLogprobs | None]:
        """What each row [R'] wants of its logits' log-probabilities."""
        wanted = self.state.logprobs[rows].tolist()
        if max(wanted) < 0:
            return [None] * len(wanted)
        chosen, top, ids = log_probabilities(logits, tokens, max(wanted))
        return [
            None if k < 0 else TokenLogprobs(own, list(zip(these[:k], values[:k], strict=True)))
            for k, own, these, values in zip(
                wanted, chosen.tolist(), ids.tolist(), top.tolist(), strict=True
            )
        ]
