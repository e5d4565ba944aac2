"""Add a user's data set under the data root. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contnorm.bench.data.added import add_arrays
from contnorm.bench.data.datasets import canonical_name
from contnorm.bench.data.registry import SOURCES, data_root
from contnorm.bench.files import Progress
from contnorm.bench.streams.tasks import ALIASES, STREAMS
from contnorm.errors import UserError

__all__ = ["add_dataset"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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
    if (folder is None) == (npz is None):
        raise UserError("add_dataset: give either a folder of images or an .npz file.")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"name={name!r}: use letters, digits, '-', '_' and '.', and start with a letter or digit.")
    if canonical_name(name.lower()) in {*SOURCES, *STREAMS, *ALIASES, "add"}:
        raise UserError(f"name={name!r}: is a stream or a data set of contnorm. Use another name.")
    return add_arrays(
        name,
        data_root(None if root is None else Path(root).expanduser(), create=True),
        folder=None if folder is None else Path(folder).expanduser(),
        npz=None if npz is None else Path(npz).expanduser(),
        tasks=tasks,
        size=size,
        test_share=test_share,
        progress=progress,
    )
