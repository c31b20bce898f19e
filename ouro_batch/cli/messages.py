"""Standard error, which a job outlives."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class Messages(Console):
    """Standard error for a job: it goes on when nobody reads that, and when its disk is full."""

    def __init__(self) -> None:
        super().__init__(file=_Lenient(sys.stderr), highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


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
