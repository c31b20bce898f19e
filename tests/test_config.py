"""Reading config.json: both spellings, defaults, and a refusal by name of what is not supported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ouro_batch.errors import ModelError
from ouro_batch.model.config import ModelConfig

ORACLE = Path(__file__).parent / "data" / "oracle"
RELEASED = json.loads((ORACLE / "gqa-3loop" / "config.json").read_text())
EXPECTED = ModelConfig(
    vocab_size=257,
    hidden_size=96,
    intermediate_size=200,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling_factor=1.0,
    max_position_embeddings=2048,
    loops=3,
    exit_threshold=1.0,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(0,),
    dtype="bfloat16",
)


def changed(without: tuple[str, ...] = (), **values: object) -> dict:
    return {k: v for k, v in (RELEASED | values).items() if k not in without}


def read(without: tuple[str, ...] = (), **values: object) -> ModelConfig:
    return ModelConfig.from_dict(changed(without, **values), "the/config.json")


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_released_format():
    assert ModelConfig.from_folder(ORACLE / "gqa-3loop") == EXPECTED


@pytest.mark.parametrize("without", ["head_dim", "early_exit_threshold", "tie_word_embeddings"])
def test_defaults(without: str):
    assert read(without=(without,)) == EXPECTED


def test_other_defaults():
    assert read(without=("num_key_value_heads",)).num_kv_heads == 6
    assert read(without=("torch_dtype",)).dtype == "float32"
    assert read(without=("bos_token_id", "eos_token_id")).eos_token_ids == ()
    assert read(without=("bos_token_id",)).bos_token_id is None
    assert read(head_dim=None).head_dim == 16
    assert read(layer_types=None, architectures=None, hidden_act=None) == EXPECTED


def test_own_values():
    assert read(early_exit_threshold=0.3).exit_threshold == 0.3
    assert read(early_exit_threshold=1).exit_threshold == 1.0
    assert read(tie_word_embeddings=True).tie_word_embeddings
    assert read(head_dim=32).head_dim == 32
    assert read(without=("torch_dtype",), dtype="float16").dtype == "float16"
    assert read(eos_token_id=[2, 0, 2]).eos_token_ids == (2, 0)
    assert read(sliding_window=4096, max_window_layers=2) == EXPECTED


@pytest.mark.parametrize(
    ("values", "theta", "factor"),
    [
        ({"rope_scaling": None}, 10000.0, 1.0),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, 10000.0, 1.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, 10000.0, 4.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10000.0, 2.5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, 1.0),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}}, 5e5, 2.0),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0, 1.0),
    ],
)
def test_rope(values: dict, theta: float, factor: float):
    config = read(**values)
    assert (config.rope_theta, config.rope_scaling_factor) == (theta, factor)


def test_theta_only_in_rope_parameters():
    config = read(("rope_theta", "rope_scaling"), rope_parameters={"rope_theta": 1e6})
    assert config.rope_theta == 1e6


@pytest.mark.parametrize(
    ("generation", "eos"),
    [
        (None, (0,)),
        ({}, (0,)),
        ({"eos_token_id": 2}, (0, 2)),
        ({"eos_token_id": [2, 0, 5], "temperature": 1.0}, (0, 2, 5)),
        ({"eos_token_id": None}, (0,)),
    ],
)
def test_eos_tokens_of_both_files(tmp_path: Path, generation: object, eos: tuple[int, ...]):
    config = ModelConfig.from_folder(write(tmp_path, RELEASED, generation))
    assert config == replace(EXPECTED, eos_token_ids=eos)


@pytest.mark.parametrize(
    ("values", "way_out"),
    [
        ({"model_type": "llama"}, 'only "ouro" models'),
        ({"architectures": ["LlamaForCausalLM"]}, "only OuroForCausalLM"),
        ({"use_sliding_window": True}, "full attention"),
        ({"hidden_act": "gelu"}, '"silu"'),
        ({"attention_bias": True}, "without bias"),
        ({"mlp_bias": True}, "without bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unquantized"),
        ({"torch_dtype": "float8_e4m3fn"}, "one of bfloat16, float16, float32"),
        ({"head_dim": 15}, "correct it"),
        ({"num_key_value_heads": 4}, "num_attention_heads, which is 6"),
        ({"total_ut_steps": 0}, "at least 1"),
        ({"total_ut_steps": True}, "must be an integer"),
        ({"vocab_size": "257"}, "must be an integer"),
        ({"hidden_size": 96.0}, "must be an integer"),
        ({"num_hidden_layers": -1}, "at least 1"),
        ({"rms_norm_eps": "1e-6"}, "must be a number"),
        ({"rms_norm_eps": True}, "must be a number"),
        ({"early_exit_threshold": float("nan")}, "finite"),
        ({"early_exit_threshold": -0.5}, "at least 0"),
        ({"rope_theta": 0}, "above 0"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"eos_token_id": "0"}, "token ids"),
        ({"eos_token_id": [0, True]}, "token ids"),
        ({"bos_token_id": -1}, "token ids"),
        ({"rope_scaling": "linear"}, "an object or null"),
        ({"layer_types": "full_attention"}, "a list or null"),
    ],
)
def test_refused_by_name(values: dict, way_out: str):
    ((key, value),) = values.items()
    with pytest.raises(ModelError) as error:
        read(**values)
    message = str(error.value)
    assert message.startswith("the/config.json: ")
    assert f"{key} {value!r}" in message
    assert way_out in message


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "llama3", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_other_rope_types(kind: str, key: str, place: str):
    with pytest.raises(ModelError) as error:
        read(**{place: {key: kind, "factor": 2.0}})
    assert f"{place}: {key} '{kind}' is not supported" in str(error.value)
    assert '"linear"' in str(error.value)


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": 0.5}, "factor 0.5 must be at least 1"),
        ({"type": "linear", "factor": "2"}, "factor '2' must be a number"),
        (
            {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5",
        ),
    ],
)
def test_broken_rope_scaling(scaling: dict, problem: str):
    with pytest.raises(ModelError) as error:
        read(rope_scaling=scaling)
    assert problem in str(error.value)


def test_sliding_layers():
    with pytest.raises(ModelError, match="'sliding_attention', which is not supported"):
        read(layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
        *("num_attention_heads", "rope_theta", "max_position_embeddings", "total_ut_steps"),
    ],
)
def test_missing_key(key: str):
    with pytest.raises(ModelError, match=rf"the/config\.json: {key} is missing \(take"):
        read(without=(key,))


def test_missing_model_type():
    with pytest.raises(ModelError, match=r'model_type is missing \(only "ouro"'):
        read(without=("model_type",))


def test_hidden_size_without_head_dim():
    with pytest.raises(ModelError, match="hidden_size 100 is not a multiple"):
        read(without=("head_dim",), hidden_size=100)


def test_no_folder_and_no_config(tmp_path: Path):
    with pytest.raises(ModelError, match=r"gone does not exist \(give the folder"):
        ModelConfig.from_folder(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"has no config\.json.*give the folder"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelError, match="is a file, not a checkpoint folder"):
        ModelConfig.from_folder(write(tmp_path, RELEASED) / "config.json")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"{", "not valid JSON"), (b"[]", "JSON object, got list"), (b"\xff", "cannot be read")],
)
def test_broken_file(tmp_path: Path, file: str, content: bytes, problem: str):
    write(tmp_path, RELEASED, {})
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match="download it again") as error:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / file) in str(error.value)
    assert problem in str(error.value)


def test_broken_eos_in_generation_config(tmp_path: Path):
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id 'x' must hold"):
        ModelConfig.from_folder(write(tmp_path, RELEASED, {"eos_token_id": "x"}))
