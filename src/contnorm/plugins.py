"""Plugins: installed packages that add norms, strategies, memories, networks and data sets.

A package names a function in the entry point group ``contnorm.plugins``. The function is called once, when a name is
used that this package does not have, or when components are listed. It calls the ``register_...`` functions. A plugin
that fails is reported with one warning. Plugins are loaded in the order of the names of their packages, so that of two
that register the same name always the same one fails.
"""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

__all__ = ["BUILT_IN", "GROUP", "Origin", "current_origin", "load_plugins"]

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

_origin = Origin()  # of the plugin that is being loaded
_is_loaded = False


def current_origin() -> Origin:
    """Return the origin of a component that is registered now: the plugin that is being loaded, or this process."""
    return _origin


def load_plugins() -> bool:
    """Load the plugins of all installed packages; return False if that was done before."""
    global _is_loaded, _origin
    if _is_loaded:
        return False
    _is_loaded = True  # first: a plugin that uses an unknown name must not start this again
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (str(_origin_of(entry)), entry.name)):
        _origin = _origin_of(entry)
        try:
            plugin = entry.load()
            (plugin.register if isinstance(plugin, types.ModuleType) else plugin)()
        except (Exception, SystemExit) as error:  # plugins raise errors of any type
            logging.getLogger("contnorm").warning(
                f"plugin {entry.name!r} of {_origin}: can't be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split())}). Update or uninstall the package."
            )
        finally:
            _origin = Origin()
    return True


def _origin_of(entry: EntryPoint) -> Origin:
    return Origin(entry.dist.name, entry.dist.version) if entry.dist is not None else Origin(entry.module)
