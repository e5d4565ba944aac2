"""The provenance of results: versions, device, data, and the git commit of the package."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.bench.components import components_of
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.precision import cn_kernel, cpu_instructions, device_name
from contnorm.kernels.triton.convolution.table import EMPTY, ConvolutionTable
from contnorm.plugins import BUILT_IN, Origin
from contnorm.registry import NORMS

__all__ = ["built_commit", "commit_of", "package_commit", "provenance"]


def provenance(
    config: RunConfig, source: Source, environment: RunEnvironment, convolutions: ConvolutionTable = EMPTY
) -> dict[str, Any]:
    """Return what the results depend on besides the settings: versions, device, precision, data and commit.

    Args:
        config: The settings.
        source: The data set.
        environment: Where the run is executed.
        convolutions: The table of convolution kernels of the run.
    """
    device = environment.device
    model = next((part for part in components_of(config) if part.kind == "model"), None)
    shared_weights = model is not None and isinstance(model.target, torch.nn.Module)
    return {
        **({"initial_weights": "those of the given module, for all seeds"} if shared_weights else {}),
        "versions": {
            "contnorm": contnorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{origin.package: origin.version for origin in _plugins(config)},
        },
        "device": {
            "kind": device.type,
            "name": device_name(device),
            "threads": torch.get_num_threads(),
            **(_cpu(config) if device.type == "cpu" else {}),
        },
        "precision": config.train.precision,
        "deterministic": config.train.deterministic,
        **({"convolutions": convolutions.digest} if convolutions else {}),
        "source": {"name": source.name, "fingerprint": source.fingerprint, **_source_details(source)},
        "commit": package_commit(),
    }


def _cpu(config: RunConfig) -> dict[str, str]:
    """Return what the bits of a run on a CPU depend on besides its threads."""
    kernel = cn_kernel(config)
    return {"instructions": cpu_instructions(), **({} if kernel is None else {"cn_kernel": kernel})}


def _plugins(config: RunConfig) -> list[Origin]:
    """Return the installed packages that have added components of a run."""
    origins = [component.origin for component in components_of(config)]
    if config.norm.name in NORMS:
        origins.append(NORMS[config.norm.name].origin)
    return [origin for origin in origins if origin.package and origin != BUILT_IN]


def _source_details(source: Source) -> dict[str, Any]:
    """Return how much of a published data set was present, and how it was split and decoded."""
    if not isinstance(source, MultiLabelSource):
        return dict(source.details)
    images = len(source.train_images) + len(source.test_images)
    return {"images": images, "published_images": source.published_images, "missing_images": source.missing_images}


@cache
def package_commit() -> str | None:
    """Return the commit of the checkout that this package is imported from, with ``-dirty`` if it has changes.

    An installed package has no checkout; its commit is the one that it was built from, in the file ``COMMIT``.
    """
    init = Path(contnorm.__file__).resolve()
    return commit_of(init) or built_commit(init.parent)


def built_commit(package: Path) -> str | None:
    """Return the commit that the build of a package has written to its folder; None if there is none.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> built_commit(folder) is None
        True
        >>> _ = (folder / "COMMIT").write_text("0123456789ab\\n")
        >>> built_commit(folder)
        '0123456789ab'
    """
    with suppress(OSError, UnicodeDecodeError):
        return (package / "COMMIT").read_text(encoding="utf-8").strip() or None
    return None


def commit_of(file: Path) -> str | None:
    """Return the commit of the repository that tracks a file; None if no repository does.

    A repository may contain a file without tracking it, such as a project with a virtual environment inside. Its commit
    says nothing about the file.

    Example:
        >>> import tempfile
        >>> commit_of(Path(tempfile.mkdtemp()) / "module.py") is None
        True
    """
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder; None if it fails, or git is not installed."""
    # Variables such as GIT_DIR, which git sets for hooks, could point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()
