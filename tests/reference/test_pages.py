"""Pages of docs/reference: they are generated from the code, complete, and led to by the first page."""

from __future__ import annotations

import re

import pytest
from tools.reference.__main__ import FOLDER, PAGES
from tools.reference.errors import ADVICE, INTERNAL, exceptions

from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.cli.main import COMMANDS, examples_of, load_command


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "run `python -m tools.reference`"


def test_all_pages_are_generated_and_listed() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
    assert pages == set(PAGES)
    assert pages <= set(re.findall(r"\]\((\w+\.md)\)", index))


@pytest.mark.parametrize("name", PAGES)
def test_rows_have_as_many_cells_as_the_heading(name: str) -> None:
    text = re.sub(r"^```.*?^```", "", (FOLDER / name).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1, block


def test_page_of_commands_has_every_option_and_example() -> None:
    sections = (FOLDER / "commands.md").read_text(encoding="utf-8").split("\n## contnorm ")[1:]
    assert [section.partition("\n")[0] for section in sections] == list(COMMANDS)
    for section, name in zip(sections, COMMANDS, strict=True):
        for parameter in load_command(name).params:
            if parameter.name != "help" and parameter.param_type_name == "option":
                assert all(f"`{option}`" in section for option in parameter.opts), (name, parameter.name)
        assert all(line in section.splitlines() for line in examples_of(load_command(name)))


def test_page_of_settings_has_every_setting() -> None:
    page = (FOLDER / "settings.md").read_text(encoding="utf-8")
    for key in flatten_settings(RunConfig().as_dict()):
        assert page.count(f"\n| `{key}` |") == 1, key


def test_every_exception_has_advice_or_is_internal() -> None:
    assert {one.name for one in exceptions()} == ADVICE.keys() | INTERNAL
