"""Extension of Griffe: docstrings in the style of torch as Markdown that MkDocs shows well.

- Sections ``Example:`` are examples; Griffe knows them as ``Examples:``. Examples outside of a section are code blocks.
- ``.. math::`` is a formula, and text that ends in ``::`` is followed by a code block.
- Arguments that share a description are listed one by one.
- A norm layer whose arguments are documented at a base class has that documentation too.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

__all__ = ["TorchStyle", "to_markdown", "with_arguments"]

_SECTION = re.compile(r"^(?P<indent> *)Example:[ ]*$", re.M)
_EXAMPLE = re.compile(r"(?P<before>\n\n|^)(?P<block>>>> .*?)(?=\n\n(?!>>> )|\Z)", re.S)
_MATH = re.compile(r"^\.\. math::[ ]*\n(?P<tex>(?:[ ]+\S.*\n?|\n(?=[ ]+\S))+)", re.M)
_LITERAL = re.compile(r"(?<=\w)::(?=\n\n {4})")
_SEVERAL = re.compile(r"^ {4}(?P<names>\*{0,2}\w+(?:, ?\n? *\*{0,2}\w+)+): (?P<text>.*(?:\n {5,}.*)*)", re.M)


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown, with sections that Griffe recognizes."""
    text = _SECTION.sub(r"\g<indent>Examples:", text)
    text = _MATH.sub(lambda match: f"$$\n{textwrap.dedent(match['tex']).strip()}\n$$\n", text)
    text = _LITERAL.sub(":", text)
    text = _SEVERAL.sub(_one_by_one, text)
    return _EXAMPLE.sub(r"\g<before>```pycon\n\g<block>\n```", text)


def _one_by_one(match: re.Match[str]) -> str:
    """Return arguments that share a description, such as ``a, b: ...``, one by one, as Griffe reads them."""
    return "\n".join(f"    {name}: {match['text']}" for name in re.split(r",\s*", match["names"]))


def with_arguments(text: str, base: str) -> str:
    """Return the docstring of a class with the description and the arguments of the docstring of a base class."""
    own, separator, examples = text.partition("\n\nExamples:")
    _, _, inherited = base.partition("\n\n")
    inherited = inherited.partition("\n\nExamples:")[0]
    return f"{own}\n\n{inherited}{separator}{examples}"


class TorchStyle(griffe.Extension):
    """Rewrites each docstring of a package after the package was read from its source."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if "norms" in pkg.members:
            for module in pkg["norms"].modules.values():
                for layer in module.classes.values():
                    if layer.name.endswith("2d"):
                        _inherit_arguments(layer)


def _inherit_arguments(layer: griffe.Class) -> None:
    if layer.docstring is None or "\nArgs:" in layer.docstring.value:
        return
    for base in layer.mro():
        if base.docstring is not None and "\nArgs:" in base.docstring.value:
            layer.docstring.value = with_arguments(layer.docstring.value, base.docstring.value)
            return
