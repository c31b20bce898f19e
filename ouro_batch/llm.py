"""The public API: ``LLM`` loads a looped model and runs requests on it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ouro_batch import memory
from ouro_batch.engine.engine import Engine
from ouro_batch.engine.request import Request
from ouro_batch.environment import versions
from ouro_batch.errors import EngineError, ModelError, RequestError
from ouro_batch.intake import EncodedPrompt, Intake, Messages, TextSide, output_of
from ouro_batch.loading import load_engine
from ouro_batch.model.files import fingerprint
from ouro_batch.model.source import CheckpointSource, ModelSource
from ouro_batch.options import (
    SCHEDULES,
    check_choice,
    check_finite,
    check_positive,
    check_rows,
    resolve_attention,
    resolve_device,
    resolve_dtype,
)
from ouro_batch.params import MAX_GIB, MAX_SEED, RequestOutput, SamplingParams, Score
from ouro_batch.scoring import check_lists, score

__all__ = ["LLM", "EncodedPrompt", "EngineSnapshot", "RequestOutput", "SamplingParams"]


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at this moment, for a progress display; token and loop counts are totals."""

    rows_in_use: int
    max_rows: int
    waiting: int
    kv_blocks_in_use: int
    kv_blocks: int
    prompt_tokens: int
    completion_tokens: int
    decode_tokens: int
    decode_loops: int


class LLM:
    """A looped model ready to run requests.

    Args:
        model: a folder with a checkpoint, a hub id, or a ``ModelSource``.
        revision: branch, tag or commit of a hub id; None is the pinned one or the default branch.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1".
        dtype: "auto" (FP32 on a CPU, the checkpoint's on a GPU), "float32", "bfloat16", "float16".
        attention: "triton" (kernels and CUDA graphs), "torch" (the reference, any device), or
            "auto": triton on a GPU.
        schedule: "refill" (a token that exits makes room for its successor in the next loop
            step), "no-refill" (running tokens wait for each other), "serial" (one request).
        loops: run the whole model with another ``total_ut_steps``, for prompt and output alike.
        max_rows: requests that run at once; None: 256 on a GPU, 64 on a CPU.
        max_batched_tokens: tokens of one step, decode rows and prompt tokens together; None:
            8,192 on a GPU, 1,024 on a CPU, beyond one for each row.
        block_size: slots of a block.
        kv_tokens: full-depth tokens the cache holds. At most one of this and ``kv_memory``.
        kv_memory: GiB of cache. None of both: on a GPU what ``gpu_memory_utilization`` leaves
            free, on a CPU a quarter of the free memory; never more than ``max_rows`` can use.
        gpu_memory_utilization: share of the GPU's memory that weights and cache may take.
        max_model_len: tokens of prompt and output together; None: the model's positions.
        batch_invariant: a request's tokens, depths and log-probabilities are the same, bit for
            bit, alone and in any batch, whatever the schedule, the chunks and the rows.
        seed: requests without a seed derive theirs from it.

    Raises:
        ModelError: the checkpoint is missing, broken or not supported.
        EngineError: an option, the device or its memory does not allow to run.
    """

    def __init__(
        self,
        model: str | Path | ModelSource,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        attention: str = "auto",
        schedule: str = "refill",
        loops: int | None = None,
        max_rows: int | None = None,
        max_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_tokens: int | None = None,
        kv_memory: float | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        batch_invariant: bool = False,
        seed: int = 0,
    ):
        if not isinstance(batch_invariant, bool):
            raise EngineError(f"batch_invariant must be true or false, got {batch_invariant!r}")
        check_choice("schedule", schedule, SCHEDULES)
        for name, value in [
            ("loops", loops),
            ("max_batched_tokens", max_batched_tokens),
            ("block_size", block_size),
            ("kv_tokens", kv_tokens),
            ("max_model_len", max_model_len),
        ]:
            check_positive(name, value)
        check_rows(max_rows)
        check_finite("kv_memory", kv_memory, MAX_GIB)
        check_finite("gpu_memory_utilization", gpu_memory_utilization)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise EngineError(f"seed must be an integer from 0 to {MAX_SEED}, got {seed!r}")
        self.seed = seed
        self.device = resolve_device(device)
        self.attention = resolve_attention(attention, self.device)
        if isinstance(model, (str, Path)):
            model = CheckpointSource(str(model), revision)
        elif not hasattr(model, "config"):
            raise ModelError(f"model must be a folder, a hub id or a ModelSource, got {model!r}")
        self.source = model
        config = model.config
        self.config = config if loops is None else replace(config, loops=loops)
        self.dtype = resolve_dtype(dtype, config.dtype, self.device)
        self.schedule = schedule
        self.batch_invariant = batch_invariant

        on_gpu = self.device.type == "cuda"
        rows = max_rows or (256 if on_gpu else 64)
        if schedule == "serial":
            rows = 1
        batched = max_batched_tokens or rows + (8192 if on_gpu else 1024)
        if batched <= rows:
            raise EngineError(
                f"max_batched_tokens {batched} must be above max_rows {rows}: a step runs one token"
                " for each row besides prompt tokens (raise it or lower max_rows)"
            )
        positions = config.max_position_embeddings
        self.max_model_len = max_model_len or positions
        if self.max_model_len > positions:
            raise EngineError(
                f"max_model_len {max_model_len} is above the model's {positions} positions"
            )
        text = TextSide.from_folder(model.folder)
        self.engine: Engine | None = load_engine(
            model,
            self.config,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            schedule=schedule,
            rows=rows,
            batched_tokens=batched,
            block_size=block_size,
            kv_tokens=kv_tokens,
            kv_memory=kv_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=self.max_model_len,
            batch_invariant=batch_invariant,
        )
        self.blocks = self.engine.scheduler.blocks
        self.intake = Intake(
            self.config, text, blocks=self.blocks, max_model_len=self.max_model_len, seed=seed
        )
        self.max_rows = rows
        self.max_batched_tokens = batched
        self._unfinished: dict[int, Request] = {}
        self._held: list[RequestOutput] = []  # finished during a generate() that did not own them
        self._next_id = 0
        self._token_texts: dict[int, str] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop weights and cache; unfinished requests are lost."""
        self.engine = None
        self._unfinished.clear()
        self._held.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts (text or token ids) to their end; results in input order.

        ``params`` is one for all or one for each. A prompt with ``n`` above 1 has so many results,
        one after another. A prompt without a seed derives its own from
        the LLM's seed and its index here.

        Raises:
            RequestError: a prompt or its parameters cannot be run; none is, then.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run_all([{"prompt": prompt} for prompt in prompts], params)

    def chat(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for lists of ``{"role", "content"}`` messages, through the chat template."""
        kwargs = {"chat_template_kwargs": chat_template_kwargs}
        return self._run_all([{"messages": c, **kwargs} for c in conversations], params)

    def score(
        self,
        prompts: Sequence[str | Sequence[int]],
        completions: Sequence[str | Sequence[int]],
        exit_depths: Sequence[Sequence[int] | None] | None = None,
        params: SamplingParams | None = None,
    ) -> list[Score]:
        """Log-probabilities and depths of given completions, each in one pass; nothing is decoded.

        With ``exit_depths``, one list for each completion as ``RequestOutput`` has them, every
        token runs at its given depth. Without (or with None for one) it leaves where ``params``
        (their threshold and loops) would have had it leave. Running requests are not disturbed.

        Raises:
            RequestError: lengths do not agree, a text cannot be run, or a number is not finite.
        """
        model = self._running_engine().runner.model
        given = {"prompts": prompts, "completions": completions}
        check_lists(given | ({} if exit_depths is None else {"exit_depths": exit_depths}))
        if not isinstance(params, SamplingParams | None):
            raise RequestError(f"params must be SamplingParams, got {reprlib.repr(params)}")
        if params is not None and params.exit_depths is not None:
            raise RequestError("params have exit_depths: give them as exit_depths, one list each")
        params = params or SamplingParams()
        scores = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                depths = None if exit_depths is None else exit_depths[index]
                scores.append(
                    score(
                        model, self.intake, self.max_model_len, prompt, completion, depths, params
                    )
                )
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}", error.type) from error
        return scores

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has more to return."""
        return bool(self._unfinished or self._held)

    def encode(
        self,
        prompt: str | Sequence[int] | None = None,
        messages: Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> EncodedPrompt:
        """Tokenize a prompt, or render and tokenize messages, for ``add_request``.

        Other threads may call it while the engine runs.

        Raises:
            RequestError: it cannot be done.
        """
        return self.intake.encode(prompt, messages, chat_template_kwargs)

    def add_request(
        self,
        prompt: str | Sequence[int] | EncodedPrompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        index: int = 0,
        sample: int | None = None,
        too_long: str = "error",
    ) -> int:
        """Queue one request, given by ``prompt`` or by ``messages``; returns its id.

        ``index`` is its place in the job and ``sample`` which of ``params.n`` samples it is (needed
        where n is above 1): a missing seed derives from both. ``too_long`` says what becomes of a
        prompt that does not fit: "error", "truncate-left" (its beginning goes) or
        "truncate-right".

        Raises:
            RequestError: it cannot be run; nothing was queued.
        """
        request = self.intake.request(
            self._next_id,
            self.intake.encode(prompt, messages, chat_template_kwargs),
            SamplingParams() if params is None else params,
            index=index,
            sample=sample,
            too_long=too_long,
        )
        self._running_engine().add_request(request)
        self._unfinished[request.request_id] = request
        self._next_id += 1
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests that have finished.

        Raises:
            EngineError: the device failed; every unfinished request is lost.
        """
        try:
            outputs = self._running_engine().step()
        except BaseException as error:
            self._unfinished.clear()  # the engine has ended them all
            if not isinstance(error, RuntimeError):
                raise
            raise EngineError(
                f"the engine stopped on {self.device}: {error} (out of memory? lower max_rows,"
                " max_batched_tokens or the cache)"
            ) from error
        finished = [o.request_id for o in outputs if o.finish_reason is not None]
        held, self._held = self._held, []
        return held + [output_of(self._unfinished.pop(request_id)) for request_id in finished]

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now; what it has so far, or None where it had ended already."""
        request = self._running_engine().abort(request_id)
        self._unfinished.pop(request_id, None)
        return request and output_of(request)

    def waiting_requests(self) -> list[int]:
        """Ids of the requests that have not begun, first come first."""
        return [request.request_id for request in self._running_engine().scheduler.waiting]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text that each token adds; joined they are the text of all."""
        detokenizer = self.intake.text.require_tokenizer().detokenizer()
        texts = [detokenizer.push(token) for token in token_ids]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def token_text(self, token_id: int) -> str:
        """A token by itself, special ones spelled out; empty where there is no tokenizer."""
        text = self._token_texts.get(token_id)
        if text is None:
            tokenizer = self.intake.text.tokenizer
            text = "" if tokenizer is None else tokenizer.decode([token_id], False)
            self._token_texts[token_id] = text
        return text

    def snapshot(self) -> EngineSnapshot:
        """Where the engine stands; cheap."""
        engine = self._running_engine()
        counts = engine.statistics
        return EngineSnapshot(
            rows_in_use=len(engine.scheduler.running),
            max_rows=self.max_rows,
            waiting=len(engine.scheduler.waiting),
            kv_blocks_in_use=self.blocks.in_use,
            kv_blocks=self.blocks.blocks,
            prompt_tokens=counts.prefill_tokens,
            completion_tokens=counts.completion_tokens,
            decode_tokens=counts.decode_tokens,
            decode_loops=counts.decode_loops,
        )

    def statistics(self) -> dict[str, Any]:
        """Totals since the start, ready for JSON."""
        counts = self._running_engine().statistics
        on_gpu = self.device.type == "cuda"
        return {
            "steps": counts.steps,
            "prefill_tokens": counts.prefill_tokens,
            "completion_tokens": counts.completion_tokens,
            "dropped_tokens": counts.dropped_tokens,
            "decode_loops": counts.decode_loops,
            "mean_exit_depth": counts.mean_exit_depth,
            "exit_depths": {str(d): counts.exit_depths[d] for d in range(1, self.config.loops + 1)},
            "rows_in_use": {
                "mean": counts.mean_rows_in_use,
                "max": max(counts.rows_in_use, default=0),
                "steps_by_rows": {str(r): n for r, n in sorted(counts.rows_in_use.items())},
            },
            "peak_requests": counts.peak_requests,
            "cache": {
                "blocks": self.blocks.blocks,
                "block_size": self.blocks.block_size,
                "tokens": self.blocks.blocks * self.blocks.block_size // self.config.loops,
                "peak_blocks": counts.peak_blocks,
                "bytes": self.blocks.blocks
                * memory.block_bytes(self.config, self.dtype, self.blocks.block_size),
            },
            "peak_memory_bytes": memory.peak_bytes(self.device),
            "memory_kind": "device" if on_gpu else "process",
            "finish_reasons": dict(counts.finish_reasons),
        }

    def describe(self) -> dict[str, Any]:
        """Model, device, options and versions, ready for JSON."""
        return {
            "model": {
                "name": self.source.name,
                "revision": self.source.revision,
                "fingerprint": self.source.folder and fingerprint(self.source.folder),
                "config": asdict(self.config),
            },
            "device": memory.device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "schedule": self.schedule,
            "batch_invariant": self.batch_invariant,
            "loops": self.config.loops,
            "max_rows": self.max_rows,
            "max_batched_tokens": self.max_batched_tokens,
            "max_model_len": self.max_model_len,
            "seed": self.seed,
            "versions": versions(),
        }

    def _run_all(
        self,
        requests: list[dict[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(requests)
        if not isinstance(params, Sequence) or isinstance(params, str):
            raise RequestError(
                f"params must be SamplingParams or a list of them, got {reprlib.repr(params)}"
            )
        if len(params) != len(requests):
            raise RequestError(f"{len(params)} sampling params for {len(requests)} prompts")
        order: dict[int, int] = {}  # request id to its place among the results
        others: list[RequestOutput] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for index, (request, own) in enumerate(zip(requests, params, strict=True)):
                try:
                    prompt = self.intake.encode(**request)
                    for sample in range(getattr(own, "n", 1)):
                        request_id = self.add_request(prompt, own, index=index, sample=sample)
                        order[request_id] = len(order)
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}", error.type) from error
            while len(outputs) < len(order):
                for output in self.step():
                    if output.request_id in order:
                        outputs[order[output.request_id]] = output
                    else:
                        others.append(output)
        except BaseException:
            if self.engine is not None:
                for request_id in order:
                    self.abort(request_id)
            raise
        finally:
            self._held += others
        return [outputs[place] for place in range(len(order))]

    def _running_engine(self) -> Engine:
        if self.engine is None:
            raise EngineError("this LLM is closed")
        return self.engine
