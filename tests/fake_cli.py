"""The command line with ``FakeLLM`` in place of the real one, as a program for subprocesses."""

import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import FakeLLM

module = types.ModuleType("ouro_batch.llm")
module.LLM = FakeLLM
sys.modules["ouro_batch.llm"] = module

if __name__ == "__main__":
    from ouro_batch.cli import main

    main()
