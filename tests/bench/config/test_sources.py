"""Sources of settings: assignments, TOML files and Python mappings. Flags are tested in tests/cli/test_settings.py."""

from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import from_dict
from contnorm.bench.config.sources import expand_keys, parse_assignment, read_toml, with_setting
from contnorm.errors import UserError


def test_expand_keys_nests_dotted_keys() -> None:
    settings = {"train.lr": 0.03, "norm": {"name": "cn"}, "norm.groups": 8, "stream.tasks": None}
    assert expand_keys(settings) == {
        "train": {"lr": 0.03},
        "norm": {"name": "cn", "groups": 8},
        "stream": {"tasks": None},
    }
    assert expand_keys({}) == {}


def test_expand_keys_allows_equal_values() -> None:
    assert expand_keys({"train.lr": 1, "train": {"lr": 1.0}}) == {"train": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.lr": 0.1, "train": {"lr": 0.2}}, r"train\.lr=0\.1 and train\.lr=0\.2 contradict"),
        ({"norm.name": "cn8", "norm": {"groups": 4}}, r"norm\.name=cn8 and norm\.groups=4 contradict"),
        ({"train": 3, "train.lr": 0.2}, r"train=3 must be a group"),
    ],
)
def test_expand_keys_rejects_contradictions(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_keys(settings)


@pytest.mark.parametrize("key", ["trian.lr", "train.lr.x", "lr", "", ".", "train.", ".lr", 3])
def test_expand_keys_leaves_unknown_keys_to_the_schema(key: Any) -> None:
    with pytest.raises(UserError, match=r"unknown key|must be a"):
        from_dict(expand_keys({key: 0.1}))


def test_with_setting_needs_a_group() -> None:
    with pytest.raises(UserError, match=r"'train\.lr': train=3 must be a group of keys"):
        with_setting({"train": 3}, "train.lr", 0.1)


def test_parse_assignment_values() -> None:
    assert parse_assignment("stream.tasks=none") == ("stream.tasks", None)
    assert parse_assignment("train.deterministic=false") == ("train.deterministic", False)
    assert parse_assignment("train.lr=0.1\nbatch=3") == ("train.lr", "0.1\nbatch=3"), "which is no number"
    with pytest.raises(UserError, match=r"--set 'lr': expected key=value"):
        parse_assignment("lr")


def test_read_toml_names_file_in_errors(tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
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
def test_read_toml_reports_hostile_file_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_toml(file)
    assert str(error.value).startswith(str(file)) and len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_read_toml_rejects_what_is_not_a_text_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / ("a" * 5000), Path("a\0b"), Path("/dev/zero")):
        with pytest.raises(UserError, match=r"can't be read|larger than"):
            read_toml(path)
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="is not UTF-8"):
        read_toml(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.lr=" + "[" * 5000, "nested too deeply"),
        ("train.lr=" + "[" * 50 + "]" * 50, "nested too deeply"),
        ("train.lr=" + "9" * 5000, "too many digits"),
        ("train.lr=0x" + "f" * 6000, "too many digits"),
        (".".join("a" * 100_000) + "=1", "a group and a name"),
        ("a" * 100_000, "expected key=value"),
    ],
)
def test_parse_assignment_reports_hostile_text_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_assignment(text)
    assert len(str(error.value)) < 400
