"""Small random checkpoints, made where a test needs one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def random_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under the released names, scaled so that gates and logits vary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(*shape, generator=generator) * scale

    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": 1 + normal(hidden, scale=0.1),
        "model.early_exit_gate.weight": normal(1, hidden, scale=0.25),
        "model.early_exit_gate.bias": torch.tensor([-0.5]),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=1.0)
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            for name in (norm, f"{norm}_2"):
                tensors[f"model.layers.{i}.{name}.weight"] = 1 + normal(hidden, scale=0.1)
    return tensors


def write_checkpoint(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """A random checkpoint in the released format; ``overrides`` change config.json."""
    config = CONFIG | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors")
    return folder
