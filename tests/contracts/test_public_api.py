"""The command line and the examples call the public API; public names of packages are imported on first use."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from contnorm.cli.main import COMMANDS, load_command

PACKAGES = [f"contnorm.{name}" for name in ("bench", "diagnosis", "paper", "report")]
FRAMEWORKS = ("timm", "lightning", "transformers", "hub", "avalanche", "mammoth", "optuna")
INTEGRATIONS = [f"contnorm.integrations.{name}" for name in FRAMEWORKS]
PUBLIC = {"contnorm", "contnorm.functional", *PACKAGES, *INTEGRATIONS}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def imported_modules(code: str) -> set[str]:
    """Modules of the package that some code imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return {module for module in modules if module.partition(".")[0] == "contnorm"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_only_the_public_api(example: Path) -> None:
    assert imported_modules(example.read_text()) <= PUBLIC


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_have_docs(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_in_list_equals_docstring(name: str) -> None:
    command = load_command(name)
    assert command.name == name and command.callback is not None
    assert str(inspect.getdoc(command.callback)).splitlines()[0] == COMMANDS[name]
    assert all(getattr(parameter, "help", None) for parameter in command.params if parameter.name != "help")
