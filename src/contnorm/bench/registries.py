"""What runs can be made of: what there is, registration of more, and making of data sets. Needs no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contnorm.bench.components import Component, ComponentKind, add_component, components, launchers
from contnorm.bench.data.arrays import array_source, read_class_folders, read_npz
from contnorm.bench.data.dataset import Progress, describe_stored, list_stored, new_folder, read_manifest, save_source
from contnorm.bench.data.multilabel import PUBLISHED_STREAMS, build, list_cocoseq, list_csv, list_nus_wideseq
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
SIDES = (256, 224)  # in the code that made the published streams, and in the paper's table of data sets
_DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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


def _check_name(name: str) -> None:
    """Raise a `UserError` if a name cannot be that of a data set of the user's."""
    if not isinstance(name, str) or not _DATASET_NAME.fullmatch(name):
        raise UserError(f"name={name!r}: use letters, digits, '-', '_' and '.', and start with a letter or digit.")
    if name.lower() in {*SOURCES, *STREAMS, *STREAM_ALIASES, "add"}:
        raise UserError(f"name={name!r}: is a stream or a data set of contnorm. Use another name.")


def add_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    folder: str | Path | None = None,
    npz: str | Path | None = None,
    tasks: int | Sequence[Sequence[Any]] | None = None,
    size: int | None = None,
    test_share: float = 0.2,
    progress: Progress = lambda *_: None,
) -> Path:
    """Add a data set of your own under the data root; its name is then the name of a stream.

    Args:
        name: Name of the data set and of its stream.
        root: Folder of data sets; None for the environment variable ``CONTNORM_DATA``, or ``./data``.
        folder: Folder of images with one label each: ``train/<class>/*`` and ``test/<class>/*``, or ``<class>/*``.
        npz: File of arrays: ``x_train``, ``y_train``, ``x_test`` and ``y_test``; optionally ``task_train`` and
            ``task_test``, the task of each sample.
        tasks: Number of tasks, over which the classes are split in sorted order; or a list of the classes of each
            task. Not with tasks of the samples.
        size: Height and width that images of a folder are resized and center-cropped to; None if all have the same.
        test_share: Share of each class that is the test split, if there are no test samples.
        progress: Called with what is done, and how much of it.

    Returns:
        The folder of the data set.

    Example:
        >>> import tempfile, numpy as np
        >>> root = Path(tempfile.mkdtemp())
        >>> np.savez(root / "blobs.npz", x=np.random.default_rng(0).normal(size=(80, 8)), y=np.arange(80) % 4)
        >>> add_dataset("blobs", root, npz=root / "blobs.npz", tasks=2).name
        'blobs'
        >>> from contnorm import bench
        >>> bench.load_stream("blobs", root=root).tasks[1].classes
        (2, 3)
    """
    _check_name(name)
    target = data_root(None if root is None else Path(root).expanduser(), create=True) / name
    if target.exists():
        raise UserError(f"{target}: exists. Use another name, or delete it to add the data set again.")
    with new_folder(target) as partial:
        if npz is not None:
            source = read_npz(Path(npz).expanduser(), tasks=tasks, test_share=test_share, name=name)
        elif folder is not None:
            arrays = read_class_folders(Path(folder).expanduser(), size, test_share, partial, progress)
            source = array_source(*arrays, tasks=tasks, task_ids=None, name=name)
        else:
            raise UserError("add_dataset: give a folder of images or an .npz file.")
        save_source(source, partial, stream="arrays" if folder is None else "folder")
    return target


def build_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    coco: str | Path | None = None,
    nus: str | Path | None = None,
    csv: str | Path | None = None,
    images: str | Path | None = None,
    groups: str | Path | None = None,
    ids: str | Path | None = None,
    out: str | Path | None = None,
    size: int = 256,
    allow_missing: bool = False,
    jobs: int | None = None,
    base: str | None = None,
    progress: Progress = lambda *_: None,
) -> Path:
    """Build a multi-label data set. One that is already built is not changed.

    Args:
        name: Name of the data set: ``cocoseq`` with ``coco``, ``nus-wideseq`` with ``nus``, or a new name with ``csv``.
        root: Folder of data sets; None for the default one.
        coco: Folder of MS-COCO.
        nus: Folder of NUS-WIDE.
        csv: Table of images with their tasks and labels; None for ``labels.csv`` in the folder of the images.
        images: Folder of the images; None for that of the table.
        groups: Table that assigns classes to groups; None to group by number of images.
        ids: Folder of the task lists; None for ``ids`` in the source folder, otherwise they are downloaded.
        out: Folder to build the data set in; None for one under the data root.
        size: Image side in pixels.
        allow_missing: Whether to build without missing images.
        jobs: Number of decoding threads; None for one per core.
        base: Address to download the task lists from.
        progress: Called with what is done, the number of decoded pictures, and the number of all.

    Returns:
        The folder of the data set.

    Example:
        >>> build_dataset("my data", csv="labels.csv")
        Traceback (most recent call last):
        contnorm.errors.UserError: name='my data': use letters, digits, ...
    """
    if name in PUBLISHED_STREAMS and size not in SIDES:
        raise UserError(f"size={size}: must be 256 or 224 for {name}.")
    paths = [None if path is None else Path(path).expanduser() for path in (coco, nus, csv, images, groups, ids, out)]
    coco_folder, nus_folder, table, pictures, group_table, lists, target = paths
    if name not in PUBLISHED_STREAMS:
        _check_name(name)
    target = target or data_root(None if root is None else Path(root).expanduser(), create=True) / name
    if name == "cocoseq" and coco_folder is not None:
        listing = list_cocoseq(coco_folder, lists, target, base)
    elif name == "nus-wideseq" and nus_folder is not None:
        listing = list_nus_wideseq(nus_folder, lists, target, base)
    elif name not in PUBLISHED_STREAMS and table is not None:
        listing = list_csv(name, table, pictures or table.parent, group_table)
    elif name not in PUBLISHED_STREAMS and pictures is not None:
        listing = list_csv(name, pictures / "labels.csv", pictures, group_table)
    else:
        raise UserError(
            f"{name}: build cocoseq from a folder of MS-COCO (coco=, --coco), nus-wideseq from one of NUS-WIDE (nus=, "
            f"--nus), and a data set of your own, with another name, from a table (csv=, --csv)."
        )
    build(listing, target, size, allow_missing=allow_missing, jobs=jobs, progress=progress)
    return target
