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


def test_show_lists_scores_and_matrices(place: Path) -> None:
    shown = contnorm("show", "--runs", place / "runs").stdout
    assert all(name in shown for name in hashes(place)) and "cn4" in shown and "+-" in shown
    one = contnorm("show", hashes(place)[0][:5], "--by-task", "--runs", place / "runs").stdout
    assert one.count("seed") == 2 and "task 1" in one and "-" in one


def test_compare_pairs_seeds_and_prints_an_interval(place: Path) -> None:
    a, b = hashes(place)
    done = contnorm("compare", a[:6], b[:6], "--runs", place / "runs")
    assert "95 % interval" in done.stdout and "2 seeds, paired" in done.stdout and " to " in done.stdout
    assert "norm.name: cn -> bn" in done.stdout or "norm.name: bn -> cn" in done.stdout


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


def test_run_with_prs_memory(place: Path) -> None:
    prs = ("--set", "memory.kind=prs", "--set", "memory.rho=-0.03", "--set", "memory.size=20", "--norm", "bn")
    done = contnorm("run", "--strategy", "er", *prs, *where(place), "--runs", place / "other", *SMALL)
    assert done.returncode == 0 and "memory.kind=prs memory.size=20 memory.rho=-0.03" in done.stdout, done.stderr


def test_flags_override_settings_file(place: Path) -> None:
    file = place / "run.toml"
    file.write_text('[norm]\nname = "gn"\ngroups = 10\n[stream]\ntrain_per_task = 40\ntasks = 2\n')
    done = contnorm("run", "--config", file, "--strategy", "single", "--groups", 5, *where(place))
    assert done.returncode == 0 and "gn5" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--stream", "split-cifar"), "unknown stream 'split-cifar'. Did you mean 'split-cifar10'"),
        (("run", "--strategy", "erx"), "unknown strategy 'erx'"),
        (("run", "--norm", "cm"), "unknown norm 'cm'"),
        (("run", "--stream", "split-cifar100"), "no cifar100 under"),
        (("run", "--set", "train.speed=9"), "unknown key 'train.speed'"),
        (("run", "--set", "lr=0.1"), "unknown key 'lr'"),
        (("run", "--buffer", "0"), "memory.size=0"),
        (("run", "--buffer", "2"), "memory.size=2 is too small"),
        (("run", "--seed", "-1"), "--seed -1: use 0 or more"),
        (("run", "--norm", "cn", "--groups", "7"), "num_groups=7 does not divide the 100 channels"),
        (("run", "--norm", "in"), "norm 'in': does not fit model 'mlp' with images of shape (1, 28, 28)"),
        (("run", "--norm", "gn", "--groups", "100"), "num_groups=100 leaves one value"),
        (("run", "--seeds", "0"), "--seeds 0: use 1 or more"),
        (("run", "--weights", "gone.pth"), "weights 'gone.pth'"),
        (("run", "--device", "tpu"), "device='tpu': use cpu, cuda"),
        (("show", "feed"), "no finished run 'feed'"),
        (("ls", "everything"), "unknown listing 'everything'"),
        (("data", "imagenet"), "unknown data set 'imagenet'"),
        (("data", "--fetch"), "There are: mnist, fashion-mnist"),
        (("data", "digits", "--fetch"), "unknown data set to download 'digits'"),
    ],
)
def test_user_error_is_one_line_and_exits_2(
    place: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    runs = ("--runs", str(tmp_path / "runs"))
    data = ("--data-root", str(place / "data"))
    done = contnorm(*arguments, *{"run": (*data, *runs, *SMALL[:2]), "show": runs, "ls": (), "data": ()}[arguments[0]])
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is written half"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--batch", "abc"), "train.batch='abc'"),
        (("run", "--nosuch"), "No such option: --nosuch. See `contnorm run --help`."),
        (("rum",), "No such command 'rum'. Did you mean 'run'"),
        (("compare", "a"), "expected two runs, got 1"),
        (("run", "--seed", "1", "--seeds", "2"), "--seed 1 and --seeds 2: use one of them"),
        (("run", "--set", "strategy.code=abc"), "strategy.code='abc' is computed and can't be set"),
        (("resume", "nowhere"), "no stopped run under nowhere"),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["contnorm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("contnorm: ") and message in err and err.count("\n") == 1


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
