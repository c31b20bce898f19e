"""Checks the engine's options and resolves the automatic ones."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence

import torch

from ouro_batch.errors import EngineError

SCHEDULES = ("refill", "no-refill", "serial")
ATTENTIONS = ("auto", "torch", "triton")
MAX_ROWS = 65_536
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise EngineError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise EngineError(f"{name} must be an integer of at least 1, got {value!r}")


def check_rows(value: int | None) -> None:
    """Rows of the decode state, which is made for all of them at once."""
    check_positive("max_rows", value)
    if value is not None and value > MAX_ROWS:
        raise EngineError(f"max_rows must be at most {MAX_ROWS:,}, got {value}")


def check_finite(name: str, value: float | None, most: float = math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and abs(value) < math.inf):
        raise EngineError(f"{name} must be a finite number, got {value!r}")
    if value is not None and value > most:
        raise EngineError(f"{name} must be at most {most:,}, got {value!r}")


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise EngineError(f"device {device!r} is not known: use auto, cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r} is not supported: use auto, cpu or cuda")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"device {device!r} was asked for, but torch sees no CUDA device"
            " (give cpu, or see why with ouro-batch info)"
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"device {device!r} does not exist; {torch.cuda.device_count()} do")
    return resolved


def resolve_attention(attention: str, device: torch.device) -> str:
    """ "triton" on a GPU where Triton is installed, "torch" elsewhere."""
    check_choice("attention", attention, ATTENTIONS)
    on_gpu = device.type == "cuda"
    installed = importlib.util.find_spec("triton") is not None
    if attention == "auto":
        return "triton" if on_gpu and installed else "torch"
    if attention == "triton":
        if not installed:
            raise EngineError("attention 'triton' needs the triton package, which runs on Linux")
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise EngineError(
                f"attention 'triton' runs on a GPU, not on {device}: use 'torch' (or set"
                " TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, very slowly)"
            )
    return attention


def resolve_dtype(dtype: str, checkpoint: str, device: torch.device) -> torch.dtype:
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else checkpoint
    return DTYPES[dtype]
