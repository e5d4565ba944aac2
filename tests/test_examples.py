"""The examples outside continual learning: they run in quick mode, and their pages have the numbers of the records."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module(name)


def record_of(name: str) -> Any:
    return json.loads((ROOT / "docs" / "records" / "examples" / f"{name}.json").read_text())


def page_of(name: str) -> str:
    return (ROOT / "docs" / "howto" / f"{name}.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # frameworks advise
@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("offpolicy_critic", "torch"),
        ("federated_moments", "torch"),
        ("averaged_weights", "torch"),
        ("private_training", "opacus"),
        ("flower_moments", "flwr"),
    ],
)
def test_quick_mode_writes_a_record_of_the_same_form(
    name: str, framework: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(framework)
    load(name, monkeypatch).main(["--quick", "--record", str(tmp_path / "record.json")])
    ours, committed = json.loads((tmp_path / "record.json").read_text()), record_of(name.replace("_", "-"))
    assert set(ours) == set(committed) and list(ours["results"]) == list(committed["results"])
    for key, result in ours["results"].items():
        if isinstance(result, dict):
            assert set(result) == set(committed["results"][key])
    assert len(capsys.readouterr().out.splitlines()) >= len(ours["results"])


def cell(values: list[float]) -> str:
    return f"{fmean(values):,.1f} ± {stdev(values):,.1f}"


def test_returns_on_the_page_are_those_of_the_record() -> None:
    record, page = record_of("offpolicy-critic"), page_of("reinforcement-learning")
    assert record["seeds"] >= 5 and f"{record['steps']:,} steps" in page and f"{record['updates']:,} updates" in page
    for result in record["results"].values():
        assert len(result["returns"]) == record["seeds"]
        half, end = ([curve[i] for curve in result["returns"]] for i in (len(result["returns"][0]) // 2 - 1, -1))
        assert f"| {result['title']} | {cell(half)} | {cell(end)} |" in page
    default, scaled = (record["results"][name] for name in ("brn", "brn_steps"))
    assert (default["r_limit"], default["d_limit"]) == (1, 0) and (scaled["r_limit"], scaled["d_limit"]) == (3, 5)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("bn", "none", "batch norm adds {} to the return, and"),
        ("brn_steps", "none", "batch renorm with `total_steps` {}; target"),
        ("target", "none", "target networks add {}."),
        ("bn", "target", "target networks**: {} for batch norm"),
        ("brn_steps", "target", "for batch norm and {} for batch renorm"),
        ("brn_steps", "bn", "better than batch norm**: {} with `total_steps`"),
        ("brn", "bn", "The difference from batch norm, {}, comes"),
        ("brn_steps", "brn", "`total_steps` is {} above the default ramps"),
        ("cn", "none", "above no norm ({})"),
        ("cn", "bn", "differ from batch norm ({})"),
    ],
)
def test_differences_of_returns_are_those_of_the_record(first: str, second: str, words: str) -> None:
    results, page = record_of("offpolicy-critic")["results"], " ".join(page_of("reinforcement-learning").split())
    ends = ([curve[-1] for curve in results[name]["returns"]] for name in (first, second))
    differences = [a - b for a, b in zip(*ends, strict=True)]
    assert words.format(f"{fmean(differences):+,.1f} ± {stdev(differences):,.1f}") in page


def test_accuracies_on_the_page_are_those_of_the_record() -> None:
    record, page = record_of("federated-moments"), page_of("federated-averaging")
    assert record["seeds"] >= 5 and f"{record['rounds']} rounds" in page
    names = {"bn": "BN", "gn10": "GN", "cn10": "CN"}
    titles = {"averaged": "averaged", "pooled": "pooled", "reestimated": "re-estimated", "local": "kept local"}
    for key, result in record["results"].items():
        norm, _, rest = key.partition(" ")
        data, _, rule = rest.rpartition(" ")
        moments = "none" if norm == "gn10" else titles[rule]
        every, own = (cell(result[digits]["seeds"]) for digits in ("all_digits", "own_digits"))
        if data == "iid":
            assert f"| {names[norm]} | {moments} | {every} |" in page
        else:
            assert f"| {names[norm]} | {moments} | {every} | {own} |" in page


@pytest.mark.parametrize(
    ("first", "second", "digits", "words"),
    [
        ("bn reestimated", "bn averaged", "all", "moments of the averaged weights return {} of them"),
        ("cn10 reestimated", "cn10 averaged", "all", "re-estimated less averaged; {} with CN"),
        ("bn pooled", "bn averaged", "all", "here: {} with BN"),
        ("cn10 pooled", "cn10 averaged", "all", "with BN, {} with CN. Pooling"),
        ("bn local", "bn reestimated", "own", "own digits ({} against re-estimated ones)"),
        ("bn local", "bn averaged", "all", "worst on all digits ({} against averaged ones)"),
        ("cn10 local", "cn10 reestimated", "own", "worse on both: {} and"),
        ("cn10 local", "cn10 averaged", "all", "and {}. - **GN"),
        ("gn10 averaged", "bn reestimated", "all", "{} against BN with re-estimated moments"),
        ("cn10 reestimated", "bn reestimated", "all", "to differ from BN ({})"),
    ],
)
def test_differences_on_the_page_are_those_of_the_record(first: str, second: str, digits: str, words: str) -> None:
    results, page = record_of("federated-moments")["results"], " ".join(page_of("federated-averaging").split())
    seeds = (results[name.replace(" ", " two digits ")][f"{digits}_digits"]["seeds"] for name in (first, second))
    differences = [a - b for a, b in zip(*seeds, strict=True)]
    assert words.format(f"{fmean(differences):+.1f} ± {stdev(differences):.1f}") in page


@pytest.mark.slow
def test_calibration_is_measured_once_for_each_row(tmp_path: Path) -> None:
    script = importlib.import_module("benchmarks.calibrated_conversion")
    generator = numpy.random.default_rng(0)
    for sheet, part, images in (("test_batch", "test", 40), ("data_batch_1", "train", 100)):
        pixels = generator.integers(0, 256, (images, 1024, 3), numpy.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{sheet}.png")
        (tmp_path / f"{part}_lables.json").write_text(json.dumps([i % 10 for i in range(images)]))
    torch.manual_seed(0)
    torch.save({"state_dict": script.SmallResNet(8).state_dict()}, tmp_path / "weights.th")
    arguments = ["resnet8", "--weights", str(tmp_path / "weights.th"), "--images", str(tmp_path)]
    arguments += ["--targets", "gn, 8 channels", "--calibrate", "20", "--seeds", "1", "--rates", "0.01"]
    for _ in range(2):  # the second run has nothing to do
        script.main([str(tmp_path / "record.json"), *arguments])
    record, committed = json.loads((tmp_path / "record.json").read_text()), record_of("calibrated-conversion")
    assert [row.get("images") for row in record["rows"]] == [None, 0, 20, 0, 500]
    assert set(map(tuple, record["rows"])) == set(map(tuple, committed["rows"]))
    assert set(record["networks"]["resnet8"]) == set(committed["networks"]["resnet20"])


@pytest.mark.parametrize(
    ("name", "page", "columns"),
    [
        ("averaged-weights", "average-weights", ("last", "averaged", "update_bn", "reestimate", "update_bn, sorted")),
        ("private-training", "differential-privacy", ("public", "before", "after")),
        ("flower-moments", "federated-averaging", ()),
    ],
)
def test_tables_on_the_pages_are_those_of_the_records(name: str, page: str, columns: tuple[str, ...]) -> None:
    record, text = record_of(name), page_of(page)
    assert record["seeds"] >= 3 and f"{record['seeds']} seeds" in text
    for row, scores in record["results"].items():
        cells = [cell(scores[key]) if key in scores else "-" for key in columns] if columns else [cell(scores)]
        assert f"| {row} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("BN, SWA", "Re-estimated ones add {} points to SWA"),
        ("BN, pruned", "to SWA with BN, and {} to the pruned"),
    ],
)
def test_gains_of_moments_on_the_page_are_those_of_the_record(row: str, words: str) -> None:
    scores, page = record_of("averaged-weights")["results"][row], " ".join(page_of("average-weights").split())
    gains = [a - b for a, b in zip(scores["reestimate"], scores["last"], strict=True)]
    assert words.format(f"{fmean(gains):.1f} ± {stdev(gains):.1f}") in page
    assert scores["reestimate"] == scores["reestimate, sorted"]


@pytest.mark.parametrize(
    ("data", "words"), [("alike", "too**: {} points against `fix`"), ("rotated", "`fix` is better**: {} p")]
)
def test_differences_after_private_training_are_those_of_the_record(data: str, words: str) -> None:
    results, page = record_of("private-training")["results"], " ".join(page_of("differential-privacy").split())
    ends = (results[f"{data}: {way}"]["after"] for way in ("calibrated, 8 a group", "ModuleValidator.fix"))
    differences = [a - b for a, b in zip(*ends, strict=True)]
    assert words.format(f"{fmean(differences):+.1f} ± {stdev(differences):.1f}") in page


@pytest.fixture
def _double_precision() -> Iterator[None]:
    """Adam turns rounding errors of float32 gradients that should be zero into steps of its learning rate."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double_precision")
def test_agents_side_by_side_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two agents learns the same as one alone, with norms over the features of all."""
    critic = load("offpolicy_critic", monkeypatch)
    for name in ("brn_steps", "cn"):
        returns = []
        for seeds in (1, 2):
            generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
            agents = critic.Agents(critic.VARIANTS[name], generators, 10)
            for _ in range(4):
                draws = [torch.randn(16, 8, generator=g) for g in generators]
                agents.update(*torch.stack(draws, 1).split((3, 1, 1, 3), -1))
            with torch.no_grad():
                returns.append(agents.values(agents.critics.eval(), torch.ones(1, seeds, 3), torch.ones(1, seeds, 1)))
        torch.testing.assert_close(returns[0][:, 0], returns[1][:, 0], rtol=1e-6, atol=1e-8)
