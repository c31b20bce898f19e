"""Variants of the model that the golden data does not have, against the serial oracle."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ouro_batch import LLM, SamplingParams
from ouro_batch.model.ouro import Ouro
from ouro_batch.model.source import CheckpointSource
from ouro_batch.validate.oracle import SerialOracle

from .tiny import CONFIG, random_tensors, write_checkpoint

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


def test_arithmetic_between_products_rounds_once(tmp_path):
    """A layer in BF16 whose products are exact is the FP64 layer, rounded at each store.

    Its projections are the identity, which leaves norms, the residual and SiLU.
    """
    config = CONFIG | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config |= {"head_dim": 64, "hidden_size": 64, "intermediate_size": 64}
    tensors = {
        name: (torch.eye(64) if "_proj" in name else tensor).bfloat16()
        for name, tensor in random_tensors(config).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    source = CheckpointSource(str(tmp_path))
    model = Ouro(source.config, source.load(torch.device("cpu"), torch.bfloat16))
    h = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"model.{name}.weight"].double()
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def stored(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    x, layer = h.double(), "layers.0."
    attended = stored(norm(x, layer + "input_layernorm"))
    x = stored(x + norm(attended, layer + "input_layernorm_2"))
    up = stored(norm(x, layer + "post_attention_layernorm"))
    update = stored(torch.nn.functional.silu(up) * up)
    x = stored(x + norm(update, layer + "post_attention_layernorm_2"))
    expected = stored(norm(x, "norm"))
    ours = model.loop(h, model.rope(torch.arange(200)), lambda index, q, k, v: v)
    # FP32 may decide a tie in rounding otherwise; a second rounding changes more.
    assert (ours.double() == expected).double().mean() > 0.99


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
