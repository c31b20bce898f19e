"""``OUT.part``: the finished records of a job that runs, or that was cut off.

Lines of JSON. The first is a header with the settings that decide results; each further one holds
a record, the index of its input line and a hash of what that line means; the last, written when
all records are there, says so. Records are appended in the order in which they finish; of two with
one index the later counts. The file is locked while a job writes it.
"""

from __future__ import annotations

import fcntl
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from ouro_batch.jobs.errors import UsageError

VERSION = 1
SYNC_INTERVAL_S = 3.0
MISSING = 2**64 - 1
ANY_INPUT = 0  # the hash of a record whose input is not known
COMPLETE = b'{"complete":true}\n'


class PartFile:
    """Owns ``path`` from the moment it is made until ``close``.

    With ``unread``, what the file holds does not matter: it stays as it is until ``begin``.

    Raises:
        UsageError: another job holds it, it cannot be made, it is no part file, or it is damaged
            other than at its end.
    """

    def __init__(self, path: Path, *, unread: bool = False):
        self.path = path
        self.records = 0
        self.header: dict[str, Any] | None = None
        self.complete = False
        self._start = array("Q")  # of an index's line; MISSING where there is none
        self._size = array("I")
        self._hash = array("Q")  # of the records that were there before this run
        self._end = 0
        self._synced = time.monotonic()
        self._file = _open_locked(path)
        self._begun = not unread
        try:
            if not unread:
                self._scan()
        except BaseException:
            os.close(self._file)
            raise

    def begin(self, settings: Mapping[str, Any], *, replaces: bool) -> None:
        """Start anew: whatever the file held goes. ``replaces``: OUT may be there and will go."""
        header = {"ouro_batch_part": VERSION, "replaces": replaces, "settings": settings}
        os.ftruncate(self._file, 0)
        self._end = self.records = 0
        self.complete = False
        self._begun = True
        for column in (self._start, self._size, self._hash):
            del column[:]
        self.header = header
        self._write(orjson.dumps(header, option=orjson.OPT_APPEND_NEWLINE))
        self.sync()

    def append(self, index: int, input_hash: int, record: bytes) -> None:
        """Add the record of an input line, JSON without a newline.

        Raises:
            OSError: it cannot be written; the file ends with the record before.
        """
        line = b'{"index":%d,"hash":"%016x","record":%s}\n' % (index, input_hash, record)
        start = self._end
        self._write(line)
        self._note(index, start, len(line))
        if input_hash == ANY_INPUT:
            self._note_hash(index, input_hash)
        if time.monotonic() - self._synced > SYNC_INTERVAL_S:
            self.sync()

    def holds(self, index: int) -> bool:
        """Whether there is a record of this input line."""
        return index < len(self._start) and self._start[index] != MISSING

    def same_input(self, index: int, input_hash: int) -> bool:
        """Whether the record of this input line was made from what the line means now."""
        return index < len(self._hash) and self._hash[index] in (input_hash, ANY_INPUT)

    def record(self, index: int) -> dict[str, Any]:
        """The record of an input line that ``holds``."""
        return orjson.loads(self._record_bytes(index))

    def in_order(self) -> Iterator[bytes]:
        """Every record as a line of its own, in input order."""
        for index in range(len(self._start)):
            if self.holds(index):
                yield self._record_bytes(index) + b"\n"

    @property
    def last_index(self) -> int:
        """The highest index of a record, -1 where there is none."""
        last = len(self._start) - 1
        while last >= 0 and not self.holds(last):
            last -= 1
        return last

    def finish(self) -> None:
        """Say that all records are there, so that only OUT is left to be made."""
        if not self.complete:
            self._write(COMPLETE)
            self.complete = True
        self.sync()

    def sync(self) -> None:
        """Have everything on the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    @property
    def worthless(self) -> bool:
        """Whether nothing would be lost with the file."""
        if not self._begun:
            return os.fstat(self._file).st_size == 0
        return not self.records and not self.complete

    def remove(self) -> None:
        """The records are elsewhere, or there are none."""
        with suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Give the file up, and with it the lock."""
        with suppress(OSError):
            self.sync()
        os.close(self._file)

    def _record_bytes(self, index: int) -> bytes:
        line = os.pread(self._file, self._size[index], self._start[index])
        return line[line.index(b'"record":') + 9 : -2]

    def _note(self, index: int, start: int, size: int) -> None:
        while len(self._start) <= index:
            self._start.append(MISSING)
            self._size.append(0)
        self.records += self._start[index] == MISSING
        self._start[index], self._size[index] = start, size

    def _note_hash(self, index: int, input_hash: int) -> None:
        while len(self._hash) <= index:
            self._hash.append(MISSING)
        self._hash[index] = input_hash

    def _write(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # A torn record would look like a finished one to whoever reads the file by line.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            raise
        self._end += len(data)

    def _scan(self) -> None:
        """Read what is there; a line that was cut off at the end goes."""
        with open(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._read(number, line)
                self._end += len(line)
        os.ftruncate(self._file, self._end)
        os.lseek(self._file, self._end, os.SEEK_SET)

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry = orjson.loads(line)
            if number == 1:
                if entry["ouro_batch_part"] != VERSION:
                    raise ValueError
                self.header = entry
            elif entry.get("complete"):
                self.complete = True
            else:
                index, input_hash = entry["index"], int(entry["hash"], 16)
                self._note(index, self._end, len(line))
                self._note_hash(index, input_hash)
                self.complete = False
        except (ValueError, KeyError, TypeError, AttributeError):
            what = "is no file of ouro-batch" if number == 1 else f"is damaged in line {number}"
            raise UsageError(
                f"{self.path} {what} (move it away, or give --resume never to start anew)"
            ) from None


def _open_locked(path: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The job that held it may have put it away meanwhile.
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise UsageError(
                f"{path} is being written by another job (wait for it, stop it, or choose another"
                " --output)"
            ) from None
        os.close(file)
