"""A deterministic LLM without a model: it answers a prompt with itself in capitals."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from ouro_batch.environment import versions
from ouro_batch.errors import EngineError, ModelError, RequestError
from ouro_batch.params import RequestOutput, SamplingParams, Timing, TokenLogprobs, Usage

LOOPS = 4


@dataclass(frozen=True)
class FakeSnapshot:
    rows_in_use: int
    max_rows: int
    waiting: int
    kv_blocks_in_use: int
    kv_blocks: int
    prompt_tokens: int
    completion_tokens: int
    decode_tokens: int
    decode_loops: int


@dataclass
class FakeRequest:
    request_id: int
    prompt_tokens: int
    answer: list[int]
    params: SamplingParams
    seed: int
    index: int = 0
    sample: int = 0
    made: list[int] = field(default_factory=list)

    @property
    def exit_depths(self) -> list[int]:
        return [LOOPS, *(1 + token % LOOPS for token in self.made[1:])]


class FakeLLM:
    """Tokens are code points; the prompt "refuse me" is refused, unless REFUSE=nothing is set.

    The model's name chooses what goes wrong: "missing" cannot be loaded, "no-device" has no
    device, "breaks" stops at its fourth step, "slow" sleeps for 20 ms in each.
    """

    def __init__(self, model, *, seed=0, max_rows=None, **options):
        if model == "missing":
            raise ModelError("there is no checkpoint in missing")
        if model == "no-device":
            raise EngineError("no CUDA device was found")
        self.model = model
        self.seed = seed
        self.max_rows = max_rows or 4
        self.options = options
        self.requests: list[FakeRequest] = []
        self.most_waiting = 0
        self.aborted: list[int] = []
        self.closed = False
        self.steps = 0
        self._next_id = 100
        self._prompt_tokens = self._completion_tokens = 0
        self._decode_tokens = self._decode_loops = 0

    def encode(self, prompt=None, messages=None, chat_template_kwargs=None):
        if messages is not None:
            prompt = messages[-1]["content"] + (chat_template_kwargs or {}).get("suffix", "")
        if prompt == "cannot be tokenized":
            raise RequestError("the prompt cannot be tokenized")
        return [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt

    def add_request(self, prompt, params, *, index=0, sample=0, too_long="error"):
        if prompt == self.encode("refuse me") and os.environ.get("REFUSE") != "nothing":
            raise RequestError("the prompt needs 9,999 tokens of cache", "too_long")
        answer = [ord(letter) for letter in "".join(map(chr, prompt)).upper()]
        if sample:
            answer.append(ord("0") + sample)
        seed = params.seed if params.seed is not None else 1000 * self.seed + index
        request = FakeRequest(self._next_id, len(prompt), answer, params, seed, index, sample)
        self.requests.append(request)
        self.most_waiting = max(self.most_waiting, len(self.requests) - self.max_rows)
        self._next_id += 1
        return request.request_id

    def step(self):
        self.steps += 1
        if self.model == "breaks" and self.steps == 4:
            raise EngineError("the engine stopped: out of memory (lower --max-rows)")
        if self.model == "slow":
            time.sleep(0.02)
        finished = []
        for request in self.requests[: self.max_rows]:
            if not request.made:
                self._prompt_tokens += request.prompt_tokens
            request.made.append(request.answer[len(request.made)])
            self._completion_tokens += 1
            if len(request.made) > 1:
                self._decode_tokens += 1
                self._decode_loops += request.exit_depths[-1]
            if len(request.made) in (len(request.answer), request.params.max_tokens):
                finished.append(request)
        for request in finished:
            self.requests.remove(request)
        return [self._output(request) for request in finished]

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.requests = [r for r in self.requests if r.request_id != request_id]

    def waiting_requests(self):
        return [request.request_id for request in self.requests[self.max_rows :]]

    @property
    def has_unfinished(self):
        return bool(self.requests)

    def token_text(self, token_id):
        return chr(token_id)

    def token_texts(self, token_ids):
        return [chr(token) for token in token_ids]

    def snapshot(self):
        rows = min(len(self.requests), self.max_rows)
        return FakeSnapshot(
            rows_in_use=rows,
            max_rows=self.max_rows,
            waiting=len(self.requests) - rows,
            kv_blocks_in_use=3 * rows,
            kv_blocks=16 * self.max_rows,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            decode_tokens=self._decode_tokens,
            decode_loops=self._decode_loops,
        )

    def statistics(self):
        return {
            "steps": self.steps,
            "rows_in_use": {"mean": 2.5, "max": self.max_rows, "steps_by_rows": {"1": 4}},
            "cache": {"blocks": 64, "peak_blocks": 12},
            "peak_memory_bytes": 12345,
        }

    def describe(self):
        return {
            "model": {"name": self.model, "revision": "f" * 40, "config": {"loops": LOOPS}},
            "device": "cpu (fake)",
            "schedule": self.options.get("schedule", "refill"),
            "loops": LOOPS,
            "max_rows": self.max_rows,
            "seed": self.seed,
            "versions": versions(),
        }

    def close(self):
        self.closed = True

    def _output(self, request):
        made, depths = request.made, request.exit_depths
        whole = len(made) == len(request.answer)
        return RequestOutput(
            request_id=request.request_id,
            text="".join(map(chr, made)),
            token_ids=list(made),
            exit_depths=depths,
            finish_reason="stop" if whole else "length",
            usage=Usage(request.prompt_tokens, len(made), sum(depths[1:])),
            timing=Timing(0.1, 0.2, 0.3, 0.6),
            seed=request.seed,
            index=request.index,
            sample=request.sample,
            logprobs=self._logprobs(request),
        )

    def _logprobs(self, request):
        k = request.params.logprobs
        if k is None:
            return None
        return [TokenLogprobs(-0.5, [(token, -0.5)][:k]) for token in request.made]
