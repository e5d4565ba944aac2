"""Formulas of the site: TeX becomes MathML."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tex", "body"),
    [
        (r"\sigma_B^2", "<msubsup><mi>σ</mi><mi>B</mi><mn>2</mn></msubsup>"),
        (r"\frac1r", "<mfrac><mn>1</mn><mi>r</mi></mfrac>"),
        (r"\mathrm{mean}_N", '<msub><mi mathvariant="normal">mean</mi><mi>N</mi></msub>'),
        (r"\text{a part } j", "<mtext>a&nbsp;part&nbsp;</mtext><mi>j</mi>"),
    ],
)
def test_formula(tex: str, body: str) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    to_mathml = runpy.run_path(str(ROOT / "docs" / "site" / "formulas.py"))["to_mathml"]
    assert to_mathml(tex) == f"<math>{body}</math>"
