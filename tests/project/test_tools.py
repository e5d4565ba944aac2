"""The scripts behind ``make dist``, ``make release-check`` and ``make test TORCH=...``."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def constraints(torch: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "tools" / "torch_constraints.py", torch)


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize(("torch", "pin"), [("oldest", "2.11.*"), ("2.12.0", "2.12.0"), ("newest", None)])
def test_constraints_for_another_torch(torch: str, pin: str | None) -> None:
    usual, found = pins((ROOT / "constraints.txt").read_text()), pins(constraints(torch).stdout)
    assert found.pop("torch", None) == pin
    assert found == {name: version for name, version in usual.items() if name not in ("torch", "torchvision", "triton")}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A tree that is ready for release 1.2.3."""
    for name in ("tools/check_release.py", "src/contnorm/__init__.py", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    edit(tmp_path / "src/contnorm/__init__.py", r'^__version__ = ".*"', '__version__ = "1.2.3"')
    edit(tmp_path / "CHANGELOG.md", r"^## .*", "## [1.2.3] - 2026-12-31")
    edit(tmp_path / "CITATION.cff", r"^version: .*", "version: 1.2.3")
    return tmp_path


def edit(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(changed)


def test_release_check_accepts_a_release(release: Path) -> None:
    assert run(release / "tools/check_release.py").returncode == 0
    assert run(release / "tools/check_release.py", "v1.2.3").returncode == 0


def test_dist_check_names_what_does_not_belong(tmp_path: Path) -> None:
    files = [path for path in (ROOT / "src" / "contnorm").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    content = {path.relative_to(ROOT / "src").as_posix(): path.read_bytes() for path in files}
    content["contnorm/COMMIT"] = b"0123456789ab\n"
    write_dist(tmp_path, content)
    done = run(ROOT / "tools/check_dist.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content |= {"contnorm/catalog.py": b"", "tests/test_it.py": b"", "carry/note.txt": b""}
    write_dist(tmp_path, content)
    done = run(ROOT / "tools/check_dist.py", str(tmp_path))
    assert done.returncode == 1
    for name in ("contnorm/catalog.py", "tests/test_it.py", "carry/note.txt"):
        assert f".whl: has {name}, which does not belong there." in done.stderr
        assert f".tar.gz: has src/{name}, which does not belong there." in done.stderr


def write_dist(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write a wheel and an sdist with these files."""
    with zipfile.ZipFile(folder / "contnorm-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
    with tarfile.open(folder / "contnorm-1.0.tar.gz", "w:gz", compresslevel=1) as sdist:
        for name, data in content.items():
            member = tarfile.TarInfo(f"contnorm-1.0/src/{name}")
            member.size = len(data)
            sdist.addfile(member, io.BytesIO(data))


def test_version_of_the_changelog_is_that_of_the_package() -> None:
    [version] = re.findall(
        r'^__version__ = "(\d+\.\d+\.\d+)', (ROOT / "src/contnorm/__init__.py").read_text(), re.MULTILINE
    )
    heading = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert heading in (version, "Unreleased")
