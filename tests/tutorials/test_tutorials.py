"""The tutorials: valid notebooks with stored outputs, which a new execution in an empty folder reproduces.

Outputs are compared exactly, apart from cells with the tag `trained`. Kernels for other CPUs sum in another order, and
a few hundred steps of SGD turn these last digits into other accuracies, as another seed would. In these cells the words
must be the same, and numbers must agree within `POINTS` or `SHARE`. On the machine where the outputs were stored,
``python -m tests.tutorials.notebooks --check`` compares all bytes.
"""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image  # noqa: E402

from contnorm.bench.records import load_runs  # noqa: E402
from tests.committed_records import RUNS  # noqa: E402
from tests.tutorials import notebooks  # noqa: E402

POINTS = 5.0  # an accuracy on 1,000 images after training differs by 1 to 2 points between seeds
SHARE = 0.3  # of numbers above 100, such as numbers of seeds, which vary as variances do
MOST_BYTES = 400_000
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
TUTORIALS = notebooks.tutorials()

tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_text(cell: Any) -> str:
    return "\n".join(text for output in cell.outputs for text in notebooks.texts(output))


def images(notebook: Any) -> list[tuple[Any, Any]]:
    """Figures that are shown as images, each with its cell."""
    return [
        (cell, output)
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type != "stream" and "image/png" in output.data and "text/html" not in output.data
    ]


def kinds(cell: Any) -> list[tuple[str, ...]]:
    """Types of the outputs of a cell."""
    return [(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs]


def close(stored: str, new: str) -> bool:
    """Whether two numbers agree within the tolerance for trained networks."""
    a, b = (float(number.replace(",", "")) for number in (stored, new))
    return abs(a - b) <= (POINTS if abs(a) <= 100 else SHARE * abs(a))


def differences(stored: str, new: str, trained: bool) -> list[tuple[str, str]]:
    """Numbers that do not agree, or the whole texts if their words differ."""
    if not trained:
        return [] if stored == new else [(stored, new)]
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", new).split():
        return [(stored, new)]
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(new), strict=True)
    return [pair for pair in pairs if not close(*pair)]


@tutorial
def test_notebook_is_valid_and_normalized(path: Path) -> None:
    notebook = notebooks.read(path)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "execute it with `make tutorials`"
    written = nbformat.writes(notebook) + "\n"
    notebooks.normalize(notebook, Path("/nowhere"))
    assert nbformat.writes(notebook) + "\n" == written == path.read_text(), "execute it with `make tutorials`"
    assert len(written) < MOST_BYTES


@tutorial
def test_outputs_name_nothing_of_the_machine(path: Path) -> None:
    for cell in code_cells(notebooks.read(path)):
        text = output_text(cell) + "".join(str(output) for output in cell.outputs if output.output_type == "stream")
        assert not re.search(r"/(home|tmp|work|root|Users|usr)/|site-packages|0x[0-9a-f]{6}", text), text


@tutorial
def test_figures_are_small_and_have_alternative_text(path: Path) -> None:
    notebook = notebooks.read(path)
    html = "".join(
        output.data.get("text/html", "")
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type != "stream"
    )
    tags = re.findall(r"<img[^>]*>", html)
    assert all(re.search(r'alt="[^"]{10,}"', tag) for tag in tags)
    assert tags or images(notebook), "a tutorial has a figure"
    for cell, output in images(notebook):
        alt = cell.metadata.get("alt", "")
        assert len(alt) > 30, f"set the metadata `alt` of the cell: {cell.source}"
        assert output.metadata["image/png"]["alt"] == alt
        image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
        assert image.format == "PNG" and image.width <= notebooks.WIDEST


@tutorial
def test_links_exist(path: Path) -> None:
    texts = "\n".join(cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", texts):
        assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute on a free core, and several where other tests take the cores
@tutorial
def test_execution_reproduces_stored_outputs(path: Path, tmp_path: Path) -> None:
    stored = notebooks.read(path)
    if missing := notebooks.missing_modules(stored):
        pytest.skip(f"not installed: {', '.join(missing)}")
    new = notebooks.execute(path, tmp_path)
    for before, after in zip(code_cells(stored), code_cells(new), strict=True):
        assert kinds(before) == kinds(after), before.source
        trained = "trained" in before.metadata.get("tags", [])
        wrong = differences(output_text(before), output_text(after), trained)
        assert not wrong, f"{before.source}\n{wrong}"


def test_archive_of_compare_two_norms_has_committed_records() -> None:
    """The archive beside the notebook is a selection of docs/records; its seals say that nothing was changed."""
    archive = notebooks.FOLDER / "compare-two-norms.jsonl.gz"
    selected = {(record.hash, record.seed): record.raw for record in load_runs(archive).records}
    committed = load_runs(RUNS / "split-cifar100-fresh-seeds.jsonl.gz").records
    expected = {
        (record.hash, record.seed): record.raw
        for record in committed
        if record.config.strategy.name == "er" and record.config.norm.name in ("bn", "cn", "in")
    }
    assert selected == expected and len(selected) == 160


def test_overview_lists_all_tutorials() -> None:
    page = (notebooks.FOLDER / "README.md").read_text()
    listed = {slug: title for title, slug in re.findall(r"^\| \[(.+?)\]\((.+?)\.ipynb\)", page, re.MULTILINE)}
    titles = {path.stem: notebooks.read(path).cells[0].source.splitlines()[0] for path in TUTORIALS}
    assert {slug: f"# {title}" for slug, title in listed.items()} == titles
