"""Runs every kernel at small shapes, for NVIDIA's compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ouro_batch import LLM, SamplingParams
from tests.conftest import ORACLE

SAMPLES = Path(__file__).parents[2] / "samples"


def run(folder: Path, dtype: str, rows: int) -> int:
    """Requests of several lengths, greedy and sampled, fixed, gated and replayed depths."""
    with LLM(
        folder, dtype=dtype, max_rows=rows, max_batched_tokens=rows + 24, kv_tokens=512
    ) as llm:
        loops = llm.config.loops
        prompts = [[3 + i % 40 for i in range(length)] for length in (1, 40, 17)][:rows]
        params = [
            SamplingParams(max_tokens=6, ignore_eos=True, exit_threshold=0.5),
            SamplingParams(max_tokens=4, temperature=0.8, top_k=9, top_p=0.9, seed=1),
            SamplingParams(max_tokens=3, exit_depths=[loops, 1, 2]),
        ]
        return sum(len(output.token_ids) for output in llm.generate(prompts, params[:rows]))


for folder in (SAMPLES / "tiny-ouro", ORACLE / "gqa-3loop"):
    for dtype in ("float32", "bfloat16"):
        for rows in (1, 3):
            print(folder.name, dtype, rows, run(folder, dtype, rows), flush=True)
