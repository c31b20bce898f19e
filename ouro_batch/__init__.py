"""Batch inference for looped language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ouro_batch.params import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ouro_batch.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # torch takes seconds to import; the command line asks for help and versions without it.
    if name == "LLM":
        from ouro_batch.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
