"""A request's output as text: detokenized as it comes, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ouro_batch.model.tokenizer import Detokenizer


class OutputText:
    """Text of the tokens pushed so far; ``push`` tells when a stop string has appeared."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()):
        self.text = ""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._stopped = False
        self._longest_stop = max(map(len, self._stop), default=0)

    def push(self, token: int) -> bool:
        """Add a token's text; True once a stop string matches, which cuts the text before it."""
        return self._append(self._detokenizer.push(token))

    def flush(self) -> None:
        """Add what was held back for an unfinished character; nothing after a stop string."""
        if not self._stopped:
            self._append(self._detokenizer.flush())

    def _append(self, piece: str) -> bool:
        searched = max(len(self.text) - self._longest_stop + 1, 0)
        self.text += piece
        matches = [self.text.find(stop, searched) for stop in self._stop]
        first = min((at for at in matches if at >= 0), default=-1)
        if first < 0:
            return False
        self.text = self.text[:first]
        self._stopped = True
        return True
