"""The dense reference that ``validate`` checks against, itself checked against the golden data."""

from __future__ import annotations

import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ouro_batch import LLM, SamplingParams
from ouro_batch.validate.check import traced
from ouro_batch.validate.dense import DenseModel

from .conftest import ORACLE, ORACLE_NAMES, load_oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ORACLE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_released_codes_states(name, dtype):
    """Golden data are FP32, so FP64 is as near to them as FP32 is."""
    tensors = load_oracle(name).tensors
    states = DenseModel.from_folder(ORACLE / name, dtype, CPU).run(tensors["dense_ids"].tolist())
    for loop, state in enumerate(states):
        for ours, golden in (
            (state.hidden, "dense_hidden"),
            (state.gate, "dense_gate_logits"),
            (state.logits, "dense_logits"),
        ):
            torch.testing.assert_close(ours.float(), tensors[golden][loop], rtol=0, atol=1e-4)


class ProductsInFP32(TorchFunctionMode):
    """BF16 products that add in FP32 and round once, as where the golden data were made.

    Processors with instructions for BF16 add otherwise: errors are 5% smaller with Intel's AMX.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        products = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.nn.functional.linear)
        if function in products and args[0].dtype == torch.bfloat16:
            return function(*(x.float() for x in args)).bfloat16()
        return function(*args, **(kwargs or {}))


def test_the_released_codes_errors_in_bf16():
    """Every operation rounds where the released code's does: the same errors, loop by loop."""
    folder = ORACLE / "bf16-192"
    tokens = load_oracle("bf16-192").tensors["dense_ids"].tolist()
    exact = DenseModel.from_folder(folder, torch.float32, CPU).run(tokens)
    model = DenseModel.from_folder(folder, torch.bfloat16, CPU, rounded_frequencies=True)
    with ProductsInFP32():
        rounded = model.run(tokens)
    golden = json.loads((folder / "bf16_error.json").read_text())
    for ours, reference, expected in zip(rounded, exact, golden, strict=True):
        logits = rms(ours.logits.float() - reference.logits)
        hidden = rms(ours.hidden.float() - reference.hidden)
        gate = float((ours.gate.float() - reference.gate).abs().max())
        # On another processor products still add in another order, and some roundings fall
        # otherwise: little for a mean of many values, much for the largest of a few.
        assert logits == pytest.approx(expected["logit_rms"], rel=0.03)
        assert hidden == pytest.approx(expected["hidden_rms"], rel=0.03)
        assert expected["gate_max_abs"] / 2 < gate < expected["gate_max_abs"] * 2


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_engine_in_bf16_is_as_near_to_fp32_as_the_released_code(batch_invariant):
    """Against golden FP32 states and the errors that the released code's BF16 had on them."""
    check_engine_errors("cpu", "torch", batch_invariant)


def check_engine_errors(device: str, attention: str, batch_invariant: bool) -> None:
    folder, tensors = ORACLE / "bf16-192", load_oracle("bf16-192").tensors
    golden = json.loads((folder / "bf16_error.json").read_text())
    options = {"device": device, "attention": attention, "batch_invariant": batch_invariant}
    with LLM(folder, dtype="bfloat16", max_rows=2, max_model_len=256, **options) as llm:
        params = SamplingParams(1, exit_threshold=1.0)
        _, (states,) = traced(llm, [tensors["dense_ids"].tolist()], [params])
        model = llm.engine.runner.model
        for loop, expected in enumerate(golden):
            with torch.inference_mode():
                logits = model.logits(states[loop].to(torch.bfloat16)).cpu()
            hidden_error = rms(states[loop].cpu() - tensors["dense_hidden"][loop])
            logit_error = rms(logits - tensors["dense_logits"][loop])
            assert hidden_error <= 1.1 * expected["hidden_rms"]
            assert logit_error <= 1.1 * expected["logit_rms"]


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
