"""Where a model comes from: a checkpoint on disk, or random weights of a given shape."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch

from ouro_batch.model.config import ModelConfig
from ouro_batch.model.hub import resolve
from ouro_batch.model.weights import ModelWeights, empty_weights, load_weights


class ModelSource(Protocol):
    """What an engine needs of a model."""

    name: str
    revision: str | None  # the commit, where it came from the hub
    config: ModelConfig
    folder: Path | None  # tokenizer and chat template; None: prompts of token ids only

    def load(self, device: torch.device, dtype: torch.dtype) -> ModelWeights: ...


class CheckpointSource:
    """A folder or a hub id. Raises ModelError as ``resolve`` and ``ModelConfig`` do."""

    def __init__(self, model: str, revision: str | None = None):
        checkpoint = resolve(model, revision)
        self.name = checkpoint.name
        self.revision = checkpoint.revision
        self.folder: Path | None = checkpoint.folder
        self.config = ModelConfig.from_folder(checkpoint.folder)

    def load(self, device: torch.device, dtype: torch.dtype) -> ModelWeights:
        return load_weights(self.folder, self.config, device, dtype)


@dataclass(frozen=True)
class RandomSource:
    """Random weights of a shape: for measuring speed, which does not depend on them."""

    name: str
    config: ModelConfig
    seed: int = 0
    revision: str | None = None
    folder: Path | None = None

    def load(self, device: torch.device, dtype: torch.dtype) -> ModelWeights:
        """Normal weights scaled by fan-in, norms of one: hidden states and gates stay finite."""
        generator = torch.Generator(device).manual_seed(self.seed)
        weights = empty_weights(self.config, device, dtype)

        def fill(tensor: torch.Tensor) -> None:
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)

        for holder in (weights, *weights.layers):
            for field in fields(holder):
                value = getattr(holder, field.name)
                if isinstance(value, torch.Tensor):
                    fill(value)
        weights.embed.normal_(generator=generator)
        weights.exit_gate_bias.zero_()
        return weights
