"""Entry point of the command-line interface: the table of commands, and errors.

A user error prints one line and exits with code 2; any other exception is a bug and keeps its traceback. The module of
a command is imported when the command is used, so that listing the commands imports almost nothing.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import logging
import os
import signal
import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from contnorm import __version__
from contnorm.cli.common import collection_paused, console, print_error
from contnorm.errors import UserError, escape_terminal

# Commands with their help. A command is the function of this name in the module of this name, unless it is in _MODULES.
COMMANDS = {
    "ls": "List available norms, streams, strategies, memories, models, launchers and tables.",
    "run": "Train once over a stream, or once with each combination of settings, as in --norm bn,cn --lr 0.01,0.03.",
    "resume": "Resume the interrupted runs of a folder, bit-exactly.",
    "show": "Show the scores of finished runs, averaged over seeds, or write them to a file.",
    "compare": "Compare two runs: differing settings, scores paired over shared seeds, a verdict, and the seeds it "
    "needs.",
    "diagnose": "Measure the cross-task normalization effect: forgetting caused by the running moments alone.",
    "paper": "Reproduce a table or figure of the paper: run what is missing, compare with the published numbers.",
    "tune": "Choose the best learning rate (or another setting) of each norm, using only validation data.",
    "data": "List data sets, download one, add one of yours, or build a multi-label one.",
    "report": "Write a report that compares the norms in your runs: an HTML page or Markdown.",
}
_MODULES = {"resume": "run", "ls": "data", "show": "records", "compare": "records", "report": "records"}


def load_command(name: str) -> TyperCommand:
    """Import the module of a command and return the command."""
    with collection_paused():
        module = importlib.import_module(f"contnorm.cli.{_MODULES.get(name, name)}")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command, help=COMMANDS[name])(getattr(module, name))
    return cast(TyperCommand, typer.main.get_command(single))


def examples_of(command: TyperCommand) -> list[str]:
    """Return the lines of a shell script with the examples in the docstring of a command."""
    return inspect.cleandoc(str(command.callback.__doc__).partition("Examples:")[2]).splitlines()


class _Command(TyperCommand):
    """Command whose help ends with its examples, one per line, so that they can be copied."""

    def invoke(self, ctx: Any) -> Any:
        """Execute the command; runs that a signal stopped are saved, and its number gives the exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            raise typer.Exit(128 + getattr(stopped, "signal", signal.SIGINT)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # rich prints this part directly; the formatter is printed after it
        lines = ["", " Examples:", *(f"   {line}" for line in examples_of(self))]
        formatter.write("".join(f"{line}\n" for line in lines))


class _Group(TyperGroup):
    """Command group that imports commands on use."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # These have a name and a help text only, for listing.
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if args[0] in COMMANDS:
            return args[0], load_command(args[0]), args[1:]
        return super().resolve_command(ctx, args)


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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    """Continual normalization: train, compare and report."""


def main() -> None:
    """Run the command line; a user error prints one line and exits with code 2."""
    atexit.register(gc.freeze)  # the operating system frees torch's half a million objects faster than a collection
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("contnorm: %(message)s"))
    logging.basicConfig(handlers=[handler])
    if hasattr(sys.stdout, "reconfigure"):  # characters that the encoding lacks are shown as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="contnorm", standalone_mode=False)
        sys.stdout.flush()  # an error here can still be handled; at exit it could not
    except UserError as error:
        print_error(str(error))
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of a pipe has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is None:
            raise
        notes = getattr(error, "__notes__", [])  # such as the steps that are saved
        print_error(" ".join([f"{error.filename}: can't be used ({error.strerror}).", *notes]))
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(130) from None  # Ctrl-C while there was nothing to save
    except _WRONG_USE as error:
        message = " ".join(str(cast(Any, error).format_message()).split())
        if message:  # empty if the help was shown because there were no arguments
            command = cast(Any, error).ctx.command_path if cast(Any, error).ctx else "contnorm"
            hint = _hint(error) or f"See `{command} --help`."
            print_error(f"{message}{'' if message.endswith(('.', '?')) else '.'} {hint}")
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _hint(error: Exception) -> str:
    """What an option that does not exist means, if it is named as a setting or as in other programs."""
    from contnorm.bench.config.schema import SHORT_KEYS, meant_keys  # only for this error: listing imports little

    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    for key in meant_keys(name) if name else ():
        options = {option for parameter in cast(Any, error).ctx.command.params for option in parameter.opts}
        short = next((short for short, full in SHORT_KEYS.items() if full == key), key.partition(".")[2])
        known = {f"--{short}": "", "--set": f" {key}=VALUE", "--where": f" {short}=VALUE"}
        return next((f"Use {option}{value}." for option, value in known.items() if option in options), "")
    return ""


class _LineFormatter(logging.Formatter):
    """Formats log messages like the other lines on stderr."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return escape_terminal(super().formatMessage(record))


# Base class of all usage errors; typer does not export it.
_WRONG_USE = cast("type[Exception]", typer.BadParameter.__mro__[1])


if __name__ == "__main__":
    main()
