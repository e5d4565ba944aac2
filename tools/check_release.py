"""Check that the files of a release agree: python tools/check_release.py [TAG]

Version, changelog and CITATION.cff must name the same release, without "dev" and "unreleased". With a tag, it must be
``v`` and the version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(root: Path, tag: str | None = None) -> list[str]:
    """Return what stands in the way of a release of the tree, one line each."""
    found = []
    [version] = re.findall(r'^__version__ = "(.*)"$', _text(root, "src/contnorm/__init__.py"), re.MULTILINE)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"src/contnorm/__init__.py: version {version} is not that of a release, such as 0.3.0.")
    if tag is not None and tag != f"v{version}":
        found.append(f"tag {tag} is not v{version}, the version in src/contnorm/__init__.py.")
    heading = re.search(r"^## (.*)$", _text(root, "CHANGELOG.md"), re.MULTILINE)
    if heading is None or not re.fullmatch(re.escape(f"[{version}] - ") + r"\d{4}-\d\d-\d\d", heading[1]):
        first = "missing" if heading is None else repr(heading[1])
        found.append(f"CHANGELOG.md: the first heading is {first}; it must be '## [{version}] - YYYY-MM-DD'.")
    if f"\nversion: {version}\n" not in _text(root, "CITATION.cff"):
        found.append(f"CITATION.cff: the version is not {version}.")
    return found


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    if found := problems(ROOT, *sys.argv[1:2]):
        raise SystemExit("\n".join(found))
    print("Version, changelog, citation and tag agree.")
