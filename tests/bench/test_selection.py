"""The selection language: conditions as text, their errors, and the runs that they select."""

from __future__ import annotations

import pytest

from contnorm.bench.config.defaults import resolved_settings
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.records import DivergedRun, Record
from contnorm.bench.runs import Runs
from contnorm.bench.selection import RunLike, has_operator, no_match, parse_selection
from contnorm.errors import UserError


def record(name: str, lr: float, seed: int = 0, groups: int | str = 32, **more: dict[str, object]) -> Record:
    config = from_dict({"norm": {"name": name, "groups": groups}, "train": {"lr": lr}, **more})
    return Record(config, seed, AccuracyMatrix([[9, None], [6, 8]], [10, 10]), {}, {})


RUNS = Runs(
    [
        record("bn", 0.03, 0),
        record("bn", 0.1, 1),
        record("cn", 0.03, 2, memory={"size": 20}),
        record("gn", 0.3, 3, groups="auto", evaluate={"drift": False}),
    ],
    [DivergedRun("0123456789ab", 9, "the loss is nan.")],
)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("norm=bn", [0, 1]),
        ("norm=bn,cn", [0, 1, 2]),
        ("norm!=bn", [2, 3]),
        ("norm!=bn,cn", [3]),
        ("norm=BN,lr=0.1", [1]),
        ("norm=bn,cn,lr=0.030", [0, 2]),
        ("lr<0.1", [0, 2]),
        ("lr<=0.1", [0, 1, 2]),
        ("train.lr>0.1", [3]),
        ("lr>=1e-1,seed<3", [1]),
        (" norm == cn ", [2]),
        ("buffer=20,50", [0, 1, 2, 3]),
        ("drift=false", [3]),
        ("drift=0", []),
        ("groups=auto", [3]),
        ("groups>=32", [2]),
        ("groups=none", [0, 1]),
        ("max_steps=none,seed=1", [1]),
        ("max_steps>0", []),
        ("status=finished", [0, 1, 2, 3]),
        ("status!=finished", []),
        (f"hash={RunConfig().hash}", [0]),
        (f"hash={RunConfig().hash[:5]}", [0]),
    ],
)
def test_text_selects(text: str, seeds: list[int]) -> None:
    assert [run.seed for run in RUNS.where(text)] == seeds


def test_texts_and_keywords_are_combined() -> None:
    assert [run.seed for run in RUNS.where("norm=bn", "lr<0.1")] == [0]
    assert [run.seed for run in RUNS.where("lr<0.1", norm=["cn", "gn"])] == [2]


def test_diverged_run_without_settings_is_selected_by_identity_only() -> None:
    assert [run.seed for run in RUNS.where("status=diverged").diverged] == [9]
    assert [run.seed for run in RUNS.where("hash=0123456789ab").diverged] == [9]
    assert not RUNS.where("norm!=bn").diverged, "its norm is unknown"


def test_hash_that_looks_like_a_number_is_text() -> None:
    (condition,) = parse_selection("hash=1e1234567890")
    assert condition.values == ("1e1234567890",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cn", "'cn'.*such as norm=cn"),
        ("", "such as norm=cn"),
        ("norm=", "'norm='.*value is missing"),
        ("norm=bn,", "value is missing"),
        ("nrom=bn", "'nrom'.*Did you mean 'norm'"),
        ("acc>50", "'acc' is a score"),
        ("lr<abc", "< needs one number"),
        ("lr<0.1,0.2", "< needs one number"),
        ("code=1", "ambiguous.*strategy.code, .*model.code"),
        ("norm<3", "norm.name has no numbers, but bn, cn or gn"),
        ("norm!=cnn", "no record has 'cnn'. Did you mean 'cn'"),
        ("lr=" + "9" * 5000, "too many digits"),
    ],
)
def test_mistakes_are_errors(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RUNS.where(text)


def test_empty_selection_is_explained() -> None:
    items: list[RunLike] = [*RUNS.records, *RUNS.diverged]
    assert no_match(items, ["norm=bn,lr=0.02"]) == "No run has lr=0.02; train.lr is 0.03, 0.1 or 0.3."
    assert "all of norm=cn lr=0.1" in no_match(items, ["norm=cn,lr=0.1"])


def test_paths_are_not_selections() -> None:
    assert has_operator("norm=bn") and has_operator("train.lr<0.1") and has_operator("lr != 3")
    assert not any(map(has_operator, ("runs", "runs/0123456789ab", "75cc", "./a=b", "/data/x=1.jsonl.gz", "")))


def test_resolved_settings_have_the_defaults_of_the_stream() -> None:
    old = from_dict({"stream": {"name": "split-cifar10"}})
    settings = resolved_settings(old)
    assert (settings["stream.scenario"], settings["stream.part"], settings["stream.augment"]) == ("class", "all", True)
    assert settings["norm.groups"] is None, "batch norm has no groups"
    unknown = resolved_settings(from_dict({"stream": {"name": "a later stream"}, "norm": {"name": "a later norm"}}))
    assert unknown["stream.scenario"] is None and unknown["norm.groups"] == 32
