"""Remembers the ids of a job's lines on disk, whatever their number."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass
from typing import Any

import orjson

from ouro_batch.jobs.errors import FileError


@dataclass(frozen=True)
class Place:
    """Where an id was first given."""

    line: int
    source: str


class SeenIds:
    """The ids seen so far, in a temporary file that goes with the process.

    Ids are told apart by 128 bits of their JSON. One thread at a time may use it.
    """

    def __init__(self) -> None:
        # An empty name is a temporary database, in memory up to its page cache and then on disk.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute(
            "CREATE TABLE seen (id BLOB PRIMARY KEY, line INTEGER, source TEXT) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def first(self, id: Any, line: int, source: str) -> Place | None:
        """Where ``id`` was given before; None, and it is remembered, where it was not."""
        digest = hashlib.blake2b(orjson.dumps(id), digest_size=16).digest()
        try:
            self._database.execute("INSERT INTO seen VALUES (?, ?, ?)", (digest, line, source))
        except sqlite3.IntegrityError:
            row = self._database.execute("SELECT line, source FROM seen WHERE id = ?", (digest,))
            return Place(*row.fetchone())
        except sqlite3.OperationalError as error:
            raise FileError(
                f"remembering ids in a temporary file failed: {error} (set SQLITE_TMPDIR to a"
                " folder with room, or give --on-duplicate keep)"
            ) from error
        return None

    def close(self) -> None:
        self._database.close()
