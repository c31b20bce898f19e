"""What a request asks for (``SamplingParams``) and what it gets back (``RequestOutput``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ouro_batch.errors import RequestError

MAX_STOP_TOKEN_IDS = 16
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
# What a device's row can hold: int32 and FP32.
MAX_INT = 2**31 - 1
MAX_FLOAT = 3.4e38
MAX_GIB = 2**20  # of memory: beyond any machine, and in bytes still an integer of 64 bits


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise RequestError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise RequestError(f"{name} must be at most {high}, got {value}")


def _finite(name: str, value: object) -> float:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:  # an integer beyond the largest float
        pass
    raise RequestError(f"{name} must be a finite number, got {value!r}")


def _tuple_of(name: str, value: object, kind: type) -> tuple:
    if isinstance(value, kind) and not isinstance(value, bool):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name} must be a list of {kind.__name__} values, got {value!r}")
    for item in value:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(f"{name} must hold only {kind.__name__} values, got {item!r}")
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples, stops and leaves its loops early. Checked when it is made.

    Args:
        max_tokens: output tokens at most, the first (produced by prefill) included; >= 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probability reaches it; (0, 1].
            Applied after temperature and ``top_k``.
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: random seed; the same seed gives the same tokens in any batch. None: derived.
        stop: strings that end the output; the match is left out of the text.
        stop_token_ids: token ids that end the output, besides the model's own.
        ignore_eos: run past the model's end-of-sequence tokens; ``stop`` and ``stop_token_ids``
            still count.
        exit_threshold: a token leaves after the first loop d with ``d >= min_loops`` where the
            probability of having exited, 1 - prod(1 - lambda_j), reaches it. >= 1 is fixed depth.
            None: the checkpoint's ``early_exit_threshold``.
        min_loops: loops every decoded token runs at least; >= 1.
        max_loops: loops a decoded token runs at most. None: all of the model's.
        exit_depths: depths to replay in place of the gate; entry i is the depth of the run that
            produces output token i, so entry 0 is the model's number of loops.
        n: samples of the prompt, each with a seed of its own; at most 1,024. Sample 0 has the seed
            of a request with n = 1.
        logprobs: None, or how many of the likeliest tokens to give with each output token and its
            own log-probability, 0 to 20. They are the model's: of the logits before temperature,
            top-k and top-p.

    Raises:
        RequestError: a value of the wrong type or out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    exit_threshold: float | None = None
    min_loops: int = 1
    max_loops: int | None = None
    exit_depths: Sequence[int] | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        object.__setattr__(self, "temperature", _finite("temperature", self.temperature))
        if self.temperature < 0:
            raise RequestError(f"temperature must be at least 0, got {self.temperature}")
        if self.temperature > MAX_FLOAT:
            raise RequestError(f"temperature must be at most {MAX_FLOAT}, got {self.temperature}")
        object.__setattr__(self, "top_p", _finite("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        _check_int("top_k", self.top_k, 0, MAX_INT)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "stop", _tuple_of("stop", self.stop, str))
        if "" in self.stop:
            raise RequestError("stop must not hold an empty string: it would match at once")
        ids = _tuple_of("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are supported"
            )
        for token in ids:
            _check_int("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.exit_threshold is not None:
            threshold = _finite("exit_threshold", self.exit_threshold)
            object.__setattr__(self, "exit_threshold", threshold)
            if threshold < 0:
                raise RequestError(f"exit_threshold must be at least 0, got {self.exit_threshold}")
        _check_int("min_loops", self.min_loops, 1, MAX_INT)
        if self.max_loops is not None:
            _check_int("max_loops", self.max_loops, 1, MAX_INT)
            if self.max_loops < self.min_loops:
                raise RequestError(
                    f"max_loops {self.max_loops} is below min_loops {self.min_loops}"
                )
        if self.exit_depths is not None:
            depths = _tuple_of("exit_depths", self.exit_depths, int)
            object.__setattr__(self, "exit_depths", depths)
            if len(depths) < self.max_tokens:
                raise RequestError(
                    f"exit_depths gives {len(depths)} depths but max_tokens is {self.max_tokens}:"
                    " replay needs one depth for each output token (lower max_tokens to"
                    f" {len(depths)})"
                )
            for depth in depths:
                _check_int("exit_depths", depth, 1)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The parameter names, in order."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class Usage:
    """Tokens and loops of one request. ``loops`` counts decode runs only (output index >= 1)."""

    prompt_tokens: int
    completion_tokens: int
    loops: int


@dataclass(frozen=True)
class Timing:
    """Seconds of one request's life, by the host's clock.

    ``queue_s`` from arrival to admission, ``prefill_s`` from admission to the first token,
    ``decode_s`` from the first token to the last, ``total_s`` from arrival to the last.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one output token and of the likeliest (id, its own)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class RequestOutput:
    """The finished result of one request, or of one of its samples.

    ``exit_depths[i]`` is the depth of the run that produced output token i; entry 0 is prefill's.
    A stop token stays in ``token_ids`` and ``exit_depths`` but not in ``text``; a matched stop
    string leaves only the text. ``finish_reason`` is "stop", "length" or "abort". ``index`` is the
    request's place in its job, ``sample`` which of its ``n`` samples this is. ``logprobs`` has an
    entry for each output token, where asked for.
    """

    request_id: int
    text: str
    token_ids: list[int]
    exit_depths: list[int]
    finish_reason: str
    usage: Usage
    timing: Timing
    seed: int
    truncated_tokens: int = 0  # dropped from a prompt that was too long
    index: int = 0
    sample: int = 0
    logprobs: list[TokenLogprobs] | None = None

    @property
    def mean_exit_depth(self) -> float | None:
        """Mean depth of the decode runs, None where there was none (a single output token)."""
        decoded = self.exit_depths[1:]
        return sum(decoded) / len(decoded) if decoded else None


@dataclass(frozen=True)
class Score:
    """What a model makes of a given completion.

    ``logprobs[i]`` is the log-probability of completion token i, ``exit_depths[i]`` the depth of
    the run that gives it (entry 0 is prefill's), ``best[i]`` the likeliest token there and
    ``margins[i]`` how far its logit is above the next one's. ``exit_margins[i]`` is how far the
    exit probability was from the threshold where it came nearest, infinite where no gate was asked.
    ``logit_scales[i]`` is the largest absolute logit, in proportion to which arithmetic errs.
    """

    token_ids: list[int]
    logprobs: list[float]
    exit_depths: list[int]
    best: list[int]
    margins: list[float]
    exit_margins: list[float]
    logit_scales: list[float]
