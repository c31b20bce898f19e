"""How much memory there is, and how large a cache may be."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Sequence

import torch

from ouro_batch.errors import EngineError
from ouro_batch.model.config import ModelConfig

GIB = 2**30
GRAPH_BYTES = 512 * 2**20  # CUDA graphs and kernels that are loaded later


def block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block: keys and values of all layers for ``block_size`` slots."""
    slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return slot * block_size


def cache_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int,
    rows: int,
    max_model_len: int,
    kv_tokens: int | None,
    kv_memory: float | None,
    gpu_memory_utilization: float,
) -> int:
    """Blocks of the cache, from what was asked for, or from what weights and work space leave."""
    if kv_tokens is not None and kv_memory is not None:
        raise EngineError("kv_tokens and kv_memory both size the cache: give one of them")
    if not 0 < gpu_memory_utilization <= 1:
        raise EngineError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization}"
        )
    if kv_tokens is not None:
        return config.loops * math.ceil(kv_tokens / block_size)
    one = block_bytes(config, dtype, block_size)
    if kv_memory is not None:
        if kv_memory <= 0:
            raise EngineError(f"kv_memory must be above 0 GiB, got {kv_memory}")
        blocks = int(kv_memory * GIB / one)
        asked = f"kv_memory {kv_memory} GiB"
    else:
        # More than every row at its longest is never used.
        most = rows * config.loops * (math.ceil(max_model_len / block_size) + 1)
        blocks = min(int(_free_bytes(device, gpu_memory_utilization) / one), most)
        asked = f"the free memory of {device}"
    if blocks < config.loops:
        raise EngineError(
            f"{asked} holds {max(blocks, 0)} blocks of {one:,} bytes; one token needs"
            f" {config.loops} (raise kv_memory or gpu_memory_utilization, or lower block_size)"
        )
    return blocks


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor on ``device``, by a copy through pinned memory that the host does not wait for."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def peak_bytes(device: torch.device) -> int:
    """Most memory used so far: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: torch.device) -> str:
    """``cuda:0 (NVIDIA H200)`` or ``cpu (x86_64, 2 threads)``."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _free_bytes(device: torch.device, gpu_memory_utilization: float) -> float:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return free - (1 - gpu_memory_utilization) * total - GRAPH_BYTES
    return available_memory() / 4


def available_memory() -> int:
    """Free bytes of main memory, reclaimable caches included where the system tells."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
