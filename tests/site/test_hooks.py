"""The hooks of the site: links, notebooks, navigation, formulas and docstrings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    return load("pages")


@pytest.fixture(scope="module")
def formulas() -> ModuleType:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    return load("formulas")


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    pytest.importorskip("griffe", reason="griffe is not installed")
    return load("docstrings")


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("README.md", "index.md"),
        ("CONTRIBUTING.md", "project/CONTRIBUTING.md"),
        ("LICENSE", "project/LICENSE.md"),
        ("docs/howto/sweeps.md", "howto/sweeps.md"),
        ("docs/records/runs", "records/runs/index.md"),
        ("docs/records", "records/README.md"),
        ("docs/records/cn-on-cpu.json", "records/cn-on-cpu.json"),
        ("examples/quickstart.ipynb", "project/examples/quickstart.md"),
        ("src/contnorm/errors.py", "project/src/contnorm/errors.py.md"),
        ("../other/file.md", None),
    ],
)
def test_site_uri_of_repository_path(pages: ModuleType, path: str, uri: str | None) -> None:
    assert pages.site_uri(path, ROOT) == uri


def test_links_are_rewritten_outside_of_code(pages: ModuleType) -> None:
    text = (
        "[a](../../CONTRIBUTING.md#style) [b](sweeps.md) [c](https://x.org/a.md) [d](#here) [e](../missing.md)\n"
        "`[f](../../CONTRIBUTING.md)`\n\n```text\n[g](../../CONTRIBUTING.md)\n```\n[h](../../README.md)"
    )
    changed = pages.rewrite_links(text, "docs/howto/logging.md", "howto/logging.md", ROOT)
    assert changed == text.replace("[a](../../CONTRIBUTING", "[a](../project/CONTRIBUTING").replace(
        "../../README.md", "../index.md"
    )


def test_links_of_root_pages_lead_into_docs(pages: ModuleType) -> None:
    changed = pages.rewrite_links("[x](docs/glossary.md#scores)", "CONTRIBUTING.md", "project/CONTRIBUTING.md", ROOT)
    assert changed == "[x](../glossary.md#scores)"


def test_globs_of_the_navigation(pages: ModuleType) -> None:
    nav = ["index.md", {"How-to": [{"First": ["howto/c.md"]}, "howto/*.md"]}, {"About": ["*.md"]}]
    found = ["howto/b.md", "howto/c.md", "howto/a.md", "howto/deep/d.md", "index.md", "faq.md"]
    assert pages.expand_globs(nav, found) == [
        "index.md",
        {"How-to": [{"First": ["howto/c.md"]}, "howto/a.md", "howto/b.md"]},
        {"About": ["faq.md"]},
    ]


def test_notebook_becomes_a_page_with_outputs(pages: ModuleType, tmp_path: Path) -> None:
    v4 = nbformat.v4
    code = "for i in range(2):\n    print(i)"
    image = v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"})
    cells = [
        v4.new_markdown_cell("# Title\n\nText with $x^2$."),
        v4.new_code_cell(code, outputs=[v4.new_output("stream", text="0\n\n    1\n")]),
        v4.new_code_cell("plot()", outputs=[image], metadata={"alt": "Accuracy by task"}),
        v4.new_code_cell("plot()", outputs=[image]),
    ]
    nbformat.write(
        v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), tmp_path / "first-steps.ipynb"
    )
    text, figures = pages.notebook_page(tmp_path / "first-steps.ipynb")
    assert text.startswith('# Title\n\n<a href="first-steps.ipynb" download>')
    assert f"```python\n{code}\n```" in text
    assert "````` { .text .output }\n0\n\n    1\n`````" in text
    assert "![Accuracy by task](first-steps-2_0.png)" in text and f"![{pages.ALT_TEXT}](first-steps-3_0.png)" in text
    assert sorted(figures) == ["first-steps-2_0.png", "first-steps-3_0.png"]


@pytest.mark.parametrize(
    ("tex", "body"),
    [
        ("x", "<mi>x</mi>"),
        (r"\sigma_B^2", "<msubsup><mi>σ</mi><mi>B</mi><mn>2</mn></msubsup>"),
        (r"\frac1r", "<mfrac><mn>1</mn><mi>r</mi></mfrac>"),
        (r"\tfrac12", '<mstyle displaystyle="false"><mfrac><mn>1</mn><mn>2</mn></mfrac></mstyle>'),
        (r"10^{-5}", "<msup><mn>10</mn><mrow><mrow><mo>−</mo><mn>5</mn></mrow></mrow></msup>"),
        ("w'", "<msup><mi>w</mi><mo>′</mo></msup>"),
        (r"a \le b", "<mi>a</mi><mo>≤</mo><mi>b</mi>"),
        ("a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
        (r"\sqrt{x}", "<msqrt><mrow><mi>x</mi></mrow></msqrt>"),
        (r"\Big(x\Big)", "<mo>(</mo><mi>x</mi><mo>)</mo>"),
        (r"\mathrm{mean}_N", '<msub><mi mathvariant="normal">mean</mi><mi>N</mi></msub>'),
        (r"\text{a part } j", "<mtext>a&nbsp;part&nbsp;</mtext><mi>j</mi>"),
    ],
)
def test_formula(formulas: ModuleType, tex: str, body: str) -> None:
    assert formulas.to_mathml(tex) == f"<math>{body}</math>"


def test_docstring_examples_math_and_literal_blocks(docstrings: ModuleType) -> None:
    text = "Sum.\n\n.. math::\n    y =\n    x\n\nA dict::\n\n    {}\n\n>>> 1 + 1\n2\n\nExample:\n    >>> 1\n"
    assert docstrings.to_markdown(text) == (
        "Sum.\n\n$$\ny =\nx\n$$\n\nA dict:\n\n    {}\n\n```pycon\n>>> 1 + 1\n2\n```\n\nExamples:\n    >>> 1\n"
    )


def test_docstring_with_arguments_of_base_class(docstrings: ModuleType) -> None:
    base = "B.\n\nMore.\n\nArgs:\n    x: X.\n\nExamples:\n    y"
    merged = docstrings.with_arguments("A.\n\nExamples:\n    >>> 1", base)
    assert merged == "A.\n\nMore.\n\nArgs:\n    x: X.\n\nExamples:\n    >>> 1"
