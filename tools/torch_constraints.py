"""Print constraints.txt for another torch: python tools/torch_constraints.py oldest|newest|VERSION

torch, torchvision and triton belong together. Their pins are dropped, and only torch is pinned: to the oldest version
that pyproject.toml allows, to the given one, or, for the newest, not at all.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPANIONS = ("torch", "torchvision", "triton")


def oldest_torch() -> str:
    """Return the lowest version of torch in the dependencies of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [version] = [match[1] for text in project["dependencies"] if (match := re.fullmatch(r"torch>=([\d.]+)", text))]
    return str(version)


def constraints(torch: str) -> str:
    """Return the constraints for a torch: ``oldest``, ``newest`` or a version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in COMPANIONS]
    if torch == "oldest":
        kept.append(f"torch=={oldest_torch()}.*")
    elif re.fullmatch(r"\d+(\.\d+)+", torch):
        kept.append(f"torch=={torch}")
    elif torch != "newest":
        raise SystemExit(f"TORCH={torch} must be oldest, newest or a version such as 2.12.0.")
    return "\n".join(kept)


if __name__ == "__main__":
    print(constraints(*sys.argv[1:]))
