"""Options and sampling parameters that cannot be: each is refused by name."""

from __future__ import annotations

import pytest
import torch

from ouro_batch import LLM, SamplingParams
from ouro_batch.errors import EngineError, ModelError, RequestError

from .tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], "x", 5, ["x"]], ids=str)
def test_params_of_another_type_are_refused(folder, params):
    llm = LLM(folder)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        llm.generate([[1]], params)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        llm.add_request([1], params)
    assert not llm.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fifo"}, "schedule must be one of refill, no-refill, serial"),
        ({"attention": "flash"}, "attention must be one of auto, torch, triton"),
        ({"batch_invariant": 1}, "batch_invariant must be true or false, got 1"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"device": "quantum"}, "quantum"),
        ({"max_rows": 70_000}, "max_rows must be at most 65,536, got 70000"),
        ({"kv_memory": 1e300}, "kv_memory must be at most 1,048,576"),
        ({"max_rows": 0}, "max_rows must be an integer of at least 1"),
        ({"max_rows": 8, "max_batched_tokens": 8}, "max_batched_tokens 8 must be above max_rows 8"),
        ({"kv_tokens": 5, "kv_memory": 1.0}, "give one of them"),
        ({"kv_memory": 1e-9}, "one token needs 3"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_model_len": 1000}, "max_model_len 1000 is above the model's 256 positions"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization must be a finite number"),
        ({"kv_memory": float("nan")}, "kv_memory must be a finite number, got nan"),
        ({"kv_memory": float("inf")}, "kv_memory must be a finite number, got inf"),
        ({"kv_memory": "1"}, "kv_memory must be a finite number, got '1'"),
        ({"device": None}, "device None is not known"),
        ({"loops": 0}, "loops must be"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"seed": "x"}, "seed must be an integer from 0"),
    ],
)
def test_options_that_cannot_run_are_refused_by_name(folder, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(EngineError, match=message):
        LLM(folder, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2.0}, "max_tokens must be an integer"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "finite"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"stop": [1]}, "stop must hold only str"),
        ({"stop": [""]}, "empty string"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"exit_threshold": -0.1}, "exit_threshold"),
        ({"min_loops": 0}, "min_loops"),
        ({"min_loops": 3, "max_loops": 2}, "max_loops 2 is below min_loops 3"),
        ({"max_tokens": 3, "exit_depths": [4]}, "exit_depths gives 1 depths but max_tokens is 3"),
        ({"n": 0}, "n must be at least 1"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
    ],
)
def test_sampling_params_refuse_bad_values_by_name(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("model", [None, 7, b"folder"])
def test_a_model_of_the_wrong_type_is_named(model):
    with pytest.raises(ModelError, match=f"a hub id or a ModelSource, got {model!r}"):
        LLM(model)
