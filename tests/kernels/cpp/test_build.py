"""The builder of C++ libraries: what is compiled again, who may write to the cache, and when there is no library."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
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
@pytest.mark.parametrize("part", ["_version_of", "_processor"])
def test_key_has_compiler_and_processor(source: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    first = compile_library(source, ["-march=native"])
    monkeypatch.setattr(build, part, lambda *_: "other")
    assert compile_library(source, ["-march=native"]) != first


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


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.003, 0.5, 0.99])
def test_library_that_is_cut_short_is_compiled_again(source: Path, share: float) -> None:
    """Loading such a file raises an error, or ends the process."""
    path = compile_library(source)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert compile_library(source) == path
    assert path.read_bytes() == content and value_in(path) == 7


@needs_compiler
def test_cache_folder_is_private(source: Path, cache_root: Path) -> None:
    old = os.umask(0)
    try:
        path = compile_library(source)
    finally:
        os.umask(old)
    assert path.parent == cache_folder() == cache_root / "contnorm" / "cpp"
    for folder in (cache_root, cache_root / "contnorm", path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("which", ["contnorm/cpp", "contnorm", "."])
def test_folder_that_others_may_write_to_is_refused(source: Path, cache_root: Path, which: str, mode: int) -> None:
    assert build_library(source) is not None
    (cache_root / which).chmod(mode)
    assert build_library(source) is None
    with pytest.raises(BuildError, match="other users may write to the folder"):
        compile_library(source)
    (cache_root / which).chmod(mode | stat.S_ISVTX)  # others can't rename what is in such a folder, but can add files
    assert (build_library(source) is None) == (which == "contnorm/cpp")


@needs_compiler
def test_nothing_is_created_in_a_folder_that_is_refused(source: Path, cache_root: Path) -> None:
    """As root in the home folder of a user: the user could not write to folders of root."""
    cache_root.mkdir()
    cache_root.chmod(0o777)
    assert build_library(source) is None
    assert list(cache_root.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_library_that_others_may_write_to_is_refused(source: Path, mode: int) -> None:
    path = compile_library(source)
    path.chmod(mode)
    with pytest.raises(BuildError, match="only the user may write"):
        compile_library(source)


@needs_compiler
def test_folder_and_library_of_another_user_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_library(source)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(BuildError, match="belongs to another user"):
        compile_library(source)
    with pytest.raises(BuildError, match="belongs to the user"):
        build._check_file(path)


@needs_compiler
def test_link_in_place_of_a_library_is_refused(source: Path, tmp_path: Path) -> None:
    path = compile_library(source)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BuildError, match="is not a file"):
        compile_library(source)


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


@needs_compiler
def test_named_compiler_may_have_arguments(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = find_compiler()
    assert command is not None
    monkeypatch.setenv("CXX", f"{command[0]} -DVALUE=5")
    assert value_in(build_library(source)) == 5


@needs_compiler
def test_flags_may_name_a_folder_that_is_not_utf_8(source: Path, tmp_path: Path) -> None:
    """As the headers of torch in an environment in such a folder."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "number.h").write_text("#define VALUE 4\n")
    source.write_text('#include "number.h"\n' + SOURCE)
    assert value_in(build_library(source, ["-isystem", str(folder)])) == 4


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


@needs_compiler
def test_interrupt_that_a_program_handles_does_not_end_its_compiler(source: Path, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal, which every process of the group gets."""
    command = find_compiler()
    assert command is not None
    started = tmp_path / "started"
    wait = f'[ "$1" = --version ] || {{ touch {started}; sleep 1; }}'
    compiler = compiler_script(tmp_path, f'{wait}; exec {command[0]} "$@"')
    code = (
        "import pathlib, signal, sys; from contnorm.kernels.cpp.build import build_library\n"
        "signal.signal(signal.SIGINT, lambda *_: print('handled'))\n"
        "print(build_library(pathlib.Path(sys.argv[1])) is not None)"
    )
    environment = {**os.environ, "CXX": str(compiler)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(source)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        while not started.exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert output.split() == ["handled", "True"]


@needs_compiler
def test_folder_that_cannot_be_created_gives_no_library(source: Path, cache_root: Path) -> None:
    cache_root.write_text("a file, not a folder")
    assert build_library(source) is None
    cache_root.unlink()
    cache_root.symlink_to(cache_root)
    assert build_library(source) is None


@needs_compiler
def test_read_only_folder_gives_no_library(source: Path, cache_root: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write to every folder")
    cache_root.mkdir()
    cache_root.chmod(0o500)
    with pytest.raises(BuildError, match="Permission denied"):
        compile_library(source)


def test_source_that_does_not_exist_gives_no_library(tmp_path: Path) -> None:
    assert build_library(tmp_path / "missing.cpp") is None


def test_other_systems_have_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BuildError, match="on Linux only, and this is darwin"):
        compile_library(source)


def test_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "contnorm" / "cpp"
