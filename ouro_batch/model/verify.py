"""Whether a checkpoint has all that a run needs, without reading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ouro_batch.errors import ModelError
from ouro_batch.model.chat import ChatTemplate
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.hub import Checkpoint
from ouro_batch.model.tokenizer import Tokenizer
from ouro_batch.model.weights import check_weights, empty_weights


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose configuration and tensors are there and fit each other.

    ``tokenizer`` and ``chat_template`` are None, or why there is none.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    weight_files: list[Path]
    weight_bytes: int  # of the files
    parameters: int
    tokenizer: str | None
    chat_template: str | None


def verify(checkpoint: Checkpoint) -> Verified:
    """Check a checkpoint's files.

    Raises:
        ModelError: something that a run needs is missing, torn or of another shape.
    """
    folder = checkpoint.folder
    config = ModelConfig.from_folder(folder)
    files = check_weights(folder, config)
    no_tokenizer = no_template = None
    try:
        Tokenizer.from_folder(folder)
    except ModelError as error:
        if (folder / "tokenizer.json").exists():
            raise
        no_tokenizer = str(error)
    if ChatTemplate.from_folder(folder) is None:
        no_template = "there is none: messages cannot be run, prompts can"
    weights = empty_weights(config, torch.device("meta"), torch.int8)
    gate = weights.exit_gate_weight.nbytes + weights.exit_gate_bias.nbytes
    return Verified(
        checkpoint,
        config,
        files,
        sum(path.stat().st_size for path in files),
        weights.nbytes - gate + gate // 4,  # the gate is FP32 whatever is asked for
        no_tokenizer,
        no_template,
    )
