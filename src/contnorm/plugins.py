"""Plugins: installed packages that add norms, strategies, memories, networks and data sets.

A package names a function in the entry point group ``contnorm.plugins``. The function is called once, when a name is
used that this package does not have, or when components are listed. It calls the ``register_...`` functions. A plugin
that fails is reported with one warning; what it had registered until then is removed. Plugins are loaded in the order
of the names of their packages, so that of two that register the same name always the same one fails.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

__all__ = ["BUILT_IN", "GROUP", "Origin", "current_origin", "has_additions", "load_plugins", "track_registry"]

GROUP = "contnorm.plugins"


@dataclass(frozen=True)
class Origin:
    """Where a component comes from.

    Attributes:
        package: Name of the distribution; empty for a component that a program registered in this process.
        version: Its version; empty if it is unknown.

    Example:
        >>> str(Origin("my-norms", "1.2")), str(Origin())
        ('my-norms 1.2', 'this process')
    """

    package: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip() or "this process"


BUILT_IN = Origin("contnorm")

_origin: ContextVar[Origin | None] = ContextVar("plugin_origin", default=None)
_is_loaded = False
_registries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # each with its content before any plugin


def current_origin() -> Origin:
    """Return the origin of a component that is registered now: the plugin that is being loaded, or this process."""
    return _origin.get() or Origin()


def track_registry(registry: dict[Any, Any]) -> None:
    """Name a registry that plugins add to, so that the additions of a plugin that fails are removed."""
    _registries.append((registry, dict(registry)))


def has_additions() -> bool:
    """Whether a program or a plugin has registered a component."""
    return any(registry != before for registry, before in _registries)


def load_plugins() -> bool:
    """Load the plugins of all installed packages; return False if that was done before."""
    global _is_loaded
    if _is_loaded:
        return False
    _is_loaded = True  # first: a plugin that uses an unknown name must not start this again
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (str(_origin_of(entry)), entry.name)):
        origin = _origin_of(entry)
        before = {id(registry): dict(registry) for registry, _ in _registries}
        try:
            with _registering(origin):
                _register(entry)
        except (Exception, SystemExit) as error:  # plugins raise errors of any type
            for registry, initial in _registries:  # one that was imported by this plugin has its initial content
                content = before.get(id(registry), initial)
                registry.clear()
                registry.update(content)
            message = " ".join(str(error).split())
            logging.getLogger("contnorm").warning(
                f"plugin {entry.name!r} of {origin}: can't be loaded ({type(error).__name__}: {message}). Update or "
                f"uninstall the package."
            )
    return True


def _register(entry: EntryPoint) -> None:
    plugin = entry.load()
    register = getattr(plugin, "register", None) if isinstance(plugin, types.ModuleType) else plugin
    if not callable(register):
        raise TypeError(f"{entry.value} must be a function, or a module with a function register()")
    register()


def _origin_of(entry: EntryPoint) -> Origin:
    return Origin(entry.dist.name, entry.dist.version) if entry.dist is not None else Origin(entry.module)


@contextmanager
def _registering(origin: Origin) -> Iterator[None]:
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)
