"""``OUT.part``: the finished records of a job that runs, or that was cut off.

Lines of JSON. The first is a header with the settings that decide results; each further one holds
a record, the index of its input line, its sample and a hash of what that line means, or says that
the records of a line so far count no more; the last, written when all records are there, says so.
Records are appended in the order in which they finish; of two with one index and sample the later
counts. The file is locked while a job writes it.
"""

from __future__ import annotations

import fcntl
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ouro_batch.jobs.errors import UsageError
from ouro_batch.params import MAX_SAMPLES

VERSION = 2
HEADER_START = b'{"ouro_batch_part":'
SYNC_INTERVAL_S = 3.0
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
        # A record each, in the order of the file: index and sample, where its line is, its hash.
        self._key = array("Q")
        self._start = array("Q")
        self._size = array("I")
        self._hash = array("Q")  # only of the records that were there before this run
        self._dropped: dict[int, int] = {}  # by index: how many records were there then
        self._before = _Lookup(self._key, self._dropped)
        self._end = 0
        self._synced = time.monotonic()
        self._file = open_locked(path)
        self._begun = not unread
        try:
            if not unread:
                self._scan()
                self._before = _Lookup(self._key, self._dropped)
                self.records = len(self._before.places)
        except BaseException:
            os.close(self._file)
            raise

    def begin(self, settings: Mapping[str, Any], *, replaces: bool, retries: bool) -> None:
        """Start anew: whatever the file held goes.

        ``replaces``: OUT may be there and will go. ``retries``: what OUT holds counts too.
        """
        header = {
            "ouro_batch_part": VERSION,
            "replaces": replaces,
            "retries": retries,
            "settings": settings,
        }
        os.ftruncate(self._file, 0)
        self._end = self.records = 0
        self.complete = False
        self._begun = True
        for column in (self._key, self._start, self._size, self._hash):
            del column[:]
        self._dropped.clear()
        self._before = _Lookup(self._key, self._dropped)
        self.header = header
        self._write(orjson.dumps(header, option=orjson.OPT_APPEND_NEWLINE))
        self.sync()

    def append(self, index: int, input_hash: int, record: bytes, sample: int = 0) -> None:
        """Add the record of an input line's sample, JSON without a newline.

        Raises:
            OSError: it cannot be written; the file ends with the record before.
        """
        line = b'{"index":%d,"sample":%d,"hash":"%016x","record":%s}\n' % (
            index,
            sample,
            input_hash,
            record,
        )
        start = self._end
        self._write(line)
        self._note(index, sample, start, len(line))
        self.records += self.find(index, sample) is None
        if time.monotonic() - self._synced > SYNC_INTERVAL_S:
            self.sync()

    def drop(self, index: int) -> None:
        """The records of an input line so far count no more: it has changed."""
        self._write(b'{"index":%d,"dropped":true}\n' % index)
        self._dropped[index] = len(self._key)

    def find(self, index: int, sample: int = 0) -> int | None:
        """The place of a record that was there before this run. Any thread may ask."""
        return self._before.find(index, sample)

    def look_again(self) -> None:
        """Take what was appended so far for records that were there before this run."""
        self._hash.extend([ANY_INPUT] * (len(self._key) - len(self._hash)))
        self._before = _Lookup(self._key, self._dropped)

    def same_input(self, place: int, input_hash: int) -> bool:
        """Whether the record at a place was made from what its line means now."""
        return self._hash[place] in (input_hash, ANY_INPUT)

    def record(self, place: int) -> dict[str, Any]:
        """The record at a place."""
        return orjson.loads(self._record_bytes(place))

    def lines(self, *, ordered: bool = True) -> Iterator[tuple[int, bytes]]:
        """Index and bytes of every record that counts, by index and sample or as they finished."""
        places = _places(self._key, self._dropped)
        if not ordered:
            places.sort()
        for place in places:
            yield self._key[place] // MAX_SAMPLES, self._record_bytes(place)

    @property
    def last_index(self) -> int:
        """The highest index of a record, -1 where there is none."""
        return max(self._key) // MAX_SAMPLES if self._key else -1

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

    def _record_bytes(self, place: int) -> bytes:
        line = os.pread(self._file, self._size[place], self._start[place])
        return line[line.index(b'"record":') + 9 : -2]

    def _note(self, index: int, sample: int, start: int, size: int) -> None:
        self._key.append(index * MAX_SAMPLES + sample)
        self._start.append(start)
        self._size.append(size)

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
                    if number == 1 and not _may_be_header(line):
                        self._read(number, line)  # which says that it is no file of ours
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
                if not {"replaces", "retries", "settings"} <= entry.keys():
                    raise KeyError
                self.header = entry
            elif entry.get("complete"):
                self.complete = True
            elif entry.get("dropped"):
                self._dropped[entry["index"]] = len(self._key)
            else:
                self._note(entry["index"], entry["sample"], self._end, len(line))
                self._hash.append(int(entry["hash"], 16))
                self.complete = False
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            what = "is no file of ouro-batch" if number == 1 else f"is damaged in line {number}"
            raise UsageError(
                f"{self.path} {what} (move it away, or give --resume never to start anew)"
            ) from None


def _may_be_header(line: bytes) -> bool:
    """Whether a first line that was cut off is the beginning of a header."""
    return line.startswith(HEADER_START) or HEADER_START.startswith(line)


def _places(keys: array[int], dropped: Mapping[int, int]) -> np.ndarray:
    """Places of the records that count, by index and sample: of those with one key the last."""
    order = np.argsort(np.frombuffer(keys, dtype=np.uint64), kind="stable")
    ordered = np.frombuffer(keys, dtype=np.uint64)[order]
    count = np.ones(len(order), dtype=bool)
    count[:-1] = ordered[:-1] != ordered[1:]
    if dropped and len(order):
        lines = np.array(sorted(dropped), dtype=np.uint64)
        before = np.array([dropped[int(line)] for line in lines])
        own = ordered // np.uint64(MAX_SAMPLES)
        at = np.minimum(np.searchsorted(lines, own), len(lines) - 1)
        count &= (lines[at] != own) | (order >= before[at])
    return order[count]


class _Lookup:
    """Finds records by index and sample among the keys that there are now."""

    def __init__(self, keys: array[int], dropped: Mapping[int, int]):
        self.places = _places(keys, dropped)
        self._keys = array("Q", np.frombuffer(keys, dtype=np.uint64)[self.places].tobytes())

    def find(self, index: int, sample: int) -> int | None:
        key = index * MAX_SAMPLES + sample
        at = bisect_left(self._keys, key)
        if at < len(self._keys) and self._keys[at] == key:
            return int(self.places[at])
        return None


def open_locked(path: Path) -> int:
    """A file's descriptor, made where there is none, that no other job can have meanwhile.

    Raises:
        UsageError: it cannot be opened, or another job has it.
    """
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
