"""samples/: the tasks and their split, tokenizer, checkpoint format, prompts and README."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

SAMPLES = Path(__file__).parent.parent / "samples"
MODEL = SAMPLES / "tiny-ouro"
sys.path.insert(0, str(SAMPLES))

import make_tokenizer  # noqa: E402
import tasks  # noqa: E402


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_checker_accepts_the_generators_answers(task):
    rng = random.Random(0)
    for _ in range(50):
        problem = tasks.make(task, rng, level=rng.random())
        assert problem.answer
        assert tasks.is_correct(f" {problem.answer}", problem.answer)
        assert not tasks.is_correct(f"{problem.answer}1", problem.answer)


def test_answers_follow_from_the_problems():
    rng = random.Random(1)
    for _ in range(100):
        a, sign, b, _ = (problem := tasks.make("subtract", rng)).plain.split()
        assert (sign, int(problem.answer)) == ("-", int(a) - int(b))
        problem = tasks.make("lookup-2", rng)
        said, asked = problem.plain.rsplit(". From ", 1)
        calls = dict(fact.split(" calls ") for fact in said.split(". "))
        person, walk = asked.split(",")[0], []
        for _ in range(3):
            person = calls[calls[person]]
            walk.append(person)
        assert problem.answer.split() == walk
        problem = tasks.make("sort", rng)
        words = problem.plain.removeprefix("Sort: ").removesuffix(" =").split()
        assert problem.answer.split() == sorted(words)


def test_training_never_draws_an_evaluation_problem():
    evaluated = {
        record["prompt"] if "prompt" in record else record["messages"][0]["content"]
        for name in ("eval.jsonl", "prompts.jsonl")
        for record in records(name)
    }
    rng = random.Random(2)
    for task in tasks.TASKS:
        for _ in range(1500):
            problem = tasks.draw(task, rng, held_out=False)
            assert not problem.held_out
            assert not {problem.plain, problem.chat} & evaluated, problem


@pytest.mark.parametrize(
    ("name", "counts", "seed"),
    [
        ("eval.jsonl", "EVAL_COUNTS", "EVAL_SEED"),
        ("prompts.jsonl", "PROMPTS_COUNTS", "PROMPTS_SEED"),
    ],
)
def test_problem_files_are_what_the_generator_makes(name, counts, seed):
    assert records(name) == tasks.held_out_records(getattr(tasks, counts), getattr(tasks, seed))


@pytest.mark.parametrize("name", ["eval.jsonl", "prompts.jsonl"])
def test_problem_files_fit_the_input_format(name):
    found = records(name)
    assert len({record["id"] for record in found}) == len(found)
    assert {record["metadata"]["task"] for record in found} == set(tasks.TASKS)
    for record in found:
        assert ("prompt" in record) != ("messages" in record)
        assert set(record) == {
            "id", "max_tokens", "metadata", "prompt" if "prompt" in record else "messages",
        }  # fmt: skip
        assert set(record["metadata"]) == {"task", "answer"}


def test_tokenizer_ids_digits_and_round_trip(tokenizer):
    for index, token in enumerate(make_tokenizer.SPECIAL):
        assert tokenizer.token_to_id(token) == index
        assert tokenizer.encode(token).ids == [index]
    assert len(tokenizer.encode("9051").ids) == 4
    assert not [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c.isdigit() for c in t)]
    for text in ("12 + 907 =", "Ann calls Tom.", "naïve 日本語 😀\n\ttabs", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_answers_of_deep_tasks_decode_several_tokens(tokenizer):
    lengths = [
        len(tokenizer.encode(record["metadata"]["answer"]).ids) + 1
        for record in records("eval.jsonl")
        if record["metadata"]["task"] not in ("sort", "facts", "reverse")
    ]
    assert sum(lengths) / len(lengths) >= 4
    assert max(lengths) < tasks.MAX_TOKENS


def test_checkpoint_has_the_released_format():
    config = json.loads((MODEL / "config.json").read_text())
    layers = range(config["num_hidden_layers"])
    norms = ("input_layernorm", "post_attention_layernorm")
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    names |= {f"model.early_exit_gate.{part}" for part in ("weight", "bias")}
    names |= {f"model.layers.{i}.{n}{s}.weight" for i in layers for n in norms for s in ("", "_2")}
    names |= {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in layers for p in "qkvo"}
    names |= {
        f"model.layers.{i}.mlp.{p}_proj.weight" for i in layers for p in ("gate", "up", "down")
    }
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert 0 < config["early_exit_threshold"] < 1
    assert (config["total_ut_steps"], config["head_dim"]) == (4, 64)


def test_model_folder_is_small():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 12e6


def test_template_and_training_agree_on_the_chat_form():
    assert (MODEL / "chat_template.jinja").read_text() == make_tokenizer.CHAT_TEMPLATE
    jinja2 = pytest.importorskip("jinja2")
    made = jinja2.Template(make_tokenizer.CHAT_TEMPLATE, keep_trailing_newline=True).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert made == make_tokenizer.chat_prompt("Hi")


def test_readme_has_the_tables():
    text = (SAMPLES / "README.md").read_text()
    begin, end = (text.index(f"<!-- tables: {mark} -->") for mark in ("begin", "end"))
    assert "full depth, 4 loops" in text[begin:end]
    assert "95% interval" in text[begin:end]


@pytest.mark.slow
def test_training_runs_end_to_end(tmp_path):
    """A few steps of every stage leave a loadable checkpoint behind."""
    command = [sys.executable, str(SAMPLES / "train.py"), str(tmp_path), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "trained 20 steps" in done.stdout
    from ouro_batch import LLM, SamplingParams

    output = LLM(str(tmp_path / "tiny-ouro")).generate(["1 + 1 ="], SamplingParams(max_tokens=2))
    assert len(output[0].token_ids) in (1, 2)
