"""Standard error, which a job outlives, and standard output, whose end is no accident."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ouro_batch.jobs.errors import FileError


class Messages(Console):
    """Standard error for a job: it goes on when nobody reads that, and when its disk is full."""

    def __init__(self) -> None:
        super().__init__(file=_Lenient(sys.stderr), highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(2)


class _Lenient:
    """A text file that drops what it cannot write, but for broken pipes."""

    def __init__(self, file: Any):
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Results:
    """Standard output: a reader that has gone misses the rest, and nothing else fails unsaid.

    Writing and flushing raise FileError where they cannot be done.
    """

    def __init__(self, file: Any):
        self._file = file

    def write(self, text: str) -> int:
        if text == "":  # with which a library asks what it may write, whatever comes of it
            return 0
        return self._try(self._file.write, text) or 0

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except BrokenPipeError:
            silence(1)
        except OSError as error:
            silence(1)
            raise FileError(f"writing standard output failed: {error.strerror}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def silence(number: int) -> None:
    """What goes to a standard file from now on, and what waits to be written, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
