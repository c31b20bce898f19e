"""Loading weights: the fused layout, bounded memory, and one clear error for each broken folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ouro_batch.errors import ModelError
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.files import SAMPLE_BYTES, SAMPLES, fingerprint
from ouro_batch.model.weights import load_weights

from .tiny import write_checkpoint

ORACLE = Path(__file__).parent / "data" / "oracle"
CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A private copy of a small released-format checkpoint with grouped key/value heads."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ORACLE / "gqa-3loop" / name).read_bytes())
    return tmp_path


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None):
    return load_weights(folder, config or config_of(ORACLE / "gqa-3loop"), CPU, dtype)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    save_file(tensors, path)


def shard(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Split the checkpoint in two shards; returns the index and the tensors."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = folder / "model.safetensors.index.json"
    weight_map = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index, tensors


def assert_layout(weights, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    def same(fused: torch.Tensor, *names: str) -> None:
        assert fused.dtype == dtype
        assert torch.equal(fused, torch.cat([tensors[name] for name in names]).to(dtype))

    same(weights.embed, "model.embed_tokens.weight")
    same(weights.norm, "model.norm.weight")
    same(weights.lm_head, "lm_head.weight")
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        same(layer.input_norm, at + "input_layernorm.weight")
        same(layer.input_norm_2, at + "input_layernorm_2.weight")
        same(layer.post_norm, at + "post_attention_layernorm.weight")
        same(layer.post_norm_2, at + "post_attention_layernorm_2.weight")
        same(layer.qkv, *(f"{at}self_attn.{p}_proj.weight" for p in "qkv"))
        same(layer.o, at + "self_attn.o_proj.weight")
        same(layer.gate_up, at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight")
        same(layer.down, at + "mlp.down_proj.weight")
    for gate, name in ((weights.exit_gate_weight, "weight"), (weights.exit_gate_bias, "bias")):
        assert gate.dtype == torch.float32
        assert torch.equal(gate, tensors[f"model.early_exit_gate.{name}"].float())


@pytest.mark.parametrize("name", ["mha-4loop", "gqa-3loop", "bf16-192"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layout(name: str, dtype: torch.dtype):
    folder = ORACLE / name
    weights = load_weights(folder, config_of(folder), CPU, dtype)
    assert_layout(weights, tensors_of(folder), dtype)
    assert len(weights.layers) == config_of(folder).num_layers


def test_shards_load_like_a_single_file(checkpoint: Path):
    _, tensors = shard(checkpoint)
    assert_layout(load(checkpoint), tensors, torch.float32)


def test_nbytes_counts_a_tied_head_once(checkpoint: Path):
    config = config_of(checkpoint)
    untied, tied = (
        load(checkpoint),
        load(checkpoint, config=replace(config, tie_word_embeddings=True)),
    )
    assert untied.nbytes == sum(t.numel() * 4 for t in tensors_of(checkpoint).values())
    assert tied.lm_head is tied.embed
    assert untied.nbytes - tied.nbytes == config.vocab_size * config.hidden_size * 4


@pytest.mark.parametrize("has_head", [True, False])
def test_tied_checkpoint_with_and_without_its_head(checkpoint: Path, has_head: bool):
    tensors = tensors_of(checkpoint)
    if not has_head:
        del tensors["lm_head.weight"]
        rewrite(checkpoint, tensors)
    weights = load(checkpoint, config=replace(config_of(checkpoint), tie_word_embeddings=True))
    assert torch.equal(weights.lm_head, tensors["model.embed_tokens.weight"].float())


def test_derived_buffers_are_ignored(checkpoint: Path):
    tensors = tensors_of(checkpoint)
    rewrite(checkpoint, tensors | {"model.rotary_emb.inv_freq": torch.ones(8)})
    assert_layout(load(checkpoint), tensors, torch.float32)


def refused(folder: Path, *words: str) -> None:
    """Loading fails with a message that holds all of ``words``: thing, value and way out."""
    with pytest.raises(ModelError) as error:
        load(folder)
    for word in words:
        assert word in str(error.value)


def test_folder_missing(tmp_path: Path):
    refused(tmp_path / "gone", str(tmp_path / "gone"), "does not exist", "config.json")


def test_no_weights(tmp_path: Path):
    refused(tmp_path, str(tmp_path), "model.safetensors", "download")


def test_pickle_is_never_loaded(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    refused(tmp_path, "pytorch_model.bin", "pickle", "save_pretrained")


def test_missing_tensors(checkpoint: Path):
    tensors = tensors_of(checkpoint)
    total = len(tensors)
    kept = {name: t for name, t in tensors.items() if "layers.1" not in name}
    rewrite(checkpoint, kept)
    refused(
        checkpoint,
        str(checkpoint),
        f"11 of {total} tensors are missing",
        "model.layers.1.input_layernorm.weight",
        "and 7 more",
        "config.json",
    )


def test_untied_checkpoint_without_head(checkpoint: Path):
    tensors = tensors_of(checkpoint)
    del tensors["lm_head.weight"]
    rewrite(checkpoint, tensors)
    refused(checkpoint, "missing: lm_head.weight")


def test_unexpected_tensor(checkpoint: Path):
    rewrite(checkpoint, tensors_of(checkpoint) | {"model.layers.0.mlp.bias": torch.ones(2)})
    refused(checkpoint, "model.safetensors", "model.layers.0.mlp.bias", "config.json")


def test_misshapen_tensor(checkpoint: Path):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(checkpoint, tensors_of(checkpoint) | {name: torch.ones(96, 32)})
    refused(checkpoint, "model.safetensors", name, "[96, 32]", "[32, 96]", "config.json")


def test_integer_tensor(checkpoint: Path):
    name = "model.norm.weight"
    rewrite(checkpoint, tensors_of(checkpoint) | {name: torch.ones(96, dtype=torch.int8)})
    refused(checkpoint, "model.safetensors", name, "I8", "unquantized")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_torn_file(checkpoint: Path, size: int):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(checkpoint, str(path), "torn", "download it again")


def test_not_a_safetensors_file(checkpoint: Path):
    path = checkpoint / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(checkpoint, str(path), "not a safetensors file", "download it again")


def test_missing_shard(checkpoint: Path):
    index, _ = shard(checkpoint)
    (checkpoint / "b.safetensors").unlink()
    refused(checkpoint, str(index), "1 of 2 shards", "b.safetensors", "download")


def test_tensor_in_two_shards(checkpoint: Path):
    _, tensors = shard(checkpoint)
    save_file({name: tensors[name] for name in sorted(tensors)[:5]}, checkpoint / "b.safetensors")
    refused(checkpoint, "lm_head.weight", "a.safetensors", "b.safetensors", "empty folder")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "../a.safetensors"),
        ('{"weight_map": {"x": 1}}', "x into 1"),
    ],
)
def test_broken_index(checkpoint: Path, text: str, problem: str):
    index, _ = shard(checkpoint)
    index.write_text(text)
    refused(checkpoint, str(index), problem, "download")


MEASURE = """
import sys
from pathlib import Path
import torch
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.weights import load_weights

def anonymous():
    # File pages mapped from the checkpoint can be dropped at any time; anonymous ones can not.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak = 0
copy = torch.Tensor.copy_

def measured_copy(place, tensor):
    global peak
    peak = max(peak, anonymous())
    result = copy(place, tensor)
    peak = max(peak, anonymous())
    return result

folder = Path(sys.argv[1])
config = ModelConfig.from_folder(folder)
load = lambda f, c: load_weights(f, c, torch.device("cpu"), getattr(torch, sys.argv[2]))
warm = Path(sys.argv[3])
load(warm, ModelConfig.from_folder(warm))
before = anonymous()
torch.Tensor.copy_ = measured_copy
weights = load(folder, config)
print(weights.nbytes, peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_second_copy_in_memory(tmp_path: Path, dtype: str):
    values = json.loads((ORACLE / "gqa-3loop" / "config.json").read_text())
    values |= {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 3072}
    values |= {"num_hidden_layers": 6, "layer_types": None, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = config_of(tmp_path)
    tensors = {
        name: torch.ones(place.shape, dtype=torch.bfloat16)
        for name, place in expected_tensors(config).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    largest = max(t.nbytes for t in tensors.values())
    del tensors
    command = [sys.executable, "-c", MEASURE, tmp_path, dtype, ORACLE / "gqa-3loop"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    nbytes, growth = map(int, result.stdout.split())
    assert nbytes > 100e6
    assert growth < nbytes + largest + 8e6
    assert growth > 0.9 * nbytes, "the measurement misses the result itself"


def expected_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Meta tensors by checkpoint name, from the names and shapes in the model's description."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
        "model.early_exit_gate.weight": (1, c.hidden_size),
        "model.early_exit_gate.bias": (1,),
    }
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = shapes[f"{at}{norm}_2.weight"] = (c.hidden_size,)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, c.hidden_size)
        shapes[f"{at}self_attn.o_proj.weight"] = (c.hidden_size, q)
        for part in ("gate", "up"):
            shapes[f"{at}mlp.{part}_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{at}mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_fingerprint_tells_checkpoints_apart(tmp_path):
    folder = write_checkpoint(tmp_path / "a")
    first = fingerprint(folder)
    assert fingerprint(write_checkpoint(tmp_path / "b")) == first
    assert fingerprint(write_checkpoint(tmp_path / "c", seed=1)) != first
    (folder / "notes.txt").write_text("not of the model")
    assert fingerprint(folder) == first
    (folder / "config.json").write_text("{}")
    assert fingerprint(folder) != first
    large = bytearray(3 * SAMPLES * SAMPLE_BYTES)
    (folder / "large.safetensors").write_bytes(large)
    before = fingerprint(folder)
    large[-1] = 1
    (folder / "large.safetensors").write_bytes(large)
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), "float32", "that are not finite .download"),
        (float("-inf"), "bfloat16", "that are not finite .download"),
        (1e6, "float16", "too large for float16 .give another dtype"),
    ],
)
def test_weights_that_are_not_finite(tmp_path, value, dtype, words):
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"layers.1.mlp.up_proj.weight has values {words}"):
        load_weights(folder, ModelConfig.from_folder(folder), CPU, getattr(torch, dtype))
