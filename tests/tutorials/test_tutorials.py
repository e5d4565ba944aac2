"""The tutorials: valid notebooks with stored outputs, which a new execution in an empty folder reproduces.

Outputs are compared exactly, apart from cells with the tag `trained`. Kernels for other CPUs sum in another order, and
a few hundred steps of SGD turn these last digits into other accuracies, as another seed would. In these cells the words
must be the same, and numbers must agree within `POINTS` or `SHARE`. On the machine where the outputs were stored,
``python -m tests.tutorials.notebooks --check`` compares all bytes.
"""

from __future__ import annotations

import base64
import io
import re
import runpy
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


def test_there_are_tutorials() -> None:
    assert TUTORIALS


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
def test_cells_that_print_or_end_with_a_value_have_outputs(path: Path) -> None:
    for cell in code_cells(notebooks.read(path)):
        last = cell.source.splitlines()[-1]
        shows_a_value = re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])?(\.\w+(\(.*\))?)*", last) and "=" not in last.split("(")[0]
        if re.search(r"^\s*print\(", cell.source, re.MULTILINE) or (shows_a_value and not last.startswith((" ", ")"))):
            assert cell.outputs, cell.source
        assert not any(output.output_type == "error" for output in cell.outputs)


@tutorial
def test_outputs_name_nothing_of_the_machine(path: Path) -> None:
    for cell in code_cells(notebooks.read(path)):
        text = output_text(cell) + "".join(str(output) for output in cell.outputs if output.output_type == "stream")
        assert not re.search(r"/(home|tmp|work|root|Users|usr)/|site-packages|0x[0-9a-f]{6}", text), text


@tutorial
def test_first_cell_has_title_contents_and_time(path: Path) -> None:
    first = notebooks.read(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert "**You will learn**" in first.source
    assert re.search(r"\*\*Time:\*\* .*\d+ (second|minute)", first.source)


@tutorial
def test_last_cell_concludes(path: Path) -> None:
    texts = [cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown"]
    assert "## Conclusion" in texts[-1]


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
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    stored = notebooks.read(path)
    if missing := notebooks.missing_modules(stored):
        pytest.skip(f"not installed: {', '.join(missing)}")
    new = notebooks.execute(path, tmp_path)
    for before, after in zip(code_cells(stored), code_cells(new), strict=True):
        assert kinds(before) == kinds(after), before.source
        trained = "trained" in before.metadata.get("tags", [])
        wrong = differences(output_text(before), output_text(after), trained)
        assert not wrong, f"{before.source}\n{wrong}"


def write_notebook(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.mark.slow
def test_execute_is_repeatable_and_removes_folder_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "sample.ipynb"
    write_notebook(
        path,
        "from pathlib import Path\nprint(Path('sample.txt').resolve(), Path('sample.txt').read_text())",
        "print(object())",
    )
    (tmp_path / "sample.txt").write_text("beside")
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        written.append(nbformat.writes(notebooks.execute(path, tmp_path / name)))
    assert written[0] == written[1]
    first, second = code_cells(nbformat.reads(written[0], as_version=4))
    assert output_text(first) == "sample.txt beside\n"
    assert output_text(second) == "<object object at 0x...>\n"


def test_missing_modules_are_those_that_are_not_installed(tmp_path: Path) -> None:
    path = tmp_path / "sample.ipynb"
    write_notebook(path, "import ast, no_such_a.part\nfrom no_such_b.part import name", "if True:\n    import torch")
    assert notebooks.missing_modules(notebooks.read(path)) == ["no_such_a", "no_such_b"]


@pytest.mark.slow
def test_kernel_has_no_names_before_the_first_cell(tmp_path: Path) -> None:
    path = tmp_path / "sample.ipynb"
    write_notebook(path, "print([name for name in ('sys', 'torch', 'torchvision_operators') if name in globals()])")
    (tmp_path / "empty").mkdir()
    (cell,) = code_cells(notebooks.execute(path, tmp_path / "empty"))
    assert output_text(cell) == "[]\n"


def test_shrunken_figure_is_smaller_and_looks_the_same() -> None:
    image = Image.linear_gradient("L").convert("RGB").resize((1600, 300))
    png = io.BytesIO()
    image.save(png, format="PNG", compress_level=0)
    small = notebooks.shrink(base64.b64encode(png.getvalue()).decode())
    assert len(small) < len(png.getvalue()) / 4
    shown = Image.open(io.BytesIO(base64.b64decode(small))).convert("RGB")
    assert shown.size == (1000, 188)
    for at in ((0, 0), (500, 94), (999, 187)):
        expected = image.resize(shown.size).getpixel(at)
        assert max(abs(a - b) for a, b in zip(shown.getpixel(at), expected, strict=True)) <= 6
    assert notebooks.shrink(small) == small


@pytest.mark.parametrize(
    ("stored", "new", "trained", "agree"),
    [
        ("accuracy 90.1 %", "accuracy 90.1 %", False, True),
        ("accuracy 90.1 %", "accuracy 90.2 %", False, False),
        ("accuracy 90.1 %", "accuracy  87.0 %", True, True),
        ("accuracy 90.1 %", "accuracy 80.0 %", True, False),
        ("about 1,000 seeds", "about 1200 seeds", True, True),
        ("cn is higher by 3.0", "cn is lower by 3.0", True, False),
    ],
)
def test_numbers_of_trained_cells_have_a_tolerance(stored: str, new: str, trained: bool, agree: bool) -> None:
    assert (not differences(stored, new, trained)) == agree


@pytest.mark.parametrize("slugs", [["no-such-tutorial"]])
def test_unknown_tutorial_is_refused(
    slugs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["notebooks", *slugs])
    with pytest.raises(SystemExit):
        notebooks.main()
    assert "there is no tutorial 'no-such-tutorial'" in capsys.readouterr().err


@pytest.mark.slow
def test_check_writes_nothing_and_fails_on_a_stale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sample.ipynb"
    write_notebook(path, "print(1)")
    unexecuted = path.read_text()
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["notebooks", "--check"])
    assert notebooks.main() == 1 and path.read_text() == unexecuted
    monkeypatch.setattr("sys.argv", ["notebooks"])
    assert notebooks.main() == 0 and path.read_text() != unexecuted
    monkeypatch.setattr("sys.argv", ["notebooks", "--check", "sample"])
    assert notebooks.main() == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "sample: differs",
        "sample: written",
        "sample: unchanged",
    ]


@pytest.mark.slow
def test_runs_of_a_notebook_use_worker_processes(tmp_path: Path) -> None:
    """A network that is defined in a notebook is sent to the processes of `lanes=2`."""
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    path = tmp_path / "sample.ipynb"
    write_notebook(
        path,
        "from torch import nn\n"
        "from contnorm import bench\n"
        "def make(input_shape, num_outputs):\n"
        "    layers = nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, num_outputs)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
        "stream = bench.load_stream('split-mnist', source='digits', tasks=2, train_per_task=40)\n"
        "bench.run(stream, model=make, norm='bn', seeds=2, lanes=2, runs='runs', tag='linear')",
    )
    (cell,) = code_cells(notebooks.execute(path, tmp_path))
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    assert "in this process" not in "".join(streams), "the seeds did not run in worker processes"
    (shown,) = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    assert "(2 seeds)" in shown["text/html"] and "data:image/png;base64," in shown["text/html"]
    assert len(list((tmp_path / "runs").glob("*/*.json"))) == 2


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


def test_tables_of_pandas_get_the_style_of_the_site() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("nbconvert", reason="nbconvert is not installed")
    path = notebooks.FOLDER / "first-experiment.ipynb"
    assert 'class=\\"dataframe\\"' in path.read_text()
    page, _ = runpy.run_path(str(notebooks.ROOT / "docs" / "site" / "pages.py"))["notebook_page"](path)
    assert "<th>model.name</th>" in page and "dataframe" not in page and "<style" not in page
