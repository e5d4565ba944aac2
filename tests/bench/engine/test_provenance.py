"""The commit of a record is that of the package's own checkout, never of a repository around it."""

import subprocess
from pathlib import Path

import pytest

from contnorm.bench.engine.provenance import commit_of


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one commit and an installed package inside that it does not track."""
    git(tmp_path, "init", "-q")
    (tmp_path / "mine.py").write_text("x = 1\n")
    git(tmp_path, "add", "mine.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return tmp_path


def test_commit_of_an_untracked_package_is_none(project: Path) -> None:
    init = project / "venv" / "package" / "__init__.py"
    assert commit_of(init) is None
    (project / ".gitignore").write_text("venv\n")
    assert commit_of(init) is None


def test_commit_of_a_tracked_package_marks_changes(project: Path) -> None:
    commit = git(project, "rev-parse", "--short=12", "HEAD")
    assert commit_of(project / "mine.py") == commit
    (project / "mine.py").write_text("x = 2\n")
    assert commit_of(project / "mine.py") == f"{commit}-dirty"
