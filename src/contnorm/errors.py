"""User errors, as opposed to bugs, and text that is safe to print.

The command line prints user errors in one line, without a traceback.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

_JOINERS = "\u200c\u200d"  # invisible letters that Indic and Persian spelling and emoji need


class UserError(Exception):
    """Invalid input from the user: an argument, a setting or a file that cannot be used.

    A notebook shows the lines of the user's own code and the message, not the frames of this package.
    """

    def _render_traceback_(self) -> list[str]:  # called by IPython
        errors = [error for error in (self, self.__cause__) if error is not None]
        frames = [frame for error in errors for frame in traceback.extract_tb(error.__traceback__)]
        own = [frame for frame in frames if not is_installed(frame.filename)]
        return [*traceback.format_list(own), f"{type(self).__name__}: {self}"]


class UserCodeError(UserError):
    """Code of the user, such as a strategy, a model or a memory, failed while a run used it.

    The message names the code and the exception, which is the ``__cause__``. Repeating the run with the same code
    would fail again, so the run is not retried.
    """


def is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or this package.

    Example:
        >>> is_installed(difflib.__file__), is_installed("<stdin>"), is_installed("net.py")
        (True, False, False)
    """
    if file.startswith("<frozen "):
        return True
    import sysconfig  # noqa: PLC0415, the layers are imported fast

    path = Path(file).resolve()
    folders = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return "site-packages" in path.parts or any(map(path.is_relative_to, [Path(__file__).parent, *folders]))


def check_count(value: object, name: str) -> int:
    """Return an argument that is a whole number from 1 on; booleans are rejected.

    Example:
        >>> check_count(0, "lanes")
        Traceback (most recent call last):
        contnorm.errors.UserError: lanes=0: use 1 or more, a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UserError(f"{name}={value!r}: use 1 or more, a whole number.")
    return int(value)


def unknown(what: str, name: str, known: Iterable[str], suggestions: Sequence[str] | None = None) -> UserError:
    """Return an error for an unknown name, with close matches, and the known names unless they are many.

    Args:
        what: The kind of thing that the name refers to.
        name: The unknown name.
        known: The known names.
        suggestions: The names to suggest. By default, the names in ``known`` with a similar spelling.

    Example:
        >>> print(unknown("stream", "split-cifar", ["split-cifar10", "split-mnist"]))
        unknown stream 'split-cifar'. Did you mean 'split-cifar10'? There are: split-cifar10, split-mnist.
    """
    names = list(known)
    if suggestions is None:
        suggestions = difflib.get_close_matches(name, names, n=2, cutoff=0.7)
    hint = f" Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
    listed = "" if suggestions and len(names) > 30 else f" There are: {', '.join(names)}."
    return UserError(f"unknown {what} {name!r}.{hint}{listed}")


@contextmanager
def usable(path: Path | str, problem: str, advice: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turn an ``OSError`` raised inside the block into a `UserError` about a path.

    Args:
        path: The path or address that the message names.
        problem: What failed.
        advice: How to fix it.
        *others: Other exceptions that mean the same, such as those of a parser.

    Example:
        >>> with usable(Path("runs"), "cannot write", "Free some disk space."):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        contnorm.errors.UserError: runs: cannot write (No space left on device). Free some disk space.
    """
    kinds: tuple[type[Exception], ...] = OSError, *others
    try:
        yield
    except kinds as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"{path}: {problem} ({reason})" + (f". {advice}" if advice else "")) from error


def import_library(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: Name of the module.
        extra: The optional dependency of this package that installs it.

    Example:
        >>> import_library("no_such_library", "wandb")
        Traceback (most recent call last):
        contnorm.errors.UserError: wandb: needs no_such_library. Install it with: pip install "contnorm[wandb]"
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise UserError(f'{extra}: needs {missing}. Install it with: pip install "contnorm[{extra}]"') from error


def escape_terminal(text: str) -> str:
    r"""Replace invisible characters, so that text can't move the cursor, set the title or reorder other text.

    Example:
        >>> print(escape_terminal("cn\x1b[2J\n"))
        cn\x1b[2J\n
    """
    if text.isprintable():
        return text
    letters = (
        letter if letter.isprintable() or letter in _JOINERS else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )
    return "".join(letters)


def shorten(text: str, limit: int) -> str:
    """Cut the middle of a text that is longer than the limit.

    Example:
        >>> shorten("0123456789", 7)
        '01...89'
    """
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"
