"""Turns prompts and messages into engine requests, or refuses them; and requests into outputs."""

from __future__ import annotations

import hashlib
import math
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ouro_batch.engine.kv import CacheShape
from ouro_batch.engine.request import Request
from ouro_batch.engine.text import OutputText
from ouro_batch.errors import ModelError, RequestError
from ouro_batch.model.chat import ChatTemplate, encode_chat
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.tokenizer import Tokenizer
from ouro_batch.params import RequestOutput, SamplingParams, Timing, Usage
from ouro_batch.runner.base import MAX_STOP_IDS

Messages = Sequence[Mapping[str, Any]]

TOO_LONG = ("error", "truncate-left", "truncate-right")


def derive_seed(job_seed: int, index: int, sample: int = 0) -> int:
    """The seed of a request that names none: a hash of (job seed, index, sample).

    53 bits, so that it passes unchanged through JSON tools that know only doubles.
    """
    digest = hashlib.blake2b(f"{job_seed}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a sample of a request that names its seed: sample 0 has just that."""
    if not sample:
        return seed
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens; ``chat`` where it was rendered from messages."""

    tokens: list[int]
    chat: bool = False


@dataclass(frozen=True)
class TextSide:
    """A checkpoint's tokenizer and chat template, as far as it has them."""

    tokenizer: Tokenizer | None
    why_none: str
    chat_template: ChatTemplate | None
    end_of_turn: int | None  # token id that ends a chat reply

    @classmethod
    def from_folder(cls, folder: Path | None) -> TextSide:
        """A missing tokenizer is no error yet: prompts of token ids run without one."""
        if folder is None:
            return cls(None, "this model has no tokenizer", None, None)
        template = ChatTemplate.from_folder(folder)
        try:
            tokenizer = Tokenizer.from_folder(folder)
        except ModelError as error:
            if (folder / "tokenizer.json").exists():
                raise
            return cls(None, str(error), template, None)
        end = None if template is None else template.end_of_turn_token_id(tokenizer)
        return cls(tokenizer, "", template, end)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.why_none}; only prompts of token ids can be run")
        return self.tokenizer


class Intake:
    """Checks requests against one model and one cache."""

    def __init__(
        self,
        config: ModelConfig,
        text: TextSide,
        *,
        blocks: CacheShape,
        max_model_len: int,
        seed: int,
    ):
        self.config = config
        self.text = text
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.seed = seed

    def encode(
        self,
        prompt: str | Sequence[int] | EncodedPrompt | None = None,
        messages: Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> EncodedPrompt:
        """The tokens of a prompt or of messages. Any thread may call it.

        Raises:
            RequestError: there are none, or the model has no embedding for one.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if (prompt is None) == (messages is None):
            raise RequestError("a request needs either a prompt or messages, one of the two")
        if messages is not None:
            tokens = self._encode_chat(messages, chat_template_kwargs or {})
        else:
            tokens = self._encode_prompt(prompt)
        self._check_vocabulary(tokens)
        return EncodedPrompt(tokens, chat=messages is not None)

    def request(
        self,
        request_id: int,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        index: int,
        sample: int | None = None,
        too_long: str = "error",
    ) -> Request:
        """A request that the engine can run; with ``params.n`` above 1, its sample ``sample``.

        ``too_long``: "error" refuses a prompt that does not fit beside ``max_tokens``,
        "truncate-left" and "truncate-right" drop as many of its first or last tokens as needed.

        Raises:
            RequestError: it cannot.
        """
        if too_long not in TOO_LONG:
            raise RequestError(f"too_long must be one of {', '.join(TOO_LONG)}, got {too_long!r}")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, got {reprlib.repr(params)}"
                " (write SamplingParams(max_tokens=...))"
            )
        if sample is None:
            if params.n > 1:
                raise RequestError(
                    f"one request is one sample, and params.n is {params.n}: say which"
                    f" (sample=0 to {params.n - 1}), or use generate"
                )
            sample = 0
        if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < params.n:
            raise RequestError(f"sample must be from 0 to {params.n - 1}, got {sample!r}")
        tokenizer, tokens = self.text.tokenizer, prompt.tokens
        if params.seed is None:
            seed = derive_seed(self.seed, index, sample)
        else:
            seed = sample_seed(params.seed, sample)
        request = Request(
            request_id=request_id,
            prompt=tokens,
            params=params,
            seed=seed,
            loops=self.config.loops,
            exit_threshold=self.exit_threshold(params),
            stop_ids=self._stop_ids(params, chat=prompt.chat),
            arrived=time.perf_counter(),
            text=tokenizer and OutputText(tokenizer.detokenizer(), params.stop),
            index=index,
            sample=sample,
        )
        if too_long != "error":
            longest = self._longest_prompt(request)
            if 0 < longest < len(tokens):
                left = too_long == "truncate-left"
                request.prompt = tokens[-longest:] if left else tokens[:longest]
                request.truncated = len(tokens) - longest
        self._check(request)
        return request

    def _longest_prompt(self, request: Request) -> int:
        """Prompt tokens that fit beside what the request may generate; 0 or less: none."""
        blocks = self.blocks.blocks - self.blocks.needed(0, request.decode_slots())
        fits = blocks // self.config.loops * self.blocks.block_size
        return min(self.max_model_len - request.params.max_tokens, fits)

    def _encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.text.require_tokenizer().encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise RequestError(
                f"a prompt must be text or a list of token ids, got {reprlib.repr(prompt)}"
            )
        tokens = list(prompt)
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"token ids must be integers, got {token!r}")
        return tokens

    def _encode_chat(self, messages: Messages, kwargs: Mapping[str, Any]) -> list[int]:
        if self.text.chat_template is None:
            raise RequestError("this model has no chat template: give a prompt instead of messages")
        return encode_chat(self.text.require_tokenizer(), self.text.chat_template, messages, kwargs)

    def _check_vocabulary(self, tokens: list[int]) -> None:
        """A tokenizer can have added tokens for which the model has no embedding."""
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.config.vocab_size}"
                )

    def _check(self, request: Request) -> None:
        """Refuse what the model or an empty cache cannot hold."""
        params, loops, prompt_tokens = request.params, self.config.loops, len(request.prompt)
        if not prompt_tokens:
            raise RequestError("the prompt is empty")
        total = prompt_tokens + params.max_tokens
        if total > self.max_model_len:
            or_raise = " or lower max_tokens"
            if self.max_model_len < self.config.max_position_embeddings:
                or_raise = ", lower max_tokens or raise max_model_len"
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_tokens {params.max_tokens} make {total};"
                f" the longest possible is {self.max_model_len} (shorten the prompt{or_raise})",
                "too_long",
            )
        if params.stop and self.text.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; this model has none")
        for token in params.stop_token_ids:
            if token >= self.config.vocab_size:
                raise RequestError(
                    f"stop token id {token} is outside the vocabulary of {self.config.vocab_size}"
                )
        if (params.logprobs or 0) > self.config.vocab_size:
            raise RequestError(
                f"logprobs {params.logprobs} asks for more tokens than the"
                f" {self.config.vocab_size} of the vocabulary"
            )
        if params.exit_depths is not None:
            first, *rest = params.exit_depths[: params.max_tokens]
            if first != loops:
                raise RequestError(
                    f"exit_depths[0] is {first}; the first token comes from prefill, which runs"
                    f" all {loops} loops"
                )
            if max(rest, default=1) > request.max_loops:
                raise RequestError(
                    f"exit_depths holds {max(rest)}; at most {request.max_loops} loops run"
                )
        needed = self.blocks.needed(prompt_tokens, request.decode_slots())
        if needed > self.blocks.blocks:
            per_token = self.blocks.block_size / loops
            raise RequestError(
                f"the request needs {math.ceil(needed * per_token):,} tokens of cache; this cache"
                f" holds {math.floor(self.blocks.blocks * per_token):,} (raise kv_memory or"
                " kv_tokens, or lower max_tokens)",
                "too_long",
            )

    def exit_threshold(self, params: SamplingParams) -> float:
        """The threshold of a request, infinite at fixed depth."""
        threshold = params.exit_threshold
        if threshold is None:
            threshold = self.config.exit_threshold
        return threshold if threshold < 1 else math.inf

    def _stop_ids(self, params: SamplingParams, *, chat: bool) -> tuple[int, ...]:
        own: list[int] = []
        if not params.ignore_eos:
            own += self.config.eos_token_ids
            if chat and self.text.end_of_turn is not None:
                own.append(self.text.end_of_turn)
        # A token that the model cannot produce ends nothing; the others must fit a device's row.
        own = [token for token in own if token < self.config.vocab_size]
        ids = tuple(dict.fromkeys([*own, *params.stop_token_ids]))
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(ids)} stop token ids; at most {MAX_STOP_IDS} are supported")
        return ids


def output_of(request: Request) -> RequestOutput:
    """What a finished request gave."""

    def seconds(begin: float, end: float) -> float:
        return 0.0 if math.isnan(begin) or math.isnan(end) else max(end - begin, 0.0)

    return RequestOutput(
        request_id=request.request_id,
        text="" if request.text is None else request.text.text,
        token_ids=request.token_ids,
        exit_depths=request.exit_depths,
        finish_reason=request.finish_reason,
        usage=Usage(len(request.prompt), len(request.token_ids), sum(request.exit_depths[1:])),
        timing=Timing(
            queue_s=seconds(request.arrived, request.admitted),
            prefill_s=seconds(request.admitted, request.first_token),
            decode_s=seconds(request.first_token, request.finished),
            total_s=seconds(request.arrived, request.finished),
        ),
        seed=request.seed,
        truncated_tokens=request.truncated,
        index=request.index,
        sample=request.sample,
        logprobs=None if request.params.logprobs is None else request.logprobs,
    )
