"""`contnorm diagnose` and `diagnose_run`: the effect of a finished run."""

import io
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from contnorm import bench
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.metrics import AccuracyMatrix
from contnorm.bench.records import Record, Store, read_record
from contnorm.cli.diagnose import show_run_diagnosis
from contnorm.diagnosis import diagnose_run
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
    path = Store(runs).path(config, seed)
    return read_record(path), path


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


@pytest.mark.parametrize("stream", ["permuted-mnist", "split-mnist"])
def test_diagnosis_equals_the_record(root: Path, tmp_path: Path, stream: str) -> None:
    """Weights, data and heads are those of the run: its last rows, with running and oracle moments, come out again."""
    record, path = made(root, tmp_path, values(stream, evaluate={"moments": "oracle"}))
    found = diagnose_run(path, runs=tmp_path, root=root).diagnosis
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


def test_all_seeds_with_weights_are_measured(root: Path, runs: Path) -> None:
    (folder,) = runs.iterdir()
    measured = diagnose_run(folder.name, runs=runs, root=root)
    single = {seed: diagnose_run(folder.name, seed=seed, runs=runs, root=root).diagnosis for seed in (1, 2)}
    assert measured.by_seed == single and measured.diagnosis.seeds == (1, 2)
    recovered = [one.recovered for one in single.values()]
    assert measured.diagnosis.recovered == pytest.approx(fmean(recovered))
    interval = measured.diagnosis.recovered_interval
    assert interval is not None and fmean(interval) == pytest.approx(fmean(recovered)) and interval[0] < min(recovered)
    assert single[2].recovered_interval is None and "over 2 seeds);" in shown(folder.name, root, runs)


def test_two_runs_are_compared_by_pairs(root: Path, runs: Path, tmp_path: Path) -> None:
    (bn,) = runs.iterdir()
    options = values("permuted-mnist", norm={"name": "cn", "groups": 4})
    for seed in (1, 2):
        other = made(root, tmp_path, options, seed=seed)[1].parent
    found = [diagnose_run(folder, runs=runs, root=root).diagnosis.recovered for folder in (other, bn)]
    comparison = diagnose_run(bn, other=other, runs=runs, root=root).comparison
    assert f"Re-estimated moments recover {found[0]:.1f} of" in comparison and "with cn4" in comparison
    assert f"and {found[1]:.1f} of" in comparison and ", over 2 seeds; the 95 % interval" in comparison


def test_what_can_not_be_measured_is_an_error(root: Path, runs: Path, tmp_path: Path) -> None:
    (bn,) = runs.iterdir()
    _, bare = made(root, tmp_path / "bare", values("permuted-mnist"), keep=False)
    with pytest.raises(UserError, match=r"no weights of this run were saved. .*--keep-weights"):
        diagnose_run(bare, runs=runs, root=root)
    with pytest.raises(UserError, match="was run on other mnist data"):
        diagnose_run(bn.name, runs=runs, root=small_mnist(tmp_path / "other", train=100, test=50))
    _, fast = made(root, tmp_path / "fast", values("permuted-mnist", norm={"name": "cn"}, train={"lr": 0.1}), seed=1)
    for other in (bn, fast.parent):
        with pytest.raises(UserError, match="differ in their norm alone"):
            diagnose_run(bn, other=other, runs=runs, root=root)
