"""Text to token ids and back, also one token at a time."""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ouro_batch.errors import ModelError, RequestError

_FALLBACK_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A checkpoint's tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._decoders = _decoder_types(backend)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json``. Raises ModelError where it is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json (put the checkpoint's own there, or give prompts"
                " as token ids)"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(
                f"{path} cannot be read: {error} (the file may be torn; download it again)"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; the text of a special token in it becomes that token.

        Raises:
            RequestError: the text holds a lone surrogate, which no UTF-8 has, or the tokenizer
                cannot encode it (some have no token for unknown text).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds the lone surrogate {text[error.start]!r} at character"
                f" {error.start}, which is no Unicode character (remove it)"
            ) from error
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(
                f"the tokenizer cannot encode the text: {error} (change it, or give token ids)"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly ``text``, None where there is none."""
        return self._backend.token_to_id(text)

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the learned vocabulary, as all special tokens are."""
        return token_id in self._added

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder for one output."""
        if [step for step in self._decoders if step != "Fuse"] == ["ByteLevel"]:
            return _ByteLevelDetokenizer(self, skip_special_tokens)
        return _WindowDetokenizer(self, skip_special_tokens)

    def _spelling(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token as the vocabulary spells it; None where decoding leaves it out."""
        added = self._added.get(token_id)
        if added is not None and added.special and skip_special_tokens:
            return None
        return self._backend.id_to_token(token_id)

    def _bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to the text under a byte-level decoder."""
        token = self._spelling(token_id, skip_special_tokens)
        if token is None:
            return b""
        found = self._token_bytes.get(token_id)
        if found is None:
            try:
                found = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token outside the byte alphabet stands for itself
                found = token.encode("utf-8")
            self._token_bytes[token_id] = found
        return found


class Detokenizer(ABC):
    """Turns one output's tokens into text as they arrive.

    All pushes and the flush together give exactly what decoding all tokens at once gives, and no
    push returns a part of a character. The cost of a push does not grow with the output.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that no later token can change, maybe none."""

    @abstractmethod
    def flush(self) -> str:
        """The rest, after the last token; an incomplete character becomes U+FFFD."""


class _ByteLevelDetokenizer(Detokenizer):
    """For byte-level BPE, where the text is the UTF-8 of the tokens' bytes in a row."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer._bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a window of a few tokens and returns what the last add.

    The window starts with the tokens that gave text last time, so that what a decoder does to the
    start of a text (stripping a space) happens to text that is out already. Fallback bytes wait for
    the end of their run, because one wrong byte turns the whole run into U+FFFD. A byte-level
    decoder among other steps waits until its text ends in a whole character; there alone a run of
    tokens that never makes one costs more the longer it gets.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_fallback = "ByteFallback" in tokenizer._decoders
        self._byte_level = "ByteLevel" in tokenizer._decoders
        self._window: list[int] = []
        self._told = 0  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        token = self._tokenizer._spelling(token_id, self._skip_special_tokens)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._byte_fallback and _FALLBACK_BYTE.fullmatch(token):
            return ""
        text = self._new_text()
        if not text or (self._byte_level and text.endswith("\ufffd")):
            return ""
        del self._window[: self._told]
        self._told = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._told = len(self._window)
        return text

    def _new_text(self) -> str:
        told = self._decode(self._window[: self._told])
        return self._decode(self._window)[len(told) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """The decoder's steps by name, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
