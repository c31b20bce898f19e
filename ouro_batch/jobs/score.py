"""Scores the completions of a job's lines: what the model makes of text that is already there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from ouro_batch.errors import RequestError
from ouro_batch.jobs.ahead import ReadAhead
from ouro_batch.jobs.answers import Answers
from ouro_batch.jobs.errors import UsageError
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.preview import counted
from ouro_batch.jobs.reader import Line
from ouro_batch.jobs.records import InputFormat, Record, RecordError, error_record, parse_record
from ouro_batch.jobs.writer import Writer
from ouro_batch.params import SamplingParams, Score

if TYPE_CHECKING:
    from ouro_batch.llm import LLM


FIELDS = ("completion", "exit_depths")  # of a line to score, besides those of a record
WAIT_S = 0.1  # for a line, before it is asked whether to stop


@dataclass(frozen=True)
class Completion:
    """What a line's prompt is followed by; ``exit_depths`` None leaves them to the gate."""

    tokens: str | list[int]
    exit_depths: list[int] | None


@dataclass
class ScoreCounts:
    """What has been scored, in all runs of the job."""

    records: int = 0
    failed: int = 0
    tokens: int = 0
    logprob: float = 0.0
    loops: int = 0
    decoded: int = 0  # tokens whose depth counts: all but the first of each completion

    def add(self, record: Mapping[str, Any]) -> None:
        """A record that was written, by this run or an earlier one."""
        self.records += 1
        if "error" in record:
            self.failed += 1
            return
        self.tokens += len(record["logprobs"])
        self.logprob += record["logprob"]
        self.loops += sum(record["exit_depths"][1:])
        self.decoded += len(record["exit_depths"]) - 1


class ScoreJob:
    """Gives a writer a record for each line, in input order.

    Args:
        inputs: files of lines, as ``read_lines`` takes them.
        answers: those of a run over the same inputs, whose tokens and depths are scored, all
            samples of a line; None: a line brings ``completion`` and may bring ``exit_depths``.
        params: threshold and loops for completions without depths.
        use_depths: whether the depths that are given are used; else the gate decides.
    """

    def __init__(
        self,
        llm: LLM,
        inputs: Sequence[str],
        writer: Writer,
        *,
        answers: Answers | None,
        params: SamplingParams,
        format: InputFormat,
        use_depths: bool,
        interrupt: Interrupt,
        on_record: Callable[[ScoreCounts], None],
    ):
        self.counts = ScoreCounts()
        self.lines = 0
        self._llm = llm
        self._inputs = inputs
        self._writer = writer
        self._answers = answers
        self._params = params
        self._format = replace(format, extra=FIELDS)
        self._use_depths = use_depths
        self._interrupt = interrupt
        self._on_record = on_record

    def run(self) -> ScoreCounts:
        """All lines. Raises KeyboardInterrupt, UsageError, FileError, OutputClosed, EngineError."""
        reader = ReadAhead(self._inputs)
        try:
            while not reader.ended:
                if self._interrupt.requested:
                    raise KeyboardInterrupt
                line = reader.poll(WAIT_S)
                if line is not None:
                    self._take(line)
        finally:
            reader.close()
            if self._answers is not None:
                self._answers.close()
        if self._answers is not None and self._answers.last_index >= self.lines:
            raise UsageError(
                f"the answers have index {self._answers.last_index}, but the input has"
                f" {self.lines:,} lines: they must be the output of the same inputs"
            )
        return self.counts

    def _take(self, line: Line) -> None:
        self.lines += 1
        answers: list[dict[str, Any]] | list[None] = [None]
        if self._answers is not None:
            answers = self._answers.of(line.index) or [{}]
        # Of all samples: where one is another now, none of the line's records counts.
        line_hash = _hash(line, answers)
        for answer in answers:
            self._take_sample(line, answer, line_hash)

    def _take_sample(self, line: Line, answer: Mapping[str, Any] | None, line_hash: int) -> None:
        record = self._writer.kept(line, line_hash, (answer or {}).get("sample", 0))
        if record is None:
            record = self._score(line, answer)
            self._writer.write(record, line_hash)
        self.counts.add(record)
        self._on_record(self.counts)

    def _score(self, line: Line, answer: Mapping[str, Any] | None) -> dict[str, Any]:
        record_id: Any = None
        sample = {} if answer is None or "sample" not in answer else {"sample": answer["sample"]}
        try:
            record = parse_record(line, self._params, self._format)
            record_id = record.id
            if record.openai is not None and answer is None:
                raise RequestError(
                    "a line to score has prompt or messages and completion; this is a request of"
                    " OpenAI's batch API, which needs --answers"
                )
            given = record.extra if answer is None else _of_answer(line, record, answer)
            completion = completion_of(given)
            depths = completion.exit_depths if self._use_depths else None
            self._check_loops(line, depths, of_run=answer is not None)
            prompt = self._llm.encode(record.prompt, record.messages, record.chat_template_kwargs)
            if answer is not None:
                _check_prompt(line, answer, len(prompt.tokens))
            (score,) = self._llm.score(
                [prompt.tokens],
                [completion.tokens],
                None if depths is None else [depths],
                params=record.params,
            )
        except RequestError as error:
            wrong = RecordError(
                str(error).removeprefix("prompt 0: "),
                error.type,
                error.id if isinstance(error, RecordError) else record_id,
            )
            return error_record(line, wrong, name_file=len(self._inputs) > 1) | sample
        return _score_record(record, score, len(prompt.tokens)) | sample

    def _check_loops(self, line: Line, depths: list[Any] | None, *, of_run: bool) -> None:
        """Refuse depths of a run with other loops, which all of its answers have.

        Raises:
            UsageError: an answer's. RequestError: a line's own.
        """
        loops = self._llm.config.loops
        if not depths or depths[0] == loops:
            return
        why = f"exit_depths[0] is {depths[0]!r}; prefill runs all {loops} loops"
        way_out = "give the --loops of the run that made them, or --ignore-depths"
        if of_run:
            raise UsageError(
                f"the answer to line {line.number} of {line.source}: {why} ({way_out})"
            )
        raise RequestError(f"{why} ({way_out})")


def _score_record(record: Record, score: Score, prompt_tokens: int) -> dict[str, Any]:
    decoded = score.exit_depths[1:]
    return {
        "id": record.id,
        "index": record.index,
        "logprob": sum(score.logprobs),
        "greedy": score.best == score.token_ids,
        "token_ids": score.token_ids,
        "logprobs": score.logprobs,
        "exit_depths": score.exit_depths,
        "mean_exit_depth": sum(decoded) / len(decoded) if decoded else None,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(score.token_ids),
            "loops": sum(decoded),
        },
        "metadata": record.metadata,
    }


def completion_of(given: Mapping[str, Any]) -> Completion:
    """The completion that a line or an answer brings. Raises RequestError where there is none."""
    if "completion" not in given:
        raise RequestError(
            "a line to score needs completion: text, or token ids (or give --answers OUT)"
        )
    tokens, depths = given["completion"], given.get("exit_depths")
    if not isinstance(tokens, (str, list)) or not tokens:
        raise RequestError("completion must be text or token ids, at least one of them")
    if depths is not None and not isinstance(depths, list):
        raise RequestError("exit_depths must be a list of integers")
    return Completion(tokens, depths)


def _of_answer(line: Line, record: Record, answer: Mapping[str, Any]) -> dict[str, Any]:
    """An output record's tokens and depths.

    Raises:
        UsageError: it is another line's.
        RequestError: it has none.
    """
    if not answer:
        raise RequestError("the answers have none to this line", "no_answer")
    if answer.get("id") != record.id:
        raise UsageError(
            f"line {line.number} of {line.source} has id {record.id!r}, its answer is that of id"
            f" {answer.get('id')!r}: they must be the output of the same inputs"
        )
    if answer.get("truncated_tokens"):
        raise RequestError(
            f"the run cut {answer['truncated_tokens']} tokens off this prompt, so its answer is one"
            " to another prompt",
            "truncated",
        )
    if "error" in answer:
        raise RequestError("the answer is an error record: there is nothing to score", "no_answer")
    return {"completion": answer["token_ids"], "exit_depths": answer.get("exit_depths")}


def _check_prompt(line: Line, answer: Mapping[str, Any], tokens: int) -> None:
    """Refuse an answer to a prompt of another length. Raises UsageError."""
    usage = answer.get("usage")
    asked = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if asked is not None and asked != tokens:
        raise UsageError(
            f"line {line.number} of {line.source} has a prompt of {counted(tokens, 'token')}, its"
            f" answer is to one of {asked}: they must be the output of the same inputs"
        )


def _hash(line: Line, answers: Sequence[Mapping[str, Any] | None]) -> int:
    """64 bits of what a line and its answers ask for."""
    data = line.data
    for answer in answers:
        if answer is None:
            continue
        data += orjson.dumps([answer.get("token_ids"), answer.get("exit_depths")])
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
