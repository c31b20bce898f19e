"""Reads the lines of a job's inputs, a bounded number ahead, in a thread of its own.

The thread is there so that a slow producer on standard input never holds up running requests.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import queue
import stat
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ouro_batch.jobs.errors import FileError, UsageError

STDIN = "-"
BOM = b"\xef\xbb\xbf"
JSON_SPACE = b" \t\r\n"
GZIP, ZSTANDARD = ".gz", ".zst"


@dataclass(frozen=True)
class Line:
    """A line that is not blank: its place among all, its number in its source, its bytes."""

    index: int
    number: int
    source: str
    data: bytes


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Files that the patterns stand for, each pattern's in order of names; ``-`` stays.

    Raises:
        UsageError: nothing matches a pattern.
    """
    inputs: list[str] = []
    for pattern in patterns:
        if pattern == STDIN or os.path.exists(pattern) or not glob.has_magic(pattern):
            inputs.append(pattern)
            continue
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise UsageError(f"no file matches {pattern}")
        inputs += found
    return inputs


def check_inputs(inputs: Sequence[str]) -> None:
    """Refuse inputs that cannot be opened.

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
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror}") from None


def count_records(inputs: Sequence[str]) -> int | None:
    """Records in all inputs, None where one is no regular file and can be read only once."""
    if not all(source != STDIN and os.path.isfile(source) for source in inputs):
        return None
    return sum(1 for _ in read_lines(inputs))


def read_lines(inputs: Sequence[str]) -> Iterator[Line]:
    """The lines of all inputs in order. Only LF ends a line; a BOM, CR and blank lines are dropped.

    Raises:
        FileError: an input fails.
    """
    index = 0
    for source in inputs:
        try:
            with _open(source) as file:
                for number, data in enumerate(file, start=1):
                    if number == 1:
                        data = data.removeprefix(BOM)
                    data = data.rstrip(b"\r\n")
                    if data.strip(JSON_SPACE):
                        yield Line(index, number, source, data)
                        index += 1
        except (OSError, EOFError, zlib.error) as error:
            raise FileError(_failed(source, error)) from error
        except Exception as error:
            # The zstandard package has an error class of its own; it may not be installed.
            if source.endswith(ZSTANDARD):
                raise FileError(_failed(source, error)) from error
            raise


class LineReader:
    """``read_lines`` ahead of its consumer; never more than ``ahead`` lines are held."""

    def __init__(self, inputs: Sequence[str], ahead: int = 1024):
        self.ended = False
        self._lines: queue.Queue[Line | BaseException | None] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(inputs,), daemon=True)
        self._thread.start()

    def poll(self, wait_s: float = 0.0) -> Line | None:
        """The next line, or None where none arrives in time or all were read (``ended``).

        Raises:
            FileError: an input failed.
        """
        if self.ended:
            return None
        try:
            line = self._lines.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None
        if line is None or isinstance(line, BaseException):
            self.ended = True
            if line is not None:
                raise line
        return line

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _read(self, inputs: Sequence[str]) -> None:
        end: BaseException | None = None
        try:
            for line in read_lines(inputs):
                if not self._put(line):
                    return
        except BaseException as error:  # raised again where the lines are used
            end = error
        self._put(end)

    def _put(self, line: Line | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._lines.put(line, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


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
