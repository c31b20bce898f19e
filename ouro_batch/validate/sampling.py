"""Check 9: sampled tokens and log-probabilities, against the dense reference's distribution.

What is drawn is compared with what should be, by counts; no random number is shared.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ouro_batch.llm import LLM
from ouro_batch.params import SamplingParams
from ouro_batch.validate.check import TOLERANCE, Context, Result, reference_dtype
from ouro_batch.validate.dense import DenseModel

QUICK_DRAWS, FULL_DRAWS = 256, 4096
SAMPLES = 128  # of a request
LEAST_P = 1e-6  # of a chi-square test: one false red in a million
LEAST_EXPECTED = 5.0  # draws of an outcome, else it is counted with other rare ones
LIKELIEST = 0.4  # probability that the temperature leaves to the likeliest token
FLAT = 100.0  # the largest logit over a temperature that leaves almost no difference
PLACES = 3  # tokens of these
DISTINCT = 24  # tokens of an output that no other seed gives, in a vocabulary of three even
LARGEST_CUT = 8  # tokens that top-k or top-p keep
EDGE = 1e-4  # of a sum of probabilities, within which top-p may end one token sooner or later
PROMPT_TOKENS = 2
ROWS = 128
TOP_LOGPROBS = 5

Outcome = tuple[int, ...]  # the tokens of an output


def check(context: Context) -> Result:
    """Outputs of a few tokens at a temperature, with top-k and with top-p; FP32."""
    result = Result(
        "sampling",
        "Sampling: draws and log-probabilities against a dense reference's distribution",
        limits={
            "p-value of a chi-square test, at least": LEAST_P,
            "tokens drawn that should not be": 0,
            "log-probability error, of the largest logit": TOLERANCE,
            "likeliest tokens that differ": 0,
            "equal draws of other seeds": 0,
        },
    )
    if context.config.vocab_size < 3:
        result.note = f"a vocabulary of {context.config.vocab_size} leaves nothing to choose"
        return result
    longest = PROMPT_TOKENS + DISTINCT
    if context.config.max_position_embeddings < longest:
        positions = context.config.max_position_embeddings
        result.note = f"its requests take up to {longest} positions, this model has {positions}"
        return result
    prompt = min(context.prompts, key=len)[:PROMPT_TOKENS]
    reference = _Reference(context, prompt)
    cases = reference.cases()
    result.passed = True
    draws = FULL_DRAWS if context.full else QUICK_DRAWS
    for attention in context.attentions:
        found: dict[str, Any] = {"draws": draws}
        with context.engine(
            attention=attention,
            max_rows=ROWS,
            max_model_len=longest,
            kv_tokens=ROWS * 32,
        ) as llm:
            for name, (options, expected) in cases.items():
                drawn = _draw(llm, prompt, draws, options)
                p, outside = goodness(drawn, expected)
                found[name] = {"p": p, "outside": outside}
                result.passed &= p >= LEAST_P and not outside
            found["positions"] = _repeats(
                _draw(llm, prompt, draws, reference.flat), context.config.vocab_size
            )
            result.passed &= found["positions"]["p"] >= LEAST_P
            found["equal_draws"] = _same_draws(llm, prompt, reference.flat["temperature"])
            result.passed &= not found["equal_draws"]
            found |= reference.compare_logprobs(llm)
        result.passed &= (
            found["logprob_error"] <= TOLERANCE * max(reference.scale, 1.0)
            and not found["likeliest_that_differ"]
        )
        result.numbers[attention] = found
    return result


class _Reference:
    """What the dense model gives after a prompt."""

    def __init__(self, context: Context, prompt: list[int]):
        dtype = reference_dtype(context.folder)
        self._model = DenseModel.from_folder(context.folder, dtype, context.device)
        self._prompt = prompt
        self._first = self._logits(())
        self.scale = float(self._first.abs().max())
        self._temperature = _temperature(self._first)

    def _logits(self, after: Outcome) -> Tensor:
        """FP64 [V] at full depth, on the CPU."""
        return self._model.run([*self._prompt, *after])[-1].logits[-1].double().cpu()

    def cases(self) -> dict[str, tuple[dict[str, Any], dict[Outcome, float]]]:
        """Sampling parameters, and the probability of every output that they allow.

        Top-k and top-p are left out where rounding may decide what they keep.
        """
        t = self._temperature
        found = {"temperature": ({"temperature": t}, _keep(self._first / t, len(self._first)))}
        ordered = (self._first / t).sort(descending=True).values
        total = ordered.softmax(-1).cumsum(-1)
        # Cuts at which the last token that is kept is above the next one.
        gaps = (ordered[:-1] - ordered[1:]) * t > 4 * TOLERANCE * self.scale
        cuts = [place + 1 for place in gaps[:LARGEST_CUT].nonzero()[:, 0].tolist()]
        if cuts:
            k = min(cuts, key=lambda cut: abs(cut - 4))
            found["top_k"] = self._pairs({"temperature": t, "top_k": k}, k)
            cut = min(cuts, key=lambda cut: abs(float(total[cut - 1]) - 0.7))
            # Half-way between two sums.
            below = float(total[cut - 2]) if cut > 1 else 0.0
            top_p = (below + float(total[cut - 1])) / 2
            found["top_p"] = self._pairs({"temperature": t, "top_p": top_p}, cut, top_p)
        return found

    def _pairs(
        self, options: dict[str, Any], cut: int, top_p: float | None = None
    ) -> tuple[dict[str, Any], dict[Outcome, float]]:
        """Of two tokens; of one, where rounding may decide what is kept of the second."""
        t = self._temperature
        firsts = _keep(self._first / t, cut)
        pairs: dict[Outcome, float] = {}
        for (token,), p in firsts.items():
            logits = self._logits((token,))
            then = cut if top_p is None else _nucleus(logits / t, top_p)
            ordered = logits.sort(descending=True).values
            near = then < len(ordered) and float(ordered[then - 1] - ordered[then]) <= (
                4 * TOLERANCE * float(logits.abs().max())
            )
            sums = (ordered / t).softmax(-1).cumsum(-1)[max(0, then - 2) : then]
            if top_p is not None:
                near = near or bool(((sums - top_p).abs() < EDGE).any())
            if near:
                return options, firsts
            pairs |= {(token, *second): p * q for second, q in _keep(logits / t, then).items()}
        return options | {"max_tokens": 2}, pairs

    @property
    def flat(self) -> dict[str, Any]:
        """Sampling parameters under which the tokens of an output are almost uniform."""
        return {"temperature": FLAT * max(self.scale, 1.0), "max_tokens": PLACES}

    def compare_logprobs(self, llm: LLM) -> dict[str, Any]:
        """Of the likeliest tokens, and of one that is drawn and need not be among them."""
        exact = self._first.log_softmax(-1)
        count = min(TOP_LOGPROBS, len(exact))
        params = SamplingParams(
            1, temperature=self._temperature, seed=3, logprobs=count, ignore_eos=True
        )
        (output,) = llm.generate([self._prompt], params)
        (entry,) = output.logprobs
        ids = [token for token, _ in entry.top]
        gaps = [abs(value - float(exact[token])) for token, value in entry.top]
        gaps.append(abs(entry.logprob - float(exact[output.token_ids[0]])))
        error = max(torch.tensor(gaps).nan_to_num(nan=float("inf")).tolist())
        # Where two are as near as FP32 is to the truth, either may come first.
        near = 2 * TOLERANCE * max(self.scale, 1.0)
        wanted = exact.sort(descending=True).values[:count].tolist()
        differ = sum(
            float(exact[token]) < value - near for token, value in zip(ids, wanted, strict=True)
        )
        return {
            "logprob_error": error,
            "largest_logit": self.scale,
            "likeliest_that_differ": differ + count - len(set(ids)),
        }


def _temperature(logits: Tensor) -> float:
    """That leaves ``LIKELIEST`` to the likeliest token, or less where many are as likely.

    Never so low that FP32's rounding of the logits would be seen.
    """
    low, high = 1e-3, 1e3
    scale = float(logits.std()) or 1.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        if float((logits / (middle * scale)).softmax(-1).max()) > LIKELIEST:
            low = middle
        else:
            high = middle
    return max(high * scale, 100 * TOLERANCE * float(logits.abs().max()))


def _keep(logits: Tensor, count: int) -> dict[Outcome, float]:
    """The ``count`` likeliest tokens with their probabilities among each other."""
    ordered, ids = logits.sort(descending=True, stable=True)
    probabilities = ordered[:count].softmax(-1).tolist()
    return {(i,): p for i, p in zip(ids[:count].tolist(), probabilities, strict=True) if p > 0}


def _nucleus(logits: Tensor, top_p: float) -> int:
    """How many of the likeliest tokens top-p keeps."""
    total = logits.sort(descending=True).values.softmax(-1).cumsum(-1)
    return min(len(logits), 1 + int((total < top_p).sum()))


def _draw(llm: LLM, prompt: list[int], count: int, options: dict[str, Any]) -> Counter[Outcome]:
    """``count`` outputs, half of them samples of few requests, the others of seeds in a row."""
    options = {"max_tokens": 1, "exit_threshold": 1.0, "ignore_eos": True} | options
    requests = [
        SamplingParams(n=SAMPLES, seed=1_000_000 * i, **options)
        for i in range(count // 2 // SAMPLES)
    ]
    requests += [SamplingParams(seed=1 + i, **options) for i in range(count // 2)]
    outputs = llm.generate([prompt] * len(requests), requests)
    return Counter(tuple(output.token_ids) for output in outputs)


def _repeats(drawn: Counter[Outcome], vocab_size: int) -> dict[str, Any]:
    """Of almost uniform outputs: the two places whose tokens agree most often.

    With the probability of so many or more; a request's tokens must not be drawn alike.
    """
    chance = math.exp(4 / FLAT) / vocab_size  # at most, where no logit is above twice the first's
    seen = max(
        sum(count for outcome, count in drawn.items() if outcome[a] == outcome[b])
        for a, b in combinations(range(PLACES), 2)
    )
    return {"p": at_least(seen, sum(drawn.values()), chance), "repeats": seen}


def _same_draws(llm: LLM, prompt: list[int], temperature: float) -> int:
    """How many outputs repeat another's, of seeds that differ in one bit and of seeds not given.

    They are almost uniform, and too long to be equal by chance.
    """
    seeds = [None] * 3 + [1 + 2**bit for bit in range(1, 63, 5)]
    params = [
        SamplingParams(
            DISTINCT, temperature=temperature, seed=seed, exit_threshold=1.0, ignore_eos=True
        )
        for seed in seeds
    ]
    outputs = [tuple(o.token_ids) for o in llm.generate([prompt] * len(params), params)]
    return len(outputs) - len(set(outputs))


def at_least(seen: int, total: int, chance: float) -> float:
    """The probability that ``seen`` or more of ``total`` independent trials succeed."""
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(chance) + (total - k) * math.log1p(-chance)
        for k in range(seen, total + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


def goodness(drawn: Counter[Outcome], expected: dict[Outcome, float]) -> tuple[float, int]:
    """The p-value of a chi-square test of counts, and how many draws have no probability.

    Outcomes of fewer than ``LEAST_EXPECTED`` expected draws are counted as one.
    """
    total = sum(drawn.values())
    outside = sum(count for outcome, count in drawn.items() if outcome not in expected)
    rare_seen = rare_expected = statistic = 0.0
    bins = 0
    for outcome, p in expected.items():
        if p * total < LEAST_EXPECTED:
            rare_seen += drawn[outcome]
            rare_expected += p * total
            continue
        statistic += (drawn[outcome] - p * total) ** 2 / (p * total)
        bins += 1
    if rare_expected >= LEAST_EXPECTED:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        bins += 1
    if bins < 2:
        return 1.0, outside
    halves = torch.tensor([(bins - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1])), outside
