"""Reads a job's inputs as ``run`` would, without an engine, and says what running them takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ouro_batch import memory
from ouro_batch.engine.kv import CacheShape
from ouro_batch.errors import RequestError
from ouro_batch.intake import Intake, TextSide
from ouro_batch.jobs.prepare import Prepared, Preparer
from ouro_batch.jobs.reader import read_lines
from ouro_batch.jobs.records import InputFormat, Record
from ouro_batch.jobs.score import FIELDS as SCORE_FIELDS
from ouro_batch.jobs.score import completion_of
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.source import CheckpointSource
from ouro_batch.model.weights import empty_weights
from ouro_batch.options import DTYPES
from ouro_batch.params import SamplingParams
from ouro_batch.scoring import prepare

UNBOUNDED = 2**62  # blocks of a cache that nothing is known of


@dataclass(frozen=True)
class Problem:
    """A line that would become an error record."""

    line: int
    file: str
    type: str
    message: str


@dataclass(frozen=True)
class Capacity:
    """What a GPU's memory holds, in bytes and in tokens of full depth."""

    gpu_bytes: int
    weight_bytes: int
    cache_bytes: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        return max(self.cache_bytes // self.token_bytes, 0)


@dataclass
class Findings:
    """What was found in all lines."""

    lines: int = 0
    samples: int = 0  # of the lines that can run
    problems: list[Problem] = field(default_factory=list)  # the first of them
    problem_types: Counter[str] = field(default_factory=Counter)
    prompt_lengths: Counter[int] = field(default_factory=Counter)  # in tokens, a line each
    longest: tuple[int, int, str] = (0, 0, "")  # tokens, line, file
    prompt_tokens: int = 0  # of all samples
    output_tokens: int = 0  # at most
    largest: int = 0  # tokens of cache that one request may need
    cache_tokens: int = 0  # that all samples may need
    truncated: int = 0  # lines whose prompts would lose tokens
    prefill_operations: float = 0.0
    decode_operations: float = 0.0  # at full depth and full length

    @property
    def failed(self) -> int:
        return sum(self.problem_types.values())

    def percentile(self, percent: float) -> int | None:
        """The prompt length that ``percent`` % of the lines do not exceed."""
        total = sum(self.prompt_lengths.values())
        seen = 0
        for length in sorted(self.prompt_lengths):
            seen += self.prompt_lengths[length]
            if seen >= total * percent / 100:
                return length
        return None

    def histogram(self) -> list[tuple[int, int, int]]:
        """Lines by prompt length: from, to, how many; bounds double."""
        bins: Counter[int] = Counter()
        for length, lines in self.prompt_lengths.items():
            bins[max(length - 1, 0).bit_length()] += lines
        if not bins:
            return []
        return [
            (1 if n == 0 else 2 ** (n - 1) + 1, 2**n, bins[n])
            for n in range(min(bins), max(bins) + 1)
        ]


def capacity(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    gpu_bytes: int,
    utilization: float,
    rows: int,
    batched_tokens: int,
) -> Capacity:
    """What a cache beside weights and work space can have, as near as can be told beforehand."""
    weights = empty_weights(config, torch.device("meta"), dtype).nbytes
    width = (
        3 * config.hidden_size
        + (3 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        + 3 * config.intermediate_size
    )
    work = ((rows + batched_tokens) * width + rows * config.vocab_size) * dtype.itemsize
    cache = utilization * gpu_bytes - weights - work - memory.GRAPH_BYTES
    token = memory.block_bytes(config, dtype, 1) * config.loops
    return Capacity(gpu_bytes, weights, max(int(cache), 0), token)


class InputCheck:
    """Checks lines against a checkpoint.

    Args:
        source: the checkpoint; its weights are not read.
        dtype: of the cache; None is the checkpoint's.
        room: what the GPU holds; None leaves that open.
        keep: problems that are kept word by word.
        score: whether lines are those of ``score``, with completions, instead of those of ``run``.
        the others: as ``Job`` and ``LLM`` have them.
    """

    def __init__(
        self,
        source: CheckpointSource,
        *,
        defaults: Mapping[str, Any],
        format: InputFormat,
        unique_ids: bool,
        too_long: str,
        loops: int | None,
        max_model_len: int | None,
        block_size: int,
        room: Capacity | None,
        keep: int,
        score: bool = False,
    ):
        config = source.config if loops is None else replace(source.config, loops=loops)
        self._config = config
        self._too_long = too_long
        self._keep = keep
        self._score = score
        if score:
            format = replace(format, extra=SCORE_FIELDS)
        blocks = UNBOUNDED
        if room is not None:
            blocks = room.tokens // block_size * config.loops
        self._intake = Intake(
            config,
            TextSide.from_folder(source.folder),
            blocks=CacheShape(blocks, block_size, config.loops),
            max_model_len=max_model_len or config.max_position_embeddings,
            seed=0,
        )
        self._preparer = Preparer(
            defaults=SamplingParams(**defaults),
            format=format,
            encode=lambda r: self._intake.encode(r.prompt, r.messages, r.chat_template_kwargs),
            done=lambda index: False,
            unique_ids=unique_ids,
        )
        self.findings = Findings()

    def read(self, inputs: Sequence[str]) -> Findings:
        """All lines of the inputs. Raises FileError where one fails."""
        for line in read_lines(inputs):
            self.findings.lines += 1
            self._take(self._preparer(line))
        return self.findings

    def _take(self, prepared: Prepared) -> None:
        found = self.findings
        try:
            if prepared.error is not None:
                raise prepared.error
            if self._score:
                self._take_completion(prepared)
            else:
                self._take_request(prepared)
        except RequestError as error:
            found.problem_types[error.type] += 1
            if len(found.problems) < self._keep:
                line = prepared.line
                found.problems.append(Problem(line.number, line.source, error.type, str(error)))

    def _take_completion(self, prepared: Prepared) -> None:
        record = prepared.record
        if record.openai is not None:
            raise RequestError("this is a request of OpenAI's batch API, not a line to score")
        completion = completion_of(record.extra)
        start, tokens, _ = prepare(
            self._intake,
            self._intake.max_model_len,
            prepared.prompt,
            completion.tokens,
            completion.exit_depths,
            record.params,
        )
        # One pass over prompt and completion, whose last token is not run.
        self._count(record, len(start), len(tokens), 1)

    def _take_request(self, prepared: Prepared) -> None:
        found, record = self.findings, prepared.record
        request = self._intake.request(
            0,
            prepared.prompt,
            record.params,
            index=record.index,
            sample=0,
            too_long=self._too_long,
        )
        samples, tokens = record.params.n, len(request.prompt)
        found.truncated += request.truncated > 0
        slots = self._config.loops * tokens + request.decode_slots()
        needed = -(-slots // self._config.loops)
        found.largest = max(found.largest, needed)
        found.cache_tokens += samples * needed
        self._count(record, tokens, record.params.max_tokens, samples)

    def _count(self, record: Record, tokens: int, output: int, samples: int) -> None:
        found = self.findings
        found.samples += samples
        found.prompt_lengths[tokens] += 1
        found.longest = max(found.longest, (tokens, record.line, record.source))
        found.prompt_tokens += samples * tokens
        found.output_tokens += samples * output
        found.prefill_operations += samples * self._operations(0, tokens)
        found.decode_operations += samples * self._operations(tokens, output - 1)

    def _operations(self, start: int, tokens: int) -> float:
        """Floating point operations of running ``tokens`` after ``start`` others, all loops."""
        c = self._config
        layer = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer += 3 * c.hidden_size * c.intermediate_size
        pairs = tokens * start + tokens * (tokens + 1) / 2
        attention = 2 * 2 * c.num_heads * c.head_dim * pairs
        return c.loops * c.num_layers * (2 * layer * tokens + attention)


def resolve_cache_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The dtype of a GPU run: the checkpoint's where ``auto``."""
    return DTYPES[config.dtype if dtype == "auto" else dtype]
