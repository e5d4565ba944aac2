"""Install each integration in an environment of its own, run its tests there.

Usage: python tests/integrations/environments.py [NAME ...] [--keep]

An environment is made with this Python under .venvs and removed afterwards, unless --keep is given. Every install goes
through constraints.txt. The exit status is 1 if the tests of an integration fail; the others still run.
"""

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


def run(name: str, keep: bool) -> bool:
    """Make the environment of an integration and run its tests; returns whether they passed."""
    environment, folder = ENVIRONMENTS[name], ROOT / ".venvs" / name
    print(f"\n=== {name}: installing into {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    tests = [environment.tests] if environment.tests else (ROOT / "tests/integrations").glob(f"test_{name}*.py")
    commands = (
        [*install, *TEST_REQUIREMENTS, *environment.requirements],
        [*install, "-e", f"{ROOT}[{environment.extras}]"],
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sorted(tests)],
    )
    passed = all(subprocess.run(list(map(str, command)), cwd=ROOT).returncode == 0 for command in commands)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--keep", action="store_true", help="keep the environments under .venvs")
    arguments = parser.parse_args()
    failed = [name for name in arguments.names if not run(name, arguments.keep)]
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))
