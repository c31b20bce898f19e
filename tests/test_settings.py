"""Options from files and variables, the reference made of them, and shell completion."""

import os
import subprocess
import sys
import typing
from enum import Enum
from pathlib import Path

import orjson
import pytest
import typer

from ouro_batch.cli import app

from .test_cli import options
from .test_cli_run import lines, run, write

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", [{"prompt": "abcdef"}, {"prompt": "abbccc"}])
    return tmp_path


def settings(folder, text):
    (folder / "job.toml").write_text(text)
    return ("--config", "job.toml")


def texts(result):
    assert result.returncode == 0, result.stderr
    return sorted(record["text"] for record in lines(result.stdout))


def test_a_file_gives_what_the_command_line_does_not(folder):
    config = settings(folder, "[run]\nmax-tokens = 2\nn = 2\nquiet = true\n[report]\njson = true\n")
    result = run(folder, "in.jsonl", *config)
    assert texts(result) == ["AB"] * 4
    assert result.stderr == b""
    assert texts(run(folder, "in.jsonl", "--n", "1", *config)) == ["AB"] * 2


def test_a_variable_counts_more_than_the_file_and_less_than_the_command_line(folder):
    config = settings(folder, "[run]\nmax-tokens = 2\n")
    variables = {**os.environ, "OURO_BATCH_RUN_MAX_TOKENS": "3"}
    assert texts(run(folder, "in.jsonl", *config, env=variables)) == ["ABB", "ABC"]
    again = run(folder, "in.jsonl", "--max-tokens", "1", *config, env=variables)
    assert texts(again) == ["A", "A"]


def test_inputs_lists_and_names_with_underscores(folder):
    config = settings(folder, '[run]\ninputs = ["in.jsonl"]\nmax_tokens = 4\nstop = ["x", "y"]\n')
    assert texts(run(folder, *config)) == ["ABBC", "ABCD"]


def test_a_switch_that_is_on_by_default(folder):
    config = settings(folder, '[run]\nordered = false\noutput = "out"\n')
    result = run(folder, "in.jsonl", *config)
    assert result.returncode == 0, result.stderr
    assert len(lines((folder / "out").read_bytes())) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\ntemprature = 1\n", "run has no option 'temprature' (did you mean 'temperature'?)"),
        ("[rnu]\nn = 1\n", "there is no command 'rnu' (did you mean 'run'?)"),
        ("n = 1\n", "there is no command 'n'"),
        ("run = 5\n", "run must be a table"),
        ("[run]\nn = [1]\n", "n must be one value, got [1]"),
        ("[run]\nquiet = 1\n", "quiet must be true or false, got 1"),
        ("[run]\nn = true\n", "n must be one value, got True"),
        ("[run]\nstop-token-id = 5\n", "stop-token-id must be a list, got 5"),
        ("[run\n", "job.toml is not valid TOML"),
        ("[run]\nmax-tokens = 'many'\n", "--max-tokens"),
        ("[run]\nschedule = 'other'\n", "--schedule"),
    ],
)
def test_what_a_file_gets_wrong_is_named(folder, text, message):
    result = run(folder, "in.jsonl", *settings(folder, text), env={**os.environ, "COLUMNS": "300"})
    assert result.returncode == 2
    assert message in result.stderr.decode()
    assert result.stdout == b""


def test_a_file_that_is_not_there(folder):
    result = run(folder, "in.jsonl", "--config", "no.toml", env={**os.environ, "COLUMNS": "300"})
    assert result.returncode == 2
    assert b"cannot read no.toml: No such file" in result.stderr


def test_a_variable_is_one_value(folder):
    """Stops and names of files may hold spaces."""
    (folder / "in.jsonl").rename(folder / "an input.jsonl")
    variables = {
        "OURO_BATCH_RUN_STOP": "END OF",
        "OURO_BATCH_RUN_STOP_TOKEN_ID": "1 2",
        "OURO_BATCH_RUN_INPUTS": "an input.jsonl",
    }
    result = run(folder, "-o", "out", env={**os.environ, **variables})
    assert result.returncode == 0, result.stderr
    options = orjson.loads((folder / "out.stats.json").read_bytes())["options"]
    assert options["sampling"]["stop"] == ["END OF"]
    assert options["sampling"]["stop_token_ids"] == [1, 2]
    assert options["inputs"] == ["an input.jsonl"]


def test_a_variable_that_the_command_does_not_know(folder):
    variables = {**os.environ, "OURO_BATCH_RUN_TEMPRATURE": "1", "COLUMNS": "300"}
    result = run(folder, "in.jsonl", env=variables)
    assert result.returncode == 2
    assert b"the variable OURO_BATCH_RUN_TEMPRATURE: run has no such option" in result.stderr
    assert b"did you mean 'OURO_BATCH_RUN_TEMPERATURE'?" in result.stderr


@pytest.mark.parametrize(
    ("name", "parameter", "kind"),
    [pytest.param(*option, id=f"{option[0]} {option[1].name}") for option in options()],
)
def test_every_option_has_the_variable_of_its_name(monkeypatch, name, parameter, kind):
    """OURO_BATCH_COMMAND_OPTION, whatever the option is called in the code."""
    option = parameter.name
    if parameter.param_type_name == "option":
        option = next(name for name in parameter.opts if name.startswith("--"))[2:]
    root = typer.main.get_command(app)
    command = root.commands[name]
    prefix = f"OURO_BATCH_{name.upper()}_"
    for needed in command.params:
        if needed.required:
            monkeypatch.setenv(prefix + needed.name.upper(), "x")
    (item,) = typing.get_args(kind)[:1] or [kind]
    text, value = "x", "x"
    if item is bool:
        text, value = ("0", False) if parameter.default else ("1", True)
    elif item in (int, float):
        text, value = "7", 7
    elif issubclass(item, Enum):
        text, value = [(choice.value, choice) for choice in item][-1]
    if kind == tuple[str, str]:
        text, value = "x x", "x"
    monkeypatch.setenv(prefix + option.replace("-", "_").upper(), text)
    context = command.make_context(name, [], parent=root.make_context("ouro-batch", [name]))
    found = context.params[parameter.name]
    found = found[0] if isinstance(found, (list, tuple)) else found
    assert getattr(found, "value", found) == getattr(value, "value", value)
    assert found != parameter.default


def test_the_reference_is_that_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from make_cli import reference

    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert written == reference(), "docs/cli.md is old: python docs/make_cli.py"


def test_every_option_of_every_command_says_what_it_does():
    for name, command in typer.main.get_command(app).commands.items():
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
            optional = parameter.param_type_name == "option" and not parameter.required
            flag = getattr(parameter, "is_flag", False)
            if optional and not flag and parameter.name != "help":
                named = isinstance(parameter.show_default, str)
                assert named or parameter.default is not None, (name, parameter.name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell):
    script = subprocess.run(
        [sys.executable, "-c", "from ouro_batch.cli import main; main()"],
        env={**os.environ, "_OURO_BATCH_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
    )
    assert "_OURO_BATCH_COMPLETE" in script.stdout
    assert "ouro-batch" in script.stdout
    assert script.returncode == 0, script.stderr


def test_completion_offers_commands_and_options():
    offered = subprocess.run(
        [sys.executable, "-c", "from ouro_batch.cli import main; main()"],
        env={
            **os.environ,
            "_OURO_BATCH_COMPLETE": "complete_bash",
            "COMP_WORDS": "ouro-batch run --max-t",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
    )
    assert "--max-tokens" in offered.stdout.split()
