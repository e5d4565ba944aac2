"""Compilation of C++ sources into shared libraries, which are cached in a folder of the user.

A library is compiled at its first use on a machine, and loaded from the cache afterwards. The name of its file has a
hash of everything that it depends on: source, headers, flags, compiler and processor. So a change of any of them
compiles it again, and processes that compile the same library at once write the same file, each atomically.

The folder is ``$XDG_CACHE_HOME/contnorm/cpp``, by default in ``~/.cache``. Loading a library executes it, so the folder
is created for the user alone.

Without a compiler, without a cache folder, or on other systems than Linux there is no library. `build_library` then
returns None, and callers have another implementation.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from contnorm.atomic_files import draft_of

__all__ = ["BuildError", "build_library", "cache_folder", "compile_library", "find_compiler"]

COMPILERS = ("g++", "clang++", "c++")
# So long that it does not decide between two kernels on a busy machine: it only ends a compiler that hangs.
TIMEOUT_S = 600.0


class BuildError(Exception):
    """A library could not be compiled; the message is the reason, without a full stop."""


def build_library(
    source: Path,
    flags: Sequence[str] = (),
    *,
    libraries: Sequence[str] = (),
    headers: Sequence[Path] = (),
    depends_on: Sequence[str] = (),
) -> Path | None:
    """Return the shared library of a C++ source, compiled if it is not in the cache; None if that is not possible.

    Args:
        source: The C++ file.
        flags: Flags of the compiler; ``-shared -fPIC`` are added.
        libraries: Flags of the linker, which follow the source, such as ``-L/folder`` and ``-lname``.
        headers: Headers of the source that may change with it. They are part of the key, but not of the command.
        depends_on: Further text that the library depends on, such as the version of torch.

    Example:
        >>> import ctypes, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "seven.cpp"
        >>> _ = file.write_text('extern "C" int seven() { return 7; }')
        >>> path = build_library(file, ["-O1"])
        >>> path is None or ctypes.CDLL(str(path)).seven() == 7
        True
    """
    try:
        return compile_library(source, flags, libraries=libraries, headers=headers, depends_on=depends_on)
    except BuildError:
        return None


def compile_library(
    source: Path,
    flags: Sequence[str] = (),
    *,
    libraries: Sequence[str] = (),
    headers: Sequence[Path] = (),
    depends_on: Sequence[str] = (),
    cached: bool = False,
) -> Path:
    """Return the shared library of a C++ source, as `build_library`; with ``cached``, without compiling it.

    Raises:
        BuildError: If it could not be compiled, or the cache folder can't be used.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"C++ kernels are compiled on Linux only, and this is {sys.platform}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (CXX is not set, and there is no g++ or clang++)")
    try:
        key = _key([source, *headers], [*flags, *libraries], [*depends_on, *_identity(compiler, tuple(flags))])
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{source.stem}-{key}.so"
        if not path.exists():
            if cached:
                raise BuildError(f"{source.name} is not compiled yet")
            _compile([*compiler, "-shared", "-fPIC", *flags, str(source)], list(libraries), path)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise BuildError(f"{source.name} can't be compiled or cached ({error.strerror or error}{where})") from error
    return path


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: ``CXX``, which may have arguments, or else g++ or clang++.

    A program of ``CXX`` that does not exist counts as no compiler: another one might not do what the user wants.
    """
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError:  # an unmatched quote
        return None
    if command:
        path = shutil.which(command[0])
        return None if path is None else (path, *command[1:])
    paths = map(shutil.which, COMPILERS)
    return next(((path,) for path in paths if path is not None), None)


def cache_folder() -> Path:
    """Return the folder of compiled libraries, which may not exist yet.

    Raises:
        BuildError: If the user has no home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):  # the specification of this variable says to ignore a relative path
        return Path(root) / "contnorm" / "cpp"
    try:
        return Path.home() / ".cache" / "contnorm" / "cpp"
    except RuntimeError as error:
        raise BuildError(f"there is no folder for compiled libraries ({error})") from error


def _key(files: Iterable[Path], flags: Iterable[str], rest: Iterable[str]) -> str:
    """Return the hash of what a library depends on."""
    digest = hashlib.sha256()
    for part in (*(file.read_bytes() for file in files), *map(os.fsencode, (*flags, "", *rest))):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _identity(compiler: tuple[str, ...], flags: tuple[str, ...]) -> list[str]:
    """Return the parts of the key that describe the compiler and the machine."""
    native = any(flag.endswith("=native") for flag in flags)  # then the code depends on the processor
    return [*compiler, _version_of(compiler), platform.machine(), _processor() if native else ""]


@cache
def _version_of(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], "the C++ compiler does not tell its version")


@cache
def _processor() -> str:
    """Return model and instruction sets of the first processor of this machine."""
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    text = Path("/proc/cpuinfo").read_text(errors="replace").strip().partition("\n\n")[0]
    return "\n".join(line for line in text.splitlines() if line.partition(":")[0].strip() in names)


def _compile(command: list[str], libraries: list[str], path: Path) -> None:
    """Compile to a draft that replaces the file at the end, so that other processes see complete files only."""
    with draft_of(path) as draft:
        _run([*command, "-o", str(draft), *libraries], "the C++ compiler failed")
        if not draft.is_file():
            raise BuildError(f"the C++ compiler wrote no library ({command[0]})")
        draft.chmod(0o700)


def _run(command: list[str], problem: str) -> str:
    """Return the output of a command.

    It has a session of its own. Otherwise an interrupt in the terminal would end the compiler of a program that handles
    the interrupt and goes on, and the program would use another kernel.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the programs that the compiler has started
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{problem} ({command[0]} took more than {TIMEOUT_S:.0f} s)") from error
            raise
    if process.returncode != 0:
        lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{problem} ({command[0]}, exit status {process.returncode}: {first})")
    return output
