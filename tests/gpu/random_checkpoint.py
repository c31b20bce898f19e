"""Writes a checkpoint with random weights in a released shape: what ``validate`` runs on a GPU.

python -m tests.gpu.random_checkpoint FOLDER [--layers 24] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..tiny import CONFIG, random_tensors


def write(folder: Path, layers: int, seed: int) -> None:
    """Ouro-1.4B has 24 layers, Ouro-2.6B 48; BF16."""
    config = CONFIG | {
        "vocab_size": 49_152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rope_theta": 1e6,
        "max_position_embeddings": 65_536,
        "total_ut_steps": 4,
        "torch_dtype": "bfloat16",
    }
    tensors = random_tensors(config, seed)
    # A gate whose decisions vary from token to token at this width.
    tensors["model.early_exit_gate.weight"] *= 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.layers, options.seed)
