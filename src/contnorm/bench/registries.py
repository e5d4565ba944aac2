"""Names, summaries and origins of everything that a run can be made of, and registration of more. Needs no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contnorm.bench.components import Component, ComponentKind, add_component, components, launchers
from contnorm.bench.data.dataset import describe_stored, list_stored, read_manifest
from contnorm.bench.data.registry import SOURCES, data_root
from contnorm.bench.memories import MEMORIES
from contnorm.bench.models import NETWORKS
from contnorm.bench.strategies import ALIASES, STRATEGIES
from contnorm.bench.streams.tasks import ALIASES as STREAM_ALIASES
from contnorm.bench.streams.tasks import STREAMS
from contnorm.errors import UserError, unknown
from contnorm.registry import BUILT_IN, NORMS, current_origin, load_plugins

REGISTERED_KINDS = ("strategy", "memory", "model", "dataset")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class Listing(NamedTuple):
    """One entry of `available`.

    Attributes:
        summary: One-line description.
        origin: ``"contnorm"``, the package and its version, ``"this process"``, the data root of an added data set, or
            ``"your own"`` for user code.

    Example:
        >>> available()["strategies"]["er-ace"].origin
        'contnorm'
    """

    summary: str
    origin: str


def available(root: str | Path | None = None) -> dict[str, dict[str, Listing]]:
    """Return the norms, streams, strategies, memories, models and launchers, with their summaries and origins.

    Plugins are loaded.

    Args:
        root: Folder of data sets, whose added ones are streams; None for the environment variable ``CONTNORM_DATA``, or
            ``./data``.

    Example:
        >>> available()["memories"]["balanced"].origin, list(available())
        ('contnorm', ['norms', 'streams', 'strategies', 'memories', 'models', 'launchers'])
    """
    load_plugins()
    folder = data_root(None if root is None else Path(root).expanduser())
    stored = {name: path for name, path in list_stored(folder).items() if name not in STREAMS}
    under_root = {name: Listing(describe_stored(read_manifest(path)), str(folder)) for name, path in stored.items()}
    in_file = Listing("code in a file", "your own")
    return {
        "norms": {
            **{spec.name: Listing(spec.summary, str(spec.origin)) for spec in NORMS.values()},
            "path/to/file.py:Class": in_file,
        },
        "streams": {**_built_in(STREAMS.values()), **_added("dataset"), **under_root},
        "strategies": {**_built_in(STRATEGIES.values()), **_added("strategy"), "path/to/file.py:Class": in_file},
        "memories": {**_built_in(MEMORIES.values()), **_added("memory"), "path/to/file.py:Class": in_file},
        "models": {
            **{name: Listing(summary, str(BUILT_IN)) for name, summary in NETWORKS.items()},
            **_added("model"),
            "path/to/file.py:make": in_file,
        },
        "launchers": {name: Listing(one.summary, str(one.origin)) for name, one in launchers().items()},
    }


def _built_in(specs: Iterable[Any]) -> dict[str, Listing]:
    return {spec.name: Listing(spec.summary, str(BUILT_IN)) for spec in specs}


def _added(kind: ComponentKind) -> dict[str, Listing]:
    return {added.name: Listing(added.summary, str(added.origin)) for added in components(kind)}


def register(
    kind: Literal["strategy", "memory", "model", "dataset"],
    name: str,
    target: Any,
    *,
    summary: str | None = None,
    exist_ok: bool = False,
) -> None:
    """Add a strategy, memory, network or data set under a name, for this process.

    It can be used like a built-in one: ``bench.run(strategy=name)``, and ``--strategy name`` if a plugin registers it.
    Its code is part of the identity of runs. For norms, see `contnorm.register_norm`.

    Args:
        kind: ``"strategy"``, ``"memory"``, ``"model"`` or ``"dataset"``.
        name: The name in settings, of letters, digits and ``_ . + -``; that of a data set is the name of its stream.
        target: A subclass of `Strategy` or `Memory`; a function or class that makes a network, called as
            ``make(input_shape, num_outputs)`` or with a third argument ``norm``; a function that makes a `Stream`,
            called as ``make(root, **settings)`` with the folder of data sets and the settings of the stream. Or
            ``"module:Name"``, which is imported on first use.
        summary: One-line description for listings. Default: the first line of the docstring.
        exist_ok: Whether to replace a registered component of the same name. Built-in ones can't be replaced.

    Example:
        >>> from contnorm.bench.components import remove_component
        >>> register("strategy", "half", "my_package.strategies:Half", summary="half of the loss")
        >>> available()["strategies"]["half"]
        Listing(summary='half of the loss', origin='this process')
        >>> remove_component("strategy", "half")
    """
    if kind not in REGISTERED_KINDS:
        raise unknown("kind of component", kind, REGISTERED_KINDS)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{kind} {name!r}: can't be registered. Use a name of letters, digits and '_', '.', '+', '-'.")
    if name.lower() in {*NORMS, *STRATEGIES, *ALIASES, *MEMORIES, *NETWORKS, *STREAMS, *STREAM_ALIASES, *SOURCES}:
        raise UserError(f"{kind} {name!r}: is the name of a built-in component, or of a norm. Use another name.")
    if not callable(target) and ":" not in str(target):
        raise UserError(f"{kind} {name!r}: {target!r} can't be registered. Use a class or function, or 'module:Name'.")
    earlier = next((component for component in components(kind) if component.name == name), None)
    if earlier is not None and not exist_ok:
        raise UserError(
            f"{kind} {name!r}: is registered already, by {earlier.origin}. Use another name, or exist_ok=True to "
            f"replace it."
        )
    if summary is None:
        summary = "" if isinstance(target, str) else (inspect.getdoc(target) or "").partition("\n")[0]
    add_component(Component(kind, name, target, summary, current_origin()))


def streams_of_source(source: str) -> list[str]:
    """Return the names of the streams that can be made of a data set.

    Example:
        >>> streams_of_source("cifar10")
        ['split-cifar10']
    """
    return [stream.name for stream in STREAMS.values() if source in stream.sources]
