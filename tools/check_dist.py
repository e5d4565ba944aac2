"""Check the files that ``make dist`` has built: python tools/check_dist.py dist

The folder must have one wheel and one sdist, of the same version and commit, with every file of the package and
nothing else: no tests, records and caches, and no modules of an earlier build.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {".whl": 1_500_000, ".gz": 3_000_000}  # bytes


def problems(folder: Path) -> list[str]:
    """Return what is wrong with the built files, one line each."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{folder}: has {len(wheels)} wheels and {len(sdists)} sdists; one of each is expected."]
    wheel, sdist = _wheel(wheels[0]), _sdist(sdists[0])
    files = [path for path in (ROOT / "src" / "contnorm").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {path.relative_to(ROOT / "src").as_posix() for path in files}
    found = [f"{wheels[0].name}: lacks {name}." for name in sorted(package - set(wheel))]
    found += [f"{sdists[0].name}: lacks src/{name}." for name in sorted(package - {n[4:] for n in sdist})]
    package |= {"contnorm/COMMIT"}
    foreign = [(wheels[0], name) for name in sorted(set(wheel) - package) if ".dist-info/" not in name]
    foreign += [(sdists[0], name) for name in sorted(sdist) if not _belongs_to_sdist(name, package)]
    found += [f"{path.name}: has {name}, which does not belong there." for path, name in foreign]
    found += [
        f"{path.name}: has {path.stat().st_size:,} bytes, more than {LIMITS[path.suffix]:,}."
        for path in (wheels[0], sdists[0])
        if path.stat().st_size > LIMITS[path.suffix]
    ]
    commits = wheel.get("contnorm/COMMIT"), sdist.get("src/contnorm/COMMIT")
    if commits[0] is None or commits[0] != commits[1]:
        found.append(f"{folder}: the commits of wheel and sdist are {commits[0]!r} and {commits[1]!r}.")
    return found


def _belongs_to_sdist(name: str, package: set[str]) -> bool:
    """Whether a file is one of the package, of its metadata, or beside them in the root of the repository."""
    generated = name.startswith("src/contnorm.egg-info/") or name in ("PKG-INFO", "setup.cfg")
    return name.removeprefix("src/") in package or generated or ("/" not in name and (ROOT / name).is_file())


def _wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def _sdist(path: Path) -> dict[str, bytes]:
    """Return the files of an sdist by their names in its folder."""
    with tarfile.open(path) as file:
        members = [member for member in file if member.isreg()]
        return {m.name.partition("/")[2]: file.extractfile(m).read() for m in members}  # type: ignore[union-attr]


if __name__ == "__main__":
    if found := problems(Path(sys.argv[1])):
        raise SystemExit("\n".join(found))
    for path in sorted(Path(sys.argv[1]).iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
