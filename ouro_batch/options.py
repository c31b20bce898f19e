"""Checks the engine's options and resolves the automatic ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ouro_batch.errors import EngineError

SCHEDULES = ("refill", "no-refill", "serial")
ATTENTIONS = ("auto", "torch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise EngineError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise EngineError(f"{name} must be an integer of at least 1, got {value!r}")


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"device {device!r} is not known: use auto, cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r} is not supported: use auto, cpu or cuda")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {device!r} was asked for, but torch sees no CUDA device")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"device {device!r} does not exist; {torch.cuda.device_count()} do")
    return resolved


def resolve_dtype(dtype: str, checkpoint: str, device: torch.device) -> torch.dtype:
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else checkpoint
    return DTYPES[dtype]
