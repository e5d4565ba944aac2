"""The command line as a process: what it prints, and one line with exit code 2 for a user error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import contnorm as cn
from contnorm.cli.main import main
from tests.datasets import small_mnist

pytestmark = pytest.mark.slow  # every test starts a process


def contnorm(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contnorm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and two settings run on two seeds each."""
    place = tmp_path_factory.mktemp("place")
    small_mnist(place / "data")
    for norm in ("bn", "cn4"):
        done = contnorm("run", "--norm", norm, "--strategy", "single", "--seeds", 2, *where(place), *SMALL)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("recorded in") == 2 and "ACC" in done.stdout
    return place


SMALL = ("--set", "stream.train_per_task=40", "--set", "stream.tasks=2")


def where(place: Path) -> tuple[str, ...]:
    return ("--data-root", str(place / "data"), "--runs", str(place / "runs"))


def hashes(place: Path) -> list[str]:
    return sorted(folder.name for folder in (place / "runs").iterdir())


def test_run_skips_recorded_runs(place: Path) -> None:
    done = contnorm("run", "--norm", "bn", "--strategy", "single", "--seeds", 2, *where(place), *SMALL)
    assert done.returncode == 0 and done.stdout.count("not run again; its record is") == 2 and "ACC" in done.stdout


def test_version_is_printed() -> None:
    done = contnorm("--version")
    assert done.returncode == 0 and done.stdout == f"contnorm {cn.__version__}\n"


def test_ls_and_data_start_without_torch(place: Path) -> None:
    listed = contnorm("ls").stdout
    assert all(word in listed for word in ("cn", "permuted-mnist", "derpp", "reservoir", "prs"))
    found = contnorm("data", "--data-root", place / "data").stdout
    assert f"under {place / 'data'} " in found and "contnorm data cifar100 --fetch" in found
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['contnorm', 'ls']\n"
    code += "import contnorm.cli.main as m; m.main()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--stream", "split-cifar"), "unknown stream 'split-cifar'. Did you mean 'split-cifar10'"),
        (("run", "--batch", "abc"), "train.batch='abc'"),
        (("run", "--set", "lr=0.1"), "unknown key 'lr'"),
        (("run", "--buffer", "2"), "memory.size=2 is too small"),
        (("run", "--norm", "cn", "--groups", "7"), "groups=7 does not divide the 100 channels"),
        (("run", "--weights", "gone.pth"), "weights 'gone.pth'"),
        (("run", "--device", "tpu"), "device='tpu': use cpu, cuda"),
        (("run", "--set", "strategy.code=abc"), "strategy.code='abc' is computed and can't be set"),
        (("run", "--nosuch"), "No such option: --nosuch. See `contnorm run --help`."),
        (("rum",), "No such command 'rum'. Did you mean 'run'"),
        (("compare", "a"), "expected two runs, got 1"),
        (("ls", "everything"), "unknown listing 'everything'"),
        (("data", "imagenet"), "unknown data set 'imagenet'"),
        (("resume", "nowhere"), "no stopped run under nowhere"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["contnorm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err.splitlines()[-1:]
    assert ended.value.code == 2 and err and err[0].startswith("contnorm: ") and message in err[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("wrong", "code"), [("KeyboardInterrupt", 130), ("ModuleNotFoundError(name='typer')", 2)])
def test_interrupted_import_prints_no_traceback(tmp_path: Path, wrong: str, code: int) -> None:
    (tmp_path / "typer.py").write_text(f"raise {wrong}")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(cn.__file__).parents[1]}"}
    command = [sys.executable, "-m", "contnorm", "ls"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr and ("bench" in done.stderr) is (code == 2)


def test_help_is_shown_without_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["contnorm"])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert "Usage:" in out + err and "contnorm: ." not in err


def test_diagnose_run_with_weights(place: Path) -> None:
    runs = ("--data-root", place / "data", "--runs", place / "kept")
    done = contnorm("run", "--norm", "bn", "--strategy", "single", "--keep-weights", *runs, *SMALL)
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "kept").iterdir()
    done = contnorm("diagnose", folder.name, *runs, "-o", place / "effect.png")
    assert done.returncode == 0 and "Re-estimated moments" in done.stdout, done.stderr
    assert (place / "effect.png").read_bytes().startswith(b"\x89PNG")
    done = contnorm("diagnose", hashes(place)[0], *where(place))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--keep-weights" in done.stderr
    done = contnorm("diagnose", *runs)
    assert done.returncode == 2 and "Missing argument" in done.stderr
