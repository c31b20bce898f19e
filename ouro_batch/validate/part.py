"""What a validation has found so far, beside its record's place, for a run that is cut off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from ouro_batch.jobs.errors import UsageError
from ouro_batch.jobs.part import open_locked
from ouro_batch.jobs.writer import check_writable

BEGINNING = b'{\n  "kind": "validation",\n'  # of every record


def as_json(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


class KeptRecord:
    """OUT.part, locked as that of ``ouro-batch run`` is, so that no two jobs write one output.

    What an earlier validation left stays until there is something newer; ``used`` says whether
    there is.

    Raises:
        UsageError: it cannot be written, is being written, or another command left it.
    """

    def __init__(self, path: Path):
        check_writable(str(path), streams=False)
        self.path = path
        self.used = False
        self._file = open_locked(path)
        beginning = os.pread(self._file, len(BEGINNING), 0)
        if beginning not in (b"", BEGINNING):
            self.close()
            raise UsageError(
                f"{path} is of another job: give --output another name, or move it away"
            )

    def keep(self, record: dict[str, Any]) -> None:
        """Raises OSError where it cannot be written; nothing is there then."""
        text = as_json(record)
        os.ftruncate(self._file, 0)
        self.used = False
        if os.pwrite(self._file, text, 0) < len(text):
            os.ftruncate(self._file, 0)
            raise OSError("no room for all of it")
        os.fsync(self._file)
        self.used = True

    def close(self, *, remove: bool = False) -> None:
        """Give the file up; one without content goes in any case."""
        if remove or os.fstat(self._file).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
