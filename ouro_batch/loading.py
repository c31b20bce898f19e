"""Puts an engine together: weights, runner, cache and scheduler, in the order that memory needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ouro_batch import memory
from ouro_batch.engine.engine import Engine
from ouro_batch.engine.kv import BlockManager
from ouro_batch.engine.scheduler import Scheduler
from ouro_batch.errors import EngineError
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.ouro import Ouro
from ouro_batch.model.source import ModelSource
from ouro_batch.runner.base import Runner


def load_engine(
    source: ModelSource,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    schedule: str,
    rows: int,
    batched_tokens: int,
    block_size: int,
    kv_tokens: int | None,
    kv_memory: float | None,
    gpu_memory_utilization: float,
    max_model_len: int,
    batch_invariant: bool,
) -> Engine:
    """An engine for a checkpoint; the arguments are those of ``LLM``, resolved.

    ``config`` is the checkpoint's, or that with another number of loops.

    Raises:
        ModelError: the checkpoint's weights are missing or broken.
        EngineError: memory does not allow to run; says what to lower.
    """
    with _out_of_memory(device, "the weights", "use another device or dtype"):
        weights = source.load(device, dtype)
    with _out_of_memory(
        device,
        f"the work space of {rows} rows and {batched_tokens} tokens a step",
        "lower max_rows, max_batched_tokens or max_model_len",
    ):
        runner = make_runner(
            attention,
            Ouro(config, weights),
            rows=rows,
            block_size=block_size,
            max_model_len=max_model_len,
            max_prefill_tokens=batched_tokens,
            refill=schedule != "no-refill",
            batch_invariant=batch_invariant,
        )
        if device.type == "cuda":
            runner.rehearse()
    blocks = memory.cache_blocks(
        config,
        dtype,
        device,
        block_size=block_size,
        rows=rows,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        kv_memory=kv_memory,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    cache_bytes = blocks * memory.block_bytes(config, dtype, block_size)
    with _out_of_memory(
        device,
        f"a cache of {cache_bytes:,} bytes",
        "lower kv_memory, kv_tokens or gpu_memory_utilization",
    ):
        runner.allocate_cache(blocks)
    scheduler = Scheduler(
        BlockManager(blocks, block_size, config.loops),
        rows=rows,
        max_batched_tokens=batched_tokens,
        gather=max(1, rows // 32) if device.type == "cuda" else 1,
    )
    return Engine(scheduler, runner)


def make_runner(
    attention: str,
    model: Ouro,
    *,
    max_prefill_tokens: int,
    batch_invariant: bool,
    **options: Any,
) -> Runner:
    """The runner that goes with ``attention``; each is imported only where it is used."""
    if attention == "triton":
        from ouro_batch.runner.triton import TritonRunner

        return TritonRunner(
            model,
            max_prefill_tokens=max_prefill_tokens,
            batch_invariant=batch_invariant,
            **options,
        )
    from ouro_batch.attention.fixed import FixedAttention
    from ouro_batch.attention.reference import ReferenceAttention
    from ouro_batch.runner.eager import EagerRunner

    implementation = (
        FixedAttention(model.config.num_heads) if batch_invariant else ReferenceAttention()
    )
    return EagerRunner(model, implementation, fixed_blocks=batch_invariant, **options)


@contextmanager
def _out_of_memory(device: torch.device, what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # a backtrace may follow
        raise EngineError(f"{what} cannot be allocated on {device}: {why} ({advice})") from error
