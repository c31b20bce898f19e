"""Cuts an answer's text into its tokens, each with its exit depth, and finds the prompts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ouro_batch.errors import OuroBatchError
from ouro_batch.jobs.errors import FileError
from ouro_batch.jobs.reader import STDIN, read_lines
from ouro_batch.report.source import Row

if TYPE_CHECKING:
    from ouro_batch.model.tokenizer import Tokenizer

Pieces = list[tuple[str, int]]  # text and exit depth of each token


def find_tokenizer(name: str, revision: str | None, *, download: bool) -> Tokenizer | None:
    """The tokenizer of a model that is on this machine, or may be downloaded.

    Raises:
        ModelError: with ``download``, the model cannot be had.
    """
    from ouro_batch.model.hub import resolve
    from ouro_batch.model.tokenizer import Tokenizer

    if download:
        return Tokenizer.from_folder(resolve(name, revision).folder)
    try:
        folder = Path(name).expanduser()
        return Tokenizer.from_folder(folder if folder.is_dir() else _cached(name, revision))
    except (OuroBatchError, OSError, ValueError):
        return None


def cut(row: Row, tokenizer: Tokenizer | None) -> Pieces | None:
    """The answer's tokens; None where the text cannot be told apart into as many.

    Without token ids in the record the text is tokenized again, which is right where it gives the
    number of tokens that there are depths for.
    """
    if tokenizer is None:
        return None
    ids = row.token_ids
    if ids is None:
        ids = tokenizer.encode(row.text, add_special_tokens=False)
        # A token that ended the answer is not in its text.
        if len(ids) not in (len(row.depths), len(row.depths) - 1):
            return None
    detokenizer = tokenizer.detokenizer()
    texts = [detokenizer.push(token) for token in ids]
    if texts:
        texts[-1] += detokenizer.flush()
    if not "".join(texts).startswith(row.text):
        return None
    left = len(row.text)
    for place, text in enumerate(texts):
        texts[place] = text[:left]
        left -= len(texts[place])
    texts += [""] * (len(row.depths) - len(texts))
    return list(zip(texts, row.depths, strict=True))


def find_prompts(
    inputs: Sequence[str], indexes: Collection[int], ids: dict[int, Any]
) -> dict[int, str]:
    """Prompts by index, from the job's inputs where they are still there and their ids fit."""
    prompts: dict[int, str] = {}
    if not indexes or STDIN in inputs or not all(Path(name).is_file() for name in inputs):
        return prompts
    last = max(indexes)
    try:
        for line in read_lines(inputs):
            if line.index > last:
                break
            if line.index in ids:
                prompt = _prompt(line.data, line.index, ids[line.index])
                if prompt is not None:
                    prompts[line.index] = prompt
    except FileError:
        pass
    return prompts


def _prompt(data: bytes, index: int, record_id: Any) -> str | None:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict) or fields.get("id", index) != record_id:
        return None
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        prompt = messages[-1].get("content")
    if isinstance(prompt, list):
        return f"{len(prompt):,} token ids" if fields.get("prompt") is prompt else None
    return prompt if isinstance(prompt, str) else None


def _cached(name: str, revision: str | None) -> Path:
    """The folder in the hub's cache that holds the model's tokenizer."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    if not isinstance(found, str):
        raise FileNotFoundError(name)
    return Path(found).parent
