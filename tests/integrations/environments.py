"""Install each integration in an environment of its own, run its tests there.

Usage: python tests/integrations/environments.py [NAME ...] [--keep]

An environment is made with this Python under .venvs and removed afterwards, unless --keep is given. Every install goes
through constraints.txt. The exit status is 1 if the tests of an integration fail; the others still run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEST_REQUIREMENTS = ("pytest", "pytest-timeout")


@dataclass(frozen=True)
class Environment:
    """What an integration is tested with: extras of contnorm, further requirements, and its tests."""

    extras: str
    requirements: tuple[str, ...] = ()
    tests: str = ""


LOGGERS = "tests/bench/loggers"
ENVIRONMENTS = {
    "timm": Environment("timm"),
    "lightning": Environment("lightning"),
    "transformers": Environment("transformers"),
    "hub": Environment("hub"),
    "avalanche": Environment("avalanche"),
    "optuna": Environment("optuna"),
    "ray": Environment("ray"),
    "mammoth": Environment("timm", ("kornia", "onedrivedownloader", "pandas", "requests", "six", "tqdm")),
    "tensorboard": Environment("bench,tensorboard", tests=LOGGERS),
    "wandb": Environment("bench,wandb", tests=LOGGERS),
    "mlflow": Environment("bench,mlflow", tests=LOGGERS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--keep", action="store_true", help="keep the environments under .venvs")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"unknown integration {unknown[0]!r}. There are: {', '.join(ENVIRONMENTS)}.")
    failed = [name for name in arguments.names if not run(name, arguments.keep)]
    tested = [name for name in arguments.names if name not in failed]
    print(f"\npassed: {', '.join(tested) or 'none'}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def run(name: str, keep: bool) -> bool:
    """Make the environment of an integration and run its tests; returns whether they passed."""
    environment, folder = ENVIRONMENTS[name], ROOT / ".venvs" / name
    print(f"\n=== {name}: installing into {folder.relative_to(ROOT)}", flush=True)
    try:
        python = install(folder, environment)
        tests = [environment.tests] if environment.tests else tests_of(name)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        status = subprocess.run(list(map(str, command)), cwd=ROOT).returncode
    except subprocess.CalledProcessError as error:
        print(f"{name}: {' '.join(map(str, error.cmd[:6]))} ... failed with status {error.returncode}")
        return False
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return status == 0


def install(folder: Path, environment: Environment) -> Path:
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *TEST_REQUIREMENTS, *environment.requirements], check=True)
    subprocess.run([*pip, "-e", f"{ROOT}[{environment.extras}]"], check=True)
    return python


def tests_of(name: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "integrations").glob(f"test_{name}*.py"))


if __name__ == "__main__":
    sys.exit(main())
