"""Execute the tutorials and store their outputs, so that a second execution on the same machine gives the same bytes.

Usage: python -m tests.tutorials.notebooks [SLUG ...] [--check]

A tutorial is docs/tutorials/<slug>.ipynb. It is executed in an empty folder, with copies of the files <slug>.* beside
it, on one thread. What is stored has no times, no paths of the machine and no memory addresses; cells are numbered,
figures are PNG files with a palette. Metadata that an author sets is kept: the alternative text of a figure (`alt`) and
tags. The tag `trained` marks cells whose numbers come from training, which differ between kinds of CPUs.
"""

import argparse
import ast
import base64
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
LIMIT = 240  # seconds for a cell; a tutorial takes about 30 on a free core
COLORS = 256  # of the palette of a figure
WIDEST = 1000  # pixels of a figure
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("alt", "tags")  # of an author; all else is of an editor

# Executed by a kernel before the first cell: what the tests do for torchvision, see there. No name of it remains.
STARTUP = """\
import sys

sys.path.insert(0, {tests!r})
import torchvision_operators

torchvision_operators.declare()
sys.path.remove({tests!r})
del sys, torchvision_operators
"""
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DATA_PNG = re.compile(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+")


def tutorials() -> list[Path]:
    """All tutorials, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def companions(path: Path) -> list[Path]:
    """Files that a tutorial reads: those beside it that have its name and another suffix."""
    return sorted(other for other in path.parent.glob(f"{path.stem}.*") if other != path)


def execute(path: Path, folder: Path) -> Any:
    """Execute a tutorial in a folder and return the notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = read(path)
    for companion in companions(path):
        shutil.copy(companion, folder)
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with tempfile.TemporaryDirectory() as profile:
        client.execute(env=kernel_environment(Path(profile)))
    normalize(notebook, folder)
    return notebook


def kernel_environment(profile: Path) -> dict[str, str]:
    """Environment of a kernel: one thread, no colors, and a new IPython folder, without a profile of the user."""
    startup = profile / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "torchvision.py").write_text(STARTUP.format(tests=str(ROOT / "tests")))
    return {  # without what Ray has set for a cluster of another test
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, which Jupyter has
        "IPYTHONDIR": str(profile),
    }


def missing_modules(notebook: Any) -> list[str]:
    """Packages that a tutorial imports and that are not installed."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.split(".")[0]
        for node in imports
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def normalize(notebook: Any, folder: Path) -> None:
    """Remove from a notebook, in place, what differs between two executions."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat_minor = 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata})
        for output in cell.get("outputs", []):
            _normalize_output(output, folder, cell.metadata.get("alt"))


def _normalize_output(output: Any, folder: Path, alt: str | None) -> None:
    if output.output_type == "stream":
        output.text = _clean(output.text, folder)
        return
    output.metadata = nbformat.from_dict({})
    for kind, content in output.data.items():
        if kind == "image/png":
            output.data[kind] = shrink(content)
            output.metadata = nbformat.from_dict({"image/png": {"alt": alt}} if alt else {})
        elif isinstance(content, str):
            text = DATA_PNG.sub(lambda match: shrink(match[0]), content)
            output.data[kind] = _clean(text, folder)


def _clean(text: str, folder: Path) -> str:
    """Text without escape sequences, addresses and the name of the folder."""
    return ADDRESS.sub("0x...", ESCAPES.sub("", text)).replace(f"{folder.resolve()}{os.sep}", "").replace("\r\n", "\n")


def shrink(encoded: str) -> str:
    """Return a PNG image, in base64, with a palette and at most `WIDEST` pixels wide."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    if image.mode == "P" and image.width <= WIDEST:
        return encoded
    image = image.convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(COLORS, kmeans=2, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def texts(output: Any) -> Iterator[str]:
    """Texts that a reader sees of an output; the plain text that stands for a figure or a table is none."""
    if output.output_type == "stream":
        yield output.text
    elif "text/html" in output.data:
        without_style = re.sub(r"<style.*?</style>", " ", output.data["text/html"], flags=re.DOTALL)
        yield re.sub(r"<[^>]*>", " ", without_style)
    elif "image/png" not in output.data and "text/plain" in output.data:
        yield output.data["text/plain"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="tutorials to execute; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file would change")
    arguments = parser.parse_args()
    known = {path.stem: path for path in tutorials()}
    for slug in arguments.slugs:
        if slug not in known:
            parser.error(f"there is no tutorial {slug!r}. There are: {', '.join(known)}.")
    changed = []
    for slug in arguments.slugs or known:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            written = nbformat.writes(execute(known[slug], Path(folder))) + "\n"
        same = written == known[slug].read_text(encoding="utf-8")
        if not same:
            changed.append(slug)
        if not same and not arguments.check:
            known[slug].write_text(written, encoding="utf-8")
        size = len(written) / 1024
        state = "unchanged" if same else "differs" if arguments.check else "written"
        print(f"{slug}: {state}, {size:.0f} KiB, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
