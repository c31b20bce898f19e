"""The output of an earlier run, looked up by input line and sample."""

from __future__ import annotations

import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import orjson

from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.openai import native_records
from ouro_batch.jobs.reader import BOM, is_plain, read_lines
from ouro_batch.params import MAX_SAMPLES


class Answers:
    """The records of a file of output lines, native or OpenAI's, in whatever order.

    Only where they stand is held in memory. What can be read only once, or is compressed, is kept
    in a temporary file.

    Raises:
        UsageError: a line is no output record, a record has no token ids, or two are of one
            sample; names the file and the line.
        FileError: the file fails.
    """

    def __init__(self, path: str):
        self._file = _seekable(path)
        found = list(self._scan(path))
        keys = np.array([key for key, _ in found], dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        self._keys = array("Q", keys[order].tobytes())
        starts = np.array([start for _, start in found], dtype=np.uint64)
        self._starts = array("Q", starts[order].tobytes())
        twice = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        if len(twice):
            index, sample = divmod(self._keys[twice[0]], MAX_SAMPLES)
            raise UsageError(
                f"{path} has two records of index {index}, sample {sample}: answers are the output"
                " of one run"
            )

    def _scan(self, path: str) -> Iterator[tuple[int, int]]:
        """Each record's key and where its line starts."""
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                try:
                    records = native_records(orjson.loads(line.removeprefix(BOM)))
                    keys = [_key(record) for record in records]
                except (ValueError, TypeError, LookupError, AttributeError):
                    raise UsageError(
                        f"line {number} of {path} is no output record of ouro-batch run"
                    ) from None
                if any("error" not in r and "token_ids" not in r for r in records):
                    raise UsageError(
                        f"line {number} of {path} has no token_ids (run with --token-ids: text"
                        " alone does not say where tokens begin)"
                    )
                yield from ((key, start) for key in keys)
            start += len(line)

    def of(self, index: int) -> list[dict[str, Any]]:
        """The records of an input line, by sample; none where it has none."""
        found = []
        at = bisect_left(self._keys, index * MAX_SAMPLES)
        while at < len(self._keys) and self._keys[at] // MAX_SAMPLES == index:
            sample = self._keys[at] % MAX_SAMPLES
            self._file.seek(self._starts[at])
            records = native_records(orjson.loads(self._file.readline().removeprefix(BOM)))
            found += [record for record in records if record.get("sample", 0) == sample]
            at += 1
        return found

    @property
    def last_index(self) -> int:
        """The highest index of a record, -1 where there is none."""
        return self._keys[-1] // MAX_SAMPLES if self._keys else -1

    def close(self) -> None:
        self._file.close()


def _key(record: dict[str, Any]) -> int:
    """Raises ValueError or KeyError where it is no record of a run."""
    index, sample = record["index"], record.get("sample", 0)
    whole = type(index) is int and 0 <= index < 2**53 and type(sample) is int
    if not whole or not 0 <= sample < MAX_SAMPLES:
        raise ValueError
    if "error" not in record and "finish_reason" not in record:
        raise ValueError
    if not isinstance(record.get("token_ids", []), list):
        raise ValueError
    return index * MAX_SAMPLES + sample


def _seekable(path: str) -> BinaryIO:
    if is_plain(path):
        return open(path, "rb")
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
    try:
        for line in read_lines([path]):
            copy.write(line.data + b"\n")
        copy.seek(0)
    except OSError as error:
        raise FileError(
            f"copying {path} to {tempfile.gettempdir()} failed: {error.strerror} (set TMPDIR to a"
            " folder with room, or give a file that is not compressed)"
        ) from error
    return copy
