"""Sources of settings: assignments and TOML files. Flags are tested in tests/cli/test_settings.py."""

from pathlib import Path

import pytest

from contnorm.bench.config.schema import from_dict, parse_assignment, read_toml
from contnorm.errors import UserError


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
    with pytest.raises(UserError, match=r"none\.toml: can't be read"):
        read_toml(tmp_path / "none.toml")
