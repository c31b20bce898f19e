"""What can run on this machine: for ``ouro-batch info``."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ouro_batch import memory
from ouro_batch.bench.machine import cpu_name
from ouro_batch.environment import as_text, versions

EXTRAS = (("zstandard", "zstd", ".zst"), ("pyarrow", "parquet", ".parquet"))


def diagnose() -> dict[str, Any]:
    """Versions, machine, devices, abilities (``why_not`` None: yes) and checkpoints, for JSON."""
    cache = _hub_cache()
    return {
        "versions": versions() | {"cuda": torch.version.cuda},
        "machine": {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "free_bytes": memory.available_memory(),
            "system": platform.platform(),
        },
        "devices": _devices(),
        "abilities": _abilities(),
        "hub_cache": as_text(cache),
        "checkpoints": _checkpoints(cache),
    }


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "model": torch.cuda.get_device_name(index),
                "memory_bytes": total,
                "free_bytes": free,
                "capability": f"{major}.{minor}",
            }
        )
    return found


def _abilities() -> list[dict[str, str | None]]:
    no_gpu = _no_gpu()
    triton = None
    if importlib.util.find_spec("triton") is None:
        triton = "the package triton is not installed (pip install triton; Linux only)"
    abilities = [
        ("torch on the CPU", None),
        ("torch on a GPU", no_gpu),
        ("Triton kernels on a GPU", no_gpu or triton),
        ("BF16 on a GPU", no_gpu or _no_bf16()),
        ("kernels that overlap", no_gpu or triton or _no_overlap()),
    ]
    for package, extra, suffix in EXTRAS:
        missing = importlib.util.find_spec(package) is None
        why = f"{package} is not installed (pip install 'ouro-batch[{extra}]')"
        abilities.append((f"{suffix} inputs", why if missing else None))
    return [{"name": name, "why_not": why} for name, why in abilities]


def _no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA (install a CUDA build from pytorch.org)"
    return "torch sees no CUDA device (check nvidia-smi and CUDA_VISIBLE_DEVICES)"


def _no_bf16() -> str | None:
    if torch.cuda.get_device_capability() >= (8, 0):
        return None
    return "the GPU is older than compute capability 8.0 (use --dtype float16)"


def _no_overlap() -> str | None:
    from ouro_batch.kernels.overlap import can_overlap

    if can_overlap(torch.device("cuda")):
        return None
    return "it needs compute capability 9.0 and Triton 3.4: a loop step takes some percent longer"


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _checkpoints(cache: Path) -> list[dict[str, Any]]:
    """Looped models in the hub's cache."""
    found = []
    for snapshot in sorted(cache.glob("models--*/snapshots/*")):
        try:
            kind = json.loads((snapshot / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if kind != "ouro":
            continue
        size = sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
        name = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
        found.append({"model": name, "commit": snapshot.name, "bytes": size})
    return found
