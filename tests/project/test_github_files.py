"""Templates, workflows and hooks are valid, and run nothing but targets of the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def module(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def check(schema: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    return module("check_jsonschema", "--builtin-schema", schema, "--default-filetype", "yaml", *files)


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schema(schema: str) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    done = check(schema, SCHEMAS[schema])
    assert SCHEMAS[schema] and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pre_commit_configuration_is_valid() -> None:
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    done = module("pre_commit", "validate-config", ".pre-commit-config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def make_commands(command: str) -> list[list[str]]:
    """Return the targets of each ``make`` in a shell command, without variables."""
    calls = re.findall(r"(?:^|[;&|]\s*)make\b([^;&|\n]*)", command, re.MULTILINE)
    return [[word for word in re.sub(r"\$\{\{.*?\}\}", "", call).split() if "=" not in word] for call in calls]


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_of_a_workflow_is_a_make_target(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        [targets] = make_commands(command)  # one call of make, and nothing else
        assert command.startswith("make ") and targets and set(targets) <= TARGETS, command


def test_workflows_test_the_versions_that_the_package_claims() -> None:
    matrix = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == claimed
    assert {entry["torch"] for entry in matrix["include"]} == {"oldest", "newest"}


def test_only_publishing_jobs_may_write() -> None:
    for workflow in WORKFLOWS:
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {"contents": "read"}
        writers = {name for name, job in content["jobs"].items() if "permissions" in job}
        assert writers <= {"deploy", "publish"}
        for name in writers:  # they run actions only, no code of the repository
            assert all("run" not in step for step in content["jobs"][name]["steps"])
