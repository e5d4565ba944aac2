"""Schema of settings: valid and invalid values, the hash of a run, own settings, and the JSON schema."""

import dataclasses
import gzip
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import (
    NormConfig,
    RunConfig,
    StrategyConfig,
    flatten_settings,
    from_dict,
    json_schema,
    parse_assignment,
    read_toml,
    resolve_options,
)
from contnorm.errors import UserError
from tests.committed_records import FOLDER

DEFAULTS = flatten_settings(RunConfig().as_dict())


def test_from_dict_round_trip() -> None:
    config = from_dict({"train": {"lr": 1}, "norm": {"name": "cn", "groups": "auto"}})
    assert from_dict(config.as_dict()) == config and from_dict(config.as_dict()).hash == config.hash
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert len({config.hash, RunConfig().hash, from_dict({"train": {"lr": 2}}).hash}) == 3
    assert from_dict(MappingProxyType({"train": MappingProxyType({"lr": 0.5})})).train.lr == 0.5


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
    ("values", "message"),
    [
        ({"lr": 0.1}, r"config: unknown key 'lr'\. Did you mean 'train.lr'"),
        ({"train": {"epochs": 2}}, r"unknown key 'train.epochs'\. Did you mean 'train.passes'"),
        ({"trian": {}}, r"config: unknown key 'trian'\. Did you mean 'train'\? There are: stream, strategy"),
        ({1: {}}, r"config: unknown key '1'"),
        ({"train": {"lrr": 1}}, r"unknown key 'train\.lrr'\. Did you mean 'train\.lr'"),
        ({"strategy": {"temperature": None, "a": [1]}}, r"strategy\.a=\[1\]"),
        ({"train": 3}, r"train=3: is a group of keys"),
        *(
            ({key.partition(".")[0]: {key.partition(".")[2]: value}}, rf"{key}=")
            for key, values in {
                "train.lr": ("fast", True, None, 0, -1.0, float("nan"), 1e300, 10**400),
                "train.batch": (2.5, 2.0, "2", True, 0),
                "train.replay": (-1,),
                "train.max_steps": (0, 10**30),
                "train.clip_value": (0.0,),
                "train.deterministic": (1,),
                "stream.augment": ("true",),
                "stream.tasks": (0,),
                "norm.auto_channels": (True, 2.0, 3),
                "norm.momentum": (True, float("nan")),
                "norm.groups": ("many", 0),
                "norm.name": (3, "cn\x1b[2J"),
                "strategy.forward": ("both", ["joint"]),
                "strategy.alpha": (float("inf"),),
                "strategy.mine": (float("nan"), 10**400, "a\x1b", {"a": 1}, b"x"),
                "memory.rho": (10.5, -11),
                "model.weights": ("a\0b",),
            }.items()
            for value in values
        ),
    ],
)
def test_from_dict_names_bad_setting(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_dict(values)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_from_dict_names_origin() -> None:
    with pytest.raises(UserError, match=r"^run\.toml: train\.lr=0: "):
        from_dict({"train": {"lr": 0}}, "run.toml")


def test_settings_that_a_built_in_component_does_not_have() -> None:
    for values, message in (
        ({"strategy": {"bta": 1}}, r"unknown key 'strategy\.bta'\. Did you mean 'strategy\.beta'"),
        ({"memory": {"kind": "rings"}}, r"unknown memory\.kind 'rings'\. Did you mean 'ring'"),
        ({"norm": {"name": "cn8", "groups": 4}}, r"norm\.name=cn8 and norm\.groups=4 contradict each other"),
    ):
        with pytest.raises(UserError, match=message):
            apply_defaults(values)


def test_own_settings_are_keys_of_their_group() -> None:
    config = from_dict({"strategy": {"name": "mine.py:Mine", "strength": 2.0, "alpha": 0.1, "active": True}})
    assert config.strategy.options == (("active", True), ("strength", 2.0)) and config.strategy.alpha == 0.1
    assert config.as_dict()["strategy"]["strength"] == 2.0 and "options" not in config.as_dict()["strategy"]
    assert from_dict(config.as_dict()) == config
    others = [{}, {"strength": 2.0}, {"strength": 2.5, "active": True}]
    hashes = {from_dict({"strategy": {"name": "mine.py:Mine", "alpha": 0.1, **other}}).hash for other in others}
    assert len(hashes | {config.hash}) == 4


class Component:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        needed: int
        temperature: "float" = 2.0
        kind: str | None = None
        computed: float = dataclasses.field(init=False, default=1.0)

        def __post_init__(self) -> None:
            if self.temperature <= 0:
                raise ValueError("temperature must be above 0")


def resolve(**options: Any) -> dict[str, Any]:
    config = StrategyConfig("mine.py:Component", options=tuple(sorted(options.items())))
    return dict(resolve_options("strategy", config, Component))


def test_own_settings_are_checked_and_completed() -> None:
    assert resolve(needed=1, temperature=3) == {"needed": 1, "temperature": 3.0, "kind": None}
    for options, message in (
        ({}, r"strategy\.needed: must be set"),
        ({"needed": 1.5}, r"strategy\.needed=1\.5: input should be a valid integer"),
        ({"needed": 1, "temprature": 2}, r"unknown key 'strategy\.temprature'\. Did you mean 'strategy\.temperature'"),
        ({"needed": 1, "temperature": 0.0}, r"strategy: temperature must be above 0"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(**options)  # type: ignore[arg-type]


def test_hash_of_every_archived_run_is_unchanged() -> None:
    found = 0
    for archive in FOLDER.rglob("*.jsonl.gz"):
        with gzip.open(archive, "rt") as lines:
            for raw in map(json.loads, lines):
                if "config" in raw:
                    found += 1
                    assert from_dict(raw["config"]).hash == raw["hash"]
    assert found > 2900


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


def test_parse_assignment_values() -> None:
    assert parse_assignment("stream.tasks=none") == ("stream.tasks", None)
    assert parse_assignment("train.deterministic=false") == ("train.deterministic", False)
    assert parse_assignment("train.lr=0.1\nbatch=3") == ("train.lr", "0.1\nbatch=3"), "which is no number"
    with pytest.raises(UserError, match=r"--set 'lr': expected key=value"):
        parse_assignment("lr")


def test_read_toml_names_file_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\nlr = 0.5\n")  # some editors write a byte order mark
    assert from_dict(read_toml(file)).train.lr == 0.5
    file.write_text("[train\n")
    with pytest.raises(UserError, match=r"run\.toml: is not TOML"):
        read_toml(file)
    file.write_text("[train]\nspeed = 9\n")
    with pytest.raises(UserError, match=r"run\.toml: unknown key 'train\.speed'"):
        read_toml(file)
    with pytest.raises(UserError, match=r"none\.toml: can't be read"):
        read_toml(tmp_path / "none.toml")
