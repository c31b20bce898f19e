"""Fixtures for all tests: the golden data and small models."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # must be set before a kernel module is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file

from ouro_batch import SamplingParams

ORACLE = Path(__file__).parent / "data" / "oracle"
DEFAULT_MARKERS = "not slow and not gpu"  # as in pyproject.toml
ORACLE_NAMES = ("mha-4loop", "gqa-3loop", "bf16-192")


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Plain ``pytest`` runs in several processes; chosen tests, slow ones and a GPU's in one."""
    chosen = config.args_source is config.ArgsSource.ARGS
    if chosen or config.option.markexpr != DEFAULT_MARKERS:
        return 0
    return min(4, len(os.sched_getaffinity(0)))


@dataclass
class OracleData:
    """One folder of golden data; ``cases`` are generations, ``tensors`` dense and cache values."""

    folder: Path
    cases: list[dict]
    tensors: dict[str, torch.Tensor]

    def params(self, case: dict) -> SamplingParams:
        return SamplingParams(
            max_tokens=case["max_tokens"],
            exit_threshold=case["exit_threshold"],
            min_loops=case["min_loops"],
            max_loops=case["max_loops"],
            ignore_eos=True,
        )


def load_oracle(name: str) -> OracleData:
    folder = ORACLE / name
    return OracleData(
        folder,
        json.loads((folder / "cases.json").read_text()),
        load_file(folder / "cases.safetensors"),
    )


@pytest.fixture(params=ORACLE_NAMES)
def oracle(request: pytest.FixtureRequest) -> OracleData:
    return load_oracle(request.param)
