"""The launchers by name: those of this package, and those of the entry point group ``contnorm.launchers``.

The module of a launcher is imported when the launcher is created, so this table needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from contnorm.errors import UserError, unknown
from contnorm.registry import BUILT_IN, Origin

__all__ = ["GROUP", "LauncherInfo", "create_launcher", "launchers"]

GROUP = "contnorm.launchers"


class LauncherInfo(NamedTuple):
    """A launcher: its class as ``module:Class``, a line that describes it, and where it comes from."""

    target: str
    summary: str
    origin: Origin = BUILT_IN


_LAUNCHERS = {
    "local": LauncherInfo("", "this machine: its GPUs, or a process per CPU core"),
    "ray": LauncherInfo("contnorm.bench.engine.ray:RayLauncher", "the nodes of a Ray cluster, with retries"),
}


def launchers() -> dict[str, LauncherInfo]:
    """Return all launchers by name. A name of this package can't be replaced.

    Example:
        >>> str(launchers()["local"].origin)
        'contnorm'
    """
    installed = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        origin = Origin(entry.module) if entry.dist is None else Origin(entry.dist.name, entry.dist.version)
        summary = f"class {entry.attr} of {entry.module}"
        installed[entry.name] = LauncherInfo(f"{entry.module}:{entry.attr}", summary, origin)
    return {**installed, **_LAUNCHERS}


def create_launcher(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Create a launcher by name; None for this machine.

    Args:
        name: One of `launchers`.
        options: Arguments of its class, such as ``{"address": "auto"}`` for Ray.

    Raises:
        UserError: If the name is unknown, or the launcher can't be created.

    Example:
        >>> create_launcher("locl")
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown launcher 'locl'. Did you mean 'local'? There are: local, ...
    """
    known = launchers()
    if name not in known:
        raise unknown("launcher", name, known)
    module, _, attribute = known[name].target.partition(":")
    if not module:
        return None
    try:
        return getattr(importlib.import_module(module), attribute)(**(options or {}))
    except UserError:
        raise
    except Exception as error:  # code of another package raises errors of any type
        raise UserError(f"launcher {name!r}: can't be created ({type(error).__name__}: {error}).") from error
