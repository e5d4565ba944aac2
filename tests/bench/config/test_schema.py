"""Schema of settings: valid and invalid values, the hash of a run, the JSON schema and the page of settings."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import (
    FLAGS,
    SYNONYMS,
    NormConfig,
    RunConfig,
    StreamConfig,
    TrainConfig,
    flatten_settings,
    from_dict,
    json_schema,
)
from contnorm.errors import UserError

ROOT = Path(__file__).parents[3]
DEFAULTS = flatten_settings(RunConfig().as_dict())


def test_from_dict_round_trip() -> None:
    config = from_dict({"train": {"lr": 1}, "norm": {"name": "cn", "groups": "auto"}})
    assert from_dict(config.as_dict()) == config and from_dict(config.as_dict()).hash == config.hash
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert len({config.hash, RunConfig().hash, from_dict({"train": {"lr": 2}}).hash}) == 3


def test_hash_of_default_values_is_the_default_hash() -> None:
    """So that a setting added later, with the old behaviour as its default, leaves the hashes of old records."""
    assert from_dict({"train": {"lr": RunConfig().train.lr}}).hash == RunConfig().hash


def test_config_is_a_frozen_dataclass() -> None:
    config = RunConfig(norm=NormConfig("cn"))
    assert [group.name for group in dataclasses.fields(config)] == list(config.as_dict()) == list(vars(config))
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, lr=0.5))
    assert changed == from_dict({"norm": {"name": "cn"}, "train": {"lr": 0.5}}) and hash(changed) != hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: TrainConfig(lr=-1.0), r"^train\.lr=-1\.0 must be a finite number above 0"),
        (lambda: dataclasses.replace(StreamConfig(), tasks=0), r"^stream\.tasks=0 must be a whole number from 1 "),
        (lambda: NormConfig("cn", 4, 1, None, "scaled", "ours", "", 7), r"^NormConfig: argument 7: "),
        (lambda: NormConfig("cn", name="bn"), r"^NormConfig: argument name: "),
        (lambda: NormConfig("cn", grups=4), r"^unknown key 'norm\.grups'\. Did you mean 'norm\.groups'"),
    ],
)
def test_constructor_checks_values(construct: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        construct()


def test_from_dict_takes_any_mapping() -> None:
    assert from_dict(MappingProxyType({"train": MappingProxyType({"lr": 0.5})})).train.lr == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, r"config: unknown key 'trian'\. Did you mean 'train'\? There are: stream, strategy"),
        ({1: {}}, r"config: unknown key '1'"),
        ({"train": {1: 1}}, r"config: unknown key 'train\.1'"),
        ({"train": {"lrr": 1}}, r"unknown key 'train\.lrr'\. Did you mean 'train\.lr'\? There are: train\.lr,"),
        ({"train": {"lr": "fast"}}, r"train\.lr='fast' must be a finite number above 0"),
        ({"train": {"lr": True}}, r"train\.lr=True must be a finite number"),
        ({"train": {"lr": None}}, r"train\.lr=None must be a finite number"),
        ({"train": {"batch": 2.5}}, r"train\.batch=2\.5 must be a whole number"),
        ({"train": {"batch": 2.0}}, r"train\.batch=2\.0 must be a whole number"),
        ({"train": {"batch": "2"}}, r"train\.batch='2' must be a whole number"),
        ({"train": {"batch": True}}, r"train\.batch=True must be a whole number"),
        ({"train": {"deterministic": 1}}, r"train\.deterministic=1 must be true or false"),
        ({"stream": {"augment": "true"}}, r"stream\.augment='true' must be true or false or none"),
        ({"norm": {"auto_channels": True}}, r"norm\.auto_channels=True must be a whole number from 1 to 2"),
        ({"norm": {"auto_channels": 2.0}}, r"norm\.auto_channels=2\.0 must be a whole number from 1 to 2"),
        ({"norm": {"auto_channels": 3}}, r"norm\.auto_channels=3 must be a whole number from 1 to 2"),
        ({"norm": {"momentum": True}}, r"norm\.momentum=True must be a finite number .* or 'cumulative' or none"),
        ({"norm": {"name": 3}}, r"norm\.name=3 must be text"),
        ({"strategy": {"forward": "both"}}, r"strategy\.forward='both' must be 'joint' or 'separate'"),
        ({"strategy": {"forward": ["joint"]}}, r"strategy\.forward=\['joint'\] must be 'joint' or 'separate'"),
        ({"train": 3}, r"train=3 must be a group of keys, such as train\.lr\.$"),
        ({"norm": {"groups": "many"}}, r"norm\.groups='many' must be a whole number .* or 'auto'"),
        ({"lr": 0.1}, r"unknown key 'lr'\. Did you mean 'train\.lr'\? There are: stream, strategy"),
        ({"buffer": 9}, r"unknown key 'buffer'\. Did you mean 'memory\.size'"),
        ({"train": {"buffer": 9}}, r"unknown key 'train\.buffer'\. Did you mean 'memory\.size'"),
        ({"train": {"norm": "cn"}}, r"unknown key 'train\.norm'\. Did you mean 'norm\.name'\? There are: train\.lr"),
        ({"groups": 4}, r"unknown key 'groups'\. Did you mean 'norm\.groups'"),
        ({"foward": "joint"}, r"unknown key 'foward'\. Did you mean 'strategy\.forward'"),
        ({"train": {"data-root": "x"}}, r"unknown key 'train\.data-root'\. It is not a setting.*--data-root\."),
        ({"train.lr": 0.1}, r"unknown key 'train\.lr'.*'lr' of the group 'train'"),
        ({"zzz": 1}, r"unknown key 'zzz'\. There are: stream, strategy"),
        ({"memory": {"size": 0}}, r"memory\.size=0 must be a whole number from 1 "),
        ({"stream": {"tasks": 0}}, r"stream\.tasks=0 must be a whole number from 1 .* or none"),
        ({"stream": {"train_per_task": 0}}, r"stream\.train_per_task=0 must be a whole number from 1 "),
        ({"stream": {"test_per_task": -1}}, r"stream\.test_per_task=-1 must be a whole number from 1 "),
        ({"model": {"width": 0}}, r"model\.width=0 must be a whole number from 1 "),
        ({"norm": {"groups": 0}}, r"norm\.groups=0 must be a whole number from 1 "),
        ({"train": {"batch": 0}}, r"train\.batch=0 must be a whole number from 1 "),
        ({"train": {"passes": 0}}, r"train\.passes=0 must be a whole number from 1 "),
        ({"train": {"replay": -1}}, r"train\.replay=-1 must be a whole number from 0 "),
        ({"train": {"max_steps": 0}}, r"train\.max_steps=0 must be a whole number from 1 "),
        ({"train": {"lr": 0}}, r"train\.lr=0 must be a finite number above 0"),
        ({"train": {"clip_value": 0.0}}, r"train\.clip_value=0\.0 must be a finite number above 0.* or none"),
        ({"train": {"lr": float("nan")}}, r"train\.lr=nan must be a finite number"),
        ({"strategy": {"alpha": float("inf")}}, r"strategy\.alpha=inf must be a finite number"),
        ({"strategy": {"beta": -float("inf")}}, r"strategy\.beta=-inf must be a finite number"),
        ({"norm": {"momentum": float("nan")}}, r"norm\.momentum=nan must be a finite number"),
        ({"memory": {"rho": 10.5}}, r"memory\.rho=10\.5 must be a finite number from -10 to 10"),
        ({"memory": {"rho": -11}}, r"memory\.rho=-11 must be a finite number from -10 to 10"),
        ({"train": {"lr": 1e300}}, r"train\.lr=1e\+300 must be a finite number above 0, up to 3\.4e\+38"),
        ({"train": {"lr": 10**400}}, r"train\.lr=10+\.\.\.0+ must be a finite number above 0, up to 3\.4e\+38"),
        ({"train": {"max_steps": 10**30}}, r"train\.max_steps=10+ must be a whole number from 1 to 1,000,000,000"),
        ({"norm": {"name": "cn\x1b[2J"}}, r"norm\.name='cn\\x1b\[2J' must be text without control characters"),
        ({"model": {"weights": "a\0b"}}, r"model\.weights='a\\x00b' must be text without control characters"),
        ({"strategy": {"name": "\ud800"}}, r"strategy\.name='\\ud800' must be text without control characters"),
        ({"train": {"optimizer": "\udcff"}}, r"train\.optimizer='\\udcff' must be 'sgd' or 'adam'"),
    ],
)
def test_from_dict_names_bad_setting(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_dict(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm": {"lr": 1}}, r"unknown key 'norm\.lr'\. Did you mean 'train\.lr'"),
        ({"memory": {"name": "prs"}}, r"Did you mean 'stream\.name' or 'strategy\.name'"),
        ({"strategy": {"bta": 1}}, r"unknown key 'strategy\.bta'\. Did you mean 'strategy\.beta'\?"),
        ({"strategy": {"options": 1}}, r"unknown key 'strategy\.options'"),
        ({"memory": {"kind": "rings"}}, r"unknown memory\.kind 'rings'\. Did you mean 'ring'"),
    ],
)
def test_settings_that_a_built_in_component_does_not_have(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_defaults(values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "a\x1b", [1], {"a": 1}, b"x"])
def test_own_settings_are_scalars(value: object) -> None:
    with pytest.raises(UserError, match=r"config: strategy\.mine=.* must be a finite number, text"):
        from_dict({"strategy": {"name": "mine.py:Mine", "mine": value}})


def test_own_settings_are_keys_of_their_group() -> None:
    config = from_dict({"strategy": {"name": "mine.py:Mine", "strength": 2.0, "alpha": 0.1, "active": True}})
    assert config.strategy.options == (("active", True), ("strength", 2.0)) and config.strategy.alpha == 0.1
    assert config.as_dict()["strategy"]["strength"] == 2.0 and "options" not in config.as_dict()["strategy"]
    assert from_dict(config.as_dict()) == config
    others = [{}, {"strength": 2.0}, {"strength": 2.5, "active": True}]
    hashes = {from_dict({"strategy": {"name": "mine.py:Mine", "alpha": 0.1, **other}}).hash for other in others}
    assert len(hashes | {config.hash}) == 4


def test_from_dict_names_origin() -> None:
    with pytest.raises(UserError, match=r"^run\.toml: train\.lr=0 "):
        from_dict({"train": {"lr": 0}}, "run.toml")
    with pytest.raises(UserError, match=r"^run\.toml: unknown key 'speed'"):
        from_dict({"speed": 1}, "run.toml")


def test_from_dict_allows_boundary_values() -> None:
    assert from_dict({"train": {"replay": 0}, "norm": {"groups": "auto"}, "stream": {"tasks": None}})
    assert from_dict({"train": {"max_steps": 10**9}}).train.max_steps == 10**9
    rho = from_dict({"memory": {"rho": -10}}).memory.rho
    assert rho == -10.0 and isinstance(rho, float)


def test_from_dict_keeps_path_that_is_not_utf8() -> None:
    assert from_dict({"model": {"weights": "caf\udce9.pt"}}).model.weights == "caf\udce9.pt"


def test_from_dict_with_values_that_have_no_repr() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, 16**6000, -(16**6000), "a" * 10**6):
        for key in ("lr", "batch", "optimizer"):
            with pytest.raises(UserError, match=rf"train\.{key}=") as error:
                from_dict({"train": {key: value}})
            assert len(str(error.value)) < 400


def test_suggested_keys_are_settings() -> None:
    assert set(SYNONYMS.values()) <= DEFAULTS.keys() and not set(FLAGS) & set(SYNONYMS)


def test_json_schema_covers_every_setting() -> None:
    schema = json_schema()
    json.dumps(schema)
    keys = {}
    for group, reference in schema["properties"].items():
        definition = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        has_options = group in ("strategy", "memory", "norm")
        assert (definition["additionalProperties"] is not False) == has_options and definition["description"]
        keys |= {f"{group}.{name}": prop for name, prop in definition["properties"].items()}
    assert {key: prop["default"] for key, prop in keys.items()} == DEFAULTS
    for key, prop in keys.items():
        assert prop["description"].endswith(".") and "\n" not in prop["description"], key
        for choice in prop.get("anyOf", [prop]):  # every number has limits
            if choice.get("type") in ("integer", "number"):
                assert ("maximum" in choice or "exclusiveMaximum" in choice) and (
                    "minimum" in choice or "exclusiveMinimum" in choice
                ), key
