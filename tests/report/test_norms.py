"""The comparison of norms that opens a report: its numbers, its choices, and folders of every kind."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from contnorm.bench import compare, load_runs
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.records import Store
from contnorm.report import collect_report
from contnorm.report.norms import Experiment
from contnorm.report.tables import markdown
from tests.committed_records import COARSE_GRID, COCOSEQ, contents_of, copy_run

FEW = ["figure3"]  # without the other tables of the paper


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
    return markdown(collect_report(root, FEW).documents[0])


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
    assert row in lines


def test_verdict_is_that_of_compare(tmp_path: Path) -> None:
    """Of two norms; three pairs of norms are a family."""
    values = {"bn": [70 + seed % 3 for seed in range(16)], "cn8": [71 + seed % 4 for seed in range(16)]}
    for norm, percents in values.items():
        save(tmp_path, config_of(norm, 0.03), percents, first_seed=100)
    runs = load_runs(tmp_path)
    verdict = compare(runs.where(norm="cn8"), runs.where(norm="bn"))
    assert verdict.outcome == "higher" and verdict.sentence in opening(tmp_path)
    assert f"| cn8 minus bn | {verdict.mean:+.2f} | {verdict.interval} | 16 | cn8 is higher |" in opening(tmp_path)
    save(tmp_path, config_of("gn8", 0.03), values["bn"], first_seed=100)
    family = [verdict for *_, verdict in only(tmp_path).differences if verdict]
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
        assert best.setting.column("acc") == pytest.approx(by_rate[rate])
        values[norm] = by_rate[rate]
    [(a, b, differences)] = [one for one in experiment.differences if {one[0].norm, one[1].norm} == {"cn32", "bn"}]
    assert (a.norm, b.norm) == ("cn32", "bn") and differences is not None
    assert list(differences.differences.values()) == pytest.approx(np.subtract(values["cn"], values["bn"]).tolist())


def test_one_run_has_its_score_and_no_difference(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03), [81.5])
    text = opening(tmp_path)
    assert "| bn | 0.03 | 81.50 |" in text and "| 1 | 1 | one setting |" in text
    assert "ACC: 81.50 with norm=bn, lr=0.03 (1 seed)." in text and "paired differences" not in text
    assert "Nothing was chosen" in text and "Highest" not in text
    html = collect_report(tmp_path, FEW).html()
    assert "<h1>contnorm: runs</h1>" in html and 'id="experiment-1"' in html


@pytest.mark.parametrize(
    ("bn", "cn", "first_seed", "row"),
    [
        ([80], [82], 0, r"\+2\.00 \| - \| 1 \| undecided"),
        ([80, 81], [82, 83], 5, r"- \| - \| 0 \| no shared seeds"),
        ([80, 81], [80, 81], 0, r"\+0\.00 \|[^|]*\| 2 \| undecided"),
        ([80, 81], [82, 83], 0, r"\+2\.00 \|[^|]*\| 2 \| undecided"),
    ],
    ids=["one seed", "no shared seed", "equal scores", "equal differences"],
)
def test_differences_without_a_spread_are_not_decided(
    bn: list[float], cn: list[float], first_seed: int, row: str, tmp_path: Path
) -> None:
    save(tmp_path, config_of("bn", 0.03), bn)
    save(tmp_path, config_of("cn8", 0.03), cn, first_seed)
    assert re.search(rf"\| (cn8 minus bn|bn minus cn8) \| {row} \|", opening(tmp_path))
    collect_report(tmp_path, FEW).html()


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
    assert "| brn | - | diverged | - | - | - | 0 | 2 | test tasks |" in text
    collect_report(tmp_path, FEW).html()


def test_setting_with_few_seeds_is_not_chosen(tmp_path: Path) -> None:
    """Two lucky seeds do not win over a setting with five; three are enough to count."""
    save(tmp_path, config_of("bn", 0.03), [80, 81, 82, 80, 81])
    save(tmp_path, config_of("bn", 0.1), [95, 94])
    save(tmp_path, config_of("bn", 0.2), [78, 79, 80])
    assert only(tmp_path).best[0].setting.lr == 0.03  # type: ignore[union-attr]
    save(tmp_path, config_of("bn", 0.1), [95, 94, 96])
    assert only(tmp_path).best[0].setting.lr == 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("validate", "learn", "data"),
    [
        ({"part": "validate"}, {"part": "learn"}, "validation tasks"),
        ({"holdout": 0.1}, {}, "held-out training samples"),
    ],
)
def test_settings_are_chosen_on_validation_runs_of_the_same_experiment(
    validate: dict[str, Any], learn: dict[str, Any], data: str, tmp_path: Path
) -> None:
    stream = {"name": "split-cifar100", "source": "cifar100"}
    for rate, validation, test in ((0.01, [70, 71], [60, 61]), (0.1, [60, 61], [75, 76])):
        save(tmp_path, config_of("bn", rate, stream={**stream, **validate}), validation)
        save(tmp_path, config_of("bn", rate, stream={**stream, **learn}), test)
    on_test, on_validation = collect_report(tmp_path, FEW).experiments
    assert on_test.title == "split-cifar100, single" and on_validation.title.endswith(data)
    [best] = on_test.best
    assert best.setting is not None and (best.setting.lr, best.chosen_on) == (0.01, data)
    assert best.setting.mean("acc") == pytest.approx(60.5), "the score is that on the test tasks"
    text = opening(tmp_path)
    assert f"chosen by ACC on {data}; the scores are on the test tasks" in text
    assert "These are validation runs" in text


def test_own_settings_of_a_component_are_named(tmp_path: Path) -> None:
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "mine.py:Mine", "strength": 2}), [80])
    save(tmp_path, config_of("bn", 0.03, strategy={"name": "mine.py:Mine"}), [70])
    experiment = only(tmp_path)
    assert [experiment.name(one) for one in experiment.chosen] == ["norm=bn, lr=0.03, strategy.strength=2"]
    assert "strategy.strength=2" in opening(tmp_path)


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
    html = collect_report(tmp_path, FEW).html()
    assert all(f">{title}</a>" in html for title in titles)


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
    assert best.setting is not None and sorted(best.setting.rows) == [0, 1, 2] and best.tried == 1


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
            raws = [record.raw for record in setting.column("record")]
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
    assert "The runs reached 1 to 2 tasks (--max-steps): their scores are not comparable." in opening(tmp_path)
    collect_report(tmp_path, FEW).html()


def test_many_norms_are_compared_with_the_first(tmp_path: Path) -> None:
    for number, norm in enumerate(("bn", "cn8", "gn8", "in", "brn")):
        save(tmp_path, config_of(norm, 0.03), [70 + number, 71.5 + number])
    experiment = only(tmp_path)
    assert [(a.norm, b.norm) for a, b, _ in experiment.differences] == [
        ("brn", norm) for norm in ("in", "gn8", "cn8", "bn")
    ]
    assert "brn, the first norm above, minus each other norm" in opening(tmp_path)
