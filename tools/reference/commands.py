"""Page of all commands, from their functions."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer

from contnorm.cli.main import COMMANDS, examples_of, load_command
from tools.reference import errors
from tools.reference.markdown import code, notice, table

__all__ = ["page"]

INTRODUCTION = """\
`contnorm COMMAND --help` shows the same. Options that are marked as repeatable can be used several times. The
[settings](settings.md) of a run can also be set with `--set`, and [exit codes and errors](#exit-codes-and-errors) are
the same for all commands."""


def page() -> str:
    """All commands with their arguments, options and examples."""
    lines = ["# Commands", "", INTRODUCTION, "", notice("the commands"), ""]
    lines += table(("command", "purpose"), [(f"[`{name}`](#contnorm-{name})", text) for name, text in COMMANDS.items()])
    lines += ["", "`contnorm --version` shows the version."]
    for name in COMMANDS:
        lines += ["", *_command(name)]
    return "\n".join([*lines, "", errors.section()])


def _command(name: str) -> list[str]:
    command = load_command(name)
    assert command.callback is not None
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    rows: dict[str, list[tuple[str, ...]]] = {"argument": [], "option": []}
    for parameter in command.params:
        if parameter.name in hints and hints[parameter.name] is not typer.Context:
            rows[parameter.param_type_name].append(_row(parameter, hints[parameter.name]))
    lines = [f"## contnorm {name}", "", COMMANDS[name]]
    for kind, found in rows.items():
        if found:
            lines += ["", *table((kind, "type", "default", "meaning"), found)]
    return [*lines, "", "```text", *examples_of(command), "```"]


def _row(parameter: Any, hint: Any) -> tuple[str, ...]:
    if parameter.param_type_name == "argument":
        names = code(parameter.metavar or str(parameter.name).upper())
    else:
        names = ", ".join(map(code, sorted(parameter.opts, key=len, reverse=True)))
    return names, _type(hint), _default(parameter), str(parameter.help)


def _type(hint: Any) -> str:
    """Type of the value that is typed, without None and without ``list`` of repeatable options."""
    base = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(base) in (Union, types.UnionType):
        base = next(one for one in get_args(base) if one is not type(None))
    if get_origin(base) is list:
        base = get_args(base)[0]
    return {bool: "flag", Path: "path", str: "text", int: "int", float: "float"}[base]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, "", False):
        return ""
    return code(parameter.default)
