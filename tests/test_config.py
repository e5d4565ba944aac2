"""Settings: where they come from, what is refused, and what a run's identity is."""

from pathlib import Path

import pytest

from contnorm.bench.config.schema import _LEAST, RunConfig, flatten_settings, from_dict, parse_assignment, read_toml
from contnorm.bench.config.suggest import FLAGS, MEANT
from contnorm.errors import UserError


def test_round_trip_and_identity() -> None:
    config = from_dict({"train": {"lr": 1}, "norm": {"name": "cn", "groups": "auto"}})
    assert from_dict(config.as_dict()) == config and from_dict(config.as_dict()).hash == config.hash
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert len({config.hash, RunConfig().hash, from_dict({"train": {"lr": 2}}).hash}) == 3


def test_identity_is_of_what_differs_from_the_defaults() -> None:
    """So that a setting added later, with the old behaviour as its default, leaves old records what they are."""
    assert from_dict({"train": {"lr": RunConfig().train.lr}}).hash == RunConfig().hash


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trian": {}}, r"config: unknown key 'trian'\. Did you mean 'train'\? There are: stream, strategy"),
        ({"train": {"lrr": 1}}, r"unknown key 'train\.lrr'\. Did you mean 'train\.lr'\? There are: train\.lr,"),
        ({"train": {"lr": "fast"}}, r"train\.lr='fast' must be a number"),
        ({"train": {"batch": 2.5}}, r"train\.batch=2\.5 must be a whole number"),
        ({"train": {"batch": True}}, r"train\.batch=True must be a whole number"),
        ({"strategy": {"forward": "both"}}, r"strategy\.forward='both' must be 'joint' or 'separate'"),
        ({"train": 3}, r"train=3 must be a group of keys, such as train\.lr\.$"),
        ({"norm": {"groups": "many"}}, r"norm\.groups='many' must be a whole number or 'auto'"),
        ({"lr": 0.1}, r"unknown key 'lr'\. Did you mean 'train\.lr'\? There are: stream, strategy"),
        ({"buffer": 9}, r"unknown key 'buffer'\. Did you mean 'memory\.size'"),
        ({"train": {"buffer": 9}}, r"unknown key 'train\.buffer'\. Did you mean 'memory\.size'"),
        ({"train": {"norm": "cn"}}, r"unknown key 'train\.norm'\. Did you mean 'norm\.name'\? There are: train\.lr"),
        ({"groups": 4}, r"unknown key 'groups'\. Did you mean 'norm\.groups'"),
        ({"norm": {"lr": 1}}, r"unknown key 'norm\.lr'\. Did you mean 'train\.lr'"),
        ({"foward": "joint"}, r"unknown key 'foward'\. Did you mean 'strategy\.forward'"),
        ({"memory": {"name": "prs"}}, r"Did you mean 'stream\.name' or 'strategy\.name' or 'model\.name' or 'norm\."),
        ({"train": {"data-root": "x"}}, r"unknown key 'train\.data-root'\. It is no setting of a run.*--data-root\."),
        ({"zzz": 1}, r"unknown key 'zzz'\. There are: stream, strategy"),
        ({"memory": {"size": 0}}, r"memory\.size=0 must be 1 or more"),
        ({"stream": {"tasks": 0}}, r"stream\.tasks=0 must be 1 or more"),
        ({"stream": {"test_per_task": -1}}, r"stream\.test_per_task=-1 must be 1 or more"),
        ({"model": {"width": 0}}, r"model\.width=0 must be 1 or more"),
        ({"norm": {"groups": 0}}, r"norm\.groups=0 must be 1 or more"),
        ({"train": {"batch": 0}}, r"train\.batch=0 must be 1 or more"),
        ({"train": {"replay": -1}}, r"train\.replay=-1 must be 0 or more"),
        ({"train": {"max_steps": 0}}, r"train\.max_steps=0 must be 1 or more"),
        ({"train": {"lr": 0}}, r"train\.lr=0\.0 must be above 0"),
        ({"train": {"lr": float("nan")}}, r"train\.lr=nan must be a finite number"),
        ({"strategy": {"alpha": float("inf")}}, r"strategy\.alpha=inf must be a finite number"),
        ({"train": {"lr": 1e300}}, r"train\.lr=1e\+300 must be a finite number, no larger than 3\.4e\+38"),
        ({"train": {"max_steps": 10**30}}, r"train\.max_steps=10+ must be no more than 1,000,000,000"),
    ],
)
def test_bad_settings_are_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_dict(values)


def test_every_key_that_is_suggested_or_bounded_is_a_setting() -> None:
    every = flatten_settings(RunConfig().as_dict())
    assert set(MEANT.values()) | set(_LEAST) <= every.keys() and not set(FLAGS) & set(MEANT)
    assert from_dict({"train": {"replay": 0}, "norm": {"groups": "auto"}, "stream": {"tasks": None}})


def test_assignments_and_files(tmp_path: Path) -> None:
    assert parse_assignment("stream.tasks=none") == ("stream.tasks", None)
    assert parse_assignment("train.deterministic=false") == ("train.deterministic", False)
    assert parse_assignment("train.lr=0.1\nbatch=3") == ("train.lr", "0.1\nbatch=3"), "which is no number"
    with pytest.raises(UserError, match=r"--set 'lr': expected key=value"):
        parse_assignment("lr")
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.5\n")
    assert from_dict(read_toml(file)).train.lr == 0.5
    file.write_text("[train\n")
    with pytest.raises(UserError, match=r"run\.toml: is not TOML"):
        read_toml(file)
    file.write_text("[train]\nspeed = 9\n")
    with pytest.raises(UserError, match=r"run\.toml: unknown key 'train\.speed'"):
        read_toml(file)
    file.write_bytes('[norm]\nname = "caf\xe9"\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"run\.toml: is not UTF-8, as TOML is \(invalid continuation byte at byte 18"):
        read_toml(file)
    with pytest.raises(UserError, match=r"none\.toml: can't be read"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("train.lr = " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("a." * 5000 + "a = 1", "nested too deeply"),
        ("[train]\nlr = " + "9" * 5000, "too many digits"),
        ("[train]\nlr = 0x" + "f" * 5000, "too many digits"),
        ('[strategy]\nname = "a\\u0000.py:C"', "control characters"),
        ('[norm]\nname = "cn\\u001b[2J"', "control characters"),
        ("#" * 2**20 + "#", "larger than"),
    ],
)
def test_a_hostile_settings_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read_toml(file)
    assert str(error.value).startswith(str(file)) and len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_a_settings_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / ("a" * 5000), Path("a\0b"), Path("/dev/zero")):
        with pytest.raises(UserError, match=r"can't be read|larger than"):
            read_toml(path)
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="is not UTF-8"):
        read_toml(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.lr=" + "[" * 5000, "nested too deeply"),
        ("train.lr=" + "[" * 50 + "]" * 50, "nested too deeply"),
        ("train.lr=" + "9" * 5000, "too many digits"),
        ("train.lr=0x" + "f" * 6000, "too many digits"),
        (".".join("a" * 100_000) + "=1", "a group and a name"),
        ("a" * 100_000, "expected key=value"),
    ],
)
def test_a_hostile_assignment_is_one_short_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse_assignment(text)
    assert len(str(error.value)) < 400


def test_values_that_have_no_repr_are_named() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, 16**6000, -(16**6000), "a" * 10**6):
        for key in ("lr", "batch", "optimizer"):
            with pytest.raises(UserError, match=rf"train\.{key}=") as error:
                from_dict({"train": {key: value}})
            assert len(str(error.value)) < 400
