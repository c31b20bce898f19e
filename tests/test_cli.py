"""The command line as such: help, version, wrong use, and what it imports."""

import re
import subprocess
import sys
import typing
from dataclasses import dataclass

import pytest

import ouro_batch
from ouro_batch import cli
from ouro_batch.cli import app

PANELS = ("Input and output", "Sampling", "Early exit", "Engine", "Memory")


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def invoke(capsys, monkeypatch):
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def invoke(*arguments):
        with pytest.raises(SystemExit) as end:
            app(arguments, prog_name="ouro-batch")
        return Result(end.value.code, *capsys.readouterr())

    return invoke


def run_options():
    """The options of ``run``, as the command line knows them."""
    import typer

    command = typer.main.get_command(app).commands["run"]
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def test_version(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"ouro-batch {ouro_batch.__version__}\n"


def test_help_lists_the_command(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    assert re.search(r"\brun\b", result.stdout)


def test_help_of_run_has_every_option_in_a_panel(invoke):
    result = invoke("run", "--help")
    assert result.exit_code == 0
    for panel in PANELS:
        assert panel in result.stdout
    for option in run_options():
        assert option.opts[0] in result.stdout
        assert option.help
        assert option.rich_help_panel in PANELS


def test_every_optional_value_names_its_default():
    for option in run_options():
        if option.is_flag or option.required:
            continue
        assert option.default is not None or isinstance(option.show_default, str), option.name


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_does_not_import_torch(arguments):
    code = (
        "import sys\n"
        "from ouro_batch.cli import main\n"
        f"sys.argv = ['ouro-batch', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_python_m_is_the_same_command():
    command = [sys.executable, "-m", "ouro_batch", "--version"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == f"ouro-batch {ouro_batch.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run"],
        ["run", "p.jsonl"],
        ["run", "-m", "x"],
        ["run", "p.jsonl", "-m", "x", "--no-such-option"],
        ["run", "p.jsonl", "-m", "x", "--schedule", "other"],
        ["run", "p.jsonl", "-m", "x", "--max-tokens", "many"],
        ["run", "p.jsonl", "-m", "x", "--max-rows", "0"],
        ["run", "p.jsonl", "-m", "x", "--seed", "-1"],
    ],
)
def test_wrong_use_is_status_2_on_standard_error(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--temperature", "-0.5"], "temperature must be at least 0, got -0.5"),
        (["--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
        (["--top-k", "-1"], "top_k must be at least 0"),
        (["--exit-threshold", "-1"], "exit_threshold must be at least 0"),
        (["--min-loops", "3", "--max-loops", "2"], "max_loops 2 is below min_loops 3"),
        (["--stop", ""], "stop must not hold an empty string"),
        (["--kv-tokens", "5", "--kv-memory", "1"], "give one of them"),
        (["--kv-memory", "0"], "--kv-memory must be above 0 GiB"),
        (["--kv-memory", "-inf"], "--kv-memory must be above 0 GiB, got -inf"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1, got 1.5"),
        (["--stats", "no/such/folder/s.json"], "there is no folder"),
    ],
)
def test_values_out_of_range_are_status_2(invoke, tmp_path, arguments, message):
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "a"}\n')
    result = invoke("run", str(source), "-m", "x", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def options():
    """Each option and argument of each command: the command's name, the option, and its type."""
    import typer

    for name, command in typer.main.get_command(app).commands.items():
        kinds = typing.get_type_hints(getattr(cli, name))
        for parameter in command.params:
            if parameter.name not in ("help", "config"):
                (kind,) = {*(typing.get_args(kinds[parameter.name]) or [kinds[parameter.name]])} - {
                    type(None)
                }
                yield name, parameter, kind


def numbers():
    """Every option that takes a number, and numbers that it cannot take."""
    for name, parameter, kind in options():
        values = ["9" * 23, "4" * 20] if kind in (int, list[int]) else []
        values = ["inf", "1e300", "nan"] if kind is float else values
        for value in values:
            yield pytest.param(name, parameter, value, id=f"{name} {parameter.name} {value}")


@pytest.mark.parametrize(
    ("command", "parameter", "value"),
    list(numbers()),
)
def test_numbers_that_no_machine_holds_are_refused_by_name(invoke, command, parameter, value):
    arguments = {
        "run": ["run", "none.jsonl", "-m", "x"],
        "score": ["score", "none.jsonl", "-m", "x"],
        "check": ["check", "none.jsonl", "-m", "x"],
        "report": ["report", "none"],
        "bench": ["bench"],
    }[command]
    result = invoke(*arguments, parameter.opts[0], value)
    assert result.exit_code == 2
    assert result.stdout == ""
    words = " ".join(result.stderr.replace("\u2502", " ").split())
    assert parameter.opts[0] in words
    if result.stderr.startswith("error: "):  # else the options have bounds of their own
        shown = value if value.isdecimal() else str(float(value))
        assert re.search(rf" must be at most .*, got {re.escape(shown)}$", words)


def test_every_command_with_numbers_is_asked():
    assert {case.values[0] for case in numbers()} == {"run", "score", "check", "report", "bench"}
