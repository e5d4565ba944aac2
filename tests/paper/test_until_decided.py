"""Seeds added look by look until the claims are decided: which runs each look has, when it ends, and what it says."""

import io
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contnorm.bench.api.progress import RunInterrupted
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store
from contnorm.errors import UserError
from contnorm.paper.recipe import Recipe, parse_recipe
from contnorm.paper.run import TableOptions, read_table, run_table

RECIPE = """
title = "three norms"
[scores]
acc = "acc"
[settings]
stream = { source = "digits", train_per_task = 20 }
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn", "ln", { name = "cn", groups = 4 }, "none"]
[[claims]]
says = "CN is over BN in ACC"
kind = "above"
score = "acc"
cells = { norm = "cn" }
than = { norm = "bn" }
[[claims]]
says = "LN is over BN in ACC"
kind = "above"
score = "acc"
cells = { norm = "ln" }
than = { norm = "bn" }
"""


@pytest.fixture
def recipe() -> Recipe:
    return parse_recipe("three", RECIPE, "three.toml")


@dataclass
class Runs:
    """Stands in for the execution of runs: writes a record for each missing job, and notes the seeds of each call."""

    accuracy: Callable[[str, int], float]
    diverges: Callable[[str, int], bool] = lambda norm, seed: False
    stop_after: int | None = None
    calls: list[dict[str, list[int]]] = field(default_factory=list)

    def __call__(self, jobs: Sequence[Run], environment: Any, console: Any) -> None:
        store = environment.store
        made: dict[str, list[int]] = {}
        self.calls.append(made)
        for job in jobs:
            norm = job.config.norm.name
            if store.has(job.config, job.seed) or store.is_diverged(job.config, job.seed):
                continue
            if self.stop_after is not None and sum(map(len, made.values())) == self.stop_after:
                raise RunInterrupted("stopped after saving. Run it again to continue.", 2)
            made.setdefault(norm, []).append(job.seed)
            if self.diverges(norm, job.seed):
                store.save_diverged(job.config, job.seed, f"seed {job.seed}: the loss is nan.")
            else:
                store.save(job.config, job.seed, content(self.accuracy(norm, job.seed)))


def content(accuracy: float) -> dict[str, Any]:
    correct = round(accuracy * 1000)
    matrix = {"correct": [[correct, None], [correct, correct]], "total": [100_000] * 2, "before": None}
    return {"matrix": matrix, "source": {"name": "digits", "fingerprint": "f00d"}}


def noisy(**means: tuple[float, float]) -> Callable[[str, int], float]:
    """ACC of a norm: its mean, and the distance from it of even seeds and of odd ones; other norms have exactly 60."""

    def accuracy(norm: str, seed: int) -> float:
        mean, spread = means.get(norm, (60.0, 0.0))
        return mean + spread * (-1) ** seed

    return accuracy


def options(root: Path, **more: Any) -> TableOptions:
    return TableOptions(runs=root, data_root=root, until_decided=True, **more)


def stages_of(seeds: Sequence[int]) -> tuple[int, int]:
    return seeds[0], seeds[-1]


@pytest.mark.slow
def test_only_undecided_cases_get_more_seeds(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LN differs by far; CN is equal, with a spread that needs 24 seeds; `none` is in no claim."""
    runs = Runs(noisy(cn=(60.1, 1.15), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    console = Console(file=io.StringIO(), width=200)
    result = run_table(recipe, options(tmp_path), console=console)
    seeds = [{norm: stages_of(made) for norm, made in call.items()} for call in runs.calls]
    assert seeds == [
        {"cn": (100, 115), "bn": (100, 115), "ln": (100, 115)},
        {"cn": (116, 123), "bn": (116, 123)},
    ]
    (variant,) = result.variants
    claims = {claim.claim.says[:2]: claim for claim in variant.claims}
    assert claims["CN"].outcome == "equivalent" and claims["CN"].evidence_text == "staged: 24 seeds"
    assert claims["LN"].outcome == "does not hold" and claims["LN"].evidence_text == "staged: 16 seeds"
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "Look at 16 seeds: 2 of 2 cases are undecided; 48 runs are missing." in said
    assert "Look at 24 seeds: 1 of 2 cases is undecided; 16 runs are missing." in said
    assert "2 of 2 cases are decided.\n" in said
    again = run_table(recipe, options(tmp_path, max_seeds=16)).variants[0].claims
    assert list(again) == list(variant.claims) and len(runs.calls) == 2, "recorded looks beyond the limit count"


@pytest.mark.slow
def test_limit_leaves_cases_undecided(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(noisy(cn=(60.1, 1.15), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    console = Console(file=io.StringIO(), width=200)
    result = run_table(recipe, options(tmp_path, max_seeds=20), console=console)
    assert len(runs.calls) == 1, "20 seeds allow the look at 16"
    cases = [case for claim in result.variants[0].claims for case in claim.cases]
    assert [case.outcome for case in cases] == ["undecided", "does not hold"]
    assert "would need about 24 seeds" in cases[0].note and "more than the limit of 20" in cases[0].note
    assert isinstance(console.file, io.StringIO)
    assert "1 of 2 cases is decided within the limit of 20 seeds." in console.file.getvalue()


@pytest.mark.slow
def test_interrupted_stage_is_continued(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = noisy(cn=(66.0, 0.5), ln=(50.0, 0.5))
    stopped = Runs(accuracy, stop_after=10)
    monkeypatch.setattr("contnorm.paper.run.run_missing", stopped)
    with pytest.raises(RunInterrupted, match="Run it again to continue"):
        run_table(recipe, options(tmp_path))
    (variant,) = read_table(recipe, options(tmp_path)).variants
    assert [one.outcome for one in variant.claims] == ["undecided"] * 2
    rest = Runs(accuracy)
    monkeypatch.setattr("contnorm.paper.run.run_missing", rest)
    outcomes = [one.outcome for one in run_table(recipe, options(tmp_path)).variants[0].claims]
    assert outcomes == ["holds", "does not hold"]
    assert len(rest.calls) == 1 and sum(map(len, rest.calls[0].values())) == 48 - 10
    again = Runs(accuracy)
    monkeypatch.setattr("contnorm.paper.run.run_missing", again)
    run_table(recipe, options(tmp_path))
    assert again.calls == [], "finished runs are not repeated"


@pytest.mark.slow
def test_diverged_runs_count_as_missing_pairs(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(noisy(cn=(66.0, 0.5), ln=(50.0, 0.5)), diverges=lambda norm, seed: (norm, seed) == ("cn", 103))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    (cn, _) = run_table(recipe, options(tmp_path)).variants[0].claims
    assert len(runs.calls) == 1 and cn.outcome == "holds"
    assert (cn.cases[0].seeds, cn.cases[0].note) == (15, "1 of 16 seeds diverged (as chance accuracy: holds)")


@pytest.mark.slow
def test_fresh_seeds_are_a_variant_of_their_own(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --until-decided, the table of the first seeds stays as it is, and recorded stages follow it."""
    runs = Runs(noisy(cn=(66.0, 0.5), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    plain = TableOptions(3, runs=tmp_path, data_root=tmp_path)
    (before,) = run_table(recipe, plain).variants
    run_table(recipe, options(tmp_path))
    table, fresh = run_table(recipe, plain).variants
    assert [list(one.records) for one in table.cells] == [[0, 1, 2]] * 4
    assert [one.values("acc") for one in table.cells] == [one.values("acc") for one in before.cells]
    assert [len(one.records) for one in fresh.cells] == [16, 16, 16, 0] and fresh.title == "Fresh seeds, from 100 on"
    assert {claim.evidence for claim in table.claims} == {"exploratory"}
    assert [claim.outcome for claim in fresh.claims] == ["holds", "does not hold"]


@pytest.mark.slow
def test_real_runs_are_interrupted_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two steps: a signal during the first stage saves, and the second call finishes it."""
    text = RECIPE.replace('norms = ["bn", "ln", { name = "cn", groups = 4 }, "none"]', 'norms = ["bn", "ln"]')
    text = text[: text.index("[[claims]]")] + text[text.rindex("[[claims]]") :]
    recipe = parse_recipe("two", text, "two.toml")
    save, saved = Store.save, []

    def save_and_stop(self: Store, *given: Any) -> Path:
        saved.append(given)
        if len(saved) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return save(self, *given)

    more = {"max_steps": 2, "max_seeds": 16, "execution": RunOptions()}
    with monkeypatch.context() as patched:
        patched.setattr(Store, "save", save_and_stop)
        with pytest.raises(RunInterrupted):
            run_table(recipe, options(tmp_path, **more))
    first = set(tmp_path.rglob("1*.json"))
    assert 3 <= len(first) < 32
    times = {path: path.stat().st_mtime_ns for path in first}
    (variant,) = run_table(recipe, options(tmp_path, **more)).variants
    assert [sorted(one.records) for one in variant.cells] == [list(range(100, 116))] * 2
    assert {path: path.stat().st_mtime_ns for path in first} == times
    (claim,) = variant.claims
    assert claim.evidence == "staged" and claim.cases[0].seeds == 16


@pytest.mark.slow
def test_cells_without_data_keep_their_seeds_and_do_not_stop_the_others(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BN and CN have a stage, recorded where their data was; without it they get no further one, and say so."""
    text = RECIPE.replace('source = "digits", ', "")
    recipe = parse_recipe("three", text, "three.toml")
    first = Runs(noisy(cn=(60.1, 1.15), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", first)
    monkeypatch.setattr("contnorm.paper.run.is_present", lambda source, root: True)
    run_table(recipe, options(tmp_path, max_seeds=16))
    monkeypatch.setattr("contnorm.paper.run.is_present", lambda source, root: False)
    later = Runs(noisy(cn=(60.1, 1.15), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", later)
    console = Console(file=io.StringIO(), width=200)
    result = run_table(recipe, options(tmp_path), console=console)
    assert later.calls == []
    assert [claim.outcome for claim in result.variants[0].claims] == ["undecided", "does not hold"]
    assert len(result.missing_data) == 1 and "three needs mnist" in result.missing_data[0]
    assert isinstance(console.file, io.StringIO)
    assert "1 of 2 cases is decided within the limit of 128 seeds." in console.file.getvalue()


@pytest.mark.slow
def test_precision_is_that_of_the_fresh_seeds(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More exploratory seeds in another precision neither hide recorded stages nor begin them anew."""
    runs = Runs(noisy(cn=(66.0, 0.5), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    run_table(recipe, TableOptions(20, runs=tmp_path, data_root=tmp_path))
    run_table(recipe, options(tmp_path, precision="tf32"))
    table, fresh = run_table(recipe, TableOptions(20, runs=tmp_path, data_root=tmp_path)).variants
    assert [claim.outcome for claim in fresh.claims] == ["holds", "does not hold"]
    assert {record.config.train.precision for one in table.cells for record in one.records.values()} == {"fp32"}
    assert {record.config.train.precision for one in fresh.cells for record in one.records.values()} == {"tf32"}
    calls = len(runs.calls)
    run_table(recipe, options(tmp_path))
    assert len(runs.calls) == calls, "the stage is recorded in tf32"


@pytest.mark.slow
def test_selection_does_not_hide_recorded_seeds_from_the_claims(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(noisy(cn=(66.0, 0.5), ln=(50.0, 0.5)))
    monkeypatch.setattr("contnorm.paper.run.run_missing", runs)
    whole = run_table(recipe, options(tmp_path)).variants[0].claims
    (variant,) = run_table(recipe, options(tmp_path, only=["norm=ln", "norm=bn"])).variants
    assert variant.claims == whole and len(runs.calls) == 1
    assert [one.cell.place["norm"] for one in variant.cells] == ["bn", "ln"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"margin": 0.0}, r"margin=0\.0"),
        ({"max_seeds": 7}, "max_seeds=7"),
        ({"seeds": 3}, "--seeds and --until-decided contradict"),
        ({"lr": "best"}, "no learning rates are chosen for three"),
        ({"lr": "bets"}, "Did you mean 'best'"),
        ({"only": ["norm=cn"]}, "no claim that compares the selected cells"),
    ],
)
def test_mistake_is_found_before_the_first_run(
    recipe: Recipe, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_table(recipe, replace(options(tmp_path, **more), runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
