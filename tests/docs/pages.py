"""The pages of the documentation, and the fenced blocks of a page with the markers before them."""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "SHELLS", "Block", "blocks", "commands", "page_name", "prose", "shell_lines"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHELLS = ("sh", "bash", "console")

_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<comment>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\s`]*)(?P<title>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: Number of the line of the fence.
        language: Word after the fence, such as ``sh``.
        text: Content, without the indentation of the fence.
        comment: Content of the HTML comment in the line before the fence, such as ``needs: gpu``.
    """

    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def needs(self) -> str:
        """Word of the marker ``<!-- needs: WORD -->``; empty without one."""
        return self.comment.removeprefix("needs:").strip() if self.comment.startswith("needs:") else ""


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages; all without any."""
    found = []
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        if not languages or match["language"] in languages:
            line = text.count("\n", 0, match.start("indent")) + 1
            content = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            found.append(Block(line, match["language"], content, match["comment"] or ""))
    return found


def commands(page: Path) -> list[str]:
    """The commands of a page that the tests run: those of its shell blocks without a marker.

    Pages of results are generated, and name the device of their runs in the command itself.
    """
    generated = page.is_relative_to(ROOT / "docs" / "results")
    return [
        line
        for block in blocks(page, *SHELLS)
        if not block.needs and not (generated and "--device cuda" in block.text)
        for line in shell_lines(block)
    ]


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCED.sub("", page.read_text())


def shell_lines(block: Block) -> list[str]:
    """The commands of a shell block, one per line; the output in a console block is left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
