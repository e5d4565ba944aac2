"""Results and comparisons: arrays, scores, frames, figures and paired differences."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from contnorm import bench
from contnorm.bench.comparison import seeds_to_resolve
from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import make_record
from contnorm.errors import UserError
from tests.datasets import small_long_tail


@pytest.fixture
def result(stream: bench.Stream) -> bench.Result:
    return bench.run(stream, norm="bn", seeds=3, keep_weights=True, lanes=1)


@pytest.mark.slow
def test_accuracy_and_scores(result: bench.Result) -> None:
    accuracy = result.accuracy
    assert accuracy.shape == (3, 3, 3) and np.isnan(accuracy[:, 0, 1]).all()
    assert np.allclose(result.acc, accuracy[:, -1].mean(1))
    assert np.allclose(result.la, np.diagonal(accuracy, axis1=1, axis2=2).mean(1))
    best = np.array([[accuracy[s, j:2, j].max() for j in range(2)] for s in range(3)])
    assert np.allclose(result.fm, (best - accuracy[:, -1, :2]).mean(1))
    assert set(result.scores()) >= {"acc", "fm", "la", "bwt", "aia"}
    with pytest.raises(UserError, match="acc"):
        result.score("accuracy")


@pytest.mark.slow
def test_models_have_the_recorded_accuracy(result: bench.Result, stream: bench.Stream) -> None:
    for seed, model in enumerate(result.models()):
        assert not model.training
        assert np.allclose(bench.evaluate(model, stream, seed=seed), result.accuracy[seed, -1])


def test_models_need_kept_weights(stream: bench.Stream) -> None:
    with pytest.raises(UserError, match="keep_weights=True"):
        bench.run(stream, settings={"train.max_steps": 2}).models()


@pytest.mark.slow
def test_frame_has_one_row_per_seed(result: bench.Result) -> None:
    frame = result.to_frame()
    assert list(frame["seed"]) == [0, 1, 2] and set(frame["norm.name"]) == {"bn"} and set(frame["train.lr"]) == {0.03}
    assert np.allclose(frame["acc"], result.acc)


@pytest.mark.slow
def test_figure_and_html(result: bench.Result) -> None:
    assert len(result.plot().axes) >= 2
    html = result._repr_html_()
    assert "data:image/png;base64," in html and f"{result.acc.mean():.2f}" in html
    assert repr(result).startswith("Result(arrays, er, bn (3 seeds): acc ")


@pytest.mark.slow
def test_compare_pairs_the_seeds_that_both_have(stream: bench.Stream, result: bench.Result) -> None:
    other = bench.run(stream, norm="cn", seeds=range(1, 5))
    comparison = bench.compare(other, result)
    differences = other.acc[:2] - result.acc[1:]
    assert comparison.seeds == (1, 2) and np.allclose(comparison.differences, differences)
    low, high = stats.t.interval(0.95, 1, differences.mean(), differences.std(ddof=1) / math.sqrt(2))
    assert comparison.interval is not None and np.allclose(comparison.interval, (low, high))
    assert bench.compare(result, other, "fm").mean == pytest.approx((result.fm[1:] - other.fm[:2]).mean())
    assert (comparison.only_a, comparison.only_b) == ((3, 4), (0,))
    for words in ("points", "95 % interval", "2 seeds in common; 2 only in a; 1 only in b"):
        assert words in str(comparison)


@pytest.mark.slow
def test_compare_rejects_what_can_not_be_compared(stream: bench.Stream, result: bench.Result) -> None:
    apart = bench.run(stream, norm="cn", seeds=[7])
    with pytest.raises(UserError, match="no seed in common"):
        bench.compare(result, apart)
    with pytest.raises(UserError, match=r"^a has records of 2 experiments.*norm.name \(bn, cn\)"):
        bench.compare([*result.records, *apart.records], result)
    with pytest.raises(UserError, match="fmm"):
        bench.compare(result, result, "fmm")


def _record(seed: int, correct: int = 7, **settings: dict[str, Any]) -> bench.Record:
    return make_record(from_dict(settings), seed, {"matrix": {"correct": [[9, None], [6, correct]], "total": [10, 10]}})


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("name", "split-mnist", "split-cifar10"),
        ("source", "mnist", "digits"),
        ("tasks", 3, 5),
        ("scenario", "task", "class"),
        ("train_per_task", None, 100),
        ("test_per_task", 10, None),
        ("class_order", "fixed", "seed"),
        ("part", "learn", "validate"),
        ("augment", True, False),
    ],
)
def test_compare_rejects_other_streams(key: str, first: object, second: object) -> None:
    """Seeds are pairs only if both runs of a seed see the same data."""
    a, b = (_record(0, stream={"name": "split-mnist", key: value}) for value in (first, second))
    values = [str(value).lower() for value in (first, second)]
    with pytest.raises(UserError, match=rf"stream\.{key} is {values[0]} and {values[1]}\."):
        bench.compare([a], [b])


def test_compare_accepts_the_default_of_a_stream_in_place_of_none() -> None:
    settings: list[dict[str, Any]] = [{}, {"scenario": "task"}]
    a, b = (_record(0, stream={"name": "split-mnist", **chosen}) for chosen in settings)
    assert bench.compare([a], [b]).mean == 0


def test_comparison_text_names_unresolved_and_identical_runs() -> None:
    bn, cn = ({"norm": {"name": name}} for name in ("bn", "cn"))
    a = [_record(seed, correct, **cn) for seed, correct in enumerate((8, 6, 9))]
    b = [_record(seed, 7, **bn) for seed in range(3)]
    difference = bench.compare(a, b)
    needed = f"to resolve a difference of this size, about {difference.seeds_needed} seeds would be needed"
    assert not difference.resolved and needed in str(difference) and "3 seeds in common; to" in str(difference)
    assert "1 seed in common; more seeds are needed" in str(bench.compare(a[:1], b[:1]))
    same = bench.compare(b, b)
    assert same.identical and same.same_settings and "identical; a and b are the same experiment" in str(same)
    equal = bench.compare([_record(0, 7, **cn)], b)
    assert equal.identical and "identical; 1 seed in common; 2 only in b" in str(equal)


def test_seeds_to_resolve_is_the_sample_size_of_a_paired_t_test() -> None:
    """Simulation: with the computed number of seeds, about 80 % of tests reject zero; with half, far fewer."""
    rng = np.random.default_rng(0)
    differences = [0.0, 1.0, 2.0, -1.0, 0.5]
    needed = seeds_to_resolve(differences)
    assert needed is not None
    mean, std = np.mean(differences), np.std(differences, ddof=1)
    samples = rng.normal(mean, std, size=(4000, needed))
    rejected = (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean()
    assert 0.77 < rejected < 0.84  # four standard errors of the simulation around 0.80
    assert (stats.ttest_1samp(samples[:, : needed // 2], 0, axis=1).pvalue < 0.05).mean() < 0.65
    assert seeds_to_resolve([1.0]) is None and seeds_to_resolve([2.0, 2.0]) is None


@pytest.mark.slow
def test_own_loop_gives_the_matrix_of_a_run(stream: bench.Stream) -> None:
    """A loop of the user's own with `batches`, `evaluate` and `metrics` reproduces training without replay."""
    import torch  # noqa: PLC0415

    from contnorm.bench.engine.trainer import Trainer  # noqa: PLC0415

    settings = {"strategy.name": "single", "model.name": "mlp"}
    result = bench.run(stream, norm="bn", settings=settings)
    model = Trainer(result.config, 0, stream.source, torch.device("cpu")).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    rows: list[np.ndarray] = []
    task = 0
    model.train()
    for batch in stream.batches(seed=0):
        if int(batch.task[0]) != task:
            rows.append(bench.evaluate(model, stream))
            task += 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    rows.append(bench.evaluate(model, stream))
    matrix = bench.accuracy_matrix([row[: i + 1] for i, row in enumerate(rows)])
    assert np.allclose(matrix, result.accuracy[0], equal_nan=True)
    assert bench.metrics.forgetting(matrix, definition="paper") == pytest.approx(result.fm[0])


def test_accuracy_matrix_says_how_many_accuracies_a_row_needs() -> None:
    with pytest.raises(UserError, match=r"row 0 has shape \(3,\)\. Give 1 to 2 accuracies"):
        bench.accuracy_matrix([[1.0, 2.0, 3.0], [1.0, 2.0]])
    with pytest.raises(UserError, match=r"row 1 has shape \(1,\)\. Give 2 accuracies after task 1\."):
        bench.accuracy_matrix([[1.0], [2.0]])


def test_title_has_the_name_of_the_data(arrays: tuple[np.ndarray, ...]) -> None:
    stream = bench.Stream.from_arrays(*arrays, tasks=1, name="sensors")
    result = bench.run(stream, settings={"train.max_steps": 2})
    assert repr(result).startswith("Result(sensors, er, cn (auto groups) (1 seed)")
    curve = result.plot().axes[0]
    assert curve.get_xticks().tolist() == [1] and curve.get_ylim()[1] <= 101


def test_progress_without_bars_is_one_line_per_run(stream: bench.Stream) -> None:
    console = Console(file=io.StringIO(), width=200)
    bench.run(stream, settings={"train.max_steps": 2}, seeds=2, lanes=1, progress=console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert ["seed 0" in lines[0], "seed 1" in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.slow
def test_multi_label_results_have_scores_and_no_accuracies(tmp_path: Path) -> None:
    small_long_tail(tmp_path, "cocoseq", per_task=10, side=8)
    stream = bench.load_stream("cocoseq", root=tmp_path)
    settings = {"train.max_steps": 2, "model.width": 8, "model.name": "mlp"}
    bn, cn = (bench.run(stream, norm=norm, settings=settings) for norm in ("bn", "cn"))
    assert list(bn.scores()) == list(cn.scores()) and "map" in bn.scores()
    assert bench.compare(cn, bn, "map").mean == pytest.approx(cn.score("map")[0] - bn.score("map")[0])
    assert "map" in bn._repr_html_() and "map" in bn.to_frame()
    for use in (bn.plot, lambda: bn.accuracy, lambda: bn.acc):
        with pytest.raises(UserError, match="cores"):
            use()
    with pytest.raises(UserError, match=r"stream\.name"):
        bench.compare(bn, bench.run(bench.load_stream("split-mnist", source="digits"), settings={"train.max_steps": 1}))


def test_frame_by_task_has_every_measured_accuracy(result: bench.Result) -> None:
    frame = result.to_frame("task")
    assert list(frame.columns) == ["seed", "after_task", "task", "accuracy"] and len(frame) == 3 * 6
    row = frame[(frame.seed == 2) & (frame.after_task == 2) & (frame.task == 1)]
    assert row["accuracy"].item() == pytest.approx(result.accuracy[2, 2, 1])
    with pytest.raises(UserError, match="by='seeds'"):
        result.to_frame("seeds")  # type: ignore[arg-type]


def test_plot_of_several_results_has_a_curve_and_a_matrix_of_each(stream: bench.Stream, result: bench.Result) -> None:
    other = bench.run(stream, norm="cn3", settings={"model.width": 6}, lanes=1)
    drawn = result.plot(other)
    curves, *matrices, _ = drawn.axes
    assert len(curves.lines) == 2 and len(matrices) == 2
    labels = [text.get_text() for text in curves.get_legend().get_texts()]
    assert labels == ["arrays, er, bn (3 seeds)", "arrays, er, cn3 (1 seed)"]
    assert drawn._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
