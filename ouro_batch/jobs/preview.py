"""Shows answers with each token coloured, or without colour numbered, by its exit depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from ouro_batch.jobs.records import Record
from ouro_batch.params import RequestOutput

if TYPE_CHECKING:
    from ouro_batch.llm import LLM

INK = "#101418"
# From leaving early to running every loop; dark ink is readable on all of them.
SCALE = ((126, 214, 190), (190, 226, 120), (250, 214, 92), (250, 160, 84), (240, 112, 112))
MAX_TOKENS = 300
INDENT = 4
# Control characters in an answer must not drive the terminal.
HARMLESS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}

Pieces = list[tuple[str, int]]  # text and exit depth of each token


@dataclass(frozen=True)
class Answer:
    """A finished record to show."""

    record: Record
    output: RequestOutput


def depth_colour(depth: int, loops: int) -> str:
    """The colour of an exit depth from 1 to ``loops``, as ``#rrggbb``."""
    place = (min(depth, loops) - 1) / max(loops - 1, 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    mix = [
        round(a + (b - a) * (place - low)) for a, b in zip(SCALE[low], SCALE[low + 1], strict=True)
    ]
    return "#{:02x}{:02x}{:02x}".format(*mix)


def depth_style(depth: int, loops: int) -> Style:
    return Style(color=INK, bgcolor=depth_colour(depth, loops))


def has_colour(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def depth_bar(histogram: Mapping[int, int], loops: int, width: int) -> Text:
    """One bar, divided among the exit depths by their share of the tokens."""
    total = sum(histogram.values())
    bar = Text()
    filled, seen = 0, 0
    for depth in sorted(histogram):
        seen += histogram[depth]
        cells = round(width * seen / total) - filled
        bar.append("█" * cells, Style(color=depth_colour(depth, loops)))
        filled += cells
    bar.append("─" * (width - filled), "dim")
    return bar


def depth_shares(histogram: Mapping[int, int], loops: int, *, coloured: bool) -> Text:
    """The share of the tokens that left after each loop: ``1: 45%, 2: 30%``, or in colours."""
    total = sum(histogram.values())
    shares = {depth: f"{histogram.get(depth, 0) / total:.0%}" for depth in range(1, loops + 1)}
    if not coloured:
        return Text(", ".join(f"{depth}: {share}" for depth, share in shares.items()))
    text = Text()
    for depth, share in shares.items():
        text.append(f" {depth} ", depth_style(depth, loops)).append(f" {share}  ")
    text.rstrip()
    return text


def token_pieces(llm: LLM, output: RequestOutput) -> Pieces:
    """Pieces of an answer's text with their exit depths, without what a stop string cut off.

    Raises:
        OuroBatchError: the model has no tokenizer.
    """
    pieces = []
    left = len(output.text)
    tokens = output.token_ids[:MAX_TOKENS]
    for text, depth in zip(llm.token_texts(tokens), output.exit_depths, strict=False):
        shown = text[:left]
        left -= len(shown)
        if shown:
            pieces.append((shown.translate(HARMLESS), depth))
    if left > 0 and len(output.token_ids) > MAX_TOKENS:
        pieces.append((" …", output.exit_depths[MAX_TOKENS - 1]))
    return pieces


def print_answers(
    console: Console, answers: Sequence[Answer], pieces: Sequence[Pieces], loops: int
) -> None:
    """Print a legend and the answers, each with its ``token_pieces``.

    Tokens are told apart by the colour of their exit depth, or by digits under them.
    """
    console.print(_legend(loops, coloured=has_colour(console)))
    for answer, tokens in zip(answers, pieces, strict=True):
        output = answer.output
        depth = output.mean_exit_depth
        facts = f"{output.usage.completion_tokens} tokens, {output.finish_reason}"
        if depth is not None:
            facts = f"mean exit depth {depth:.2f}, {facts}"
        console.print()
        question = Text(f"{answer.record.index:>{INDENT - 1}} ", "bold")
        question.append(_question(answer.record, console.width - INDENT - 1), "dim")
        console.print(question, no_wrap=True, overflow="ellipsis")
        if has_colour(console):
            text = Text()
            for piece, exit_depth in tokens:
                text.append(piece.replace("\t", "    "), depth_style(exit_depth, loops))
            console.print(Padding(text, (0, 0, 0, INDENT), expand=False))
        else:
            _print_digits(console, tokens)
        console.print(Padding(Text(facts, "dim"), (0, 0, 0, INDENT), expand=False))


def _legend(loops: int, *, coloured: bool) -> Text:
    legend = Text("exit depth  ", "bold")
    if not coloured:
        return legend.append("the digit under a token is the loop it left after", "not bold")
    for depth in range(1, loops + 1):
        legend.append(f" {depth} ", depth_style(depth, loops))
    legend.append("  the loop a token left after (the first comes from prefill)", "not bold dim")
    return legend


def _question(record: Record, width: int) -> str:
    if record.messages is not None:
        content = record.messages[-1]["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        text = "".join(parts)
    elif isinstance(record.prompt, str):
        text = record.prompt
    else:
        text = f"{len(record.prompt or ())} token ids"
    text = " ".join(text.translate(HARMLESS).split())
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 1)) + "…"


def _print_digits(console: Console, tokens: Pieces) -> None:
    """The text with a line below it that has each token's exit depth under its first letter."""
    width = max(console.width - INDENT, 20)
    text = digits = ""

    def flush() -> None:
        nonlocal text, digits
        if text:
            for line in (text, digits.rstrip()):
                console.print(Text(" " * INDENT + line), soft_wrap=True)
        text = digits = ""

    for piece, depth in tokens:
        for part in piece.expandtabs(4).splitlines(keepends=True):
            shown = part.rstrip("\r\n")
            # A token that is only a line break still has a depth to show.
            ends = shown != part
            shown = shown if shown.strip() or not ends else shown + "⏎"
            number = str(depth)
            cells = max(cell_len(shown), len(number))
            if text and cell_len(text) + cells > width:
                flush()
            text += set_cell_size(shown, cells)
            digits += number.ljust(cells)
            if ends:
                flush()
    flush()


def counted(number: int, noun: str) -> str:
    """``1 record``, ``2,000 records``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """``4.2 s``, ``1:05``, ``2:03:04``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
