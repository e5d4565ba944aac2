"""Compilation of C++ sources into shared libraries, which are cached in a folder of the user, and extensions of torch.

A library is compiled at its first use on a machine, and loaded from the cache afterwards. The name of its file has a
hash of everything that it depends on: source, flags, compiler and processor. So a change of any of them compiles it
again, and processes that compile the same library at once write the same file, each atomically.
``python -m contnorm.kernels.build`` compiles both libraries of the package ahead, as when an image is prepared.

The folder is ``$XDG_CACHE_HOME/contnorm/cpp``, by default in ``~/.cache``. Loading a library executes it, so the folder
is created for the user alone. Without a compiler, without a cache folder, or on other systems than Linux there is no
library, and callers have another implementation.

Extensions of torch include its headers. Torch's own builder needs ninja and builds into a shared folder. These
extensions are single files, so one call of the compiler is enough.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from contnorm.atomic_files import draft_of

COMPILERS = ("g++", "clang++", "c++")
# So long that it does not decide between two kernels on a busy machine: it only ends a compiler that hangs.
TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)


class BuildError(Exception):
    """A library could not be compiled; the message is the reason, without a full stop."""


def compile_library(
    source: Path,
    flags: Sequence[str] = (),
    *,
    libraries: Sequence[str] = (),
    depends_on: Sequence[str] = (),
    cached: bool = False,
) -> Path:
    """Return the shared library of a C++ source, compiled if it is not in the cache.

    Args:
        source: The C++ file.
        flags: Flags of the compiler; ``-shared -fPIC`` are added.
        libraries: Flags of the linker, which follow the source, such as ``-L/folder`` and ``-lname``.
        depends_on: Further text that the library depends on, such as the version of torch.
        cached: Whether to raise an error instead of compiling.

    Raises:
        BuildError: If it could not be compiled, or the cache folder can't be used.

    Example:
        >>> import ctypes, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "seven.cpp"
        >>> _ = file.write_text('extern "C" int seven() { return 7; }')
        >>> ctypes.CDLL(str(compile_library(file, ["-O1"]))).seven()
        7
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"C++ kernels are compiled on Linux only, and this is {sys.platform}")
    try:
        compiler = find_compiler()
        if compiler is None:
            raise BuildError("there is no C++ compiler (CXX is not set, and there is no g++ or clang++)")
        digest = hashlib.sha256(source.read_bytes())
        native = any(flag.endswith("=native") for flag in flags)  # then the code depends on the processor
        machine = [platform.machine(), _processor() if native else ""]
        for part in (*flags, *libraries, "", *depends_on, *compiler, _version_of(compiler), *machine):
            digest.update(os.fsencode(part) + b"\0")
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{source.stem}-{digest.hexdigest()[:32]}.so"
        if not path.exists():
            if cached:
                raise BuildError(f"{source.name} is not compiled yet")
            with draft_of(path) as draft:  # replaces the file at the end, so that others see complete files only
                command = [*compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(draft), *libraries]
                _run(command, "the C++ compiler failed")
                draft.chmod(0o700)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:  # such as no home folder
        raise BuildError(f"{source.name} can't be compiled or cached ({error})") from error
    return path


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: ``CXX``, which may have arguments, or else g++ or clang++.

    A program of ``CXX`` that does not exist counts as no compiler: another one might not do what the user wants.
    """
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        path = shutil.which(command[0])
        return None if path is None else (path, *command[1:])
    return next(((path,) for path in map(shutil.which, COMPILERS) if path is not None), None)


def cache_folder() -> Path:
    """Return the folder of compiled libraries, which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")  # its specification says to ignore a relative path
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "contnorm" / "cpp"


@cache
def _version_of(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], "the C++ compiler does not tell its version")


@cache
def _processor() -> str:
    """Return model and instruction sets of the first processor of this machine."""
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    text = Path("/proc/cpuinfo").read_text(errors="replace").strip().partition("\n\n")[0]
    return "\n".join(line for line in text.splitlines() if line.partition(":")[0].strip() in names)


def _run(command: list[str], problem: str) -> str:
    """Return the output of a command.

    It has a session of its own. Otherwise an interrupt in the terminal would end the compiler of a program that handles
    the interrupt and goes on, and the program would use another kernel.
    """
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{problem} ({command[0]}, exit status {done.returncode}: {first})")
    return done.stdout


# --- extensions of torch ----------------------------------------------------------------------------------------


def is_built(name: str) -> bool:
    """Whether an extension is in the cache for this version of torch and Python."""
    try:
        compile_extension(name, cached=True)
    except BuildError:
        return False
    return True


@cache
def load_extension(name: str) -> Any:
    """Return an extension as a module, built if it is not in the cache; None if that is not possible."""
    try:
        loader = ExtensionFileLoader(f"contnorm_{name}", str(compile_extension(name)))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    except (BuildError, ImportError) as error:  # ImportError: a library of another version of torch
        _log.debug("the C++ extension %s can't be used: %s", name, error)
        return None
    return module


def compile_extension(name: str, cached: bool = False) -> Path:
    """Return the library of an extension; with ``cached``, without compiling it."""
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    flags = ["-O2", "-std=c++20", "-fvisibility=hidden", f"-DMODULE_NAME=contnorm_{name}"]
    flags += [part for folder in folders for part in ("-isystem", str(folder))]
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    identity = [torch.__version__, str(torch.version.git_version), sysconfig.get_config_var("SOABI") or ""]
    source = Path(__file__).with_name(f"{name}.cpp")
    return compile_library(source, flags, libraries=libraries, depends_on=identity, cached=cached)


def main() -> None:
    """Compile the libraries that are not in the cache, and print what CN will use on this machine."""
    reason = import_module("contnorm.kernels.cpp").unavailable_reason()
    print(f"CN on a CPU: {'torch operators, since ' + reason if reason else 'the compiled kernel'}")
    try:
        print(f"CN on a GPU in eager loops: {compile_extension('replay')}")
    except BuildError as error:
        sys.exit(f"CN on a GPU in eager loops: calls go through Python, since {error}")


if __name__ == "__main__":
    main()
