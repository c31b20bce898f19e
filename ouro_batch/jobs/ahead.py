"""Reads and prepares a job's lines a bounded number ahead, in a thread of its own.

So neither a slow producer on standard input nor tokenizing ever holds up running requests.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ouro_batch.jobs.reader import Line, read_lines

AHEAD = 512


class ReadAhead:
    """``prepare(line)`` of the inputs' lines in order; never more than ``ahead`` are held.

    Reading begins with the first ``poll``. ``prepare`` runs in the thread.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        prepare: Callable[[Line], Any] = lambda line: line,
        ahead: int = AHEAD,
    ):
        self.ended = False
        self._inputs = inputs
        self._prepare = prepare
        self._items: queue.Queue[Any] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self, wait_s: float = 0.0) -> Any | None:
        """The next line, prepared; None where none arrives in time or all were read (``ended``).

        Raises:
            FileError: an input failed. Whatever ``prepare`` raised.
        """
        if self.ended:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        try:
            item = self._items.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None
        if item is None or isinstance(item, BaseException):
            self.ended = True
            if item is not None:
                raise item
        return item

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _read(self) -> None:
        end: BaseException | None = None
        try:
            for line in read_lines(self._inputs):
                if not self._put(self._prepare(line)):
                    return
        except BaseException as error:  # raised again where the lines are used
            end = error
        self._put(end)

    def _put(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
