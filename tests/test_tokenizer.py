"""Tokenizer and incremental detokenization, against decoding everything at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ouro_batch.errors import ModelError, RequestError
from ouro_batch.model.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["Hello world, the quick brown fox jumps over the lazy dog. é ü 日本語 😀"] * 5


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("ü x", special=False)])
    return backend


def byte_level_in_sequence() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend


def byte_fallback() -> Backend:
    """Spaces as a visible character, unknown characters as bytes, the first space stripped."""
    pieces = ["▁", "▁Hello", "▁world", "ing", "a", "b", "日", ".", "�"]
    tokens = [*SPECIAL, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def word_level(decoder) -> Backend:
    pieces = ["▁a", "▁", "b", "##b", "##ing", ".", "c</w>", "d</w>", "'s", "日"]
    vocab = {token: i for i, token in enumerate([*SPECIAL, "<unk>", *pieces])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZERS = {
    "byte-level": Tokenizer(byte_level()),
    "byte-level-in-sequence": Tokenizer(byte_level_in_sequence()),
    "byte-fallback": Tokenizer(byte_fallback()),
    "metaspace": Tokenizer(word_level(decoders.Metaspace())),
    "word-piece": Tokenizer(word_level(decoders.WordPiece())),
    "bpe-suffix": Tokenizer(word_level(decoders.BPEDecoder())),
    "no-decoder": Tokenizer(word_level(None)),
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def pushed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> tuple[list[str], str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


@each_tokenizer
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens(name: str, data: st.DataObject, skip: bool):
    tokenizer = TOKENIZERS[name]
    some_beyond = tokenizer.vocab_size + 3
    ids = data.draw(st.lists(st.integers(0, some_beyond - 1), max_size=30))
    parts, rest = pushed(tokenizer, ids, skip)
    assert "".join(parts) + rest == tokenizer.decode(ids, skip)


@given(data=st.lists(st.binary(max_size=6), max_size=10))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data: list[bytes]):
    """Raw bytes, valid characters cut anywhere among them."""
    tokenizer = TOKENIZERS["byte-level"]
    spelled = {value: character for character, value in _alphabet().items()}
    ids = [tokenizer.token_id(spelled[byte]) for chunk in data for byte in chunk]
    parts, rest = pushed(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)
    assert "".join(parts) + rest == b"".join(data).decode("utf-8", errors="replace")


def _alphabet() -> dict[str, int]:
    """The byte of each character of the alphabet, from the library itself."""

    def spelled(text: str) -> str:
        encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return encoder.pre_tokenize_str(text)[0][0]

    ascii_bytes = {spelled(chr(byte)): byte for byte in range(0x80)}
    second_bytes = {spelled(chr(byte))[1]: byte for byte in range(0x80, 0xC0)}
    return ascii_bytes | second_bytes | {chr(byte): byte for byte in range(0xC0, 0x100)}


@pytest.mark.parametrize("name", ["byte-level", "byte-level-in-sequence", "byte-fallback"])
@given(text=st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_without_split_characters(name: str, text: str):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    if name == "byte-level":
        assert whole == text
    parts, rest = pushed(tokenizer, ids)
    assert "".join(parts) + rest == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in part for part in parts)


def test_a_character_waits_for_its_last_byte():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("🙃", add_special_tokens=False)
    assert len(ids) > 1
    parts, rest = pushed(tokenizer, ids)
    assert parts == [*[""] * (len(ids) - 1), "🙃"]
    assert rest == ""
    parts, rest = pushed(tokenizer, ids[:-1])
    assert "".join(parts) == ""
    assert rest == "\ufffd"


NEVER_A_CHARACTER = {"byte-level": "ÿ", "byte-fallback": "<0xFF>"}


@each_tokenizer
def test_cost_of_a_push_does_not_grow(name: str):
    """Also for a run of tokens that never makes a character."""
    tokenizer = TOKENIZERS[name]
    tokens = [tokenizer.vocab_size - 3]
    if name in NEVER_A_CHARACTER:
        tokens.append(tokenizer.token_id(NEVER_A_CHARACTER[name]))
    for token in tokens:
        ids = [token] * 40_000
        started = time.perf_counter()
        parts, rest = pushed(tokenizer, ids)
        seconds = time.perf_counter() - started
        assert "".join(parts) + rest == tokenizer.decode(ids)
        assert seconds < 4, f"{seconds:.1f} s for 40,000 tokens; growing cost takes minutes"


def test_special_tokens_in_text():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.is_added(2)
    assert not tokenizer.is_added(tokenizer.token_id("a"))


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path: Path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("xyzzy plugh")) == "xyzzy plugh"
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match=r"ud800.*character 2.*remove"):
        TOKENIZERS["byte-level"].encode("ab\ud800")


def test_missing_tokenizer(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*token ids") as error:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"'])
def test_torn_tokenizer(tmp_path: Path, text: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="download it again") as error:
        Tokenizer.from_folder(tmp_path)
    assert str(path) in str(error.value)
