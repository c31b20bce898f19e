"""Variants of the model that the golden data does not have, against the serial oracle."""

from __future__ import annotations

import pytest
import torch

from ouro_batch import LLM, SamplingParams
from ouro_batch.model.ouro import Ouro, rms_norm
from ouro_batch.model.source import CheckpointSource
from ouro_batch.validate.oracle import SerialOracle

from .tiny import write_checkpoint

PARAMS = SamplingParams(12, exit_threshold=0.6, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7]]


@pytest.mark.parametrize(
    "variant",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 1, "total_ut_steps": 6},
        {"num_hidden_layers": 3, "total_ut_steps": 1},
        {"hidden_size": 40, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_variants_generate_what_the_oracle_does(tmp_path, variant):
    folder = write_checkpoint(tmp_path, seed=2, **variant)
    outputs = LLM(folder).generate(PROMPTS, PARAMS)
    oracle = SerialOracle.from_folder(folder)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = oracle.generate(prompt, PARAMS)
        assert min(expected.margins + expected.exit_margins) > 1e-4, (
            "the seed makes a decision too close to call"
        )
        assert output.token_ids == expected.tokens
        assert output.exit_depths == expected.depths


def test_rms_norm_rounds_before_the_weight():
    """As the released code does: the norm to the model's dtype first, then times the weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 32, generator=generator).bfloat16() for _ in range(2))
    wide = x.double()
    expected = weight * (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    # The variance's last bit may move a value over a rounding border; the other order changes
    # a quarter of the values.
    assert (rms_norm(x, weight, 1e-6) == expected).float().mean() > 0.99


def test_linear_rope_scaling_divides_positions(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    plain, scaled = (
        Ouro(source.config, source.load(torch.device("cpu"), torch.float32))
        for source in (
            CheckpointSource(str(write_checkpoint(tmp_path / "plain"))),
            CheckpointSource(str(write_checkpoint(tmp_path / "scaled", rope_scaling=scaling))),
        )
    )
    for ours, expected in zip(
        scaled.rope(torch.tensor([4, 8, 120])), plain.rope(torch.tensor([1, 2, 30])), strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_more_loops_than_the_checkpoint_names(tmp_path):
    """``loops`` is another ``total_ut_steps``, deeper as well as shallower."""
    folder = write_checkpoint(tmp_path / "three")
    deeper = write_checkpoint(tmp_path / "five", total_ut_steps=5)
    ours = LLM(folder, loops=5).generate(PROMPTS, PARAMS)
    theirs = LLM(deeper).generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
    assert [o.exit_depths for o in ours] == [o.exit_depths for o in theirs]
