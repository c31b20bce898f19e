"""Chat templates: rendering as Transformers does, the sandbox, and the end-of-turn token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ouro_batch.errors import ModelError, RequestError
from ouro_batch.model.chat import ChatTemplate, encode_chat
from ouro_batch.model.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes as tokens, besides the special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"]
    vocab = {token: i for i, token in enumerate(special)}
    vocab |= {c: len(vocab) + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(backend)


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens, "chat_template.jinja")


def render(source: str, messages: list = HELLO, **kwargs: object) -> str:
    return template(source).render(messages, **kwargs)


def test_chatml():
    messages = [{"role": "system", "content": "Be <brief>"}, *HELLO]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nBe <brief><|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


def test_kwargs_reach_the_template():
    assert "<think>" not in render(CHATML)
    assert "<think>" not in render(CHATML, enable_thinking=True)
    assert render(CHATML, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render(CHATML, [{"role": "user", "content": parts}]) == render(CHATML)


def test_further_fields_of_a_message_stay():
    message = {"role": "user", "name": "Ada", "content": "x"}
    assert render("{{ messages[0].name }}", [message]) == "Ada"


def test_environment_is_transformers():
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\ny") == "x\ny"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "01"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"


def test_special_tokens_in_the_context(tmp_path: Path):
    config = {
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "<s>|</s>|"


def write_config(folder: Path, chat_template: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": chat_template, "bos_token": "<s>"}))
    return path


def test_no_template(tmp_path: Path):
    assert ChatTemplate.from_folder(tmp_path) is None
    write_config(tmp_path, None)
    assert ChatTemplate.from_folder(tmp_path) is None


def test_jinja_file_comes_first(tmp_path: Path):
    write_config(tmp_path, "from the config")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}from the file é")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "<s>from the file é"


def test_named_templates(tmp_path: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_config(tmp_path, named)
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "d"
    path = write_config(tmp_path, named[:1])
    with pytest.raises(ModelError, match=r"\"default\", only tool_use \(name one") as error:
        ChatTemplate.from_folder(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("value", [3, {"default": "d"}, [{"name": "default"}], ["d"]])
def test_malformed_template_entry(tmp_path: Path, value: object):
    path = write_config(tmp_path, value)
    with pytest.raises(ModelError, match=r"must be a string or a list.*download") as error:
        ChatTemplate.from_folder(tmp_path)
    assert str(path) in str(error.value)


def test_broken_files(tmp_path: Path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON.*download"):
        ChatTemplate.from_folder(tmp_path)
    path.unlink()
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: .*does not compile.*correct it"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, ["messages", "None", "a list"]),
        ("Hello", ["messages", "'Hello'", "a list"]),
        ([], ["messages", "[]", "at least one"]),
        (["x"], ["messages[0]", "'x'", "role and content"]),
        ([*HELLO, {"content": "x"}], ["messages[1].role", "None", '"user"']),
        ([{"role": 3, "content": "x"}], ["messages[0].role", "3", '"user"']),
        ([{"role": "user"}], ["messages[0].content", "None", "a string or a list"]),
        ([{"role": "user", "content": 3}], ["messages[0].content", "3"]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 100}]}],
            ["messages[0].content", "image_url", '"type": "text"', "..."],
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], ["messages[0].content"]),
        ([{"role": "user", "content": ["x"]}], ["messages[0].content", "'x'"]),
    ],
)
def test_malformed_messages(messages: object, words: list[str]):
    with pytest.raises(RequestError) as error:
        render(CHATML, messages)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["messages", "raise_exception", "strftime_now", "eos_token"])
def test_reserved_kwargs(name: str):
    with pytest.raises(RequestError, match=f"must not set {name}.*leave it out"):
        template(CHATML, eos_token="</s>").render(HELLO, **{name: "x"})


def test_template_refuses():
    source = "{{ raise_exception('only ' + messages[0].role) }}"
    with pytest.raises(RequestError, match="refuses the messages: only user"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content / 2 }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.nothing }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_fails(source: str):
    with pytest.raises(RequestError, match=r"template fails on the messages.*check roles"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format('') | length and ''['__class__'].x }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
    ],
)
def test_sandbox(source: str):
    with pytest.raises(RequestError, match="SecurityError"):
        render(source)


def test_messages_of_the_caller_are_untouched():
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render(CHATML, parts)
    assert parts == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
ONLY_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
)
ONLY_ANSWER = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "token"),
    [
        (CHATML, "<|im_end|>"),
        (NO_SYSTEM + CHATML, "<|im_end|>"),
        (ONLY_SYSTEM + CHATML, "<|im_end|>"),
        (ONLY_ANSWER + CHATML, "<|im_end|>"),
        (LLAMA, "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("no content at all", None),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_end_of_turn(tokenizer: Tokenizer, source: str, token: str | None):
    found = template(source, eos_token="</s>").end_of_turn_token_id(tokenizer)
    assert found == (None if token is None else tokenizer.token_id(token))


def test_encode_chat(tokenizer: Tokenizer):
    ids = encode_chat(tokenizer, template(CHATML), HELLO, {"enable_thinking": False})
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 1
    rendered = render(CHATML, enable_thinking=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert encode_chat(tokenizer, template(CHATML), HELLO, None)[0] == ids[0]


@pytest.mark.parametrize("kwargs", ["x", [1], {1: 2}])
def test_kwargs_must_be_an_object(tokenizer: Tokenizer, kwargs: object):
    with pytest.raises(RequestError, match="chat_template_kwargs must be an object, got") as error:
        encode_chat(tokenizer, template(CHATML), HELLO, kwargs)
    assert repr(kwargs) in str(error.value)
