"""The weights of a looped model: their fused layout, and loading them from safetensors.

Every tensor goes from the file into its place in the fused result, one at a time, so that no second
copy of the model is ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ouro_batch.errors import ModelError
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.files import check_folder, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_DERIVED_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
_SHOWN = 4


@dataclass
class LayerWeights:
    """One physical layer. H, G, D: query heads, key/value heads, head dimension; I: MLP width."""

    input_norm: Tensor  # [hidden]
    input_norm_2: Tensor  # [hidden]
    post_norm: Tensor  # [hidden]
    post_norm_2: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2G) * D, hidden]: query, key, value rows
    o: Tensor  # [hidden, H * D]
    gate_up: Tensor  # [2 * I, hidden]: gate, up rows
    down: Tensor  # [hidden, I]


@dataclass
class ModelWeights:
    """All weights of a model. The exit gate is FP32, everything else has the model's dtype."""

    embed: Tensor  # [V, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    exit_gate_weight: Tensor  # FP32 [1, hidden]
    exit_gate_bias: Tensor  # FP32 [1]
    lm_head: Tensor  # [V, hidden]; the same object as embed where tied

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, a tied head counted once."""
        return sum(tensor.nbytes for tensor in {id(t): t for t in self._tensors()}.values())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embed, self.norm, self.exit_gate_weight, self.exit_gate_bias, self.lm_head)
        for layer in self.layers:
            yield from (getattr(layer, field.name) for field in fields(layer))


def load_weights(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> ModelWeights:
    """Load ``model.safetensors``, or the shards that its index names, onto ``device`` as ``dtype``.

    Everything is checked before memory is taken. Besides the result at most one tensor is in
    memory. A tied checkpoint's own ``lm_head.weight`` is ignored, as the released code does.

    Raises:
        ModelError: no safetensors file, a torn or missing file, or a tensor that is missing,
            unexpected, misshapen, given twice, not floating point, or not finite in ``dtype``.
    """
    with ExitStack() as stack:
        files, sources = _open_checked(folder, config, stack)
        weights = empty_weights(config, device, dtype)
        finite = []
        places = _places(weights, config)
        for name, place in places.items():
            place.copy_(_read(sources[name], files[sources[name]], name))
            finite.append(torch.stack(place.aminmax()).isfinite().all())
        for name, fine in zip(places, torch.stack(finite).tolist(), strict=True):
            if not fine:
                read = _read(sources[name], files[sources[name]], name)
                kind = str(places[name].dtype).removeprefix("torch.")
                raise ModelError(
                    f"{sources[name]}: {name} has values "
                    + (
                        f"too large for {kind} (give another dtype)"
                        if read.isfinite().all()
                        else "that are not finite (download the file again)"
                    )
                )
    return weights


def check_weights(folder: Path, config: ModelConfig) -> list[Path]:
    """Check the files of weights without reading the weights; returns the files.

    Raises:
        ModelError: as ``load_weights``.
    """
    with ExitStack() as stack:
        files, _ = _open_checked(folder, config, stack)
        return list(files)


def _open_checked(
    folder: Path, config: ModelConfig, stack: ExitStack
) -> tuple[dict[Path, Any], dict[str, Path]]:
    """The open files by path, and the file of each tensor, all of which are there and fit."""
    expected = _places(empty_weights(config, torch.device("meta"), torch.float32), config)
    files = {path: stack.enter_context(_open(path)) for path in _weight_files(folder)}
    sources = _find_tensors(files)
    if config.tie_word_embeddings:
        sources.pop("lm_head.weight", None)
    _check_names(folder, sources, expected)
    for name, path in sources.items():
        _check_tensor(path, files[path], name, tuple(expected[name].shape))
    return files, sources


def empty_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Uninitialized weights of the config's shapes."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    c = config
    hidden, width = c.hidden_size, c.intermediate_size
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            input_norm_2=empty(hidden),
            post_norm=empty(hidden),
            post_norm_2=empty(hidden),
            qkv=empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, hidden),
            o=empty(hidden, c.num_heads * c.head_dim),
            gate_up=empty(2 * width, hidden),
            down=empty(hidden, width),
        )
        for _ in range(c.num_layers)
    ]
    embed = empty(c.vocab_size, hidden)
    return ModelWeights(
        embed=embed,
        layers=layers,
        norm=empty(hidden),
        exit_gate_weight=empty(1, hidden, dtype=torch.float32),
        exit_gate_bias=empty(1, dtype=torch.float32),
        lm_head=embed if c.tie_word_embeddings else empty(c.vocab_size, hidden),
    )


def _places(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Each checkpoint tensor's name and its place, a view into the fused weights."""
    places = {
        "model.embed_tokens.weight": weights.embed,
        "model.norm.weight": weights.norm,
        "model.early_exit_gate.weight": weights.exit_gate_weight,
        "model.early_exit_gate.bias": weights.exit_gate_bias,
    }
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = weights.lm_head
    kv_rows = config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((config.num_heads * config.head_dim, kv_rows, kv_rows))
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "input_layernorm_2": layer.input_norm_2,
            "post_attention_layernorm": layer.post_norm,
            "post_attention_layernorm_2": layer.post_norm_2,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        places |= {f"model.layers.{index}.{part}.weight": t for part, t in parts.items()}
    return places


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in ``folder``."""
    check_folder(folder)
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} has weights only as pickle ({_listed(pickles)}), which is never loaded"
            " because it can run code (load it with Transformers where you trust it and write it"
            " again with save_pretrained, which makes safetensors)"
        )
    raise ModelError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        " (download the checkpoint's weights into it)"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: weight_map must map tensor names to files, got"
            f" {type(weight_map).__name__} (download the index again)"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(
                f"{index}: weight_map puts {tensor} into {name!r}, which is no file name in the"
                " checkpoint's own folder (download the index again)"
            )
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{index} names {len(missing)} of {len(paths)} shards that are not there:"
            f" {_listed(missing)} (download them into the same folder)"
        )
    return paths


def _torn(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path} is torn or not a safetensors file: {error}"
        f" ({path.stat().st_size:,} bytes; download it again)"
    )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _torn(path, error) from error


def _read(path: Path, file: safe_open, name: str) -> Tensor:
    """The tensor as it is in the file, on the CPU and backed by the file's pages."""
    try:
        return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _torn(path, error) from error


def _find_tensors(files: dict[Path, safe_open]) -> dict[str, Path]:
    """The file that holds each tensor, without buffers that follow from the configuration."""
    sources: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
            if name.endswith(_DERIVED_BUFFERS):
                continue
            if name in sources:
                raise ModelError(
                    f"tensor {name} is in both {sources[name]} and {path}"
                    " (download the checkpoint again into an empty folder)"
                )
            sources[name] = path
    return sources


def _check_names(folder: Path, sources: dict[str, Path], expected: dict[str, Tensor]) -> None:
    missing = [name for name in expected if name not in sources]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing: {_listed(missing)}"
            " (the weights do not belong to this config.json, or a download is incomplete)"
        )
    unexpected = [name for name in sources if name not in expected]
    if unexpected:
        raise ModelError(
            f"{sources[unexpected[0]]}: {len(unexpected)} tensors are not part of the model:"
            f" {_listed(unexpected)} (the weights do not belong to this config.json)"
        )


def _check_tensor(path: Path, file: safe_open, name: str, shape: tuple[int, ...]) -> None:
    header = file.get_slice(name)
    found = tuple(header.get_shape())
    if found != shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(found)}, but config.json asks for"
            f" {list(shape)} (the weights do not belong to this config.json)"
        )
    if header.get_dtype() not in _FLOAT_DTYPES:
        raise ModelError(
            f"{path}: tensor {name} has dtype {header.get_dtype()}; only"
            f" {', '.join(_FLOAT_DTYPES)} can be loaded (use the unquantized checkpoint)"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
