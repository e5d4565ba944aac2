"""The builder of C++ libraries: what is compiled again, who may write to the cache, and when there is no library."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contnorm.kernels.cpp import build
from contnorm.kernels.cpp.build import BuildError, build_library, cache_folder, compile_library, find_compiler

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


def value_in(path: Path | None) -> int:
    assert path is not None
    return int(ctypes.CDLL(str(path)).value())


def compiler_script(folder: Path, text: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_compiler
def test_library_is_compiled_once_and_then_taken_from_the_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_library(source)
    assert value_in(first) == 7

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", refuse)
    assert build_library(source) == first


@needs_compiler
def test_library_is_compiled_again_if_what_it_depends_on_changes(source: Path, tmp_path: Path) -> None:
    header = tmp_path / "number.h"
    header.write_text("// one")
    paths = [
        build_library(source),
        build_library(source, ["-DVALUE=8"]),
        build_library(source, ["-march=native"]),
        build_library(source, libraries=["-lm"]),
        build_library(source, headers=[header]),
        build_library(source, depends_on=["torch 1"]),
        build_library(source, depends_on=["torch 2"]),
    ]
    header.write_text("// two")
    paths.append(build_library(source, headers=[header]))
    source.write_text(SOURCE.replace("7", "9"))
    paths.append(build_library(source))
    assert None not in paths and len(set(paths)) == len(paths)
    assert value_in(paths[1]) == 8 and value_in(paths[-1]) == 9


@needs_compiler
def test_processor_matters_for_native_code_only(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_library(source, ["-O1"])
    monkeypatch.setattr(build, "_processor", lambda: "other")
    assert compile_library(source, ["-O1"]) == first


@needs_compiler
def test_several_builds_at_once_give_one_complete_library(source: Path) -> None:
    """In threads and in processes: none of them may see a file that another one is writing."""
    code = (
        "import ctypes, pathlib, sys; from contnorm.kernels.cpp.build import compile_library\n"
        "path = compile_library(pathlib.Path(sys.argv[1])); print(path, ctypes.CDLL(str(path)).value())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths: list[Path | None] = []
    threads = [threading.Thread(target=lambda: paths.append(build_library(source))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    printed = {process.communicate(timeout=120)[0].strip() for process in processes}
    [path] = set(paths)
    assert value_in(path) == 7 and path is not None
    assert printed == {f"{path} 7"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no drafts are left


def test_without_a_compiler_there_is_no_library(
    source: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(source.parent))
    assert find_compiler() is None and build_library(source) is None
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(source)
    assert not cache_root.exists()


@pytest.mark.parametrize("named", ["no-such-compiler", "'unmatched"])
def test_named_compiler_that_does_not_exist_is_not_replaced(
    source: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("CXX", named)
    assert find_compiler() is None and build_library(source) is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'x.cpp: error: no such thing' >&2; exit 3", "exit status 3: x.cpp: error: no such thing"),
        ("[ \"$1\" = --version ] || { echo 'broken' >&2; exit 1; }", "exit status 1: broken"),
        ("exit 0", "wrote no library"),
    ],
)
def test_broken_compiler_gives_no_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, script)))
    assert build_library(source) is None
    with pytest.raises(BuildError, match=message):
        compile_library(source)
    folder = cache_folder()
    assert not folder.exists() or list(folder.iterdir()) == []


def test_compiler_that_hangs_is_ended(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, "exec sleep 60")))
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    with pytest.raises(BuildError, match="took more than"):
        compile_library(source)
