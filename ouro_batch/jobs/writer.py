"""Writes a job's output records: into a file in input order, or to a stream as they finish.

While a job runs, finished records are appended to ``OUT.part``. At its end they become ``OUT`` in
input order, at once: ``OUT`` never holds half a job.
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from ouro_batch.jobs.errors import FileError, OutputClosed, UsageError
from ouro_batch.jobs.reader import STDIN

STDOUT = "-"


class Writer(Protocol):
    """Where output records go."""

    written: int

    def write(self, record: dict[str, Any]) -> None:
        """Take one record. Raises FileError or OutputClosed where it cannot be written."""

    def finish(self) -> None:
        """All records were written. Raises FileError where they cannot be put in place."""

    def keep(self) -> str | None:
        """Write no more. Where the finished records are, None where there are none."""


class FileWriter:
    """Appends to ``OUT.part``, and puts the records into ``OUT`` in input order at the end.

    Raises:
        UsageError: ``OUT`` or ``OUT.part`` exists and ``overwrite`` is False, or cannot be made.
    """

    def __init__(self, output: str, *, overwrite: bool = False):
        # A link stays a link: what it points to is replaced.
        self.path = Path(os.path.realpath(output))
        self.part = self.path.with_name(self.path.name + ".part")
        self.written = 0
        self._finished = False
        self._end = 0  # bytes of whole records
        self._index = array("Q")  # of each record in the order written
        self._start = array("Q")
        if self.path.exists() and not overwrite:
            raise UsageError(f"{output} exists (give --overwrite to replace it)")
        try:
            mode = os.O_TRUNC if overwrite else os.O_EXCL
            self._file = os.open(self.part, os.O_CREAT | os.O_RDWR | mode, 0o666)
        except FileExistsError:
            raise UsageError(
                f"{self.part} exists, left by a job that did not finish or is still running"
                " (move it away to keep its records, or give --overwrite to discard them)"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot write {self.part}: {error.strerror}") from None

    def write(self, record: dict[str, Any]) -> None:
        line = encode(record)
        try:
            _write_all(self._file, line)
        except OSError as error:
            # A torn record would look like a finished one to whoever reads the file by line.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise FileError(f"writing {self.part} failed: {error.strerror}") from error
        self._index.append(record["index"])
        self._start.append(self._end)
        self._end += len(line)
        self.written += 1

    def finish(self) -> None:
        try:
            if all(index == place for place, index in enumerate(self._index)):
                os.fsync(self._file)
                os.replace(self.part, self.path)
            else:
                write_atomically(self.path, self._in_order())
                os.unlink(self.part)
        except OSError as error:
            raise FileError(
                f"writing {self.path} failed: {error.strerror}"
                f" (all {self.written:,} records are in {self.part})"
            ) from error
        self._finished = True
        os.close(self._file)

    def keep(self) -> str | None:
        if self._finished:
            return str(self.path)
        os.close(self._file)
        if self.written:
            return str(self.part)
        with suppress(OSError):
            os.unlink(self.part)
        return None

    def _in_order(self) -> Iterator[bytes]:
        ends = [*self._start[1:], self._end]
        for place in sorted(range(self.written), key=self._index.__getitem__):
            start = self._start[place]
            yield os.pread(self._file, ends[place] - start, start)


class StreamWriter:
    """Writes each record at once to standard output, or to a device or named pipe."""

    def __init__(self, output: str):
        self.written = 0
        self._name = "standard output" if output == STDOUT else output
        try:
            self._file = sys.stdout.buffer if output == STDOUT else _open_stream(output)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from None

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(encode(record))
            self._file.flush()
        except BrokenPipeError:
            raise OutputClosed(f"{self._name} was closed by its reader") from None
        except OSError as error:
            raise FileError(f"writing {self._name} failed: {error.strerror}") from error
        self.written += 1

    def finish(self) -> None:
        """Nothing is left to do: each record was flushed."""

    def keep(self) -> str | None:
        return self._name if self.written else None


def open_writer(output: str, *, overwrite: bool = False) -> FileWriter | StreamWriter:
    """The writer for an output: a file, or ``-``, a device or a named pipe as a stream.

    Raises:
        UsageError: the output cannot be written or must not be replaced.
    """
    if os.path.isdir(output):
        raise UsageError(f"cannot write {output}: it is a folder")
    if is_stream(output):
        return StreamWriter(output)
    return FileWriter(output, overwrite=overwrite)


def is_stream(output: str) -> bool:
    """Whether records go out as they finish, there being no file to put into order."""
    return output == STDOUT or (os.path.exists(output) and not os.path.isfile(output))


def check_apart(inputs: Sequence[str], output: str, statistics: str | None) -> None:
    """Refuse to write to a file that is read, or two things to one file.

    Raises:
        UsageError: naming the file.
    """
    read = {_identity(source, 0): source for source in inputs}
    written: dict[object, str] = {}
    targets = [output, f"{output}.part"] if not is_stream(output) else [output]
    for target in [*targets, *([statistics] if statistics else [])]:
        identity = _identity(target, 1)
        if identity is None:
            continue
        if identity in read:
            raise UsageError(f"{target} is an input too: a job cannot write what it reads")
        if identity in written:
            raise UsageError(f"{target} would be both output and statistics")
        written[identity] = target


def check_writable(path: str) -> None:
    """Refuse a file that could not be made or replaced.

    Raises:
        UsageError: naming the file and what is wrong.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise UsageError(f"cannot write {path}: it is a folder")
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder {folder} is not writable")


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Make or replace a file at once: readers see the old or the new one, never half of it.

    Raises:
        OSError: it cannot be written; nothing has changed then.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def encode(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON."""
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _open_stream(output: str) -> BinaryIO:
    return open(output, "wb")


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _identity(path: str, standard: int) -> object:
    """What tells whether two names are one file; None for what is no file on disk."""
    try:
        status = os.fstat(standard) if path in (STDIN, STDOUT) else os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
