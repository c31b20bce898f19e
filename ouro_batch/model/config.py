"""The checkpoint's configuration: what config.json says, checked, and refused where not supported.

Only models that the equations in ``ouro.py`` compute exactly get through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ouro_batch.errors import ModelError
from ouro_batch.model.files import check_folder, read_json_object

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one looped model.

    Args:
        vocab_size: V, rows of the embedding and of the head.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_layers: N, physical layers; each runs once per loop.
        num_heads, num_kv_heads, head_dim: H, G, D; H is a multiple of G, D is even.
        rms_norm_eps: added to the variance in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling_factor: positions are divided by it; 1.0 is no scaling.
        max_position_embeddings: tokens of one sequence at most.
        loops: L, loops of a full-depth token (``total_ut_steps``).
        exit_threshold: the checkpoint's exit threshold; >= 1 is fixed depth.
        tie_word_embeddings: whether the head is the embedding.
        bos_token_id: beginning-of-sequence token, if any.
        eos_token_ids: tokens that end a sequence, without repetition; may be empty.
        dtype: the checkpoint's dtype, one of ``DTYPES``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling_factor: float
    max_position_embeddings: int
    loops: int
    exit_threshold: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json``, and ``generation_config.json`` for further EOS tokens.

        Raises:
            ModelError: a file is missing or broken, or the model is not supported.
        """
        check_folder(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no config.json, so it is not a checkpoint"
                " (give the folder that holds config.json and model.safetensors)"
            )
        config = cls.from_dict(read_json_object(path), str(path))
        generation = folder / "generation_config.json"
        if generation.is_file():
            more = _Fields(read_json_object(generation), str(generation)).token_ids("eos_token_id")
            config = replace(config, eos_token_ids=_unique(config.eos_token_ids + more))
        return config

    @classmethod
    def from_dict(cls, values: dict, source: str) -> ModelConfig:
        """Build from the keys of a config.json; ``source`` names the file in errors.

        Raises:
            ModelError: a key is missing, of the wrong type, or asks for what is not supported.
        """
        fields = _Fields(values, source)
        _refuse_unsupported(fields)
        hidden = fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise fields.error(
                "num_key_value_heads", f"must divide num_attention_heads, which is {heads}"
            )
        if fields.get("head_dim") is None and hidden % heads:
            raise fields.error(
                "hidden_size",
                f"is not a multiple of num_attention_heads {heads}, and there is no head_dim",
            )
        head_dim = fields.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            raise fields.error("head_dim", "must be even for RoPE")
        rope_theta, rope_scaling_factor = _rope(fields)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling_factor=rope_scaling_factor,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            loops=fields.integer("total_ut_steps"),
            exit_threshold=fields.number("early_exit_threshold", default=1.0),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            bos_token_id=fields.token_id("bos_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            dtype=_dtype(fields),
        )


class _Fields:
    """Typed access to the keys of one JSON object; null counts as absent."""

    def __init__(self, values: dict, source: str):
        self._values = values
        self.source = source

    def get(self, key: str) -> object:
        return self._values.get(key)

    def nested(self, key: str) -> _Fields | None:
        """The object under ``key``, None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object or null")
        return _Fields(value, f"{self.source}: {key}")

    def error(self, key: str, problem: str, way_out: str = "correct it") -> ModelError:
        value = self.get(key)
        what = key if value is None else f"{key} {value!r}"
        return ModelError(f"{self.source}: {what} {problem} ({way_out})")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer >= 1."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer")
        if value < 1:
            raise self.error(key, "must be at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number >= 0."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "must be a number")
        if not math.isfinite(value) or value < 0:
            raise self.error(key, "must be finite and at least 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; absent is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return bool(value)

    def token_id(self, key: str) -> int | None:
        """A token id, None where absent."""
        value = self.get(key)
        if value is None:
            return None
        self._check_token(key, value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; absent is empty."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            self._check_token(key, token)
        return _unique(tuple(ids))

    def _check_token(self, key: str, token: object) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise self.error(key, "must hold token ids, integers of at least 0")

    def _present(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(
                key, "is missing", "take config.json from the released checkpoint, or add the key"
            )
        return default


def _refuse_unsupported(fields: _Fields) -> None:
    """Raise ModelError for whatever would make the computed result differ from the model's."""
    model_type = fields.get("model_type")
    architectures = fields.get("architectures")
    if model_type != "ouro":
        problem = "is missing" if model_type is None else "is not supported"
        raise fields.error("model_type", problem, 'only "ouro" models run')
    if architectures is not None and architectures != ["OuroForCausalLM"]:
        raise fields.error("architectures", "is not supported", "only OuroForCausalLM runs")
    if fields.flag("use_sliding_window"):
        raise fields.error(
            "use_sliding_window", "is not supported", "only checkpoints with full attention run"
        )
    layer_types = fields.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise fields.error("layer_types", "must be a list or null")
    for kind in layer_types or ():
        if kind != "full_attention":
            raise ModelError(
                f"{fields.source}: layer_types holds {kind!r}, which is not supported"
                " (only checkpoints with full_attention in every layer run)"
            )
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "is not supported", 'only "silu" is')
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key):
            raise fields.error(key, "is not supported", "only projections without bias run")
    if fields.get("quantization_config") is not None:
        raise fields.error(
            "quantization_config", "is not supported", "use the unquantized checkpoint"
        )


def _rope(fields: _Fields) -> tuple[float, float]:
    """(theta, factor that positions are divided by), from either spelling of the config."""
    parameters = fields.nested("rope_parameters")
    scaling = parameters or fields.nested("rope_scaling")
    with_theta = fields
    if parameters is not None and parameters.get("rope_theta") is not None:
        with_theta = parameters
    theta = with_theta.number("rope_theta")
    if theta == 0:
        raise with_theta.error("rope_theta", "must be above 0")
    if scaling is None:
        return theta, 1.0
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(key)
    if scaling.get("partial_rotary_factor") not in (None, 1):
        raise scaling.error("partial_rotary_factor", "is not supported", "only 1.0 is")
    if kind is None or kind == "default":
        return theta, 1.0
    if kind != "linear":
        raise scaling.error(key, "is not supported", 'only "default" and "linear" are')
    factor = scaling.number("factor")
    if factor < 1:
        raise scaling.error("factor", "must be at least 1")
    return theta, factor


def _dtype(fields: _Fields) -> str:
    """The checkpoint's dtype; float32, which loses nothing, where the config names none."""
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise fields.error(key, "is not supported", f"one of {', '.join(DTYPES)} is")
    return value


def _unique(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
