"""The comparison of norms that opens a report: its numbers, its choices, and folders of every kind."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from contnorm.bench import compare, load_runs
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.records import Store
from contnorm.errors import UserError
from contnorm.paper.recipe import find_recipe
from contnorm.report import report as report_module
from contnorm.report.norm_comparison import Experiment
from contnorm.report.report import collect_report, report_files, report_text, write_report
from tests.committed_records import COARSE_GRID, COCOSEQ, contents_of, copy_run
from tests.report.record_samples import make_records

FEW = ["figure3"]  # searching the runs of all recipes takes most of the time of a small report
HASH = re.compile(r"\b[0-9a-f]{12}\b")


def config_of(norm_name: str, lr: float, **more: Any) -> RunConfig:
    base = {"stream": {"name": "split-mnist", "source": "mnist"}, "norm": {"name": norm_name}, "train": {"lr": lr}}
    return from_dict(merge_settings(base, more))


def save(root: Path, config: RunConfig, percents: list[float], first_seed: int = 0) -> None:
    """One run per percentage, with this accuracy on both of its tasks at the end."""
    for seed, percent in enumerate(percents, first_seed):
        last = round(percent * 10)
        matrix = {"correct": [[900, None], [last, last]], "total": [1000, 1000]}
        Store(root).save(config, seed, {"matrix": matrix})


def diverge(root: Path, config: RunConfig, seed: int) -> None:
    Store(root).save_diverged(config, seed, f"seed {seed}: the loss is nan at step 9 of 60 (task 2).", {})


def only(root: Path) -> Experiment:
    [experiment] = collect_report(root, FEW).experiments
    return experiment


def opening(root: Path) -> str:
    return report_text(collect_report(root, FEW), "md", "comparison")


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Two norms with two learning rates and three seeds each."""
    save(tmp_path, config_of("bn", 0.01), [60, 61, 63])
    save(tmp_path, config_of("bn", 0.1), [70, 72, 71])
    save(tmp_path, config_of("cn8", 0.01), [75, 78, 76])
    save(tmp_path, config_of("cn8", 0.1), [50, 52, 54])
    return tmp_path


def test_best_settings_and_differences_are_those_of_numpy_and_scipy(grid: Path) -> None:
    lines = opening(grid).splitlines()
    bn, cn = np.array([70.0, 72.0, 71.0]), np.array([75.0, 78.0, 76.0])
    for name, rate, values in (("cn8", 0.01, cn), ("bn", 0.1, bn)):
        [row] = [line for line in lines if line.startswith(f"| {name} | {rate} |")]
        assert f"| {values.mean():.2f} +- {values.std(ddof=1):.2f} |" in row
        assert row.endswith("| 3 | 2 | test tasks |")
    low, high = stats.ttest_rel(cn, bn).confidence_interval(0.95)
    row = f"| cn8 (lr=0.01) minus bn (lr=0.1) | {(cn - bn).mean():+.2f} | {low:+.2f} to {high:+.2f} | 3 | undecided |"
    assert row in lines, "three exploratory seeds have an ordinary interval and no verdict"


def test_verdict_is_that_of_compare(tmp_path: Path) -> None:
    """Of two norms; three pairs of norms are a family."""
    values = {"bn": [70 + seed % 3 for seed in range(16)], "cn8": [71 + seed % 4 for seed in range(16)]}
    for norm, percents in values.items():
        save(tmp_path, config_of(norm, 0.03), percents, first_seed=100)
    runs = load_runs(tmp_path)
    verdict = compare(runs.where(norm="cn"), runs.where(norm="bn"))
    assert verdict.outcome == "higher" and verdict.sentence in opening(tmp_path)
    assert f"| cn8 minus bn | {verdict.mean:+.2f} | {verdict.interval} | 16 | cn8 is higher |" in opening(tmp_path)
    save(tmp_path, config_of("gn8", 0.03), values["bn"], first_seed=100)
    family = [one.verdict for one in only(tmp_path).differences if one.verdict]
    assert [one.cases for one in family] == [3] * 3 and "one of 3 questions" in opening(tmp_path)


def test_opening_of_committed_records_is_that_of_their_counts() -> None:
    """The best of the five learning rates of BN and CN with ER, computed from the counts in the archive."""
    report = collect_report(COARSE_GRID)
    [experiment] = [one for one in report.experiments if one.title.startswith("split-cifar100, er")]
    finals: dict[tuple[str, float], dict[int, float]] = {}
    for record in experiment.records:
        raw = contents_of(record.hash, COARSE_GRID)[record.seed] if record.seed == 0 else dict(record.raw)
        last, total = raw["matrix"]["correct"][-1], raw["matrix"]["total"]
        place = raw["config"]["norm"]["name"], raw["config"]["train"]["lr"]
        finals.setdefault(place, {})[record.seed] = float(np.mean(100 * np.array(last) / np.array(total)))
    values = {}
    for norm in ("bn", "cn"):
        by_rate = {rate: list(some.values()) for (name, rate), some in finals.items() if name == norm}
        rate = max(by_rate, key=lambda one: np.mean(by_rate[one]))
        [best] = [one for one in experiment.best if one.norm.rstrip("0123456789") == norm]
        assert best.setting is not None and best.setting.lr == rate and best.tried == len(by_rate) == 5
        assert list(best.setting.seed_scores("acc").values()) == pytest.approx(by_rate[rate])
        values[norm] = by_rate[rate]
    [difference] = [one for one in experiment.differences if {one.a.norm, one.b.norm} == {"cn32", "bn"}]
    verdict = difference.verdict
    expected = stats.ttest_rel(values["cn"], values["bn"]).confidence_interval(0.95)
    assert verdict is not None and verdict.uncorrected == pytest.approx((expected.low, expected.high))
    assert verdict.mean == pytest.approx(np.mean(values["cn"]) - np.mean(values["bn"])) and not verdict.is_decided


def test_csv_is_not_rounded(grid: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report_text(collect_report(grid), "csv", "comparison"))))
    assert [row["norm"] for row in rows] == ["cn8", "bn"]
    assert float(rows[1]["std"]) == pytest.approx(1.0) and rows[1]["settings"] == "lr=0.1"
    low, high = stats.ttest_rel([75, 78, 76], [70, 72, 71]).confidence_interval(0.95)
    assert [float(rows[1][key]) for key in ("difference", "low", "high")] == pytest.approx([16 / 3, low, high])
    assert rows[0]["difference"] == "", "the first norm is not compared with itself"


def test_page_opens_with_the_comparison_and_names_settings(grid: Path) -> None:
    html = report_text(collect_report(grid), "html")
    begin, end = html.index('<section id="comparison">'), html.index("<h2>Scores of all runs")
    assert html.index("<main>") < begin < end
    part = html[begin:end]
    assert not HASH.search(part), "settings are named, not hashes"
    for legend in ("norm=cn8, lr=0.01", "norm=bn, lr=0.1"):
        assert f">{legend}</text>" in part
    assert part.count("<svg") == 3, "accuracy after each task, by learning rate, and the differences"
    assert "split-mnist, single: ACC by learning rate. Highest: norm=cn8 76.33 at 0.01, norm=bn 71.00 at 0.1." in part


def test_report_without_runs_of_the_paper_does_not_mention_it(grid: Path, tmp_path: Path) -> None:
    report = collect_report(grid)
    assert report_files(report, "md").keys() == {"comparison.md", "runs.md"}
    assert report_files(report, "csv").keys() == {"comparison.csv", "runs.csv"}
    html = report_text(report, "html")
    for word in ("claim", "Table 1", "Not run", "not-run"):
        assert word not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    assert "No run belongs to a claim" in report_text(report, "md", "claims")
    write_report(report, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == html


def test_claims_without_runs_are_not_listed(tmp_path: Path) -> None:
    make_records(find_recipe("table10"), tmp_path, only=lambda cell: cell.norm in ("bn", "gn32"))
    report = collect_report(tmp_path, ["table10"])
    text = report_text(report, "md", "claims")
    assert "without replay GN forgets less than BN" in text and "CN is over BN" not in text
    assert "CN is over BN" not in re.search(r'<section id="claims">.*?</section>', report_text(report, "html"), re.S)[0]  # type: ignore[index]


def test_one_run_has_its_score_and_no_difference(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [81.5])
    text = opening(tmp_path)
    assert "| bn | 0.03 | 81.50 |" in text and "| 1 | 1 | one setting |" in text
    assert "ACC: 81.50 with norm=bn, lr=0.03 (1 seed)." in text and "paired differences" not in text
    assert "Nothing was chosen" in text and "Highest" not in text
    html = report_text(collect_report(tmp_path, FEW), "html")
    assert "<h1>contnorm: runs</h1>" in html and 'id="comparison-1"' in html


def test_one_norm_has_the_curves_of_its_settings(tmp_path: Path) -> None:
    for rate in (0.01, 0.03):
        save(tmp_path, config_of("bn", rate), [60 + 100 * rate, 61])
    html = report_text(collect_report(tmp_path, FEW), "html")
    assert ">norm=bn, lr=0.01</text>" in html and ">norm=bn, lr=0.03</text>" in html
    assert only(tmp_path).differences == []


def test_one_seed_has_a_difference_without_an_interval(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [80])
    save(tmp_path, config_of("cn8", 0.03), [82])
    assert "| cn8 minus bn | +2.00 | - | 1 | undecided |" in opening(tmp_path)
    report_text(collect_report(tmp_path, FEW), "html")


def test_norms_without_a_shared_seed_are_not_compared(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [80, 81])
    save(tmp_path, config_of("cn8", 0.03), [82, 83], first_seed=5)
    text = opening(tmp_path)
    assert "| cn8 minus bn | - | - | 0 | no shared seeds |" in text and "have no seed in common" in text
    report_text(collect_report(tmp_path, FEW), "html")


def test_equal_differences_are_undecided(tmp_path: Path) -> None:
    """Their standard deviation of zero is no estimate."""
    save(tmp_path, config_of("bn", 0.03), [80, 81])
    save(tmp_path, config_of("cn8", 0.03), [82, 83])
    assert "| cn8 minus bn | +2.00 | - | 2 | undecided |" in opening(tmp_path)


def test_unfinished_runs_are_counted_with_the_command_that_resumes_them(tmp_path: Path) -> None:
    config = config_of("bn", 0.03)
    save(tmp_path, config, [80, 81])
    for seed in (1, 2):  # the first has a record: a folder that was not removed
        folder = tmp_path / config.hash / f"{seed}.unfinished"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"config": config.as_dict(), "seed": seed}))
    assert "1 run is not finished and not counted; contnorm resume continues stopped runs." in opening(tmp_path)
    assert "1 run is not finished" in report_text(collect_report(tmp_path, FEW), "html")


def test_setting_with_a_diverged_seed_is_not_chosen(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [80, 81, 82])
    save(tmp_path, config_of("bn", 0.3), [90, 91])
    diverge(tmp_path, config_of("bn", 0.3), 2)
    [best] = only(tmp_path).best
    assert best.setting is not None and (best.setting.lr, best.tried) == (0.03, 2)
    text = opening(tmp_path)
    assert "Diverged: norm=bn, lr=0.3 (1 of 3 seeds)." in text and "| 90.50 +- 0.71, 1 diverged |" in text


def test_norm_whose_runs_all_diverged_has_a_row(tmp_path: Path) -> None:
    save(tmp_path, config_of("cn8", 0.03), [80, 81])
    for rate in (0.03, 0.3):
        diverge(tmp_path, config_of("brn", rate), 0)
    text = opening(tmp_path)
    assert "| brn | - | diverged | - | - | - | 0 | 2 | - |" in text
    report_text(collect_report(tmp_path, FEW), "html")


def test_folder_of_diverged_runs_is_refused(tmp_path: Path) -> None:
    diverge(tmp_path, config_of("bn", 0.3), 0)
    with pytest.raises(UserError, match="no finished runs, all diverged"):
        write_report(tmp_path, tmp_path / "report.html")


def test_setting_with_few_seeds_is_not_chosen(tmp_path: Path) -> None:
    """Two lucky seeds do not win over a setting with five; three are enough to count."""
    save(tmp_path, config_of("bn", 0.03), [80, 81, 82, 80, 81])
    save(tmp_path, config_of("bn", 0.1), [95, 94])
    save(tmp_path, config_of("bn", 0.2), [78, 79, 80])
    assert only(tmp_path).best[0].setting.lr == 0.03  # type: ignore[union-attr]
    save(tmp_path, config_of("bn", 0.1), [95, 94, 96])
    assert only(tmp_path).best[0].setting.lr == 0.1  # type: ignore[union-attr]


def test_settings_are_chosen_on_validation_runs_of_the_same_experiment(tmp_path: Path) -> None:
    cifar = {"stream": {"name": "split-cifar100", "source": "cifar100"}}
    for rate, validation, test in ((0.01, [70, 71], [60, 61]), (0.1, [60, 61], [75, 76])):
        values = merge_settings(cifar, {"train": {"lr": rate}})
        save(tmp_path, from_dict(merge_settings(values, {"stream": {"part": "validate"}})), validation)
        save(tmp_path, from_dict(merge_settings(values, {"stream": {"part": "learn"}})), test)
    on_test, on_validation = collect_report(tmp_path, FEW).experiments
    assert (on_test.title, on_validation.title) == (
        "split-cifar100, single",
        "split-cifar100, single, validation tasks",
    )
    [best] = on_test.best
    assert best.setting is not None and (best.setting.lr, best.chosen_on) == (0.01, "validation tasks")
    assert best.setting.mean("acc") == pytest.approx(60.5), "the score is that on the test tasks"
    text = opening(tmp_path)
    assert "chosen by ACC on validation tasks; the scores are on the test tasks" in text
    assert "These are validation runs" in text


def test_settings_are_chosen_on_held_out_samples(tmp_path: Path) -> None:
    for rate, validation, test in ((0.01, [70, 71], [60, 61]), (0.1, [60, 61], [75, 76])):
        save(tmp_path, config_of("bn", rate, stream={"holdout": 0.1}), validation)
        save(tmp_path, config_of("bn", rate), test)
    on_test, on_validation = collect_report(tmp_path, FEW).experiments
    assert on_validation.title == "split-mnist, single, stream.holdout=0.1, held-out training samples"
    [best] = on_test.best
    assert best.setting is not None and (best.setting.lr, best.chosen_on) == (0.01, "held-out training samples")


def test_own_settings_of_a_component_are_named(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "mine.py:Mine", "strength": 2}), [80])
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "mine.py:Mine"}), [70])
    experiment = only(tmp_path)
    assert [experiment.name(one) for one in experiment.chosen] == ["norm=bn, lr=0.03, strategy.strength=2"]
    assert "strategy.strength=2" in opening(tmp_path)


def test_choice_on_test_tasks_is_stated(grid: Path) -> None:
    assert "Settings were chosen by ACC on the test tasks, so the scores of the chosen ones are too high" in opening(
        grid
    )


def test_different_streams_strategies_and_memories_are_not_compared(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [80, 81])
    save(tmp_path, config_of("cn8", 0.03, strategy={"name": "er"}), [82, 83])
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "er"}), [82, 83])
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "er"}, memory={"size": 7}), [70, 71])
    save(tmp_path, config_of("bn", 0.03, stream={"name": "split-cifar10", "source": "cifar10"}), [60])
    titles = [one.title for one in collect_report(tmp_path, FEW).experiments]
    usual = from_dict({"stream": {"name": "split-mnist"}}).memory.size
    assert titles == [
        f"split-mnist, er, memory.size={usual}",
        "split-cifar10, single",
        "split-mnist, er, memory.size=7",
        "split-mnist, single",
    ]
    html = report_text(collect_report(tmp_path, FEW), "html")
    assert "Highest score in each experiment" in html and all(f">{title}</a>" in html for title in titles)


def test_settings_that_vary_are_named_and_others_are_not(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03, train={"batch": 5}, norm={"momentum": 0.5}), [80])
    save(tmp_path, config_of("bn", 0.03, train={"batch": 20}, norm={"momentum": 0.1}), [82])
    save(tmp_path, config_of("cn8", 0.03, train={"batch": 20}), [70])
    experiment = only(tmp_path)
    names = [experiment.name(setting) for setting in experiment.chosen]
    assert names == ["norm=bn, lr=0.03, norm.momentum=0.1, batch=20", "norm=cn8, lr=0.03, batch=20"]


def test_settings_of_evaluation_do_not_separate_runs(tmp_path: Path) -> None:
    """They do not change the training, so both folders have seeds of the same setting."""
    save(tmp_path, config_of("bn", 0.03), [80, 81])
    save(tmp_path, config_of("bn", 0.03, evaluate={"ahead": True}), [80, 81, 85])
    [best] = only(tmp_path).best
    assert best.setting is not None and list(best.setting.seed_scores("acc")) == [0, 1, 2] and best.tried == 1


def test_exact_moments_follow_running_ones(tmp_path: Path) -> None:
    copy_run("be94d42372be", tmp_path)
    experiment = only(tmp_path)
    assert [best.norm for best in experiment.best] == ["bn", "bn*"], "although BN* is higher"
    raws = contents_of("be94d42372be").values()
    for norm, key in (("bn", "matrix_running"), ("bn*", "matrix")):
        finals = [np.mean(100 * np.array(r[key]["correct"][-1]) / np.array(r[key]["total"])) for r in raws]
        [setting] = [one for one in experiment.chosen if one.norm == norm]
        assert setting.mean("acc") == pytest.approx(np.mean(finals))
    text = opening(tmp_path)
    assert "ACC without exact moments: 83.67" in text and "An asterisk marks" in text


def test_moments_of_evaluation_and_frozen_moments_are_rows_of_their_own(tmp_path: Path) -> None:
    matrix = {"correct": [[900, None], [800, 800]], "total": [1000, 1000]}
    for weights, correct in (("plain", 830), ("task", 850)):
        config = config_of("bn", 0.03, evaluate={"moments": "memory", "weights": weights})
        row = {"correct": [[900, None], [correct, correct]]}
        Store(tmp_path).save(config, 0, {"matrix": {**matrix, **row}, "matrix_running": matrix})
    save(tmp_path, config_of("bn", 0.03, norm={"freeze_after": 1}), [82])
    scores = {one.norm: one.mean("acc") for one in only(tmp_path).chosen}
    assert scores == {"bn memory (task weights)": 85.0, "bn memory": 83.0, "bn frozen": 82.0, "bn": 80.0}


def test_multilabel_runs_are_compared_by_map() -> None:
    experiments = collect_report(COCOSEQ, ["table5"]).experiments
    assert [one.title for one in experiments] == ["cocoseq, crs", "cocoseq, prs"]
    for experiment in experiments:
        assert experiment.score_names[0] == "map" and len(experiment.best) == 5
        for setting in experiment.chosen:
            raws = [record.raw for record in setting.records.values()]
            texts = [raw["labels"]["tally"][-1]["ap"].split() for raw in raws]
            finals = [100 * np.mean([float(text) for text in some if text != "-"]) for some in texts]
            assert setting.mean("map") == pytest.approx(np.mean(finals))


def test_runs_with_max_steps_are_compared_among_themselves(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [80])
    save(tmp_path, config_of("cn8", 0.03, train={"max_steps": 5}), [20])
    Store(tmp_path).save(
        config_of("cn8", 0.03, train={"max_steps": 5}), 1, {"matrix": {"correct": [[30]], "total": [100]}}
    )
    assert [one.title for one in collect_report(tmp_path, FEW).experiments] == [
        "split-mnist, first 5 steps, single",
        "split-mnist, single",
    ]
    assert "The runs reached 1 to 2 tasks (--max-steps), so their scores are not comparable." in opening(tmp_path)
    report_text(collect_report(tmp_path, FEW), "html")


def test_many_norms_are_compared_with_the_first(tmp_path: Path) -> None:
    for number, norm in enumerate(("bn", "cn8", "gn8", "in", "brn")):
        save(tmp_path, config_of(norm, 0.03), [70 + number, 71.5 + number])
    experiment = only(tmp_path)
    assert [(one.a.norm, one.b.norm) for one in experiment.differences] == [
        ("brn", norm) for norm in ("in", "gn8", "cn8", "bn")
    ]
    assert "brn, the first norm above, minus each other norm" in opening(tmp_path)


def test_experiments_beyond_a_limit_are_folded_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in ("single", "er"):
        save(tmp_path, config_of("bn", 0.03, strategy={"name": strategy}), [80])
    monkeypatch.setattr(report_module, "MOST_DRAWN", 1)
    html = report_text(collect_report(tmp_path, FEW), "html")
    first, second = (re.search(rf'<section id="comparison-{i}">.*?</section>', html, re.S) for i in (1, 2))
    assert first and "<h2>split-mnist, er</h2>" in first[0] and "<svg" in first[0]
    assert second and "<summary>split-mnist, single</summary>" in second[0] and "<svg" not in second[0]
    assert "Figures are drawn of the first 1 of 2 experiments; the others are folded." in html
