"""The engine with kernels that let the next one start and then take their time.

    python -m tests.gpu.late_join

What a kernel reads too early is then never there yet. Prints which configurations give other tokens,
depths or log-probabilities than kernels that do not start ahead; status 1 where one does.
"""  # noqa: E501

from __future__ import annotations

import random
import sys
from pathlib import Path

import triton
import triton.language as tl
from ouro_batch.kernels import overlap
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer


@triton.jit
def late_join(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
        begin = globaltimer()
        while globaltimer() - begin < 20_000:
            pass


# Kernels take ``join`` when they are imported.
overlap.join = late_join

from ouro_batch import LLM, SamplingParams  # noqa: E402
from ouro_batch.runner import triton as runner  # noqa: E402

MODEL = Path(__file__).parents[2] / "samples" / "tiny-ouro"
ROWS = (1, 2, 3, 8, 20, 70)


def outputs(rows: int, **options: object) -> list[tuple]:
    draw = random.Random(rows)
    prompts = [
        [draw.randrange(3, 1000) for _ in range(draw.choice([1, 14, 30, 120]))] for _ in range(rows)
    ]
    params = [
        SamplingParams(
            10,
            exit_threshold=draw.choice([0.4, 0.8, 1.0]),
            temperature=draw.choice([0.0, 0.9]),
            seed=index,
            logprobs=2,
            ignore_eos=True,
        )
        for index in range(rows)
    ]
    with LLM(MODEL, max_rows=rows, max_model_len=160, **options) as llm:
        return [
            (o.token_ids, o.exit_depths, o.logprobs)
            for _ in range(2)  # launched one by one, then as graphs
            for o in llm.generate(prompts, params)
        ]


def main() -> int:
    wrong = 0
    for dtype in ("float32", "bfloat16"):
        for invariant in (False, True):
            for rows in ROWS:
                options = {"dtype": dtype, "batch_invariant": invariant}
                can_overlap, runner.can_overlap = runner.can_overlap, lambda device: False
                expected = outputs(rows, **options)
                runner.can_overlap = can_overlap
                found = outputs(rows, **options)
                differ = sum(a != b for a, b in zip(found, expected, strict=True))
                wrong += differ > 0
                print(f"{dtype}, invariant {invariant}, {rows} rows: {differ} differ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
