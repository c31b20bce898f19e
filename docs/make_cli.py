"""Writes docs/cli.md from the command line itself: ``python docs/make_cli.py``."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from ouro_batch.cli import app
from ouro_batch.cli.settings import PREFIX

TARGET = Path(__file__).with_name("cli.md")
HEAD = f"""# Command line

Made from the code by `python docs/make_cli.py`; a test keeps both equal.

Every option can also be given by a variable of the environment, `{PREFIX}_COMMAND_OPTION`, as in `{PREFIX}_RUN_MAX_TOKENS=64`, and by a TOML file, `--config FILE`, which has a table for each command:

```toml
[run]
model = "ByteDance/Ouro-1.4B"
max-tokens = 64
stop = ["\\n\\n"]
ordered = false
```

Arguments have names too: `inputs` (a list) of run, score and check, `outputs` of report, `model` of fetch. The command line counts first, then the variable, then the file. An unknown name is refused, with the nearest known one. `ouro-batch --install-completion` installs completion for the shell in use (bash, zsh, fish), `--show-completion` prints it.
"""  # noqa: E501


def reference() -> str:
    """The whole page."""
    commands = typer.main.get_command(app).commands
    return "\n".join([HEAD, *(_command(name, command) for name, command in commands.items())])


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["ouro-batch", name, *(a.metavar for a in arguments), "[OPTIONS]"])
    lines = [f"## {name}", "", f"`{usage}`", "", inspect.cleandoc(command.help or ""), ""]
    lines += [f"- `{argument.metavar}`: {argument.help}" for argument in arguments]
    lines += [""] if arguments else []
    panels = list(dict.fromkeys(getattr(o, "rich_help_panel", None) or "Options" for o in options))
    for panel in panels:
        lines += [f"**{panel}**", "", "| option | default | |", "|---|---|---|"]
        for option in options:
            if (getattr(option, "rich_help_panel", None) or "Options") == panel:
                lines.append(_row(option))
        lines.append("")
    return "\n".join(lines)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.metavar:
        names += f" {option.metavar}"
    elif isinstance(option.default, Enum):
        names += " " + "\\|".join(choice.value for choice in type(option.default))
    return f"| {names} | {_default(option)} | {option.help} |"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    value = getattr(option.default, "value", option.default)
    if isinstance(value, bool):
        if option.secondary_opts:
            return f"`{(option.opts if value else option.secondary_opts)[0]}`"
        return "on" if value else "off"
    return f"`{value}`"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
