"""`contnorm compare`: which runs are compared, their scores, the verdict, and mistakes."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from contnorm import bench
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Store
from tests.cli.test_show import multilabel_records
from tests.committed_records import FOLDER

SCORES = {"bn": [60, 61, 64, 62, 63], "cn": [64, 66, 67, 65]}
ARCHIVE = FOLDER / "runs" / "split-cifar100-fresh-seeds.jsonl.gz"
Compare = Callable[..., tuple[int, str, str]]


def save(
    runs: Path, correct: list[int], seeds: range | None = None, memory: list[int] | None = None, **groups: Any
) -> RunConfig:
    config = from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, **groups})
    for place, (seed, right) in enumerate(zip(seeds or range(len(correct)), correct, strict=True)):
        content: dict[str, Any] = {"matrix": matrix(right), "source": {"fingerprint": "same"}}
        if memory is not None:
            content["matrix_memory"] = matrix(memory[place])
        Store(runs).save(config, seed, content)
    return config


def matrix(right: int) -> dict[str, Any]:
    return {"correct": [[90, None], [right, right]], "total": [100, 100]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for norm, correct in SCORES.items():
        save(tmp_path / "runs", correct, norm={"name": norm})
    return tmp_path / "runs"


@pytest.fixture
def compare(contnorm: Compare) -> Compare:
    return partial(contnorm, "compare")


def row(out: str, title: str = "ACC") -> list[str]:
    return next(re.split("  +", line) for line in out.splitlines() if line.startswith(f"{title}  "))


def test_scores_and_verdict_of_selections(compare: Compare, runs: Path) -> None:
    code, out, err = compare(runs, "norm=bn", "norm=cn")
    low, high = stats.ttest_rel(SCORES["cn"], SCORES["bn"][:4]).confidence_interval(0.95)
    assert code == 0 and not err and "warning" not in out
    assert row(out)[1:] == ["61.75 +- 1.71", "65.50 +- 1.29", "+3.75 +- 0.96", f"{low:+.2f} to {high:+.2f}"]
    assert row(out, "mean over the stream")[3] == "+1.88 +- 0.48", "half of the stream is the same"
    assert "4 seeds, paired" in out and "Seeds that only one run has are left out: 1 of A." in out
    verdict = "Undecided whether cn32 or bn is higher in ACC: mean difference +3.75 (4 shared seeds, 95 % interval "
    assert f"{verdict}without correction {low:+.2f} to {high:+.2f}); the first look needs 16 seeds." in out
    assert compare("norm=bn", "norm=cn", "--runs", runs)[1] == out
    assert "higher in FM: mean difference -3.75" in compare(runs, "norm=bn", "norm=cn", "--score", "fm")[1]


def test_command_and_python_say_the_same(compare: Compare) -> None:
    where = bench.load_runs(ARCHIVE).where("strategy=er")
    bn, cn = where.where(norm="bn"), where.where(norm="cn")
    options: dict[str, tuple[object, ...]] = {"acc": (), "aia": ("--score", "aia", "--cases", 4, "--margin", 2)}
    for score, typed in options.items():
        lines = compare(ARCHIVE, "norm=bn", "norm=cn", "--where", "strategy=er", *typed)[1].splitlines()
        rule: dict[str, Any] = {"cases": 4, "margin": 2.0} if typed else {}
        verdict = bench.compare(cn, bn, score, **rule)
        assert verdict.is_decided and verdict.sentence == bench.decide(cn, bn, score, **rule).sentence
        assert (
            verdict.sentence in lines
            and lines[-1] == verdict.seeds_needed
            and lines[-2].endswith(f": {verdict.spread}.")
        )
    few = compare(ARCHIVE, "norm=bn", "norm=cn", "--where", "strategy=er", "--where", "seed<105")[1]
    assert "Undecided" in few and "spread" not in few


def test_output_in_the_documentation_is_the_printed_one(compare: Compare) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "run-the-bench.md").read_text()
    _, out, _ = compare(ARCHIVE, "norm=bn", "norm=cn", "--where", "strategy=derpp")
    assert "```text\n" + "\n".join(out.rstrip().splitlines()[-3:]) + "\n```" in page


def test_paths_and_hashes_are_selections(compare: Compare, runs: Path) -> None:
    hashes = [
        from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, "norm": {"name": n}}).hash for n in SCORES
    ]
    _, expected, _ = compare(runs, "norm=bn", "norm=cn")
    assert compare(*hashes, "--runs", runs)[1] == compare(*(runs / name for name in hashes))[1] == expected
    assert compare(runs, hashes[0][:6], "norm=cn")[1] == expected, "both kinds together"


def test_differing_settings_are_listed(compare: Compare, runs: Path) -> None:
    save(runs, [70, 72, 74], norm={"name": "gn"}, train={"lr": 0.1})
    out = compare(runs, "norm=bn", "norm=gn")[1]
    assert "\n  train.lr: 0.03 -> 0.1\n" in out and "norm=gn, lr=0.1 or norm=bn, lr=0.03 is higher" in out


def test_several_runs_of_a_selection_are_an_error(compare: Compare, runs: Path) -> None:
    save(runs, [70, 71, 74], norm={"name": "cn"}, train={"lr": 0.1})
    code, out, err = compare(runs, "norm=bn", "norm=cn")
    assert code == 2 and not out and "norm=cn: selects 2 runs" in err and "such as norm=cn,lr=0." in err
    assert compare(runs, "norm=bn", "norm=cn", "--where", "lr=0.03")[0] == 0


def test_runs_that_do_not_pair_are_refused(compare: Compare, runs: Path) -> None:
    save(runs, [60, 66, 61], range(7, 10), norm={"name": "gn"})
    code, out, err = compare(runs, "norm=bn", "norm=gn")
    assert code == 2 and not out and "no seed in common" in err
    save(runs, [60, 65, 61], norm={"name": "ln"}, train={"max_steps": 6})
    code, out, err = compare(runs, "norm=bn", "norm=ln")
    assert code == 2 and not out and "did not use the same data: train.max_steps is 6 and none" in err


def test_moments_choose_the_evaluation(compare: Compare, tmp_path: Path) -> None:
    bn, cn = [60 + seed % 3 for seed in range(16)], [61 + seed % 2 for seed in range(16)]
    seeds = range(100, 116)
    save(tmp_path, bn, seeds, memory=[value + 4 for value in bn], norm={"name": "bn"})
    save(tmp_path, cn, seeds, memory=[value + 9 for value in cn], norm={"name": "cn"})
    same = compare(tmp_path, "norm=bn", "norm=bn", "--moments", "running,memory")[1]
    assert row(same)[3] == "+4.00 +- 0.00" and "memory moments is higher than running moments in ACC by 4.00" in same
    a, b = (bench.load_runs(tmp_path).where(norm=norm) for norm in ("bn", "cn"))
    for options, moments in (((), None), (("--moments", "memory"), "memory")):
        out = compare(tmp_path, "norm=bn", "norm=cn", *options)[1]
        verdict = bench.compare(b, a, moments=moments)
        assert verdict.sentence in out.splitlines() and row(out)[3].startswith(f"{verdict.mean:+.2f} ")


def test_multilabel_runs_are_compared(compare: Compare, tmp_path: Path) -> None:
    multilabel_records(tmp_path), multilabel_records(tmp_path, norm={"name": "cn"})
    out = compare(tmp_path, "norm=bn", "norm=cn")[1]
    assert re.findall(r"^((?:FM )?(?:C-F1|O-F1|mAP)) ", out, re.MULTILINE)[:2] == ["C-F1", "O-F1"]
    assert "is higher in C-F1: mean difference +0.00" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["norm=bn"], "expected two runs, got 1"),
        (["norm=bn", "norm=bn"], "the same experiment"),
        (["norm=bn", "norm=gn"], "No run has norm.name=gn"),
        (["norm=bn", "nrom=cn"], "Did you mean 'norm'"),
        (["norm=bn", "norm=cn", "--score", "fwt"], "score 'fwt': use one that both experiments have"),
        (["norm=bn", "norm=cn", "--moments", "memory"], "was not evaluated with memory moments"),
        (["norm=bn", "cn"], "Use a path, the beginning of a hash, or a setting: norm=cn for"),
    ],
)
def test_mistakes_are_one_line(compare: Compare, runs: Path, arguments: list[str], words: str) -> None:
    code, out, err = compare(*arguments, "--runs", runs)
    assert code == 2 and not out and words in err and err.count("\n") == 1
