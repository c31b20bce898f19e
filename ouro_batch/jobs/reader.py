"""Reads the lines of a job's inputs, whatever they are kept in."""

from __future__ import annotations

import glob
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.parquet import parquet_lines, parquet_rows, require_pyarrow
from ouro_batch.params import MAX_SAMPLES

STDIN = "-"
BOM = b"\xef\xbb\xbf"
JSON_SPACE = b" \t\r\n"
TEMPORARY = ".ouro-tmp"  # a file's suffix until it is whole; nobody else's
GZIP, ZSTANDARD, PARQUET = ".gz", ".zst", ".parquet"
PACKED = (GZIP, ZSTANDARD)


@dataclass(frozen=True)
class Line:
    """A line that is not blank: its place among all, its number in its source, its bytes."""

    index: int
    number: int
    source: str
    data: bytes
    problem: str | None = None  # why there are no data to read


def expand_inputs(patterns: Sequence[str], output: str = STDIN) -> list[str]:
    """Files that the patterns stand for, each pattern's in order of names; ``-`` stays.

    A pattern never stands for ``output`` and what a job keeps beside it.

    Raises:
        UsageError: nothing matches a pattern.
    """
    inputs: list[str] = []
    for pattern in patterns:
        if pattern == STDIN or os.path.exists(pattern) or not glob.has_magic(pattern):
            inputs.append(pattern)
            continue
        found = sorted(glob.glob(pattern, recursive=True))
        if output != STDIN:
            ends = ("", ".part", TEMPORARY, ".stats.json", f".stats.json{TEMPORARY}")
            own = {os.path.realpath(output + end) for end in ends}
            found = [name for name in found if os.path.realpath(name) not in own]
        if not found:
            raise UsageError(f"no file matches {pattern}")
        inputs += found
    for name in inputs:
        if not _is_text(name):
            raise UsageError(f"the name of input {name!a} is not UTF-8 (rename it)")
    return inputs


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_inputs(inputs: Sequence[str], *, text: bool = False) -> None:
    """Refuse inputs that cannot be opened; with ``text``, those that have no lines of text.

    Raises:
        UsageError: naming the input and what is wrong with it.
    """
    if list(inputs).count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once")
    for source in inputs:
        if source == STDIN:
            continue
        try:
            mode = os.stat(source).st_mode
            # Opening a named pipe here would take its writer away from the reader.
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                open(source, "rb").close()
            if source.endswith(ZSTANDARD):
                _zstandard()
            if source.endswith(PARQUET):
                require_pyarrow()
                if text:
                    raise UsageError(f"{source} has columns, not lines of text (see --format)")
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror}") from None


def is_plain(source: str) -> bool:
    """Whether a source's bytes are its lines, and can be read more than once."""
    packed = source.endswith((GZIP, ZSTANDARD, PARQUET))
    return source != STDIN and os.path.isfile(source) and not packed


def count_records(inputs: Sequence[str], samples: int = 1, *, text: bool = False) -> int | None:
    """Records that all inputs ask for, None where one is no regular file and is read only once.

    ``samples`` is the ``n`` of lines that name none. A line that cannot be run gives a single
    record, which is foreseen only of those that are not JSON.
    """
    if not all(source != STDIN and os.path.isfile(source) for source in inputs):
        return None
    return sum(_count(source, samples, text) for source in inputs)


def _count(source: str, samples: int, text: bool) -> int:
    if source.endswith(PARQUET):
        try:
            rows = parquet_rows(source, unless=("n", "body"))
        except Exception as error:  # of classes of the package's own
            raise FileError(_failed(source, error)) from error
        if rows is not None:
            return rows * samples
    return sum(samples if text else _samples(line.data, samples) for line in read_lines([source]))


def _samples(data: bytes, samples: int) -> int:
    """Records that a line asks for; most need not be read for that."""
    if samples == 1 and b'"n"' not in data:
        return 1
    try:
        fields = orjson.loads(data)
        body = fields.get("body")  # of OpenAI
        asked = (body if isinstance(body, dict) else fields).get("n")
    except (ValueError, AttributeError):
        return 1
    if asked is None:
        return samples
    return asked if type(asked) is int and 1 <= asked <= MAX_SAMPLES else 1


def read_lines(inputs: Sequence[str]) -> Iterator[Line]:
    """The lines of all inputs in order. Only LF ends a line; a BOM, CR and blank lines are dropped.

    Raises:
        FileError: an input fails.
    """
    index = 0
    for source in inputs:
        try:
            for number, data in enumerate(_raw_lines(source), start=1):
                if isinstance(data, str):
                    yield Line(index, number, source, data.encode(), data)
                    index += 1
                    continue
                if number == 1:
                    data = data.removeprefix(BOM)
                data = data.rstrip(b"\r\n")
                if data.strip(JSON_SPACE):
                    yield Line(index, number, source, data)
                    index += 1
        except (OSError, EOFError, zlib.error) as error:
            raise FileError(_failed(source, error)) from error
        except Exception as error:
            # These packages have error classes of their own; they may not be installed.
            if source.endswith((ZSTANDARD, PARQUET)):
                raise FileError(_failed(source, error)) from error
            raise


def _raw_lines(source: str) -> Iterator[bytes | str]:
    """Each line's bytes, or what is wrong with it."""
    if source != STDIN and source.endswith(PARQUET):
        yield from parquet_lines(source)
        return
    with _open(source) as file:
        yield from file


def _failed(source: str, error: Exception) -> str:
    return f"reading {source} failed: {getattr(error, 'strerror', None) or error}"


def _open(source: str) -> BinaryIO:
    if source == STDIN:
        # Not sys.stdin: its lock, held by a thread that waits for a line, would hang the exit.
        return open(0, "rb", closefd=False)
    if source.endswith(GZIP):
        return gzip.open(source, "rb")
    if source.endswith(ZSTANDARD):
        return io.BufferedReader(_ZstandardFile(source), 1 << 17)
    return open(source, "rb")


class _ZstandardFile(io.RawIOBase):
    """The decompressed bytes of a file of Zstandard frames.

    The package's own reader takes a file that was cut off for a whole one.
    """

    def __init__(self, source: str):
        self._new = _zstandard().ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._begun = False
        self._ready = b""
        self._file = open(source, "rb")  # noqa: SIM115 (closed by close)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._new(), False
            data = data or self._file.read(1 << 17)
            if not data:
                if self._begun:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._begun = True
            self._ready = self._frame.decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstandard() -> Any:
    """The package that reads Zstandard files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            f"reading {ZSTANDARD} files needs the package zstandard"
            " (pip install 'ouro-batch[zstd]', or decompress them first)"
        ) from None
    return zstandard
