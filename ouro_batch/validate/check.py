"""What a check is given, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ouro_batch.bench.machine import commit
from ouro_batch.llm import LLM
from ouro_batch.model.config import ModelConfig
from ouro_batch.params import RequestOutput, SamplingParams, Score
from ouro_batch.validate.oracle import OracleOutput

TOLERANCE = 1e-4  # of the largest value: how far FP32 may be from the equations
FP64_BYTES = 4 * 2**30  # weights up to which a reference is FP64
MARGIN = 1e-3  # of a logit or an exit probability: what FP32 may decide otherwise, at least


@dataclass(frozen=True)
class Question:
    """A prompt whose right answer is known.

    ``given`` is what ``LLM.add_request`` takes for it, ``params`` the record's own.
    """

    given: dict[str, Any]
    answer: str
    params: SamplingParams


@dataclass
class Result:
    """A check's verdict: ``passed`` None where it could not run, and ``note`` says why."""

    name: str
    title: str
    passed: bool | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Context:
    """What the checks share.

    Args:
        model: folder or hub id that LLMs are made of; ``folder`` is where its files are.
        device: that everything runs on.
        full: whether the full level was asked for.
        prompts: token ids.
        questions: for the quality check; empty where there are none.
        commit: of the source tree when this was made: it may change under a run of minutes.
    """

    model: str
    folder: Path
    config: ModelConfig
    device: torch.device
    full: bool
    prompts: list[list[int]]
    questions: list[Question]
    commit: str | None = field(default_factory=commit)

    @property
    def attentions(self) -> list[str]:
        """Attention implementations that run here."""
        return ["triton", "torch"] if self.device.type == "cuda" else ["torch"]

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the checks make."""
        return self._longest_prompt + 64

    def room(self, tokens: int) -> int:
        """``tokens``, or as many as the model's positions leave after the longest prompt."""
        return max(1, min(tokens, self.config.max_position_embeddings - self._longest_prompt))

    @property
    def _longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    @contextmanager
    def engine(self, **options: Any) -> Iterator[LLM]:
        """An LLM with a small cache, FP32 where nothing else is asked for."""
        chosen = {
            "device": str(self.device),
            "dtype": "float32",
            "max_rows": 8,
            "max_model_len": min(self.longest, self.config.max_position_embeddings),
        } | options
        chosen.setdefault("kv_tokens", 8 * chosen["max_model_len"])
        with LLM(self.model, **chosen) as llm:
            yield llm


class LoopTrace:
    """Collects what each loop gives for every token that the engine runs.

    ``states[index]`` is FP32 [L, positions, hidden] of the request with that index, NaN where
    nothing ran.
    """

    def __init__(self, llm: LLM, lengths: list[int]):
        config = llm.config
        self._scheduler = llm.engine.scheduler
        self.states = [
            torch.full((config.loops, n, config.hidden_size), float("nan"), device=llm.device)
            for n in lengths
        ]
        llm.engine.runner.trace = self

    def __call__(self, rows: Tensor, positions: Tensor, planes: Tensor, hidden: Tensor) -> None:
        owners = {row: request.index for row, request in self._scheduler.running.items()}
        for row in set(rows.tolist()):
            mine = rows == row
            state = self.states[owners[row]]
            inside = positions[mine] < state.shape[1]
            where = planes[mine][inside].long(), positions[mine][inside].long()
            state[where] = hidden[mine][inside].float()


def reference_dtype(folder: Path) -> torch.dtype:
    """Of a dense reference: FP64 where the weights are few enough, else FP32."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return torch.float64 if weights <= FP64_BYTES else torch.float32


def traced(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[RequestOutput], list[Tensor]]:
    """Generations of ``max_tokens`` each, and every token's state in every loop that it ran."""
    lengths = [len(p) + own.max_tokens - 1 for p, own in zip(prompts, params, strict=True)]
    trace = LoopTrace(llm, lengths)
    try:
        outputs = llm.generate(prompts, params)
    finally:
        llm.engine.runner.trace = None
    return outputs, trace.states


def token_margin(score: Score | OracleOutput, place: int) -> float:
    """How far above the next one's a logit must be for FP32 to decide nothing else there."""
    return max(MARGIN, 2 * TOLERANCE * score.logit_scales[place])


def distance(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Largest and RMS difference, and the largest value of the reference."""
    difference = ours.double() - theirs.double()
    return {
        "max": float(difference.abs().max()),
        "rms": float(difference.square().mean().sqrt()),
        "scale": float(theirs.abs().max()),
    }
