"""Entry point of the command-line interface: start-up, errors, and the table of commands.

A user error prints one line and exits with code 2; any other exception is a bug and keeps its traceback. The module of
a command is imported when the command is used, so that listing the commands imports almost nothing.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import io
import logging
import os
import sys
from contextlib import suppress
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from contnorm import __version__
from contnorm.bench.escape import escape_terminal, shorten
from contnorm.cli.common import collection_paused, console
from contnorm.cli.examples import example_lines, examples_of
from contnorm.cli.tables import print_error
from contnorm.errors import UserError

__all__ = ["app", "load_command", "main"]

# Commands with their help. A command is the function of this name in the module of this name, unless it is in _MODULES.
COMMANDS = {
    "ls": "List available norms, streams, strategies, memories, models, launchers and tables.",
    "run": "Train once over a stream; after each task, measure accuracy on all tasks so far.",
    "sweep": "Run all combinations of some settings, and show the best setting of each norm.",
    "resume": "Resume all interrupted runs under a folder, bit-exactly.",
    "show": "Show the scores of finished runs, averaged over seeds.",
    "archive": "Write all records of a runs folder to one file, which every command reads like a folder.",
    "compare": "Compare two runs: differing settings, score differences paired over shared seeds, and a verdict.",
    "export": "Write records as tables, or log them to TensorBoard, W&B or MLflow.",
    "diagnose": "Measure the cross-task normalization effect: forgetting caused by the running moments alone.",
    "paper": "Reproduce a table or figure of the paper: run what is missing, compare with the published numbers.",
    "tune": "Choose the best learning rate (or another setting) of each norm, using only validation data.",
    "data": "List data sets, download one, add one of yours, or build a multi-label one.",
    "report": "Write a report that compares the norms in your runs: an HTML page, Markdown, LaTeX or CSV.",
}
_MODULES = {"resume": "run"}

_UNUSABLE = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM,
    errno.EROFS,
}  # fmt: skip
_FAILED_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_LONGEST_VALUE = 100  # characters of a typed value in an error message


def load_command(name: str) -> TyperCommand:
    """Import the module of a command and return the command."""
    with collection_paused():
        module = importlib.import_module(f"contnorm.cli.{_MODULES.get(name, name)}")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command, help=COMMANDS[name])(getattr(module, name))
    return cast(TyperCommand, typer.main.get_command(single))


class _Command(TyperCommand):
    """Command whose help ends with its examples, one per line, so that they can be copied."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # rich prints this part directly; the formatter is printed after it
        lines = example_lines(examples_of(str(self.name)))
        formatter.write("".join(f"{line}\n" for line in ("", " Examples:", *(f"   {line}" for line in lines))))


class _Group(TyperGroup):
    """Command group that imports commands on use, rejects NUL characters and converts OS errors to user errors."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # These have a name and a help text only, for listing.
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if args[0] in COMMANDS:
            return args[0], load_command(args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        for argument in args:
            if "\0" in argument:
                raise UserError(f"{_shown(argument)}: has a NUL character, which no path or setting can have.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise _in_words(error) from error


def _shown(value: str) -> str:
    return shorten(repr(value), _LONGEST_VALUE)


def _in_words(error: OSError) -> Exception:
    """Convert an OS error that the user can fix to a `UserError`; return other errors unchanged."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(
            "the system's limit of open files is reached. Raise it with `ulimit -n 1024`, or use fewer --lanes."
        )
    if error.errno == errno.ENOMEM:
        return UserError(OUT_OF_MEMORY)
    if error.filename is not None and error.errno in _UNUSABLE:
        return UserError(f"{_shown(str(error.filename))}: can't be used ({error.strerror}).")
    return error


def _has_working_folder() -> bool:
    """Whether the current folder exists. If it was deleted, torch's libraries end the process without a message."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Redirect stdout to the null device, so that flushing its buffer at exit does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_standard_streams() -> None:
    """Point closed standard descriptors at the null device.

    Otherwise the next opened files, such as records, would get these numbers, and output to stderr would go into them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


app = typer.Typer(
    name="contnorm",
    cls=_Group,
    help="Normalization layers for continual learning: run, resume, score and compare experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"contnorm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    from contnorm.bench.user_code import only_trusted

    context.with_resource(only_trusted(()))  # commands execute only user code that is named on the command line


def main() -> None:
    """Run the command line; a user error prints one line and exits with code 2."""
    _prepare_process()
    try:
        code = app(prog_name="contnorm", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()  # an error here can still be handled; at exit it could not
    except UserError as error:
        print_error(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        raise SystemExit(_output_failed(error)) from None
    except typer.Abort:
        raise SystemExit(130) from None  # Ctrl-C while there was nothing to save
    except (MemoryError, RuntimeError, ImportError) as error:
        if not _out_of_memory(error):
            raise
        print_error(OUT_OF_MEMORY)
        raise SystemExit(2) from None
    except _WRONG_USE as error:
        message = _in_one_line(error)
        if message:  # empty if the help was shown because there were no arguments
            print_error(message)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _prepare_process() -> None:
    """Set up what every command needs: standard streams, an existing current folder, logging."""
    _open_standard_streams()
    if not _has_working_folder():
        print_error("the current folder was deleted. Change to one that exists.")
        raise SystemExit(2)
    # Torch's modules hold half a million objects. The operating system frees them faster than a last collection.
    atexit.register(gc.freeze)
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the encoding lacks are shown as escapes
        sys.stdout.reconfigure(errors="backslashreplace")


def _output_failed(error: OSError) -> int:
    """Report that output could not be written; re-raise other errors.

    Returns:
        The exit code: 2, or 1 without a message if the reader of a pipe has ended.
    """
    if not isinstance(error, BrokenPipeError):
        if error.filename is not None or error.errno not in _FAILED_WRITE:
            raise error
        print_error(f"output can't be written ({error.strerror}). What was recorded and saved stays.")
    _discard_output()
    return 1 if isinstance(error, BrokenPipeError) else 2


OUT_OF_MEMORY = (
    "the settings need more memory than there is. Use a smaller model.width, train.batch, train.replay or memory.size, "
    "or fewer --lanes."
)


def _out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation; on a CPU torch has no exception class for it, only the message."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("allocate memory", "CUDA out of memory", "can't start new thread", "failed to map segment")
    )


class _LineFormatter(logging.Formatter):
    """Formats log messages like the other lines on stderr."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return escape_terminal(super().formatMessage(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("contnorm: %(message)s"))
    logging.basicConfig(handlers=[handler])


# Base class of all usage errors; typer does not export it.
_WRONG_USE = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _in_one_line(error: Any) -> str:
    """Message of a usage error in one line, with a pointer to the help; empty if the error has no message."""
    message = " ".join(str(error.format_message()).split())
    if not message:
        return ""
    message += "" if message.endswith((".", "?")) else "."
    where = error.ctx.command_path if error.ctx is not None else "contnorm"
    return f"{message} See `{where} --help`."


if __name__ == "__main__":
    main()
