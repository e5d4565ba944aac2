"""Results and comparisons: arrays, scores, frames, figures and paired differences."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from contnorm import bench
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
    assert repr(result).startswith("Result(arrays, er, bn (3 seeds): acc ") and ", aia " in repr(result)


@pytest.mark.slow
def test_compare_pairs_the_seeds_that_both_have(stream: bench.Stream, result: bench.Result) -> None:
    other = bench.run(stream, norm="cn", seeds=range(1, 5))
    verdict = bench.compare(other, result)
    differences = other.acc[:2] - result.acc[1:]
    assert list(verdict.differences) == [1, 2] and np.allclose(list(verdict.differences.values()), differences)
    assert bench.compare(result, other, "aia").mean == pytest.approx((result.aia[1:] - other.aia[:2]).mean())
    assert verdict.outcome == "undecided" and "2 shared seeds" in verdict.sentence


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
    matrix = np.where(np.tri(len(rows)) == 1, rows, np.nan)
    assert np.allclose(matrix, result.accuracy[0], equal_nan=True)
    assert bench.metrics.forgetting(matrix, definition="paper") == pytest.approx(result.fm[0])


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
    assert "mAP" in bn._repr_html_() and "map" in bn.to_frame()
    for use in (bn.plot, lambda: bn.accuracy, lambda: bn.acc):
        with pytest.raises(UserError, match="cores"):
            use()
    with pytest.raises(UserError, match=r"stream\.name"):
        bench.compare(bn, bench.run(bench.load_stream("split-mnist", source="digits"), settings={"train.max_steps": 1}))
