"""The README's commands are the ones that CI runs, and its links and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ouro_batch import SamplingParams

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_first_two_commands_as_the_readme_spells_them():
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    for block in blocks[:2]:
        (command,) = block.strip().splitlines()
        assert command in ci


def test_the_first_screen_says_what_it_is_and_how_to_start():
    first_screen = README.splitlines()[:18]
    assert sum(line == "```sh" for line in first_screen) == 2


@pytest.mark.parametrize(
    "document",
    ["README.md", "samples/README.md", "docs/design.md", "docs/performance.md", "docs/recipes.md"],
)
def test_links_point_to_files(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_sampling_field_is_named():
    for name in SamplingParams.names():
        assert f"`{name}`" in README, name


def test_options_in_the_readme_exist():
    source = "".join(path.read_text() for path in (ROOT / "ouro_batch" / "cli").glob("*.py"))
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - {"--index-url", "--help"}:
        assert f'"{option}"' in source or f'/{option}"' in source, option


def test_the_python_example_runs(monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(" 42 [4")
