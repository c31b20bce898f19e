"""Words and numbers as both the terminal and the page show them."""

from __future__ import annotations

import unicodedata
from typing import Any

import orjson

_KEPT = "\n\t"


def visible(text: str) -> str:
    """Text with every character that is not seen, or moves others, spelled out as ``‹U+202E›``.

    Control characters, bidi controls, zero-width and other format characters, line separators and
    lone surrogates; line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in _KEPT or not _hidden(character) else f"‹U+{ord(character):04X}›"
        for character in text
    )


def one_line(value: Any, limit: int = 200) -> str:
    """An id or message on one line, as JSON where it is no text."""
    if not isinstance(value, str):
        value = orjson.dumps(value).decode()
    cut = value[: limit + 1]
    shown = visible(" ".join(cut.split()))
    return shown[:limit] + "…" if len(shown) > limit or len(cut) < len(value) else shown


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def depth(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def share(part: float, whole: float) -> str:
    """A share in percent, never rounded to all or nothing unless it is."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "<1%"
    if 99 < percent < 100:
        return ">99%"
    return f"{percent:.0f}%"


def seconds(value: float | None) -> str:
    """``0 s``, ``12 ms``, ``4.2 s``, ``1:05``, ``2:03:04``."""
    if value is None:
        return "–"
    if value == 0:
        return "0 s"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def request_name(id: Any, sample: int, width: int) -> str:
    """An id on one line of at most ``width`` characters, with the number of a further sample."""
    name = one_line(id, width)
    return f"{name}, sample {sample}" if sample else name
