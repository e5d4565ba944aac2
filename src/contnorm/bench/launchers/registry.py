"""The table of launchers by name: those of this package, and those of the entry point group ``contnorm.launchers``.

The module of a launcher is imported when the launcher is created, so the table needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from contnorm.errors import UserError, unknown
from contnorm.plugins import BUILT_IN, Origin

__all__ = ["GROUP", "LAUNCHERS", "LauncherSpec", "create_launcher", "launchers"]

GROUP = "contnorm.launchers"


@dataclass(frozen=True)
class LauncherSpec:
    """A row of the table.

    Attributes:
        target: The class, as ``module:Class``.
        summary: One line that describes it.
        origin: Where it comes from.
    """

    target: str
    summary: str
    origin: Origin = BUILT_IN


_PACKAGE = "contnorm.bench.launchers"
LAUNCHERS = {
    "local": LauncherSpec(f"{_PACKAGE}.local:LocalLauncher", "this machine: its GPUs, or a process per CPU core"),
    "ray": LauncherSpec(f"{_PACKAGE}.ray_launcher:RayLauncher", "the nodes of a Ray cluster, with retries"),
}


def launchers() -> dict[str, LauncherSpec]:
    """Return all launchers by name. A name of this package can't be replaced.

    Example:
        >>> str(launchers()["local"].origin)
        'contnorm'
    """
    installed = {entry.name: _installed(entry) for entry in entry_points(group=GROUP)}
    return {**LAUNCHERS, **{name: spec for name, spec in sorted(installed.items()) if name not in LAUNCHERS}}


def _installed(entry: EntryPoint) -> LauncherSpec:
    origin = Origin(entry.module) if entry.dist is None else Origin(entry.dist.name, entry.dist.version)
    return LauncherSpec(f"{entry.module}:{entry.attr}", f"class {entry.attr} of {entry.module}", origin)


def create_launcher(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Create a launcher by name.

    Args:
        name: One of `launchers`.
        options: Arguments of its class, such as ``{"address": "auto"}`` for Ray.

    Raises:
        UserError: If the name or an option is unknown, or a library that the launcher needs is not installed.

    Example:
        >>> create_launcher("locl")
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown launcher 'locl'. Did you mean 'local'? There are: local, ...
    """
    known = launchers()
    if name not in known:
        raise unknown("launcher", name, known)
    module, _, attribute = known[name].target.partition(":")
    try:
        kind = attrgetter(attribute)(importlib.import_module(module))
        _check_options(name, options or {}, inspect.signature(kind).parameters)
        return kind(**(options or {}))
    except UserError:
        raise
    except Exception as error:  # code of another package raises errors of any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"launcher {name!r} of {known[name].origin}: can't be created ({reason}).") from error


def _check_options(name: str, options: Iterable[str], parameters: Mapping[str, inspect.Parameter]) -> None:
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # the class checks them
    for option in options:
        if option not in parameters:
            raise unknown(f"option of launcher {name}:", option, parameters)
