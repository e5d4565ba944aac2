"""`compare`: from records, results, arrays and data frames; one verdict, and what can't be compared."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from contnorm import bench
from contnorm.bench.comparison import compare, differing_keys, experiment_names
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Record, Runs, make_record
from contnorm.bench.sequential import decide_differences
from contnorm.errors import UserError
from contnorm.report.norms import experiments_of

RNG = np.random.default_rng(5)
CN, BN = RNG.integers(62, 70, 24).tolist(), RNG.integers(58, 64, 24).tolist()


def config(**groups: Any) -> RunConfig:
    stream = {"name": "split-mnist", "scenario": "task", "part": "all", "augment": False, **groups.pop("stream", {})}
    return from_dict({"stream": stream, **groups})


def experiment(values: list[int], first: int = 100, memory: list[int] | None = None, **groups: Any) -> list[Record]:
    """The seeds from ``first`` on have these accuracies in percent, after each of two tasks."""
    made, records = config(**groups), []
    for seed, value in enumerate(values, first):
        raw = {} if memory is None else {"matrix_memory": matrix(memory[seed - first])}
        records.append(make_record(made, seed, {"matrix": matrix(value), **raw}))
    return records


def matrix(value: int) -> dict[str, Any]:
    return {"correct": [[value, None], [value, value]], "total": [100, 100]}


def test_all_inputs_have_the_same_verdict() -> None:
    cn, bn = experiment(CN, norm={"name": "cn"}), experiment(BN)
    expected = decide_differences([a - b for a, b in zip(CN, BN, strict=True)], score="acc", names=("cn32", "bn"))
    assert expected.outcome == "higher"
    verdicts = [
        compare(cn, bn),
        compare(iter(cn), Runs(bn)),
        bench.decide(bench.Result(cn), bench.Result(bn)),
        compare(CN, BN),
        compare(np.array(CN), np.array(BN)),
        compare(pd.Series(CN, range(7, 31)), pd.Series(BN[::-1], range(30, 6, -1))),
        compare(dict(enumerate(map(float, CN), 100)), dict(enumerate(map(float, BN), 100)), first_seed=100),
        bench.decide(CN, BN),
    ]
    ((_, _, of_report),) = next(iter(experiments_of(Runs([*cn, *bn])))).differences
    assert of_report is not None
    verdicts.append(of_report)
    frame = pd.DataFrame({"n": ["CN"] * 24 + ["BN"] * 24, "s": [*range(24)] * 2, "top1": CN + BN})
    verdicts += [decide(frame, by="n", seed="s", score="top1") for decide in (compare, bench.decide)]
    for verdict in verdicts:
        assert (verdict.outcome, verdict.interval, verdict.seeds) == ("higher", expected.interval, 24)
    assert str(verdicts[0]) == str(expected) and verdicts[-1].names == ("CN", "BN")
    assert compare(bn, cn).outcome == "lower" and verdicts[0].a == tuple(cn)


def test_few_and_exploratory_seeds_decide_nothing() -> None:
    """The same eight seeds: an ordinary interval without a verdict, from every input."""
    for first in (0, 100):
        cn, bn = experiment(CN[:8], first, norm={"name": "cn"}), experiment(BN[:8], first)
        verdict = compare(cn, bn)
        assert verdict.outcome == compare(CN[:8], BN[:8]).outcome == "undecided" and verdict.interval is None
        low, high = stats.ttest_rel(CN[:8], BN[:8]).confidence_interval(0.95)
        assert verdict.uncorrected == pytest.approx((low, high)) and low > 0
        assert f"95 % interval without correction {low:+.2f} to {high:+.2f}); the first look needs 16" in str(verdict)
    assert not compare(experiment(CN, 0, norm={"name": "cn"}), experiment(BN, 0)).is_decided
    assert compare(experiment(CN, 0, norm={"name": "cn"}), experiment(BN, 0), first_seed=0).is_decided


def test_score_and_family_of_a_comparison() -> None:
    cn, bn = experiment(CN, norm={"name": "cn"}), experiment(BN)
    assert "in mean over the stream by" in compare(cn, bn, "aia").sentence
    assert "one of 9 questions" in compare(cn, bn, cases=9).sentence
    with pytest.raises(UserError, match="score 'nope': use one that both experiments have: acc, aia, fm, la"):
        compare(cn, bn, "nope")


def test_moments_choose_the_matrix() -> None:
    """By default that of the settings; also two evaluations of the same networks."""
    memory = [value + 2 for value in BN]
    bn, cn = experiment(BN, memory=memory), experiment(CN, memory=[value + 1 for value in CN], norm={"name": "cn"})
    same = compare(bn, bn, moments=("memory", "running"))
    assert same.mean == 2.0 and same.names == ("memory moments", "running moments") and same.outcome == "higher"
    assert compare(cn, bn, moments="memory").mean == pytest.approx(compare(cn, bn).mean - 1)
    by_memory = experiment(CN, memory=CN, norm={"name": "cn"}, evaluate={"moments": "memory"})
    assert compare(by_memory, bn).names == ("norm=cn, moments=memory", "norm=bn, moments=running")
    assert compare(by_memory, bn, moments="memory").names == ("cn32", "bn")  # what was compared, not the settings
    with pytest.raises(UserError, match="was not evaluated with exact moments, but with running, memory"):
        compare(cn, bn, moments="exact")


def test_diverged_runs_are_left_out_and_shown_at_chance() -> None:
    cn, bn = experiment(CN, norm={"name": "cn"}), experiment(BN)
    lost = make_record(cn[0].config, 110, {"status": "diverged", "reason": "the loss is nan."})
    verdict = compare(Runs([record for record in cn if record.seed != 110], [lost]), bn)
    assert (verdict.seeds, verdict.pairs) == (24, 23) and "1 of them diverged" in verdict.sentence
    at_chance = verdict.at_chance
    assert at_chance is not None and at_chance.pairs == 24
    expected = [a - b for a, b in zip(CN, BN, strict=True)]
    expected[10] = 50 - BN[10]  # two classes in each task
    assert at_chance.interval == decide_differences(expected).interval


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"stream": {"name": "split-cifar10"}}, "stream.name is split-mnist and split-cifar10"),
        ({"stream": {"class_order": "seed"}}, "stream.class_order is fixed and seed"),
        ({"stream": {"scenario": "class"}}, "stream.scenario is task and class"),
        ({"train": {"max_steps": 6}}, "train.max_steps is none and 6"),
    ],
)
def test_runs_on_other_data_are_not_compared(groups: dict[str, Any], message: str) -> None:
    """Such as a smoke test and a full run."""
    with pytest.raises(UserError, match=message):
        compare(experiment(CN), experiment(BN, norm={"name": "cn"}, **groups))


def test_augmentation_may_differ() -> None:
    assert compare(experiment(CN), experiment(BN, stream={"augment": True})).is_decided


def test_what_is_not_two_experiments_is_an_error() -> None:
    cn, bn = experiment(CN, norm={"name": "cn"}), experiment(BN)
    with pytest.raises(UserError, match="the same experiment"):
        compare(bn, bn)
    with pytest.raises(UserError, match="no seed in common"):
        compare(cn[:3], bn[5:])
    with pytest.raises(UserError, match=r"2 experiments, which differ in train.lr \(0.03, 0.1\)"):
        compare([*bn, *experiment(BN, train={"lr": 0.1})], cn)
    for wrong in (5, ["cn"], "cn"):
        with pytest.raises(UserError, match=r"use a result of bench\.run"):
            compare(wrong, bn)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="b=None"):
        compare(cn)
    frame = pd.DataFrame({"n": ["a", "b", "c"], "seed": [0, 0, 0], "x": [1.0, 2.0, 3.0]})
    with pytest.raises(UserError, match="the column has 3 values"):
        compare(frame, by="n", score="x")
    with pytest.raises(UserError, match="no column 'acc'"):
        compare(frame, by="n", score="acc")
    with pytest.raises(UserError, match="pass percent"):
        compare([0.7] * 16, [0.6] * 16)
    with pytest.raises(UserError, match="24 and 23 scores"):
        compare(CN, BN[1:])
    with pytest.raises(UserError, match="some seeds occur twice"):
        compare(pd.concat([frame[:2], frame[:2]]), by="n", score="x")


def test_other_fingerprints_and_tasks_are_other_data() -> None:
    cn, bn = experiment(CN, norm={"name": "cn"}), experiment(BN)
    prints = ((cn, "2:0a"), (bn, "2:0b"))
    sources = [
        [make_record(one.config, one.seed, {**one.raw, "source": {"fingerprint": text}}) for one in side]
        for side, text in prints
    ]
    with pytest.raises(UserError, match="has different content"):
        compare(*sources)
    short = [make_record(one.config, one.seed, {"matrix": {"correct": [[5]], "total": [10]}}) for one in bn]
    with pytest.raises(UserError, match="the first 2 and the first 1 tasks"):
        compare(cn, short)


def test_names_are_the_settings_that_differ() -> None:
    bn, cn8 = config(), config(norm={"name": "cn", "groups": 8})
    both = config(norm={"name": "cn"}, train={"lr": 0.1})
    assert experiment_names(bn, cn8) == ("bn", "cn8")
    assert experiment_names(cn8, config(norm={"name": "cn"})) == ("cn8", "cn32")
    assert experiment_names(bn, both) == ("norm=bn, lr=0.03", "norm=cn, lr=0.1")
    assert experiment_names(bn, bn) == ("a", "b")
    assert differing_keys(bn, both) == ["norm.name", "train.lr"], "batch norm has no groups"
