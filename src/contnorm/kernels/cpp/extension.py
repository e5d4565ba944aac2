"""Extensions of torch in C++: sources of this package that include torch's headers, built on first use and loaded once.

Torch's own builder needs ninja and builds into a shared folder. These extensions are single files, so one call of the
compiler is enough, and the private cache of `build` is used.
"""

from __future__ import annotations

import logging
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from contnorm.kernels.cpp.build import BuildError, compile_library

__all__ = ["is_built", "load"]

_log = logging.getLogger(__name__)


def is_built(name: str) -> bool:
    """Whether the extension is in the cache for this version of torch and Python."""
    try:
        _library(name, cached=True)  # raises if it is not there
    except BuildError:
        return False
    return True


@cache
def load(name: str) -> Any:
    """Return the extension as a module, built if it is not in the cache; None if that is not possible.

    Example:
        >>> load("not-a-source") is None
        True
    """
    try:
        loader = ExtensionFileLoader(_module_name(name), str(_library(name)))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    except (BuildError, ImportError) as error:  # ImportError: a library of another version of torch
        _log.debug("the C++ extension %s can't be used: %s", name, error)
        return None
    return module


def _module_name(name: str) -> str:
    return f"contnorm_{name}"


def _library(name: str, cached: bool = False) -> Path:
    """Return the library of an extension; with ``cached``, without compiling it."""
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    flags = ["-O2", "-std=c++20", "-fvisibility=hidden", f"-DMODULE_NAME={_module_name(name)}"]
    flags += [part for folder in folders for part in ("-isystem", str(folder))]
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    identity = [torch.__version__, str(torch.version.git_version), sysconfig.get_config_var("SOABI") or ""]
    source = Path(__file__).with_name(f"{name}.cpp")
    return compile_library(source, flags, libraries=libraries, depends_on=identity, cached=cached)
