"""``check``, ``fetch`` and ``info``: what they find on a machine without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from typer.testing import CliRunner

from ouro_batch.cli import app

from .test_cli_run import write
from .test_hub import COMMIT, make_snapshot
from .tiny import write_checkpoint

TINY_OURO = Path(__file__).parents[1] / "samples" / "tiny-ouro"


def command(*arguments, cwd=None, **environment):
    """The program's status and output; in a process of its own only where variables are set."""
    arguments = [str(argument) for argument in arguments]
    if environment:
        return subprocess.run(
            [sys.executable, "-m", "ouro_batch", *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "200", **environment},
        )
    before = os.getcwd()
    os.chdir(cwd or before)
    try:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    finally:
        os.chdir(before)
    return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def check(folder, *arguments, status=0):
    result = command("check", "in.jsonl", "-m", TINY_OURO, *arguments, "--json", cwd=folder)
    assert result.returncode == status, result.stderr
    return orjson.loads(result.stdout)


def test_lines_to_score(tmp_path):
    lines = [
        {"id": 1, "prompt": [7] * 5, "completion": [7, 8]},
        {"id": 1, "prompt": "1 +", "completion": " 2", "exit_threshold": 0.5},
        {"prompt": [7], "completion": [7, 8], "exit_depths": [4]},
        {"prompt": [7]},
        {"prompt": [7] * 300, "completion": [7] * 300},
    ]
    write(tmp_path / "in.jsonl", lines)
    found = check(tmp_path, "--score", "--gpu-memory", "80", status=1)
    assert [p["message"] for p in found["problems"]["first"]] == [
        "1 exit_depths for 2 completion tokens",
        "a line to score needs completion: text, or token ids (or give --answers OUT)",
        "300 prompt tokens and 300 completion tokens are more than the 512 that the model takes"
        " (shorten one of them)",
    ]
    assert found["prompt_tokens"]["longest"]["tokens"] == 5
    assert found["output_tokens_at_most"] == 2 + 2
    shown = command("check", "in.jsonl", "-m", TINY_OURO, "--score", cwd=tmp_path)
    assert "cache" not in shown.stdout
    assert check(tmp_path, status=1)["problems"]["total"] == 4  # which run knows nothing of


def test_how_many_requests_fit(tmp_path):
    write(tmp_path / "in.jsonl", [{"prompt": [7] * 5}] * 3)
    arguments = ["check", "in.jsonl", "-m", TINY_OURO, "--gpu-memory"]
    assert "all requests at once" in command(*arguments, "80", cwd=tmp_path).stdout
    write(tmp_path / "in.jsonl", [{"prompt": [7] * 5}] * 90_000)
    assert "requests of mean size at once" in command(*arguments, "1.2", cwd=tmp_path).stdout


def test_what_an_input_takes(tmp_path):
    lengths = [1, 2, 3, 4, 5, 9, 300]
    write(tmp_path / "in.jsonl", [{"prompt": [7] * n, "max_tokens": 10} for n in lengths])
    found = check(tmp_path, "--n", "2")
    assert (found["lines"], found["samples"], found["problems"]["total"]) == (7, 14, 0)
    tokens = found["prompt_tokens"]
    assert tokens["total"] == 2 * sum(lengths)
    assert (tokens["p50"], tokens["p99"]) == (4, 300)
    assert tokens["longest"] == {"tokens": 300, "line": 7, "file": "in.jsonl"}
    bins = [(b["from"], b["to"], b["lines"]) for b in tokens["histogram"] if b["lines"]]
    assert bins == [(1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 1), (9, 16, 1), (257, 512, 1)]
    assert found["output_tokens_at_most"] == 140
    assert found["cache"]["largest_request_tokens"] == 309  # the last token never runs
    assert found["cache"]["gpu"] is None


def test_work_is_that_of_the_model(tmp_path):
    """Counted by hand for one token after another: products of all layers and loops, attention."""
    config = json.loads((TINY_OURO / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    write(tmp_path / "in.jsonl", [{"prompt": [7] * 3, "max_tokens": 3}])
    found = check(tmp_path)["operations_at_full_depth"]
    products = 2 * (hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * width)
    each = config["num_hidden_layers"] * config["total_ut_steps"]

    def run(contexts):
        return each * sum(products + 4 * heads * size * context for context in contexts)

    assert found["prefill"] == run([1, 2, 3])
    assert found["decode_at_most"] == run([4, 5])


def test_problems_are_those_that_a_run_would_have(tmp_path):
    records = [
        {"id": "a", "prompt": "2 + 2 ="},
        {"id": "a", "prompt": "3 + 3 ="},
        {"prompt": [9999]},
        {"promt": "x"},
        {"prompt": [7] * 600},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    write(tmp_path / "in.jsonl", records)
    found = check(tmp_path, status=1)["problems"]
    ran = command("run", "in.jsonl", "-m", TINY_OURO, "-q", cwd=tmp_path)
    errors = [r["error"] for r in map(orjson.loads, ran.stdout.splitlines()) if "error" in r]
    told = [{name: p[name] for name in ("type", "message", "line")} for p in found["first"]]
    assert told == sorted(errors, key=lambda error: error["line"])
    assert found["total"] == 4
    assert found["by_type"] == {"duplicate_id": 1, "invalid_request": 2, "too_long": 1}
    short = check(tmp_path, "--limit", "1", status=1)["problems"]
    assert (len(short["first"]), short["total"]) == (1, 4)
    cut = check(tmp_path, "--on-too-long", "truncate-left", status=1)
    assert (cut["problems"]["total"], cut["prompt_tokens"]["truncated_lines"]) == (3, 1)


def test_memory_decides_what_fits(tmp_path):
    write(tmp_path / "in.jsonl", [{"prompt": [7] * 400, "max_tokens": 100}] * 50)
    options = ("--max-rows", "4", "--max-batched-tokens", "64", "--gpu-memory")
    large = check(tmp_path, *options, "1.0")["cache"]["gpu"]
    assert large["requests_at_once"] == 50
    small = check(tmp_path, *options, "0.6")["cache"]["gpu"]
    assert 0 < small["requests_at_once"] < 50
    config = json.loads((TINY_OURO / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size
    per_token *= config["total_ut_steps"]
    assert small["cache_tokens"] == small["cache_bytes"] // per_token
    none = check(tmp_path, *options, "0.5", status=1)["problems"]
    assert none["by_type"] == {"too_long": 50}
    assert "tokens of cache; this cache holds" in none["first"][0]["message"]


def test_the_tables_say_the_same(tmp_path):
    write(tmp_path / "in.jsonl", [{"prompt": [7] * 30}, {"promt": 1}])
    result = command("check", "in.jsonl", "-m", TINY_OURO, "--gpu-memory", "1", cwd=tmp_path)
    assert result.returncode == 1
    for text in ("1 of 2 can run", "1 (1 invalid_request)", "17 to 32", "unknown field 'promt'"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("none.jsonl", "-m", TINY_OURO), 2, "cannot read none.jsonl"),
        (("in.jsonl", "-m", "./none"), 3, "there is no model folder"),
        (("in.jsonl", "-m", TINY_OURO, "--gpu-memory-utilization", "2"), 2, "at most 1, got 2.0"),
        (("in.jsonl", "-m", TINY_OURO, "--max-tokens", "0"), 2, "max_tokens must be at least 1"),
    ],
)
def test_wrong_use(tmp_path, arguments, status, message):
    write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    result = command("check", *arguments, cwd=tmp_path)
    assert result.returncode == status
    assert message in result.stderr


def test_a_whole_folder_is_found_whole():
    result = command("fetch", TINY_OURO, "--json")
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert found["weights"]["files"] == ["model.safetensors"]
    # The gate's bias included, every number of the checkpoint.
    from safetensors import safe_open

    with safe_open(TINY_OURO / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert found["weights"]["parameters"] == sum(sizes.values())
    assert (found["tokenizer"], found["chat_template"]) == (True, True)
    assert "every tensor there" in command("fetch", TINY_OURO).stdout


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-1000]
            ),
            "model.safetensors",
        ),
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path, damage, message):
    shutil.copytree(TINY_OURO, tmp_path / "model")
    damage(tmp_path / "model")
    result = command("fetch", tmp_path / "model")
    assert result.returncode == 3
    assert message in result.stderr
    assert result.stdout == ""


def test_a_hub_model_is_fetched_and_then_listed(tmp_path):
    """From the cache, as there is no network: what was fetched once is whole and at its commit."""
    snapshot = make_snapshot(tmp_path, "org/looped", COMMIT)
    write_checkpoint(snapshot)
    home = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = orjson.loads(command("fetch", "org/looped", "--json", **home).stdout)
    assert (found["model"], found["commit"]) == ("org/looped", COMMIT)
    assert found["folder"] == str(snapshot)
    assert found["tokenizer"] is False
    missing = command("fetch", "org/other", **home)
    assert missing.returncode == 3
    assert "HF_HUB_OFFLINE is set" in missing.stderr
    (listed,) = orjson.loads(command("info", "--json", **home).stdout)["checkpoints"]
    assert (listed["model"], listed["commit"]) == ("org/looped", COMMIT)
    assert "org/looped at 0123456789ab" in command("info", **home).stdout


def test_info_says_what_cannot_run_and_why(tmp_path):
    found = orjson.loads(command("info", "--json", HF_HOME=str(tmp_path)).stdout)
    able = {ability["name"]: ability["why_not"] for ability in found["abilities"]}
    assert able["torch on the CPU"] is None
    assert found["versions"]["torch"]
    assert found["machine"]["memory_bytes"] >= found["machine"]["free_bytes"] > 0
    assert found["checkpoints"] == []
    if not found["devices"]:
        assert "CUDA" in able["Triton kernels on a GPU"]
