"""Options of commands that execute runs on several GPUs, or on other machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from contnorm.bench.config.sources import parse_assignment
from contnorm.bench.launchers.registry import create_launcher
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench import Launcher

__all__ = ["Address", "Devices", "LauncherName", "LauncherSettings", "find_launcher"]

Devices = Annotated[
    str | None,
    typer.Option("--devices", help="GPUs of this machine to use in parallel, such as 0,1,2,3, or all."),
]
LauncherName = Annotated[
    str | None,
    typer.Option("--launcher", help="Where to execute the runs: local, ray, ...; see `contnorm ls launchers`."),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Address of the cluster for --launcher ray, such as auto or ray-head:6379."),
]
LauncherSettings = Annotated[
    list[str] | None,
    typer.Option("--launcher-set", metavar="KEY=VALUE", help="Option of the launcher, such as retries=5; repeatable."),
]


def find_launcher(name: str | None, address: str | None, assignments: Iterable[str] | None) -> Launcher | None:
    """Create the launcher of the command-line options; None for this machine.

    Example:
        >>> find_launcher(None, "auto", None)
        Traceback (most recent call last):
        contnorm.errors.UserError: --address: needs --launcher, such as --launcher ray.
    """
    options = dict(parse_assignment(text) for text in assignments or ())
    if address is not None:
        options["address"] = address
    if name is None:
        if options:
            flag = "--address" if address is not None else "--launcher-set"
            raise UserError(f"{flag}: needs --launcher, such as --launcher ray.")
        return None
    launcher: Launcher = create_launcher(name, options)
    return launcher
