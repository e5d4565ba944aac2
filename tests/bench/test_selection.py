"""The selection language: conditions as text, their errors, and the runs that they select."""

from typing import Any

import pytest

from contnorm.bench.config.defaults import resolved_settings
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Record, Runs, make_record
from contnorm.bench.selection import has_operator, no_match, parse_selection
from contnorm.errors import UserError


def record(name: str, lr: float, seed: int = 0, groups: int | str = 32, **more: dict[str, object]) -> Record:
    config = from_dict({"norm": {"name": name, "groups": groups}, "train": {"lr": lr}, **more})
    return make_record(config, seed, {"matrix": {"correct": [[9, None], [6, 8]], "total": [10, 10]}})


RUNS = Runs(
    [
        record("bn", 0.03, 0),
        record("bn", 0.1, 1),
        record("cn", 0.03, 2, memory={"size": 20}),
        record("gn", 0.3, 3, groups="auto", evaluate={"drift": False}),
    ],
    [make_record(from_dict({"train": {"lr": 9.0}}), 9, {"status": "diverged", "reason": "the loss is nan."})],
)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("norm=bn,cn", [0, 1, 2]),
        ("norm!=bn", [2, 3]),
        ("norm=BN,lr=0.1", [1]),
        ("lr<=0.1", [0, 1, 2]),
        ("train.lr>0.1", [3]),
        ("lr>=1e-1,seed<3", [1]),
        (" norm == cn ", [2]),
        ("norm=bn, cn  lr <= 0.03", [0, 2]),
        ("buffer=20,50", [0, 1, 2, 3]),
        ("drift=false", [3]),
        ("groups=auto", [3]),
        ("groups=none", [0, 1]),
        ("max_steps=none,seed=1", [1]),
        ("status=finished", [0, 1, 2, 3]),
        (f"hash={RunConfig().hash[:5]}", [0]),
    ],
)
def test_text_selects(text: str, seeds: list[int]) -> None:
    assert [run.seed for run in RUNS.where(text)] == seeds


def test_texts_and_keywords_are_combined() -> None:
    assert [run.seed for run in RUNS.where("norm=bn", "lr<0.1")] == [0]
    assert [run.seed for run in RUNS.where("lr<0.1", norm=["cn", "gn"])] == [2]


def test_diverged_runs_are_selected_too() -> None:
    assert [run.seed for run in RUNS.where("status=diverged").diverged] == [9]
    assert [run.seed for run in RUNS.where("lr>1").diverged] == [9] and not RUNS.where("norm!=bn").diverged


@pytest.mark.parametrize(
    ("conditions", "finished"),
    [
        ({"norm": "cn8"}, 1),
        ({"norm": ["cn8", "bn"]}, 2),
        ({"strategy": "DER++"}, 3),
        ({"stream": "SplitCIFAR100", "memory": "ring"}, 3),
        ({"model": "mine.py:make", "seed": range(3)}, 1),
    ],
)
def test_where_understands_names_as_run_does(conditions: dict[str, Any], finished: int) -> None:
    norms = ({"name": "cn", "groups": 8}, {"name": "cn", "groups": 32}, {"name": "bn", "groups": 8})
    models = ("mlp", "mine.py:make", "mlp")
    base = {"strategy": {"name": "derpp"}, "stream": {"name": "split-cifar100"}}
    configs = [from_dict({**base, "norm": n, "model": {"name": m}}) for n, m in zip(norms, models, strict=True)]
    counts = {"matrix": {"correct": [[9, None], [6, 8]], "total": [10, 10]}}
    assert len(Runs([make_record(config, 0, counts) for config in configs]).where(**conditions)) == finished


def test_hash_that_looks_like_a_number_is_text() -> None:
    (condition,) = parse_selection("hash=1e1234567890")
    assert condition.values == ("1e1234567890",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cn", "'cn'.*such as norm=cn"),
        ("", "such as norm=cn"),
        ("nrom=bn", "'nrom'.*Did you mean 'norm'"),
        ("lr<abc", "< needs one number"),
        ("lr<0.1,0.2", "< needs one number"),
        ("code=1", "ambiguous.*strategy.code, .*model.code"),
    ],
)
def test_mistakes_are_errors(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RUNS.where(text)


def test_empty_selection_is_explained() -> None:
    items = [*RUNS.records, *RUNS.diverged]
    assert no_match(items, ["norm=bn,lr=0.02"]) == "No run has train.lr=0.02; train.lr is 0.03, 0.1, 0.3, 9.0."
    assert "all of norm.name=cn train.lr=0.1" in no_match(items, ["norm=cn,lr=0.1"])


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
