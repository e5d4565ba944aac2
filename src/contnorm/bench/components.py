"""Registered components: strategies, memories, networks and data sets that a program or a plugin adds under a name.

Components of this package are in the registries of their packages, such as ``STRATEGIES``. The functions that users
call, such as ``bench.register_strategy``, are in `registries`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from contnorm.errors import UserError
from contnorm.plugins import Origin, load_plugins

__all__ = [
    "KINDS",
    "Component",
    "Kind",
    "add_component",
    "components",
    "components_of",
    "find_component",
    "registered",
    "remove_component",
    "share_components",
]

Kind = Literal["strategy", "memory", "model", "dataset"]
KINDS: tuple[Kind, ...] = ("strategy", "memory", "model")  # their names are in settings
_SETTINGS: dict[Kind, tuple[str, str]] = {  # the setting that names a component
    "strategy": ("strategy", "name"),
    "memory": ("memory", "kind"),
    "model": ("model", "name"),
    "dataset": ("stream", "source"),
}


@dataclass(frozen=True)
class Component:
    """A component that is registered under a name.

    Attributes:
        kind: Its kind.
        name: Its name in the settings of runs.
        target: The class, function or module; or ``"module:Name"``, which is imported on first use.
        summary: One-line description for listings.
        origin: Where it comes from.
        code: The hash of its code in the process that registered it, for use in another process.
    """

    kind: Kind
    name: str
    target: object
    summary: str
    origin: Origin
    code: str | None = None

    def load(self) -> object:
        """Return the class, function or module; raises `UserError` if it can't be imported."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # code of another package raises errors of any type
            raise UserError(
                f"{self.kind} {self.name!r} of {self.origin}: {self.target} can't be imported "
                f"({type(error).__name__}: {error})."
            ) from error


_components: dict[tuple[str, str], Component] = {}


def add_component(component: Component, exist_ok: bool = False) -> None:
    """Add a component; one of the same kind and name is replaced only if ``exist_ok`` is True."""
    key = (component.kind, component.name)
    if key in _components and not exist_ok:
        raise UserError(
            f"{component.kind} {component.name!r}: is registered already, by {_components[key].origin}. Use another "
            f"name, or exist_ok=True to replace it."
        )
    _components[key] = component


def remove_component(kind: Kind, name: str) -> None:
    """Remove a component; without effect if there is none of this name."""
    _components.pop((kind, name), None)


def registered(name: str, kind: str = "") -> Component | None:
    """Return the component of a name, of one kind or of any; None if no loaded one has it."""
    if kind:
        return _components.get((kind, name))
    return next((component for known in KINDS if (component := _components.get((known, name)))), None)


def find_component(kind: str, name: str) -> Component | None:
    """Return the component of a kind and a name, after plugins are loaded if it is not known yet; None if none has it.

    Call it for names that are not built in, so that runs of built-in components load no plugin.
    """
    if (kind, name) not in _components:
        load_plugins()
    return _components.get((kind, name))


def components(kind: str) -> list[Component]:
    """Return the components of a kind, without loading plugins."""
    return [component for component in _components.values() if component.kind == kind]


def components_of(settings: Mapping[str, Mapping[str, object]]) -> list[Component]:
    """Return the registered components that nested settings name."""
    names = {kind: str(settings.get(group, {}).get(key)) for kind, (group, key) in _SETTINGS.items()}
    names["dataset"] = names["dataset"].partition("@")[0]  # a digest of the data follows
    return [component for key in names.items() if (component := _components.get(key))]


def share_components(components: Iterable[Component]) -> None:
    """Add the components of a parent process to those of this one."""
    for component in components:
        add_component(component, exist_ok=True)
