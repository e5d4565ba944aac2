"""`contnorm compare` with selections: which runs are compared, the verdict, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from contnorm import bench
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Store
from tests.committed_records import FOLDER

SCORES = {"bn": [60, 61, 64, 62, 63], "cn": [64, 66, 67, 65]}
Compare = Callable[..., tuple[int, str, str]]


def save(runs: Path, correct: list[int], seeds: range | None = None, **groups: Any) -> RunConfig:
    config = from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, **groups})
    for seed, right in zip(seeds or range(len(correct)), correct, strict=True):
        matrix = {"correct": [[90, None], [right, right]], "total": [100, 100]}
        Store(runs).save(config, seed, {"matrix": matrix, "source": {"fingerprint": "same"}})
    return config


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for norm, correct in SCORES.items():
        save(tmp_path / "runs", correct, norm={"name": norm})
    return tmp_path / "runs"


@pytest.fixture
def compare(contnorm: Compare) -> Compare:
    return partial(contnorm, "compare")


def test_selections_end_in_a_verdict(compare: Compare, runs: Path) -> None:
    code, out, err = compare(runs, "norm=bn", "norm=cn")
    test = stats.ttest_rel(SCORES["cn"], SCORES["bn"][:4])
    low, high = test.confidence_interval(0.95)
    verdict = out.splitlines()[-1]
    assert code == 0 and not err and "warning" not in out
    assert verdict.startswith(f"cn32 is higher than bn in ACC by 3.75 points (95 % interval {low:.2f} to {high:.2f}, ")
    assert f"4 paired seeds, p = {test.pvalue:.3f}" in verdict
    assert "Seeds that only one run has are left out: 1 of A." in out
    assert compare("norm=bn", "norm=cn", "--runs", runs)[1] == out


def test_paths_and_hashes_end_in_a_verdict(compare: Compare, runs: Path) -> None:
    hashes = [
        from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, "norm": {"name": n}}).hash for n in SCORES
    ]
    _, expected, _ = compare(runs, "norm=bn", "norm=cn")
    assert compare(*hashes, "--runs", runs)[1] == compare(*(runs / name for name in hashes))[1] == expected
    assert compare(runs, hashes[0][:6], "norm=cn")[1] == expected, "both kinds together"


def test_score_of_the_verdict(compare: Compare, runs: Path) -> None:
    verdict = compare(runs, "norm=bn", "norm=cn", "--score", "fm")[1].splitlines()[-1]
    assert verdict.startswith("cn32 is lower than bn in FM by 3.75 points")


def test_verdict_in_the_documentation_is_the_printed_one(compare: Compare) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "run-the-bench.md").read_text()
    _, out, _ = compare(
        FOLDER / "runs/split-cifar100-fresh-seeds.jsonl.gz", "norm=bn", "norm=cn", "--where", "strategy=derpp"
    )
    assert f"```text\n{out.splitlines()[-1]}\n```" in page


def test_unselected_differences_are_named(compare: Compare, runs: Path) -> None:
    save(runs, [70, 72, 74], norm={"name": "gn"}, train={"lr": 0.1})
    out = compare(runs, "norm=bn", "norm=gn")[1]
    assert "warning: A and B also differ in train.lr (0.03 and 0.1)" in out
    assert "norm=gn, lr=0.1 is higher than norm=bn, lr=0.03" in out.splitlines()[-1]
    assert "warning" not in compare(runs, "norm=bn,lr=0.03", "norm=gn,lr=0.1")[1]


def test_several_runs_of_a_selection_are_refused(compare: Compare, runs: Path) -> None:
    save(runs, [70, 71, 74], norm={"name": "cn"}, train={"lr": 0.1})
    code, out, err = compare(runs, "norm=bn", "norm=cn")
    assert code == 2 and not out and err.count("\n") == 1
    assert "norm=cn: selects 2 runs" in err and ("train.lr (0.03, 0.1)" in err or "train.lr (0.1, 0.03)" in err)
    assert "such as norm=cn,lr=0." in err
    assert compare(runs, "norm=bn", "norm=cn", "--where", "lr=0.03")[0] == 0
    assert "cn32 is" in compare(runs, "norm=bn", "norm=cn,lr=0.03")[1]


def test_seeds_that_do_not_pair_are_compared_unpaired(compare: Compare, runs: Path) -> None:
    save(runs, [60, 66, 61], range(7, 10), norm={"name": "gn"})
    out = compare(runs, "norm=bn", "norm=gn")[1]
    assert "share no seed (0, 1, 2, 3, 4; 7, 8, 9)" in out and "5 unpaired seeds" in out.splitlines()[-1]
    assert "seeds of each would resolve" in out.splitlines()[-1]


def test_other_streams_get_no_verdict(compare: Compare, runs: Path) -> None:
    save(runs, [60, 65, 61], stream={"name": "permuted-mnist", "source": "mnist"}, norm={"name": "gn"})
    assert (
        compare(runs, "norm=bn", "norm=gn")[1].splitlines()[-1].startswith("No verdict: A and B have different stream")
    )


def test_diverged_seeds_are_named_before_the_verdict(compare: Compare, runs: Path) -> None:
    config = from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, "norm": {"name": "cn"}})
    Store(runs).save_diverged(config, 4, "seed 4: the loss is nan.")
    out = compare(runs, "norm=bn", "norm=cn")[1].splitlines()
    assert "1 of 5 seeds diverged" in out[-3] and out[-2] == "" and "cn32 is higher" in out[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["norm=bn"], "expected two runs, got 1"),
        (["a", "b", "c", "d"], "expected two runs, got 4"),
        (["norm=bn", "norm=cnn"], "No run has norm.name=cnn"),
        (["norm=bn", "norm=gn"], "No run has norm.name=gn; norm.name is bn, cn"),
        (["norm=bn", "nrom=cn"], "Did you mean 'norm'"),
        (["norm=bn", "norm=cn", "--score", "accc"], "unknown score 'accc'"),
        (["norm=bn", "norm=cn", "--score", "fwt"], "--score fwt"),
        (["nowhere", "norm=bn", "norm=cn"], "nowhere: there is no such folder"),
        (["norm=bn", "feed"], "no finished run 'feed'"),
    ],
)
def test_mistakes_are_one_line(compare: Compare, runs: Path, arguments: list[str], words: str) -> None:
    code, out, err = compare(*arguments, "--runs", runs)
    assert code == 2 and not out and words in err and err.count("\n") == 1


def test_fresh_seeds_get_a_staged_verdict_and_a_spread(compare: Compare) -> None:
    archive = FOLDER / "runs" / "split-cifar100-fresh-seeds.jsonl.gz"
    lines = compare(archive, "norm=bn", "norm=cn", "--where", "strategy=er")[1].splitlines()
    runs = bench.load_runs(archive).where("strategy=er")
    b, a = runs.where(norm="bn"), runs.where(norm="cn")
    assert f"In stages, seeds from 100 on: {bench.decide(a, b).sentence}" in lines
    assert bench.compare_spread(a, b).sentence in lines
    few = compare(archive, "norm=bn", "norm=cn", "--where", "strategy=er", "--where", "seed<105")[1]
    assert "In stages" not in few and "spread" not in few
