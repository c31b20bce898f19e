"""Stop strings: found across token borders, cut from the text, first match first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_batch.engine.text import OutputText
from ouro_batch.model.tokenizer import Detokenizer


class Scripted(Detokenizer):
    """Token i adds ``pieces[i]``; ``tail`` is held back to the end, as half a character is."""

    def __init__(self, pieces: list[str], tail: str = ""):
        self.pieces, self.tail = pieces, tail

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.tail


def run(pieces: list[str], stop: list[str], tail: str = "") -> tuple[str, int | None]:
    """The text, and the token that ended it."""
    output = OutputText(Scripted(pieces, tail), stop)
    ended = next((token for token in range(len(pieces)) if output.push(token)), None)
    output.flush()
    return output.text, ended


@given(
    pieces=st.lists(st.text("abé", max_size=4), max_size=8),
    stop=st.lists(st.text("abé", min_size=1, max_size=5), max_size=3),
    tail=st.text("ab\N{REPLACEMENT CHARACTER}", max_size=2),
)
@settings(max_examples=500, deadline=None)
def test_the_text_ends_before_the_first_match_of_the_first_token_with_one(pieces, stop, tail):
    text, ended = "", None
    for token, piece in enumerate([*pieces, tail]):
        text += piece
        matches = [text.find(string) for string in stop if string in text]
        if matches:
            text = text[: min(matches)]
            ended = token if token < len(pieces) else None
            break
    assert run(pieces, stop, tail) == (text, ended)


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["x\n", "\ny"], ["\n\n"], ("x", 1)),
        (["a", "b", "c", "d"], ["bcd"], ("a", 3)),
        (["one", "two"], ["w", "t", "o"], ("", 0)),
        (["say STOP now"], ["STOP", "say"], ("", 0)),
        (["one", "two"], ["three"], ("onetwo" + "\N{REPLACEMENT CHARACTER}", None)),
        (["one", "two"], [], ("onetwo" + "\N{REPLACEMENT CHARACTER}", None)),
    ],
)
def test_stop_strings(pieces, stop, expected):
    """Half a character is held back: lost behind a stop string, U+FFFD at the end of the rest."""
    assert run(pieces, stop, "\N{REPLACEMENT CHARACTER}") == expected
