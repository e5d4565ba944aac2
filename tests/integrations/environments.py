"""Install each integration in an environment of its own, run its tests there.

Usage: python tests/integrations/environments.py [NAME ...] [--oldest] [--keep]

An environment is made with this Python under .venvs and removed afterwards, unless --keep is given. Installs go through
constraints.txt. With --oldest, the requirements of the extras have the lowest version that pyproject.toml allows, torch
and torchvision that of constraints.txt, and pip chooses the others. The exit status is 1 if the tests of an integration
fail; the others still run.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEST_REQUIREMENTS = ("pytest", "pytest-timeout")


@dataclass(frozen=True)
class Environment:
    """What an integration is tested with: extras of contnorm, further requirements, and arguments of pytest.

    A framework that pins other versions than constraints.txt is installed with the torch of that file alone.
    """

    extras: str
    requirements: tuple[str, ...] = ()
    tests: str = ""
    constrained: bool = True


LOGGERS = "tests/bench/loggers"
EXAMPLES = "tests/test_examples.py tests/docs/test_python_blocks.py -k "
ENVIRONMENTS = {
    "timm": Environment("timm"),
    "lightning": Environment("lightning"),
    "transformers": Environment("transformers"),
    "hub": Environment("hub"),
    "avalanche": Environment("avalanche"),
    "optuna": Environment("optuna"),
    "ray": Environment("ray"),
    "mammoth": Environment("timm", ("kornia", "onedrivedownloader", "pandas", "requests", "six", "tqdm")),
    "flower": Environment("bench", ("flwr[simulation]",), EXAMPLES + "'flower or federated'", constrained=False),
    "opacus": Environment("bench", ("opacus",), EXAMPLES + "private"),
    "sb3": Environment("bench", ("sb3-contrib",), EXAMPLES + "'crossq or reinforcement'"),
    "bench": Environment(
        "bench",
        ("hypothesis",),
        "tests/bench tests/cli tests/paper tests/report -m 'not slow' -W ignore::DeprecationWarning",
    ),
    "tensorboard": Environment("bench,tensorboard", tests=LOGGERS),
    "wandb": Environment("bench,wandb", tests=LOGGERS),
    "mlflow": Environment("bench,mlflow", tests=LOGGERS),
}


def loose(extras: str) -> str:
    """Return constraints: torch and torchvision of constraints.txt, and the lowest versions that the extras allow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        text for extra in filter(None, extras.split(",")) for text in project["optional-dependencies"][extra]
    ]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.startswith(("torch==", "torchvision=="))]
    return "\n".join(pins + [re.sub(r"\[.*\]", "", text).replace(">=", "==") for text in requirements if ">=" in text])


def run(name: str, lowest: bool, keep: bool) -> bool:
    """Make the environment of an integration and run its tests; returns whether they passed."""
    environment, folder = ENVIRONMENTS[name], ROOT / ".venvs" / name
    print(f"\n=== {name}: installing into {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    constraints = ROOT / "constraints.txt"
    if lowest or not environment.constrained:
        constraints = folder / "constraints.txt"
        constraints.write_text(loose(environment.extras if lowest else ""), encoding="utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
    named = shlex.split(environment.tests)
    tests = named or sorted((ROOT / "tests/integrations").glob(f"test_{name}*.py"))
    commands = (
        [*install, ROOT / "constraints.txt", *TEST_REQUIREMENTS],
        [*install, constraints, *environment.requirements, "-e", f"{ROOT}[{environment.extras}]"],
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
    )
    passed = all(subprocess.run(list(map(str, command)), cwd=ROOT).returncode == 0 for command in commands)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--oldest", action="store_true", help="install the lowest versions that pyproject.toml allows")
    parser.add_argument("--keep", action="store_true", help="keep the environments under .venvs")
    arguments = parser.parse_args()
    failed = [name for name in arguments.names if not run(name, arguments.oldest, arguments.keep)]
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))
