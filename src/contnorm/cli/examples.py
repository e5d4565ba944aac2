"""Examples of commands: defined beside each command, shown at the end of its help, and executed by the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

__all__ = ["Example", "Need", "example_lines", "examples", "examples_of"]

Need = Literal["", "gpu", "data", "network"]
_Command = TypeVar("_Command", bound=Callable[..., Any])
_EXAMPLES: dict[str, tuple[Example, ...]] = {}


@dataclass(frozen=True)
class Example:
    """One example of a command.

    Attributes:
        purpose: What it does, as one sentence.
        command: The command line.
        needs: What it needs beyond an installed contnorm, its data and its other examples; empty for nothing.
    """

    purpose: str
    command: str
    needs: Need = ""


def examples(*items: Example) -> Callable[[_Command], _Command]:
    """Decorator that attaches examples to the function of a command.

    Example:
        >>> @examples(Example("Say hello.", "contnorm hello"))
        ... def hello() -> None: ...
        >>> examples_of("hello")
        (Example(purpose='Say hello.', command='contnorm hello', needs=''),)
    """

    def attach(function: _Command) -> _Command:
        _EXAMPLES[function.__name__] = items
        return function

    return attach


def examples_of(command: str) -> tuple[Example, ...]:
    """Examples of a command whose module is imported; empty if it has none."""
    return _EXAMPLES.get(command, ())


def example_lines(items: tuple[Example, ...]) -> list[str]:
    """Lines of a shell script with the examples, each below a comment that says what it does.

    Example:
        >>> example_lines((Example("Show all runs.", "contnorm show"), Example("Run.", "contnorm run", "gpu")))
        ['# Show all runs.', 'contnorm show', '# Run. Needs a GPU.', 'contnorm run']
    """
    return [line for item in items for line in (f"# {item.purpose}{_NEEDS[item.needs]}", item.command)]


_NEEDS: dict[Need, str] = {
    "": "",
    "gpu": " Needs a GPU.",
    "data": " Needs the data set.",
    "network": " Needs a network.",
}
