"""Turns Ctrl-C and SIGTERM into a request to stop at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, a first signal only sets ``requested``; a second stops at once.

    A record is never torn in the middle by the first. ``immediately`` makes the first stop at
    once too, for the time in which nothing can be lost.
    """

    def __init__(self) -> None:
        self.requested = False
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self.immediately:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True
