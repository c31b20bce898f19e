"""What the checks run on: a file's prompts, or random tokens where there is none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ouro_batch.engine.kv import CacheShape
from ouro_batch.errors import RequestError
from ouro_batch.intake import EncodedPrompt, Intake, TextSide
from ouro_batch.jobs.errors import FileError
from ouro_batch.jobs.reader import read_lines
from ouro_batch.jobs.records import Record, parse_record
from ouro_batch.model.config import ModelConfig
from ouro_batch.model.source import CheckpointSource
from ouro_batch.params import SamplingParams
from ouro_batch.validate.check import Question

QUICK_PROMPTS, FULL_PROMPTS = 8, 32
QUICK_TOKENS, FULL_TOKENS = 64, 1024  # of a prompt; the rest of a longer one is cut off


def random_prompts(config: ModelConfig, *, full: bool) -> list[list[int]]:
    """Token ids, the same ones for the same vocabulary; lengths from 1 up, unevenly."""
    draw = random.Random(0)
    longest = min(FULL_TOKENS if full else QUICK_TOKENS, config.max_position_embeddings // 2)
    count = FULL_PROMPTS if full else QUICK_PROMPTS
    lengths = [max(1, round(longest ** (i / (count - 1)))) for i in range(count)]
    draw.shuffle(lengths)
    return [[draw.randrange(config.vocab_size) for _ in range(n)] for n in lengths]


def read_prompts(
    path: str, source: CheckpointSource, *, full: bool
) -> tuple[list[list[int]], list[Question]]:
    """Token ids of prompts spread over a file, and every record with ``metadata.answer``.

    Raises:
        FileError: the file cannot be read, has no prompts, or a line that is no record.
    """
    records = []
    for line in read_lines([path]):
        try:
            records.append(parse_record(line, SamplingParams()))
        except RequestError as error:
            raise FileError(f"{path}, line {line.number}: {error}") from None
    if not records:
        raise FileError(f"{path} has no prompts")
    count = FULL_PROMPTS if full else QUICK_PROMPTS
    longest = min(FULL_TOKENS if full else QUICK_TOKENS, source.config.max_position_embeddings // 2)
    chosen = records[:: max(1, len(records) // count)][:count]
    intake = _intake(source)
    prompts = []
    for record in chosen:
        try:
            tokens = _encode(intake, record).tokens[:longest]
        except RequestError as error:
            raise FileError(f"{path}, line {record.line}: {error}") from None
        if tokens:
            prompts.append(tokens)
    return prompts, _questions(path, records, intake)


def _intake(source: CheckpointSource) -> Intake:
    config = source.config
    return Intake(
        config,
        TextSide.from_folder(source.folder),
        blocks=CacheShape(2**62, 16, config.loops),
        max_model_len=config.max_position_embeddings,
        seed=0,
    )


def _encode(intake: Intake, record: Record) -> EncodedPrompt:
    return intake.encode(record.prompt, record.messages, record.chat_template_kwargs)


def _questions(path: str, records: Sequence[Record], intake: Intake) -> list[Question]:
    """Raises FileError where one cannot run."""
    questions = []
    for record in records:
        answer = record.metadata.get("answer") if isinstance(record.metadata, dict) else None
        if isinstance(answer, (str, int, float)):
            try:
                encoded = _encode(intake, record)
                intake.request(0, encoded, record.params, index=record.index, sample=0)
            except RequestError as error:
                raise FileError(f"{path}, line {record.line}: {error}") from None
            given: dict[str, Any] = {"prompt": record.prompt}
            if record.messages is not None:
                template = record.chat_template_kwargs
                given = {"messages": record.messages, "chat_template_kwargs": template}
            questions.append(Question(given, str(answer), record.params))
    return questions
