"""Blocks of data: TOML, YAML and JSON parse; settings and recipes have keys and values that the bench accepts."""

import json
import tomllib
from typing import Any

import pytest
import yaml

from contnorm.bench.config.defaults import apply_defaults
from contnorm.paper.recipe import parse_recipe
from tests.docs.pages import PAGES, Block, blocks, page_name

DATA = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}
FOUND = [pytest.param(block, id=f"{page_name(page)}:{block.line}") for page in PAGES for block in blocks(page, *DATA)]


@pytest.mark.parametrize("block", FOUND)
def test_data_of_block_is_valid(block: Block) -> None:
    content: Any = DATA[block.language](block.text)
    if block.language != "toml" or "project" in content or "tool" in content:
        return  # packaging, which the bench does not read
    if "runs" in content:
        assert parse_recipe("table", block.text, "table.toml").runs
    else:
        apply_defaults(content)
