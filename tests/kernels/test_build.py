"""The builder of C++ libraries: what is compiled again, and when there is no library."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.kernels import build
from contnorm.kernels.build import BuildError, cache_folder, compile_library, find_compiler

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are compiled on Linux only")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")

SOURCE = """
#ifndef VALUE
#define VALUE 7
#endif
extern "C" int value() { return VALUE; }
"""


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, which does not exist yet."""
    root = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "number.cpp"
    path.write_text(SOURCE)
    return path


def value_in(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).value())


@needs_compiler
def test_library_is_compiled_again_only_if_what_it_depends_on_changes(source: Path) -> None:
    paths = [
        compile_library(source),
        compile_library(source, ["-DVALUE=8"]),
        compile_library(source, ["-march=native"]),
        compile_library(source, libraries=["-lm"]),
        compile_library(source, depends_on=["torch 1"]),
    ]
    assert compile_library(source, cached=True) == paths[0]
    source.write_text(SOURCE.replace("7", "9"))
    with pytest.raises(BuildError, match="not compiled yet"):
        compile_library(source, cached=True)
    paths.append(compile_library(source))
    assert len(set(paths)) == len(paths)
    assert [value_in(path) for path in paths] == [7, 8, 7, 7, 7, 9]


@pytest.mark.slow
@needs_compiler
def test_several_builds_at_once_give_one_complete_library(source: Path) -> None:
    """None of them may see a file that another one is writing."""
    code = (
        "import ctypes, pathlib, sys; from contnorm.kernels.build import compile_library\n"
        "path = compile_library(pathlib.Path(sys.argv[1])); print(path, ctypes.CDLL(str(path)).value())"
    )
    command = [sys.executable, "-c", code, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    path = compile_library(source)
    printed = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert value_in(path) == 7 and printed == {f"{path} 7"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no drafts are left


def test_without_a_compiler_there_is_no_library(
    source: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(source)
    assert not cache_root.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'x.cpp: error: no such thing' >&2; exit 3", "exit status 3: x.cpp: error: no such thing"),
        ("exit 0", "number.cpp can't be compiled"),
        ("exec sleep 60", "timed out after"),
    ],
    ids=["fails", "writes nothing", "hangs"],
)
def test_broken_compiler_gives_no_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "TIMEOUT_S", 0.5 if "sleep" in script else 60.0)
    with pytest.raises(BuildError, match=message):
        compile_library(source)
    folder = cache_folder()
    assert not folder.exists() or list(folder.iterdir()) == []
