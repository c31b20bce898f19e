"""Turns Ctrl-C and SIGTERM into a request to finish what runs and stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 8.0  # what SIGTERM leaves: system managers kill soon after


class Interrupt:
    """While entered, a first signal only sets ``requested``; a second stops at once.

    A record is never torn in the middle by the first. After a SIGTERM the time is ``up`` soon.
    ``immediately`` makes the first stop at once too, for the time in which nothing can be lost.
    """

    def __init__(self) -> None:
        self.requested = False
        self.deadline: float | None = None  # of time.monotonic
        self.immediately = True
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # A job started with nohup or in the background keeps ignoring what it was told to.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def up(self) -> bool:
        """Whether what still runs has no time left."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self.immediately:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGTERM:
            self.deadline = time.monotonic() + GRACE_S
