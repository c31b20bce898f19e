"""Every block of docs/recipes.md runs, in order, in one folder that holds the samples."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^## ([^\n]+)\n.*?```sh\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.S | re.M
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("recipes")
    (made / "samples").symlink_to(ROOT / "samples")
    (made / "bin").mkdir()
    command = made / "bin" / "ouro-batch"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ouro_batch "$@"\n')
    command.chmod(0o755)
    return made


def test_every_recipe_has_a_block():
    headings = re.findall(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    assert len(BLOCKS) == len(headings) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_recipe(folder, title, block):
    if "jq " in block and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    assert "null" not in result.stdout or "metadata" in block, result.stdout
    expected = {
        "A filter in a pipeline": r"^add-000\t",
        "Look before you leap": "60 of 60 can run",
        "pass@k": '"prompts": 10,\n  "pass@4": (9|10)',
        "Which threshold?": "at-0.6.jsonl",
        "Log-probabilities of the chosen tokens": r'{"id":"add-000","logprob":-[0-9]',
        "Is this text likely, and how deep did it go?": r"^-[0-9.]+\n-[0-9.]+\n$",
        "Are the numbers right on this machine?": '"name":"invariance","passed":true',
        "To and from OpenAI's batches": r'"exit_depths":\[4',
        "Other people's columns": r'{"id":7,"text":" 42","metadata":{"answer":"42"}}',
    }.get(title)
    if expected:
        assert re.search(expected, result.stdout), result.stdout
