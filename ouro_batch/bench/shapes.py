"""Named model shapes, run with random weights."""

from __future__ import annotations

from ouro_batch.bench.workload import BenchError
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.source import RandomSource


def _shape(**values: int) -> ModelConfig:
    return ModelConfig(
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling_factor=1.0,
        max_position_embeddings=65_536,
        loops=4,
        exit_threshold=1.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_ids=(0,),
        dtype="bfloat16",
        **values,
    )


def _ouro(layers: int) -> ModelConfig:
    return _shape(
        vocab_size=49_152,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
    )


SHAPES = {
    "ouro-1.4b": _ouro(24),
    "ouro-2.6b": _ouro(48),
    "tiny": _shape(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
    ),
}


def random_source(shape: str, seed: int) -> RandomSource:
    """Random weights of the named shape.

    Raises:
        BenchError: no shape has this name.
    """
    if shape not in SHAPES:
        raise BenchError(f"shape {shape!r} is not known: one of {', '.join(SHAPES)}, or --model")
    return RandomSource(shape, SHAPES[shape], seed)
