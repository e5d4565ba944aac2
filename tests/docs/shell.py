"""Commands of the documentation: the program runs in this process; other programs are checked without running them."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from contnorm import bench
from contnorm.cli.main import main
from tests.docs.pages import ROOT

__all__ = ["Shell"]

# Options that are added to a command unless it has them: the tables of the paper have hundreds of runs.
_LIMITS = {
    "paper": {"--seeds": "1", "--max-steps": "2"},
    "paper --until-decided": {"--max-seeds": "16"},
    "tune": {"--seeds": "1", "--max-steps": "4"},
}
# What a command says, with an exit code, where a reader who follows the page has nothing for it to do.
_NOTHING_TO_DO = {"resume": "no stopped run under"}


class Shell:
    """Runs the commands of one page in the current folder, one after another.

    Args:
        contnorm: Called with the arguments of the program; returns exit code, output and errors.
    """

    def __init__(self, contnorm: Callable[[list[str]], tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
        self._contnorm = contnorm
        self._monkeypatch = monkeypatch
        self._programs: dict[str, Callable[[list[str]], None]] = {
            "make": self._make,
            "pip": self._pip,
            "python": self._python,
            "tensorboard": self._tensorboard,
            "export": self._export,
            "cd": lambda words: os.chdir(words[0]),
            "mkdir": lambda words: Path(words[-1]).mkdir(parents="-p" in words),
            ".venv/bin/pytest": self._pytest,
        }

    def run(self, line: str) -> None:
        """Run one line, or check that what it names exists; fails with the line and the errors."""
        words = [_home(word) for word in shlex.split(line, comments=True)]
        output = None
        if len(words) > 2 and words[-2] == ">":
            words, output = words[:-2], words[-1]
        if words[0] == "contnorm":
            code, out, err = self._contnorm(_limited(self._with_hashes(words[1:])))
            if missing := re.search(r"needs (\S+)\. Install it with: pip install", err):
                pytest.skip(f"{missing[1]} is not installed")
            nothing_to_do = any(words[1] == name and text in err for name, text in _NOTHING_TO_DO.items())
            assert code == 0 or nothing_to_do, f"{line}\nexited with {code}\n{out}{err}"
            if output is not None:
                Path(output).write_text(out)
            return
        assert words[0] in self._programs, (
            f"{line}: mark the block with <!-- needs: ... -->, or add {words[0]} to Shell"
        )
        self._programs[words[0]](words[1:])

    def _with_hashes(self, words: list[str]) -> list[str]:
        """Replace HASH and OTHER by hashes of two recorded experiments, those with saved weights first."""
        if not {"HASH", "OTHER"} & set(words):
            return words
        weights = " ".join(map(str, Path("runs").rglob("*.safetensors")))
        hashes = sorted({record.hash for record in bench.load_runs("runs")}, key=lambda hash_: hash_ not in weights)
        names = {"HASH": hashes[0], "OTHER": hashes[-1]}
        return [names.get(word, word) for word in words]

    def _make(self, words: list[str]) -> None:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets, f"make {words[0]}: the Makefile has no such target"

    def _pip(self, words: list[str]) -> None:
        assert words[0] == "install"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words[1:]:
            if match := re.search(r"^(?:\.|contnorm)\[(.*)\]$", word):
                assert set(match[1].split(",")) <= set(extras), f"pip install {word}: there is no such extra"

    def _python(self, words: list[str]) -> None:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"python {' '.join(words)}\n{done.stdout}{done.stderr}"

    def _tensorboard(self, words: list[str]) -> None:
        assert find_spec("tensorboard") is None or list(Path(words[words.index("--logdir") + 1]).rglob("events.out.*"))

    def _export(self, words: list[str]) -> None:
        for word in words:
            self._monkeypatch.setenv(*word.split("=", 1))

    def _pytest(self, words: list[str]) -> None:
        for word in words:
            assert "/" not in word or (ROOT / word).exists(), f"pytest {word}: does not exist"


def _home(word: str) -> str:
    """Expand `~` as a shell does, also after `=`."""
    return re.sub(r"(^|=)~(?=/|$)", lambda match: match[1] + os.environ["HOME"], word)


def _limited(words: list[str]) -> list[str]:
    if not words or "--list" in words or "--help" in words:
        return words
    key = " ".join([words[0], *(word for word in words if word == "--until-decided")])
    added = [f"{option}={value}" for option, value in _LIMITS.get(key, {}).items() if option not in words]
    return [*words, *added]


def call_program(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Run the program in this process; returns exit code, output and errors."""
    monkeypatch.setattr("sys.argv", ["contnorm", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
