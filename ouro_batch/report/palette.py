"""Colours of exit depths on the page, light and dark, with ink that can be read on them."""

from __future__ import annotations

from ouro_batch.jobs.preview import depth_colour

Colour = tuple[int, int, int]
NIGHT: Colour = (16, 20, 26)
NIGHT_SHARE = 0.84  # of the colour in the dark, where the full one would glare


def depth_css(loops: int) -> str:
    """Rules for ``.d1`` to ``.d<loops>``: ``--b`` is the colour, ``--n`` the digit."""
    rules, dark = [], []
    for depth in range(1, loops + 1):
        colour = depth_colour(depth, loops)
        rules.append(f'.d{depth}{{--b:{colour};--n:"{depth}"}}')
        dark.append(f".d{depth}{{--b:{as_hex(night(colour))}}}")
    return "".join(rules) + "@media (prefers-color-scheme:dark){" + "".join(dark) + "}"


def night(colour: str) -> Colour:
    """A colour as it is in the dark."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    mixed = (
        round(c * NIGHT_SHARE + n * (1 - NIGHT_SHARE)) for c, n in zip(parts, NIGHT, strict=True)
    )
    return tuple(mixed)  # type: ignore[return-value]


def as_hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
