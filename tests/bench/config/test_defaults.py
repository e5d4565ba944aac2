"""Defaults of streams and strategies: precedence, canonical names, and differences from the defaults."""

from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.defaults import apply_defaults, changed, complete, differences, varying
from contnorm.bench.config.resolve import find_source, resolve
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.streams.tasks import STREAMS
from contnorm.errors import UserError


def settings(name: str, /, **groups: dict[str, Any]) -> dict[str, Any]:
    return {**groups, "stream": {"name": name, **groups.get("stream", {})}}


def test_user_settings_override_strategy_and_stream() -> None:
    by_stream = complete(settings("split-cifar10"), "cifar10")
    assert (by_stream.memory.kind, by_stream.memory.size, by_stream.train.batch) == ("reservoir", 500, 32)
    by_strategy = complete(settings("split-cifar10", strategy={"name": "prs"}), "cifar10")
    assert (by_strategy.memory.kind, by_strategy.memory.size) == ("prs", 500)
    chosen = settings("split-cifar10", strategy={"name": "prs"}, memory={"kind": "ring"}, train={"batch": 5})
    by_user = complete(chosen, "cifar10")
    assert (by_user.memory.kind, by_user.memory.size, by_user.train.batch) == ("ring", 500, 5)


def test_default_value_typed_by_the_user_overrides_the_stream() -> None:
    default = RunConfig().train.batch
    assert complete(settings("split-cifar10", train={"batch": default}), "cifar10").train.batch == default


def test_none_is_the_default_of_a_stream_or_all() -> None:
    none = {"scenario": None, "part": None, "augment": None, "train_per_task": None}
    config = complete(settings("permuted-mnist", stream=none), "mnist")
    assert (config.stream.scenario, config.stream.part, config.stream.augment) == ("domain", "all", False)
    assert config.stream.train_per_task is None, "all samples, not the stream's default of 2,000"


def test_names_become_canonical() -> None:
    config = complete(settings("SplitMNIST", strategy={"name": "DER++"}, norm={"name": "CN8"}), "mnist")
    assert (config.stream.name, config.strategy.name, config.norm.name, config.norm.groups) == (
        "split-mnist",
        "derpp",
        "cn",
        8,
    )
    plain = settings("split-mnist", strategy={"name": "derpp"}, norm={"name": "cn", "groups": 8})
    assert config.hash == complete(plain, "mnist").hash


def test_task_free_scenario_has_other_defaults() -> None:
    config = complete(settings("split-mnist", stream={"scenario": "free"}), "mnist")
    assert (config.memory.kind, config.strategy.replay_from) == ("reservoir", "all")
    assert changed(config) == {"stream.name": "split-mnist", "stream.source": "mnist", "stream.scenario": "free"}


def test_completing_twice_changes_nothing() -> None:
    for name, spec in STREAMS.items():
        values = settings(name, norm={"name": "cn", "groups": "auto"}, strategy={"name": "crs"})
        config = complete(values, source := (spec.sources or ("own",))[0])
        assert complete(config.as_dict(), source) == config


def test_apply_defaults_keeps_the_requested_source() -> None:
    assert apply_defaults(settings("split-mnist")).stream.source is None
    assert apply_defaults(settings("split-mnist", stream={"source": "digits"})).stream.source == "digits"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stream": {"name": "split-minst"}}, r"unknown stream 'split-minst'.*'split-mnist'"),
        ({"norm": {"name": "cn8", "groups": "many"}}, r"norm\.groups='many'"),
        ({"strategy": {"name": "der++", "loss": "sum"}}, r"strategy\.loss=sum: .* 'derpp', but with er, prs, crs\."),
        ({"strategy": {"name": "er", "beta": 0.1}}, r"strategy\.beta=0\.1: has no effect with 'er', but with derpp\."),
        ({"memory": {"kind": "ring", "rho": 0.5}}, r"memory\.rho=0\.5: has no effect with 'ring', but with prs\."),
    ],
)
def test_apply_defaults_checks_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_defaults(values)


def test_resolve_finds_the_first_source_on_disk(tmp_path: Path) -> None:
    assert resolve(settings("split-mnist"), tmp_path).stream.source == "digits"
    with pytest.raises(UserError, match=r"no cifar10 under .*--data-root"):
        resolve(settings("split-cifar10"), tmp_path)
    with pytest.raises(UserError, match=r"stream\.source for split-mnist: 'cifar10'.*mnist, digits"):
        find_source(STREAMS["split-mnist"], "cifar10", tmp_path)


def test_resolve_rejects_computed_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.code='abc' .*can't be set"):
        resolve(settings("split-mnist", model={"code": "abc"}), tmp_path)


def test_differences_and_varying_keys() -> None:
    first, second = (from_dict({"train": {"lr": lr, "batch": 5}}) for lr in (0.03, 0.1))
    assert differences(first, second) == {"train.lr": (0.03, 0.1)}
    assert varying([first, second]) == {"train.lr"} and varying([]) == set()
