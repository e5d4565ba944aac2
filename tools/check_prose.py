"""Check the prose of the documentation with proselint: python tools/check_prose.py [PAGE.md ...]

Code is left out: proselint would read it as English. Without arguments, all Markdown pages are checked but those that
are generated from records.
"""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent

# All checks of proselint's default are on, but:
RULES = {
    "typography": False,  # wants curly quotes and signs that Markdown makes, and an accent on the verb "resume"
    "misc.phrasal_adjectives.ly": False,  # takes "multiply-add" for an adverb
}
# The first key that matches decides, so that the rules come before the default.
CONFIG: Config = {"max_errors": DEFAULT["max_errors"], "checks": {**RULES, **DEFAULT["checks"], **RULES}}
GENERATED = ("docs/results/", "docs/records/")


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages whose prose is written by hand."""
    found = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    return [page for page in found if not page.relative_to(root).as_posix().startswith(GENERATED)]


def prose(text: str) -> str:
    """Return the prose of a page; the lines keep their numbers, and each piece of code becomes another word.

    Example:
        >>> prose("# A norm\\n\\nA norm `cn` or `bn`.\\n```sh\\nls ls\\n```\\n")
        '# A norm:\\n\\nA norm code1 or code2.\\n\\n\\n\\n'
    """
    numbers = count(1)
    text = re.sub(
        r"^( *)```.*?^\1```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", lambda match: f"code{next(numbers)}" + "\n" * match[0].count("\n"), text)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # the address of a link
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)  # a row of a table has no sentences
    return re.sub(r"^(#+ .*)$", r"\1:", text, flags=re.MULTILINE)  # a sentence may begin with the words of its heading


def problems(page: Path, root: Path = ROOT) -> list[str]:
    """Return what proselint finds in a page, as ``page:line: message``."""
    content = prose(page.read_text(encoding="utf-8"))
    if not content.strip():
        return []
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    results = LintFile(page.name, content).lint(CONFIG)
    name = page.resolve().relative_to(root.resolve()).as_posix()
    return [f"{name}:{line}: {result.check_path}: {result.message}" for result, (line, _) in results]


if __name__ == "__main__":
    if found := [problem for page in map(Path, sys.argv[1:] or pages(ROOT)) for problem in problems(page)]:
        raise SystemExit("\n".join(found))
