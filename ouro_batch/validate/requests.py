"""The requests that checks make of a set of prompts: unlike each other in every way there is."""

from __future__ import annotations

from ouro_batch.params import SamplingParams

TOKENS = 24  # output tokens of a request at most
Asked = tuple[list[int], SamplingParams]


def mixed(
    prompts: list[list[int]], loops: int, tokens: int, *, logprobs: int | None = None
) -> list[Asked]:
    """A request a prompt: fixed depth and live gates, greedy and sampled, bounded, stopped.

    ``tokens`` is the longest output.
    """
    kinds = [
        {"exit_threshold": 0.5},
        {"exit_threshold": 1.0},
        {"exit_threshold": 0.8, "temperature": 0.8},
        {"exit_threshold": 0.0, "min_loops": min(2, loops)},
        {"exit_threshold": 0.3, "max_loops": max(1, loops - 1), "ignore_eos": True},
        {"exit_threshold": 0.9, "temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"exit_threshold": 0.65, "ignore_eos": True},
    ]
    asked = []
    for index, prompt in enumerate(prompts):
        most = max(1, tokens - tokens // 5 * (index % 4))
        kind = kinds[index % len(kinds)]
        asked.append((prompt, SamplingParams(most, seed=index, logprobs=logprobs, **kind)))
    return asked


def bordering(prompt: list[int], loops: int) -> list[Asked]:
    """Prompts and exits that end on the borders of blocks of 16 and of chunks; all depths.

    ``prompt`` has at least 31 tokens.
    """
    every = [depth for shallow in range(1, loops + 1) for depth in (shallow, shallow, loops)]
    depths = [loops, *every * (1 + 16 // len(every))]

    def params(tokens: int, **options: object) -> SamplingParams:
        return SamplingParams(tokens, ignore_eos=True, **options)

    return [
        (prompt[:16], params(17, exit_threshold=0.5)),  # the prompt fills its block
        (prompt[:15], params(18, exit_threshold=0.0)),
        (prompt[:17], params(17, exit_depths=depths)),
        (prompt[:1], params(17, exit_threshold=0.97)),
        (prompt[:4], params(40, exit_threshold=0.8)),
        (prompt[:20], params(9, exit_threshold=0.0, min_loops=max(1, loops - 1))),
        (prompt[:19], params(9, exit_threshold=1.0, max_loops=1)),
        (prompt[:31], params(12, exit_depths=[loops, *[1] * 6, *[loops] * 5])),
        (prompt[:9], params(12, temperature=0.9, seed=5, exit_threshold=0.6)),
        (prompt[:8], params(12, temperature=0.3, seed=2**40 + 5, exit_threshold=0.6)),
        (prompt[2:30], params(14, exit_threshold=0.7)),
    ]
