"""The notebook in examples/: stored without outputs, runs from top to bottom, and shows its figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


def read_notebook() -> Any:
    return pytest.importorskip("nbformat", reason="nbformat is not installed").read(NOTEBOOK, as_version=4)


def outputs(notebook: Any, code: str) -> list[Any]:
    """Outputs of the cell that ends with a line of code."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.splitlines()[-1] == code]
    return [output.data for output in cell.outputs if output.output_type == "execute_result"]


def test_notebook_is_valid_and_stored_without_outputs() -> None:
    notebook = read_notebook()
    pytest.importorskip("nbformat").validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_notebook_runs_and_shows_figures_and_comparison(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    notebook = read_notebook()
    client.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    (result,) = outputs(notebook, "bn")
    assert "(2 seeds)" in result["text/plain"] and "data:image/png;base64," in result["text/html"]
    (figure,) = outputs(notebook, "cn.plot()")
    assert "image/png" in figure
    (comparison,) = outputs(notebook, "bench.compare(cn, bn)")
    assert re.search(r"acc: [+-]\d.*95 % interval.*2 seeds", comparison["text/html"])
    assert len(list((tmp_path / "runs").glob("*/*.json"))) == 2
    errors = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert "in this process" not in errors, "the seeds did not run in worker processes"
