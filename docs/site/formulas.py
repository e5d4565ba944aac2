r"""Hook of MkDocs: formulas between dollar signs as MathML, which browsers show without a script.

The part of TeX that the documentation uses is supported: letters, numbers and operators, Greek letters, ``_`` and
``^``, ``\frac``, ``\sqrt``, ``\text``, ``\mathrm``, names of functions, spaces, and brackets of a given size. An
unknown command is a warning, which fails a strict build.
"""

from __future__ import annotations

import html
import logging
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

__all__ = ["on_page_content", "to_mathml"]

log = logging.getLogger("mkdocs.hooks.formulas")

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ",
    "tau": "τ", "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ",
    "Theta": "Θ", "Lambda": "Λ", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "ell": "ℓ",
}  # fmt: skip
OPERATORS = {
    "cdot": "⋅", "times": "×", "pm": "±", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠",
    "approx": "≈", "sim": "∼", "in": "∈", "notin": "∉", "cap": "∩", "cup": "∪", "subset": "⊂", "setminus": "∖",
    "leftarrow": "←", "rightarrow": "→", "to": "→", "mid": "∣", "lvert": "|", "rvert": "|", "vert": "|", "infty": "∞",
    "dots": "…", "ldots": "…", "cdots": "⋯", "partial": "∂", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊",
    "rfloor": "⌋", "{": "{", "}": "}", "%": "%", "odot": "⊙", "circ": "∘", "propto": "∝", "forall": "∀",
}  # fmt: skip
LARGE = {"sum": "∑", "prod": "∏", "bigcup": "⋃"}
FUNCTIONS = {"max", "min", "log", "exp", "arg", "sup", "inf", "Pr", "ln", "det", "tanh"}
SPACES = {",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", "quad": "1em", "qquad": "2em", "!": "-0.17em"}
SIZES = {"big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "left", "right", "middle"}
ACCENTS = {"hat": "^", "bar": "¯", "tilde": "~", "vec": "→", "overline": "¯"}
UPRIGHT = {"mathrm", "operatorname", "textrm", "mathit", "mathbf"}

_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\d+(?:\.\d+)?|\s+|.", re.S)
_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', re.S)


def to_mathml(tex: str, *, display: bool = False) -> str:
    """Return a formula as a ``math`` element.

    Example:
        >>> print(to_mathml("x^2"))
        <math><msup><mi>x</mi><mn>2</mn></msup></math>
    """
    parser = _Parser(_TOKEN.findall(tex.strip()))
    body = parser.row(())
    attribute = ' display="block"' if display else ""
    return f"<math{attribute}>{body}</math>"


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0

    def row(self, until: tuple[str, ...]) -> str:
        """Return all atoms, with their scripts, up to a token of `until` or the end."""
        atoms: list[str] = []
        while self.position < len(self.tokens):
            if self.tokens[self.position] in until:
                return "".join(atoms)
            atoms.append(self._scripted())
        if until:
            raise ValueError(f"{until[0]} is missing")
        return "".join(atoms)

    def _next(self) -> str:
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if not token.isspace():
                return token
        raise ValueError("an argument is missing at the end")

    def _peek(self) -> str:
        while self.position < len(self.tokens) and self.tokens[self.position].isspace():
            self.position += 1
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _scripted(self) -> str:
        if not self._peek():
            return ""
        large = self._peek()[1:] in LARGE if self._peek().startswith("\\") else False
        base = self._atom(self._next())
        scripts = {"_": "", "^": ""}
        while self._peek() in ("_", "^", "'"):
            token = self._next()
            if token == "'":
                scripts["^"] += "<mo>′</mo>"
            else:
                scripts[token] += self._atom(self._next())
        below, above = (f"<mrow>{part}</mrow>" if part.count("<m") > 1 else part for part in scripts.values())
        if below and above:
            tag = "munderover" if large else "msubsup"
            return f"<{tag}>{base}{below}{above}</{tag}>"
        if below:
            tag = "munder" if large else "msub"
            return f"<{tag}>{base}{below}</{tag}>"
        return f"<msup>{base}{above}</msup>" if above else base

    def _atom(self, token: str) -> str:
        if token == "{":
            inside = self.row(("}",))
            self.position += 1
            return f"<mrow>{inside}</mrow>"
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        return f"<mo>{html.escape({'-': '−', '*': '∗'}.get(token, token))}</mo>"

    def _command(self, name: str) -> str:
        if name in GREEK:
            return f"<mi>{GREEK[name]}</mi>"
        if name in OPERATORS:
            return f"<mo>{OPERATORS[name]}</mo>"
        if name in LARGE:
            return f'<mo movablelimits="true">{LARGE[name]}</mo>'
        if name in FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>'
        if name in ("frac", "tfrac", "dfrac"):
            fraction = f"<mfrac>{self._argument()}{self._argument()}</mfrac>"
            return f'<mstyle displaystyle="false">{fraction}</mstyle>' if name == "tfrac" else fraction
        return self._command_with_text(name)

    def _command_with_text(self, name: str) -> str:
        if name == "sqrt":
            return f"<msqrt>{self._argument()}</msqrt>"
        if name == "bmod":
            return '<mspace width="0.22em"></mspace><mi>mod</mi><mspace width="0.22em"></mspace>'
        if name in SIZES:
            token = self._next()
            return "" if token == "." else self._atom(token)
        if name in ACCENTS:
            return f'<mover accent="true">{self._argument()}<mo>{ACCENTS[name]}</mo></mover>'
        if name == "text":
            return f"<mtext>{html.escape(self._raw()).replace(' ', '&nbsp;')}</mtext>"
        if name in UPRIGHT:
            return f'<mi mathvariant="normal">{html.escape(self._raw().strip())}</mi>'
        raise ValueError(f"the command \\{name} is not supported")

    def _argument(self) -> str:
        token = self._next()
        if len(token) > 1 and token[0].isdigit():  # \frac12: one digit is an argument
            self.position -= 1
            self.tokens[self.position] = token[1:]
            token = token[0]
        return self._atom(token)

    def _raw(self) -> str:
        if self._next() != "{":
            raise ValueError("text needs braces")
        end = self.tokens.index("}", self.position)
        text = "".join(self.tokens[self.position : end])
        self.position = end + 1
        return text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the formulas of a page, which the extension arithmatex has marked."""
    return _FORMULA.sub(lambda match: _replacement(match, page.file.src_uri), html)


def _replacement(match: re.Match[str], page: str) -> str:
    tex = html.unescape(match["tex"]).strip()
    display = match["tag"] == "div"
    try:
        element = to_mathml(tex[2:-2], display=display)  # without \( and \), or \[ and \]
    except ValueError as error:
        log.warning(f"{page}: the formula {tex[2:-2]!r} cannot be shown: {error}.")
        return match[0]
    return f'<div class="formula">{element}</div>' if display else element
