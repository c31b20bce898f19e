"""Writes a job's output records: into a file in input order, or to a stream as they finish.

While a job runs, finished records are appended to ``OUT.part`` (``part.py``). At its end they
become ``OUT``, in input order or as they finished, at once: ``OUT`` never holds half a job. What is
in the part when a job begins was made by an earlier run of it, and is not made again.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from ouro_batch.jobs.errors import FileError, OutputClosed, UsageError
from ouro_batch.jobs.openai import OutputForm, native_records
from ouro_batch.jobs.part import ANY_INPUT, PartFile
from ouro_batch.jobs.reader import PACKED, PARQUET, STDIN, TEMPORARY, Line
from ouro_batch.params import MAX_SAMPLES

STDOUT = "-"


class Writer(Protocol):
    """Where output records go."""

    written: int
    resumed: int  # records of an earlier run whose lines have come by

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Before the first record; ``settings`` decide results."""

    def holds(self, index: int) -> bool:
        """Whether an earlier run made a record of a line; any thread may ask."""

    def kept(
        self, line: Line, input_hash: int, sample: int = 0, id: Any = None
    ) -> dict[str, Any] | None:
        """The record that an earlier run made of a line's sample, None where there is none."""

    def write(self, record: dict[str, Any], input_hash: int = 0) -> None:
        """Take one record. Raises FileError or OutputClosed where it cannot be written."""

    def complete(self, lines: int | None = None) -> None:
        """All records were written, of an input of ``lines``. Raises as ``write`` does."""

    def finish(self) -> None:
        """After ``complete``: put the records in place. Raises FileError where that fails."""

    def keep(self) -> str | None:
        """Write no more. Where the finished records are, None where there are none."""


class FileWriter:
    """Appends to ``OUT.part``, and puts the records into ``OUT`` in input order at the end.

    A part that an earlier run of the same job left is taken up: ``begin`` says how. With
    ``retry_errors`` the records without an error of ``OUT`` or its part are kept, and all other
    lines are run; ``made_with`` are the settings that ``OUT`` was made with, where they are known.
    ``ordered`` False leaves the records in the order in which they finished.

    Raises:
        UsageError: ``OUT`` exists and ``overwrite`` is False, another job writes it, it cannot be
            made, the part is damaged, or there is nothing to retry.
    """

    def __init__(
        self,
        output: str,
        *,
        overwrite: bool = False,
        resume: str = "auto",
        retry_errors: bool = False,
        made_with: Mapping[str, Any] | None = None,
        ordered: bool = True,
    ):
        self._ordered = ordered
        self._made_with = made_with
        # A link stays a link: what it points to is replaced.
        self.path = Path(os.path.realpath(output))
        self.resumed = 0  # records that were there and whose lines have come by
        self._resume = resume
        self._retry_errors = retry_errors
        self._finished = False
        self._only_copies = False  # the part holds nothing that OUT does not
        self._changed: set[int] = set()  # lines that are run again because they are others now
        if retry_errors and resume == "never":
            raise UsageError(
                "--retry-errors keeps what was answered and --resume never drops it: give one of"
                " them"
            )
        self._part = PartFile(
            self.path.with_name(self.path.name + ".part"), unread=resume == "never"
        )
        header = self._part.header
        # A part that was to replace OUT, or whose records are all there already, is this job's.
        ours = header is not None and (header["replaces"] or self._part.complete)
        self._replaces = self.path.exists()
        if retry_errors and header is None and not self._replaces:
            self._leave()
            raise UsageError(f"there is no {output} whose errors could be retried")
        if self._replaces and not (overwrite or ours or retry_errors):
            self._leave()
            raise UsageError(f"{output} exists (give --overwrite to replace it)")

    @property
    def part(self) -> Path:
        return self._part.path

    @property
    def written(self) -> int:
        """Records that are safe."""
        return self._part.records

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Before the first record, once it is sure that the job can run.

        ``settings`` decide results. Where a part is there: with resume "auto" they must be those
        it was begun with, with "force" they need not, with "never" the part goes. So it is with
        those of an ``OUT`` whose errors are retried.

        Raises:
            UsageError: settings differ; names each. Nothing has changed then.
        """
        header = self._part.header
        try:
            if header is None or self._resume == "never":
                if self._retry_errors and self._resume != "force":
                    self._compare_made(settings)
                self._part.begin(settings, replaces=self._replaces, retries=self._retry_errors)
            elif self._resume != "force":
                self._compare_begun(header["settings"], settings)
        except OSError as error:
            raise FileError(f"writing {self.part} failed: {error.strerror}") from error
        # A retry that was cut off may have been so before it had all of OUT. The part of a job that
        # was to replace OUT has nothing to do with it.
        if self._replaces and (self._retry_errors if header is None else header["retries"]):
            self._only_copies = header is None
            self._take_over()

    def _take_over(self) -> None:
        """Bring what ``OUT`` holds and its part does not, but for errors, into the part."""
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    for record in self._finished_records(number, line):
                        index, sample = record["index"], record.get("sample", 0)
                        if "error" not in record and self._part.find(index, sample) is None:
                            self._part.append(index, ANY_INPUT, orjson.dumps(record), sample)
            self._part.look_again()
        except OSError as error:
            raise FileError(f"copying {self.path} failed: {error.strerror}") from error

    def _finished_records(self, number: int, line: bytes) -> list[dict[str, Any]]:
        try:
            records = native_records(orjson.loads(line))
            if all(map(_is_output, records)):
                return records
        except (ValueError, TypeError, KeyError):
            pass
        raise UsageError(f"line {number} of {self.path} is no output record of ouro-batch run")

    def _compare_begun(self, old: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        differences = _differences(old, settings)
        if differences:
            raise UsageError(
                f"{self.part} was begun with other settings: {differences} (run the"
                " same command again, or give --resume force to go on all the same, --resume never"
                " to start anew)"
            )

    def _compare_made(self, settings: Mapping[str, Any]) -> None:
        differences = _differences(self._made_with or settings, settings)
        if differences:
            raise UsageError(
                f"{self.path} was made with other settings: {differences} (give the settings of"
                " that job, or --resume force to retry its errors with these all the same)"
            )

    def holds(self, index: int) -> bool:
        return self._resume != "never" and self._part.find(index) is not None

    def kept(
        self, line: Line, input_hash: int, sample: int = 0, id: Any = None
    ) -> dict[str, Any] | None:
        """The record that an earlier run made of a line's sample; None where that is to be run.

        ``id`` is the line's, None where it has none or is no record.

        Raises:
            UsageError: the line is not what it was; with resume "force" it is run again instead.
        """
        place = None if self._resume == "never" else self._part.find(line.index, sample)
        if place is None or line.index in self._changed:
            return None
        record = self._part.record(place)
        same = self._part.same_input(place, input_hash)
        if id is not None and "error" not in record:
            same &= record.get("id") == id  # all that a finished OUT tells of its lines
        if self._retry_errors and "error" in record:
            # It is the error of all samples: with the first that is answered it counts no more.
            self._drop(line.index)
            return None
        if not same:
            if self._resume == "force":
                self._drop(line.index)
                return None
            scored = self._part.header["settings"].get("command") == "score"
            answer = ", or its answer is another" if scored else ""
            raise UsageError(
                f"line {line.number} of {line.source} is not the line that {self.part} holds a"
                f" record of{answer} (give the input of that job, or --resume force to run changed"
                " lines again, or --resume never to start anew)"
            )
        self.resumed += 1
        return record

    def _drop(self, index: int) -> None:
        """What an earlier run made of a line counts no more."""
        self._changed.add(index)
        try:
            self._part.drop(index)
        except OSError as error:
            raise FileError(f"writing {self.part} failed: {error.strerror}") from error

    def write(self, record: dict[str, Any], input_hash: int = 0) -> None:
        sample = record.get("sample", 0)
        self._only_copies = False
        try:
            self._part.append(record["index"], input_hash, orjson.dumps(record), sample)
        except OSError as error:
            raise FileError(f"writing {self.part} failed: {error.strerror}") from error

    def complete(self, lines: int | None = None) -> None:
        """All records are in the part; ``lines`` is how many the input had.

        Raises:
            UsageError: the part holds records of lines that the input did not have.
        """
        if lines is not None and self._part.last_index >= lines:
            raise UsageError(
                f"{self.part} holds a record of line index {self._part.last_index}, but the input"
                f" has {lines:,} lines (give the input of that job, or --resume never)"
            )
        try:
            self._part.finish()
        except OSError as error:
            raise FileError(f"writing {self.part} failed: {error.strerror}") from error

    def finish(self) -> None:
        """Put all records in place, and let the part go."""
        try:
            write_atomically(self.path, _as_asked(self._part.lines(ordered=self._ordered)))
        except OSError as error:
            raise FileError(
                f"writing {self.path} failed: {error.strerror}"
                f" (all {self.written:,} records are in {self.part}; the same command goes on)"
            ) from error
        self._finished = True
        self._part.remove()

    def keep(self) -> str | None:
        if self._finished:
            return str(self.path)
        return self._leave()

    def _leave(self) -> str | None:
        if self._part.worthless or self._only_copies:
            self._part.remove()
            return None
        self._part.close()
        return str(self.part)


class StreamWriter:
    """Writes each record at once to standard output, or to a device or named pipe."""

    def __init__(self, output: str):
        self.written = self.resumed = 0
        self._form = OutputForm()
        self._name = "standard output" if output == STDOUT else output
        try:
            self._file = sys.stdout.buffer if output == STDOUT else _open_stream(output)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from None

    def begin(self, settings: Mapping[str, Any]) -> None:
        """A stream has no past."""

    def holds(self, index: int) -> bool:
        return False

    def kept(
        self, line: Line, input_hash: int, sample: int = 0, id: Any = None
    ) -> dict[str, Any] | None:
        return None

    def write(self, record: dict[str, Any], input_hash: int = 0) -> None:
        try:
            self._file.write(self._form.push(record))
            self._file.flush()
        except BrokenPipeError:
            raise OutputClosed(f"{self._name} was closed by its reader") from None
        except OSError as error:
            raise FileError(f"writing {self._name} failed: {error.strerror}") from error
        self.written += 1

    def complete(self, lines: int | None = None) -> None:
        """Each record was flushed."""

    def finish(self) -> None:
        """Nothing is left to do."""

    def keep(self) -> str | None:
        return self._name if self.written else None


def open_writer(
    output: str,
    *,
    overwrite: bool = False,
    resume: str = "auto",
    retry_errors: bool = False,
    made_with: Mapping[str, Any] | None = None,
    ordered: bool = True,
) -> FileWriter | StreamWriter:
    """The writer for an output: a file, or ``-``, a device or a named pipe as a stream.

    Raises:
        UsageError: the output cannot be written or must not be replaced.
    """
    if os.path.isdir(output):
        raise UsageError(f"cannot write {output}: it is a folder")
    if output.endswith((*PACKED, PARQUET)):
        raise UsageError(
            f"cannot write {output}: records are plain JSONL (give another name, or --output - and"
            " pipe it through a compressor)"
        )
    if is_stream(output):
        if retry_errors:
            raise UsageError(f"the errors of {output} cannot be retried: it is no file")
        return StreamWriter(output)
    return FileWriter(
        output,
        overwrite=overwrite,
        resume=resume,
        retry_errors=retry_errors,
        made_with=made_with,
        ordered=ordered,
    )


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
    targets = [output]
    if not is_stream(output):
        path = os.path.realpath(output)  # beside which the other files are
        targets += [f"{path}.part", f"{path}{TEMPORARY}"]
    if statistics:
        targets.append(statistics)
        if not is_stream(statistics):
            targets.append(f"{os.path.realpath(statistics)}{TEMPORARY}")
    for target in targets:
        identity = _identity(target, 1)
        if identity is None:
            continue
        if identity in read:
            raise UsageError(f"{target} is an input too: a job cannot write what it reads")
        if identity in written:
            raise UsageError(f"{target} would be both output and statistics")
        written[identity] = target


def check_writable(path: str, *, streams: bool = True) -> None:
    """Refuse a file that could not be made or replaced; devices and pipes unless ``streams``.

    Raises:
        UsageError: naming the file and what is wrong.
    """
    if not path:
        raise UsageError("the name of a file to write is empty")
    target = os.path.realpath(path) if os.path.islink(path) else path
    for name in (path, f"{target}{TEMPORARY}"):
        try:
            if stat.S_ISDIR(os.stat(name).st_mode):
                raise UsageError(f"cannot write {name}: it is a folder")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # none is there yet, or the folder says what is wrong
        except OSError as error:  # a link to itself, a name that is too long
            raise UsageError(f"cannot write {name}: {error.strerror}") from None
    if not streams and is_stream(path):
        raise UsageError(f"cannot write {path}: it is no file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder {folder} is not writable")


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Make or replace a file at once: readers see the old or the new one, never half of it.

    Raises:
        OSError: it cannot be written; nothing has changed then.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # of a run that was cut off; were it a link, its target is not ours
    try:
        with open(temporary, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _is_output(record: Mapping[str, Any]) -> bool:
    """Whether it is a record of ``run`` that a job can go on from."""
    index, sample = record["index"], record.get("sample", 0)
    if type(index) is not int or index < 0 or type(sample) is not int:
        return False
    answered = all(name in record for name in ("finish_reason", "exit_depths", "usage"))
    return 0 <= sample < MAX_SAMPLES and ("error" in record or answered)


def _as_asked(lines: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Records in the form in which their lines asked for them."""
    form = OutputForm()
    for _, line in lines:
        # Nearly all records are as they should be: they need not be read.
        record = orjson.loads(line) if b'"openai":{' in line else {}
        yield form.push(record) if "openai" in record else line + b"\n"


def _open_stream(output: str) -> BinaryIO:
    return open(output, "wb")


def _differences(old: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Which settings are others now, and what they were; empty where none is."""
    new = orjson.loads(orjson.dumps(settings, default=str))
    old = orjson.loads(orjson.dumps(old, default=str))
    return "; ".join(
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    )


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _identity(path: str, standard: int) -> object:
    """What tells whether two names are one file; None for what is no file on disk."""
    try:
        status = os.fstat(standard) if path in (STDIN, STDOUT) else os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
