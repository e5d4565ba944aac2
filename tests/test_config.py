"""Settings: where they come from, what is refused, and what a run's identity is."""

from pathlib import Path

import pytest

from contnorm.config import RunConfig, from_dict, parse_assignment, read_toml
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
        ({"train": {"lrr": 1}}, r"unknown key 'train\.lrr'\. Did you mean 'train\.lr'"),
        ({"train": {"lr": "fast"}}, r"train\.lr='fast' must be a number"),
        ({"train": {"batch": 2.5}}, r"train\.batch=2\.5 must be a whole number"),
        ({"train": {"batch": True}}, r"train\.batch=True must be a whole number"),
        ({"strategy": {"forward": "both"}}, r"strategy\.forward='both' must be 'joint' or 'separate'"),
        ({"train": 3}, r"train=3 must be a group of keys, such as train\.name"),
        ({"norm": {"groups": "many"}}, r"norm\.groups='many' must be a whole number or 'auto'"),
    ],
)
def test_bad_settings_are_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_dict(values)


def test_assignments_and_files(tmp_path: Path) -> None:
    assert parse_assignment("stream.tasks=none") == ("stream.tasks", None)
    assert parse_assignment("train.deterministic=false") == ("train.deterministic", False)
    with pytest.raises(UserError, match=r"--set 'lr': expected key=value"):
        parse_assignment("lr")
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.5\n")
    assert from_dict(read_toml(file)).train.lr == 0.5
    file.write_text("[train\n")
    with pytest.raises(UserError, match=r"run\.toml: is not TOML"):
        read_toml(file)
    with pytest.raises(UserError, match=r"none\.toml: can't be read"):
        read_toml(tmp_path / "none.toml")
