"""What the results of a run depend on besides its settings: numerics, versions, device, data, and the git commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import contnorm
from contnorm.bench.components import components_of, is_user_code
from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.bench.data.dataset import MultiLabelSource, Source
from contnorm.bench.engine.run import Run
from contnorm.kernels import VARIABLE as KERNEL_VARIABLE
from contnorm.kernels.convolution import EMPTY, ConvolutionTable
from contnorm.kernels.cpp import unavailable_reason
from contnorm.registry import BUILT_IN, NORMS

_one_thread_at_a_time = threading.RLock()


@contextmanager
def numerics(config: TrainConfig, threads: int = 1) -> Iterator[None]:
    """Set the precision and determinism of torch for a run; all settings are restored afterwards.

    The number of threads determines the order of sums, so it is fixed for each run on a CPU. The results then do not
    depend on other runs that are executed at the same time in other processes. All of this is global in a process, so
    runs of several Python threads take turns.

    Args:
        config: The training settings.
        threads: CPU threads of the run.
    """
    with _one_thread_at_a_time:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        deterministic: Any = torch.utils.deterministic
        old = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
        old_threads, old_deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
        old_fill = deterministic.fill_uninitialized_memory
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        try:
            torch.set_num_threads(threads)
            matmul.allow_tf32 = cudnn.allow_tf32 = config.precision != "fp32"
            cudnn.deterministic, cudnn.benchmark = config.deterministic, False
            # Not torch.use_deterministic_algorithms: it also imports torch's compiler, which takes seconds.
            torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
            # Deterministic mode fills every new tensor before use: half of all kernels of a step, without any effect.
            deterministic.fill_uninitialized_memory = False
            yield
        finally:
            torch.set_num_threads(old_threads)
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = old
            torch.set_deterministic_debug_mode(old_deterministic)
            deterministic.fill_uninitialized_memory = old_fill


def cpu_circumstances(config: RunConfig) -> dict[str, Any]:
    """Return what the bits of a run on a CPU depend on: torch's instruction set, such as AVX2, and the kernel of CN.

    The kernel is ``cpp``, or ``torch`` if it can't be compiled here. One that the settings or ``CONTNORM_KERNEL`` name
    is returned as it is. It is left out if the run can't have such layers; a norm or network of the user may have them.
    """
    circumstances = {"instructions": torch.backends.cpu.get_cpu_capability()}
    has_cn = config.norm.name == "cn" and config.norm.layers == "ours"
    if has_cn or is_user_code(config.norm.name) or is_user_code(config.model.name):
        named = dict(config.norm.options).get("kernel") or os.environ.get(KERNEL_VARIABLE) or "auto"
        chosen = "cpp" if unavailable_reason() is None else "torch"
        circumstances["cn_kernel"] = chosen if named == "auto" else str(named)
    return circumstances


def provenance(
    run: Run, source: Source, device: torch.device, convolutions: ConvolutionTable = EMPTY
) -> dict[str, Any]:
    """Return what the results depend on besides the settings: versions, device, precision, data and commit.

    Args:
        run: The run.
        source: The data set.
        device: The device it is executed on.
        convolutions: The table of convolution kernels of the run.
    """
    config, details = run.config, dict[str, Any]()
    parts = components_of(config)
    origins = [part.origin for part in parts] + ([NORMS[config.norm.name].origin] if config.norm.name in NORMS else [])
    if isinstance(source, MultiLabelSource):  # how much of a published data set was present
        images = len(source.train_images) + len(source.test_images)
        counts = {"published_images": source.published_images, "missing_images": source.missing_images}
        details = {"images": images, **counts}
    else:
        details = dict(source.details)
    on_gpu = device.type == "cuda"
    shared_weights = any(part.kind == "model" and isinstance(part.target, nn.Module) for part in parts)
    return {
        **({"initial_weights": "those of the given module, for all seeds"} if shared_weights else {}),
        "versions": {
            "contnorm": contnorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{origin.package: origin.version for origin in origins if origin.package and origin != BUILT_IN},
        },
        "device": {
            "kind": device.type,
            "name": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            **({} if on_gpu else cpu_circumstances(config)),
        },
        "precision": config.train.precision,
        "deterministic": config.train.deterministic,
        **({"convolutions": convolutions.digest} if convolutions.entries else {}),
        "source": {"name": source.name, "fingerprint": source.fingerprint, **details},
        "commit": package_commit(),
    }


@cache
def package_commit() -> str | None:
    """Return the commit of the checkout that this package is imported from, with ``-dirty`` if it has changes.

    An installed package has no checkout; its commit is the one that it was built from, in the file ``COMMIT``.
    """
    init = Path(contnorm.__file__).resolve()
    built = init.with_name("COMMIT")
    return commit_of(init) or (built.read_text().strip() if built.is_file() else None)


def commit_of(file: Path) -> str | None:
    """Return the commit of the repository that tracks a file; None if no repository does.

    A repository may contain a file without tracking it, such as a project with a virtual environment inside. Its commit
    says nothing about the file.
    """
    # Variables such as GIT_DIR, which git sets for hooks, could point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    if shutil.which("git") is None:
        return None
    described = None
    for arguments in (
        ("ls-files", "--error-unmatch", "--", file.name),
        ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
    ):
        command = ["git", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:  # no repository tracks the file
            return None
        described = done.stdout.strip()
    return described
