"""Tables as plain text: a sheet has blocks of rows, and is written as Markdown or as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Block", "Sheet", "latex", "markdown"]

LATEX = {"\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}


@dataclass(frozen=True)
class Block:
    """One table of a sheet; without rows it is its title and what is said below."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Sheet:
    """What goes into one file.

    Attributes:
        name: Of the file.
        command: What to type to make what it shows again.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    notes: Sequence[str] = ()
    command: str = ""


def markdown(sheet: Sheet) -> str:
    """A sheet in Markdown.

    Example:
        >>> print(markdown(Sheet("runs", "Runs", [Block("", ["norm", "ACC"], [["a|b", "1.00"]])])))
        # Runs
        <BLANKLINE>
        | norm | ACC |
        |---|---|
        | a\\|b | 1.00 |
        <BLANKLINE>
    """
    parts = [f"# {sheet.title}", *sheet.notes]
    parts += [f"```bash\n{sheet.command}\n```"] if sheet.command else []
    for block in sheet.blocks:
        parts += [f"## {block.title}"] if block.title else []
        parts += [_table(block)] if block.rows else []
        parts += ["\n".join(f"- {_said(text)}" for text in block.below)] if block.below else []
    return "\n\n".join(parts) + "\n"


def _table(block: Block) -> str:
    lines = [_row(block.heads), "|" + "---|" * len(block.heads), *map(_row, block.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_said(cell).replace("|", r"\|") for cell in cells) + " |"


def _said(text: str) -> str:
    """With stars that are stars: BN* is a name."""
    return text.replace("*", r"\*")


def latex(sheet: Sheet) -> str:
    """A sheet in LaTeX, for a document that has booktabs; what is said besides goes into comments.

    Example:
        >>> print(latex(Sheet("runs", "Runs", [Block("", ["norm", "95 %"], [["bn_gn", "1 +- 2"]])])))
        % Runs
        \\begin{tabular}{ll}
        \\toprule
        norm & 95 \\% \\\\
        \\midrule
        bn\\_gn & 1 $\\pm$ 2 \\\\
        \\bottomrule
        \\end{tabular}
        <BLANKLINE>
    """
    lines = [f"% {text}" for text in (sheet.title, *sheet.notes, sheet.command) if text]
    for block in sheet.blocks:
        lines += ["", f"% {block.title}"] if block.title else []
        lines += _tabular(block) if block.rows else []
        lines += [f"% {text}" for text in block.below]
    return "\n".join(lines) + "\n"


def _tabular(block: Block) -> list[str]:
    begin = [rf"\begin{{tabular}}{{{'l' * len(block.heads)}}}", r"\toprule", _set(block.heads), r"\midrule"]
    return [*begin, *map(_set, block.rows), r"\bottomrule", r"\end{tabular}"]


def _set(cells: Sequence[str]) -> str:
    escaped = ("".join(LATEX.get(letter, letter) for letter in cell) for cell in cells)
    return " & ".join(cell.replace("+-", r"$\pm$") for cell in escaped) + r" \\"
