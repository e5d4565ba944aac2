"""Page of exit codes and exceptions, from the classes of the package."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import NamedTuple

import contnorm
from tools.reference.markdown import code, table

__all__ = ["ADVICE", "EXIT_CODES", "INTERNAL", "exceptions", "section"]

INTRODUCTION = """\
An error that you can mend is one line on stderr: what is wrong, the value, what is allowed, and what to do. Bad input
never gives a traceback, and nothing is written. A traceback is a bug of contnorm: report it with the command."""

EXIT_CODES = {
    0: ("The command did what it was asked for.", ""),
    1: (
        "The reader of a pipe has ended, as `head` does; or a bug, with a traceback.",
        "Nothing for a pipe. Report a traceback.",
    ),
    2: (
        "A user error: an option, a setting, a file or data that cannot be used; a run that diverged; a disk or a "
        "memory that is full; or some of several runs or files that failed.",
        "Read the line on stderr: its last sentence says what to do. Finished runs are recorded, and the same command "
        "continues with the others.",
    ),
    130: (
        "Ctrl-C (SIGINT): the runs were stopped. They are saved after the current step; a second Ctrl-C ends at once, "
        "with the last checkpoint.",
        "`contnorm resume`, or the same command again.",
    ),
    143: ("SIGTERM, as from a scheduler or `kill`: as 130.", "`contnorm resume`, or the same command again."),
}

# What to do about each exception that user code can meet, by name.
ADVICE = {
    "UserError": "Follow the message. It is the base class: `except contnorm.bench.UserError` catches all below it.",
    "UserCodeError": "Mend the code; the exception it raised is the `__cause__`. The run is not repeated until then.",
    "DivergedError": "Use a smaller learning rate or another norm. The runs are recorded as diverged and not repeated.",
    "RunInterrupted": "Call the same function again, or `contnorm.bench.resume`: it continues bit-exactly.",
    "StopRun": "Raise it yourself in `on_task_done`, to stop or discard runs.",
    "NonFiniteMomentsError": "Check the batches for NaN and the model for divergence; `layer` names the first layer.",
    "NormCheckError": "Mend the norm; `report` has the results of all checks.",
}
# Caught by the package, which raises a `UserError`, skips a check or uses another kernel instead.
INTERNAL = {
    "BuildError",
    "CheckSkipped",
    "NoLockstepError",
}


class Found(NamedTuple):
    """A public exception class: its name, the module that it is imported from, its base classes and its docstring."""

    name: str
    module: str
    bases: tuple[str, ...]
    doc: str


@cache
def exceptions() -> list[Found]:
    """All exception classes of the package, from its source: an import of all modules would need every framework."""
    root = Path(contnorm.__file__).parent
    known = {name for name, thing in vars(builtins).items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    known |= {"KeyboardInterrupt"}
    classes = [
        (node, ".".join(("contnorm", *path.relative_to(root).with_suffix("").parts)))
        for path in sorted(root.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    found: list[Found] = []
    count = -1
    while count < len(found):  # until no class has a base among the exceptions found last
        count = len(found)
        for node, module in classes:
            bases = tuple(ast.unparse(base) for base in node.bases)
            if node.name not in known and known.intersection(bases):
                known.add(node.name)
                found.append(Found(node.name, _public_module(node.name, module), bases, ast.get_docstring(node) or ""))
    return [one for one in found if not one.name.startswith("_")]


def _public_module(name: str, module: str) -> str:
    """Shortest package that exports a class; the module of its definition if there is none."""
    packages = ("contnorm", "contnorm.bench", "contnorm.paper", "contnorm.testing")
    exporting = (package for package in packages if name in importlib.import_module(package).__all__)
    return next(exporting, module)


def section() -> str:
    """Exit codes, and exceptions with what to do, as a section of the page of commands."""
    lines = ["## Exit codes and errors", "", INTRODUCTION, "", "### Exit codes", ""]
    lines += table(("code", "meaning", "what to do"), [(str(n), *texts) for n, texts in EXIT_CODES.items()])
    lines += ["", "### Exceptions in Python", "", _PYTHON, ""]
    order = list(ADVICE)
    found = sorted((one for one in exceptions() if one.name not in INTERNAL), key=lambda one: order.index(one.name))
    rows = [
        (
            code(f"{one.module}.{one.name}"),
            ", ".join(map(code, one.bases)),
            one.doc.partition("\n\n")[0],
            ADVICE[one.name],
        )
        for one in found
    ]
    lines += table(("exception", "subclass of", "meaning", "what to do"), rows)
    return "\n".join([*lines, "", _EXAMPLE])


_PYTHON = """\
The norm library (`contnorm`) raises Python's own exceptions, as torch does: `ValueError` for a value that is not
allowed, `TypeError` for an object of another type. The bench (`contnorm.bench`) raises `UserError` and its subclasses
for what a command reports in one line. These are the further classes:"""

_EXAMPLE = """\
```python
from contnorm import bench

try:
    bench.load_stream("split-cifar")
except bench.UserError as error:
    print(error)
```
"""
