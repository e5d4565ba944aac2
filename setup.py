"""Build hooks: a wheel and an sdist carry the commit that they are built from, in ``contnorm/COMMIT``.

Everything else is in pyproject.toml. The file is written to what is built and never to the source tree, so that a
checkout, also one that is installed with ``pip install -e``, has the commit that git reports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
NAME = "COMMIT"
SOURCE = ROOT / "src" / "contnorm" / NAME  # exists in an unpacked sdist only


def commit() -> str | None:
    """Return the commit of the checkout, or the one that the sdist carries; None if neither is known."""
    try:
        # A source tree inside another repository that does not track it must not get the commit of that repository.
        _git("ls-files", "--error-unmatch", "--", "src/contnorm/__init__.py")
        return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return SOURCE.read_text(encoding="utf-8").strip() if SOURCE.is_file() else None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    # Variables such as GIT_DIR, which git sets for hooks, could point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return done.stdout.strip()


def write_commit(path: Path) -> None:
    """Write the commit to a file of the build, if it is known."""
    if (text := commit()) is not None and path.parent.is_dir():
        path.unlink(missing_ok=True)  # in an sdist it may be a hard link to the source
        path.write_text(f"{text}\n", encoding="utf-8")


class BuildWithCommit(build_py):
    """Copies the package, and adds the commit unless the installation is editable."""

    def _commit_file(self) -> Path:
        return Path(self.build_lib, "contnorm", NAME)

    def run(self) -> None:
        target = self._commit_file().parent.resolve()
        if not self.editable_mode and target != SOURCE.parent:
            # An earlier build in the source tree leaves build/lib, with modules that may not exist any more.
            shutil.rmtree(target, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            write_commit(self._commit_file())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        file = str(self._commit_file())
        return [*outputs, *([file] if not self.editable_mode and file not in outputs else [])]


class SdistWithCommit(sdist):
    """Collects the sources, and adds the commit, since an sdist has no repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, "src", "contnorm", NAME))


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
