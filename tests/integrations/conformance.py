"""The conformance table of the integrations: framework, feature and version tested, from recorded test runs.

A test of an integration is marked with the feature that it shows::

    @pytest.mark.feature("timm", "`create_model(norm_layer='cn')`")

``pytest tests/integrations --record-integrations`` writes one record per framework to docs/records/integrations;
``python -m tests.integrations.conformance`` then writes the table of docs/integrations/README.md from the records.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import contnorm

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDS = ROOT / "docs" / "records" / "integrations"
PAGE = ROOT / "docs" / "integrations" / "README.md"
BEGIN, END = "<!-- conformance table: begin -->", "<!-- conformance table: end -->"
MAMMOTH = "CONTNORM_MAMMOTH"
# The title of each framework, and the distribution that its version is of; None for one that is no package.
FRAMEWORKS: dict[str, tuple[str, str | None]] = {
    "timm": ("timm", "timm"),
    "lightning": ("Lightning", "lightning"),
    "transformers": ("transformers", "transformers"),
    "hub": ("Hugging Face Hub", "huggingface_hub"),
    "avalanche": ("Avalanche", "avalanche-lib"),
    "mammoth": ("mammoth", None),
    "optuna": ("Optuna", "optuna"),
    "ray": ("Ray", "ray"),
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("Weights & Biases", "wandb"),
    "mlflow": ("MLflow", "mlflow-skinny"),
}


@dataclass
class Outcomes:
    """The outcomes of the tests of each feature, collected from the reports of a test run.

    Attributes:
        by_feature: The outcomes of each framework and feature.
        complete: Whether the tests of all integrations were asked for, rather than those of some.
    """

    by_feature: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    complete: bool = False

    def add(self, framework: str, feature: str, outcome: str) -> None:
        self.by_feature.setdefault((framework, feature), []).append(outcome)

    def frameworks(self) -> list[str]:
        return list(dict.fromkeys(framework for framework, _ in self.by_feature))

    def was_run(self, framework: str) -> bool:
        return any("passed" in outcomes for (name, _), outcomes in self.by_feature.items() if name == framework)

    def features(self, framework: str) -> dict[str, dict[str, int]]:
        found = {feature: outcomes for (name, feature), outcomes in self.by_feature.items() if name == framework}
        return {
            feature: {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
            for feature, outcomes in sorted(found.items())
        }


def version_of(framework: str) -> str:
    """Return the version of a framework that is installed, or the commit of a checkout of mammoth."""
    distribution = FRAMEWORKS[framework][1]
    if distribution is not None:
        return importlib.metadata.version(distribution)
    command = ["git", "-C", os.environ[MAMMOTH], "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def record(framework: str, outcomes: Outcomes, device: str) -> dict[str, Any]:
    """Return the record of the tests of a framework."""
    return {
        "framework": framework,
        "version": version_of(framework),
        "date": datetime.now(UTC).date().isoformat(),
        "contnorm": contnorm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "features": outcomes.features(framework),
    }


def write_records(outcomes: Outcomes, device: str, folder: Path = RECORDS) -> list[Path]:
    """Write a record for each framework of which a test has passed; one that was skipped keeps its last record."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for framework in outcomes.frameworks():
        if outcomes.was_run(framework):
            paths.append(folder / f"{framework}{'' if device == 'cpu' else '-cuda'}.json")
            paths[-1].write_text(json.dumps(record(framework, outcomes, device), indent=2) + "\n")
    return paths


def load_records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """Return the records in the order of `FRAMEWORKS`, those of a GPU after that of the CPU."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    records = [raw for raw in found if isinstance(raw, dict) and "features" in raw]
    return sorted(records, key=lambda raw: (list(FRAMEWORKS).index(raw["framework"]), raw["device"] != "CPU"))


def describe(raw: dict[str, Any]) -> str:
    """Return one line on a recorded run, for the end of a test run that could not repeat it."""
    passed = sum(counts.get("passed", 0) for counts in raw["features"].values())
    title = FRAMEWORKS[raw["framework"]][0]
    return f"{title} {raw['version']}: {passed} tests of {len(raw['features'])} features passed on {raw['date']}"


def table(records: list[dict[str, Any]]) -> str:
    """Return the conformance table in Markdown."""
    rows = ["| framework | version | feature | tests passed | device, torch |", "|---|---|---|---|---|"]
    for raw in records:
        title, where = FRAMEWORKS[raw["framework"]][0], f"{raw['device']}, {raw['torch']}"
        for feature, counts in raw["features"].items():
            others = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if outcome != "passed")
            passed = f"{counts.get('passed', 0)}{f' ({others})' if others else ''}"
            rows.append(f"| {title} | {raw['version']} | {feature} | {passed} | {where} |")
    return "\n".join(rows)


def marked_features() -> set[tuple[str, str]]:
    """Return the features that the tests of the integrations are marked with, from their source."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.feature" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.feature", "feature"):
                framework, feature = (ast.literal_eval(argument) for argument in node.args)
                found.add((framework, feature))
    return found


def replace_table(page: str, content: str) -> str:
    """Replace the table between its two markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), table(load_records())))
    print(f"{PAGE.relative_to(ROOT)}: {len(load_records())} records")
