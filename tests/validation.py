"""A small context for the checks of ``validate``, and their verdicts."""

from __future__ import annotations

from pathlib import Path

import torch

from ouro_batch.model.config import ModelConfig
from ouro_batch.validate.check import Context
from ouro_batch.validate.prompts import random_prompts
from ouro_batch.validate.record import CHECKS, run_checks

SMALL = [name for name in CHECKS if name != "quality"]  # which needs questions


def context_of(folder: Path) -> Context:
    """Level quick on a CPU, without questions."""
    config = ModelConfig.from_folder(folder)
    prompts = random_prompts(config, full=False)
    return Context(str(folder), folder, config, torch.device("cpu"), False, prompts, [])


def verdicts(context: Context, *names: str) -> dict[str, bool | None]:
    done = run_checks(context, names or SMALL, lambda name, result: None)
    for result, _ in done:
        assert not result.note.startswith(("TypeError", "AttributeError", "KeyError")), result
    return {result.name: result.passed for result, _ in done}
