"""The checkpoint's chat template: messages to prompt text, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ouro_batch.errors import ModelError, RequestError
from ouro_batch.model.files import read_json_object, read_text
from ouro_batch.model.tokenizer import Tokenizer

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MARKER = "the answer goes here"


class _TemplateRefusal(Exception):
    """The template itself refused the messages, through raise_exception."""


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks what a model wrote for training: the body, unchanged."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A jinja2 chat template, as Transformers runs them.

    Args:
        source: the template.
        special_tokens: its special tokens' text by name, such as ``eos_token``.
        origin: the file it comes from, for errors.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"{origin}: the chat template does not compile: {error}"
                " (correct it, or give prompts in place of messages)"
            ) from error
        self._special_tokens = special_tokens
        self._reserved = {"messages", "raise_exception", "strftime_now", *special_tokens}

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Read chat_template.jinja or tokenizer_config.json; None where neither has a template.

        Raises:
            ModelError: a file is broken, or the template does not compile.
        """
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        path = folder / "chat_template.jinja"
        if path.is_file():
            source = read_text(path)
        else:
            path = config_path
            source = _default_template(config.get("chat_template"), path)
        if source is None:
            return None
        return cls(source, _special_tokens(config), str(path))

    def render(
        self,
        messages: Sequence[Mapping],
        /,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: object,
    ) -> str:
        """The prompt text of ``messages``, each with a ``role`` and a ``content``.

        Args:
            messages: content is a string or a list of text parts, which are joined.
            add_generation_prompt: end with the start of the assistant's answer.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: malformed messages, a reserved variable, or the template refuses or fails.
        """
        taken = sorted(self._reserved & chat_template_kwargs.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]}, which the template gets from"
                " elsewhere (leave it out)"
            )
        variables = {"tools": None, "documents": None} | self._special_tokens | chat_template_kwargs
        checked = _checked(messages)
        try:
            return self._template.render(
                variables, messages=checked, add_generation_prompt=add_generation_prompt
            )
        except _TemplateRefusal as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # the template is the checkpoint's code and can fail anyhow
            raise RequestError(
                f"the chat template fails on the messages: {type(error).__name__}: {error}"
                " (check roles, contents and chat_template_kwargs)"
            ) from error

    def end_of_turn_token_id(self, tokenizer: Tokenizer) -> int | None:
        """The added token that the template puts right behind an assistant's content.

        Found by rendering an exchange; None where the template ends a turn in another way.
        """
        user = {"role": "user", "content": "a question"}
        answer = {"role": "assistant", "content": _MARKER}
        system = {"role": "system", "content": "an instruction"}
        for messages in ([user, answer], [system, user, answer], [answer]):
            try:
                text = self.render(messages, add_generation_prompt=False)
                _, marker, rest = text.rpartition(_MARKER)
                ids = tokenizer.encode(rest.lstrip(), add_special_tokens=False) if marker else []
            except RequestError:  # not every template takes every sequence of roles
                continue
            if ids and tokenizer.is_added(ids[0]):
                return ids[0]
        return None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping],
    kwargs: Mapping[str, object] | None = None,
) -> list[int]:
    """Prompt token ids of ``messages``, ready for the assistant's answer.

    The template writes the special tokens itself, so none are added. Raises RequestError as
    ``ChatTemplate.render`` does, and where ``kwargs`` (``chat_template_kwargs``) is no object.
    """
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(f"chat_template_kwargs must be an object, got {kwargs!r}")
    return tokenizer.encode(template.render(messages, **kwargs), add_special_tokens=False)


def _checked(messages: object) -> list[dict]:
    """A copy of ``messages`` whose contents are strings; raises RequestError if malformed."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(
            f"messages must be a list with at least one message, got {_short(messages)}"
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{index}] must be an object with role and content, got {_short(message)}"
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f'messages[{index}].role must be a string such as "user",'
                f" got {_short(message.get('role'))}"
            )
        content = _text_of(message.get("content"), f"messages[{index}].content")
        checked.append({**message, "content": content})
    return checked


def _text_of(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{name} must be a string or a list of text parts, got {_short(content)}"
        )
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{name} must hold only parts like {{"type": "text", "text": "..."}},'
                f" got {_short(part)}"
            )
    return "".join(part["text"] for part in content)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _default_template(value: object, path: Path) -> str | None:
    """The template in tokenizer_config.json: a string, or the one named "default" of a list."""
    if value is None or isinstance(value, str):
        return value
    named = value if isinstance(value, list) else [value]
    for entry in named:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise ModelError(
                f"{path}: chat_template must be a string or a list of named templates,"
                f" got {_short(value)} (download the file again)"
            )
    templates = {entry.get("name"): entry["template"] for entry in named}
    if "default" not in templates:
        names = ", ".join(map(str, templates)) or "nothing"
        raise ModelError(
            f'{path}: chat_template has no template named "default", only {names}'
            " (name one of them so)"
        )
    return templates["default"]


def _special_tokens(config: dict) -> dict[str, str]:
    """The text of each special token that tokenizer_config.json names."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _refuse(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which a prompt must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
