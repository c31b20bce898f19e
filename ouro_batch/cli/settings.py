"""Options from a file: ``--config FILE``, a TOML table a command, below command line and variables.

Each command's options can also come from the environment as ``OURO_BATCH_COMMAND_OPTION``; that is
click's doing (``auto_envvar_prefix``), which looks at the command line first, then at the variable,
then at what the file gave. A variable with a value for ``WHOLE`` is one value, spaces and all.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any

import typer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "OURO_BATCH"
WHOLE = ("inputs", "outputs", "stop")


def load(context: typer.Context, value: str | None) -> str | None:
    """Callback of ``--config``: make the file's values the defaults of this command.

    Raises:
        typer.BadParameter: the file cannot be read, or it or a variable names what the command
            does not know.
    """
    _check_variables(context)
    if value is not None:
        context.default_map = _from_file(context, value)
    context.default_map = {**(context.default_map or {}), **_whole_values(context)}
    return value


def _whole_values(context: typer.Context) -> dict[str, str | list[str]]:
    """What variables say of ``WHOLE``, which click would cut at white space, and of arguments.

    click asks no variables for these.
    """
    found: dict[str, str | list[str]] = {}
    for parameter in context.command.params:
        if parameter.name in WHOLE or parameter.param_type_name == "argument":
            parameter.allow_from_autoenv = False
            text = os.environ.get(f"{context.auto_envvar_prefix}_{parameter.name.upper()}")
            if text:
                found[parameter.name] = [text] if parameter.name in WHOLE else text
    return found


def _from_file(context: typer.Context, value: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {value}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{value} is not valid TOML: {error}") from None
    commands = context.find_root().command.commands
    for table, values in tables.items():
        if table not in commands:
            raise typer.BadParameter(
                f"{value}: there is no command {table!r}{_nearest(table, list(commands))}"
                " (options belong into a table of their command, such as [run])"
            )
        if not isinstance(values, dict):
            raise typer.BadParameter(f"{value}: {table} must be a table, as [{table}]")
    return _defaults(value, context.command, tables.get(context.command.name, {}))


def _check_variables(context: typer.Context) -> None:
    prefix = f"{context.auto_envvar_prefix}_"
    known = [f"{prefix}{parameter.name.upper()}" for parameter in context.command.params]
    for variable in os.environ:
        if variable.startswith(prefix) and variable not in known:
            raise typer.BadParameter(
                f"{context.command.name} has no such option{_nearest(variable, known)}",
                param_hint=f"the variable {variable}",
            )


def _defaults(file: str, command: Any, values: dict[str, Any]) -> dict[str, Any]:
    known = {p.name: p for p in command.params if p.name not in ("config", "help")}
    names = {name: name for name in known}
    for parameter in known.values():
        for option in parameter.opts:
            names[option.lstrip("-").replace("-", "_")] = parameter.name
    found = {}
    for key, value in values.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            spelled = [n.replace("_", "-") for n in names if len(n) > 1]
            near = _nearest(key.replace("_", "-"), spelled)
            raise typer.BadParameter(f"{file}: {command.name} has no option {key!r}{near}")
        found[name] = _checked(file, key, known[name], value)
    return found


def _checked(file: str, key: str, parameter: Any, value: Any) -> Any:
    """``value`` if it has the shape that the option takes; click checks what it says."""
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1
    flag = getattr(parameter, "is_flag", False)
    if several:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            raise typer.BadParameter(f"{file}: {key} must be a list, got {value!r}")
        return value
    if isinstance(value, (dict, list)) or (flag != isinstance(value, bool)):
        wanted = "true or false" if flag else "one value"
        raise typer.BadParameter(f"{file}: {key} must be {wanted}, got {value!r}")
    return value


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
