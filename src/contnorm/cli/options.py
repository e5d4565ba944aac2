"""Options of the commands that run: one for each setting of `FLAGS`, with the help of the schema, and how it is run.

A command takes them as one argument, ``request``, which the decorator `takes_settings` fills in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contnorm import bench
from contnorm.bench.config.schema import RunConfig, flatten_settings, show_value
from contnorm.bench.config.sources import (
    Setting,
    collect_settings,
    parse_assignment,
    parse_assignments,
)
from contnorm.bench.launchers import create_launcher
from contnorm.cli.common import (
    DEVICE_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    Lanes,
    Log,
    LogDir,
    LogEvery,
    MemoryMoments,
    RunsFolder,
    importing_torch,
)
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench import Launcher, Stream

__all__ = [
    "FLAGS",
    "Address",
    "Devices",
    "LauncherName",
    "LauncherSettings",
    "Request",
    "find_launcher",
    "setting_help",
    "takes_settings",
]

FLAGS = {
    "stream": "stream.name",
    "strategy": "strategy.name",
    "memory": "memory.kind",
    "norm": "norm.name",
    "groups": "norm.groups",
    "model": "model.name",
    "weights": "model.weights",
    "buffer": "memory.size",
    "batch": "train.batch",
    "replay": "train.replay",
    "lr": "train.lr",
    "precision": "train.precision",
    "max-steps": "train.max_steps",
    "eval-moments": "evaluate.moments",
}  # options, with their settings
DEFAULTS = {"stream.name": "permuted-mnist", "strategy.name": "er", "norm.name": "cn"}  # a settings file overrides them
_TEXTS = ("stream.name", "norm.name", "strategy.name", "memory.kind", "model.name", "model.weights")

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
# How runs are executed: the annotation and the default of each option.
_EXECUTION: dict[str, tuple[Any, Any]] = {
    "device": (Annotated[str, typer.Option(help=DEVICE_HELP)], "cpu"),
    "devices": (Devices, None),
    "lanes": (Lanes, None),
    "threads": (Annotated[int, typer.Option(help=THREADS_HELP)], 1),
    "memory_moments": (MemoryMoments, False),
    "runs": (RunsFolder, Path("runs")),
    "data_root": (DataRoot, None),
    "allow_missing": (AllowMissing, False),
    "log": (Log, None),
    "log_every": (LogEvery, 50),
    "log_dir": (LogDir, None),
    "launcher": (LauncherName, None),
    "address": (Address, None),
    "launcher_set": (LauncherSettings, None),
    "config": (Annotated[Path | None, typer.Option(help="TOML file of settings.")], None),
    "set_": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="Any setting, such as strategy.forward=separate; or its values, as train.batch=5,10; repeatable.",
            ),
        ],
        None,
    ),
}


@dataclass(frozen=True)
class Request:
    """What a command was asked to run.

    Attributes:
        typed: The settings of options and of ``--set``; several values are a list.
        execution: The options of execution, by name.
    """

    typed: list[Setting] = field(default_factory=list)
    execution: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        """Whether a setting has several values."""
        return any(isinstance(setting.value, list) for setting in self.typed)

    @property
    def runs(self) -> Path:
        """The folder of records and checkpoints."""
        return Path(self.execution["runs"])

    @functools.cached_property
    def launcher(self) -> Launcher | None:
        """Where runs are executed."""
        return find_launcher(*(self.execution[name] for name in ("launcher", "address", "launcher_set")))

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of the stream by name, and the others by dotted key."""
        values = collect_settings(DEFAULTS, self.execution["config"], self.typed, ())
        stream = values.pop("stream")
        lists = {f"stream.{name}": value for name, value in stream.items() if isinstance(value, list)}
        single = {name: value for name, value in stream.items() if not isinstance(value, list)}
        return single, {**flatten_settings(values), **lists}

    def load_stream(self, settings: dict[str, Any]) -> Stream:
        """Load the stream of some settings."""
        missing = self.execution["allow_missing"]
        return bench.load_stream(root=self.execution["data_root"], allow_missing=missing, **settings)

    def importing(self) -> AbstractContextManager[None]:
        """Return the context for the first import of torch, with which a GPU is initialized."""
        execution = self.execution
        return importing_torch(execution["device"], in_workers=bool(execution["devices"] or execution["launcher"]))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `bench.run` that say how runs are executed."""
        names = ("device", "devices", "lanes", "threads", "memory_moments", "runs", "log", "log_every", "log_dir")
        return {**{name: self.execution[name] for name in names}, "launcher": self.launcher}


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of settings and of execution, which it gets as its argument ``request``."""
    own = [one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "request"]
    parameters = []
    for flag, key in FLAGS.items():
        default = f" Default: {DEFAULTS[key]}." if key in DEFAULTS else ""
        option = typer.Option(f"--{flag}", help=f"{setting_help(key)}{default}")
        parameters.append((flag.replace("-", "_"), Annotated[str | None, option], None))
    parameters += [(one.name, one.annotation, one.default) for one in own]
    parameters += [(name, annotation, default) for name, (annotation, default) in _EXECUTION.items()]

    def with_request(**values: Any) -> Any:
        typed = []
        for flag, key in FLAGS.items():
            text = values.pop(flag.replace("-", "_"))
            if text is not None:
                typed.append(Setting(f"--{flag}", key, _parse_list(f"--{flag}", key, text)))
        for setting in parse_assignments(values["set_"] or ()):
            several = isinstance(setting.value, str) and "," in setting.value and setting.key not in _TEXTS
            value = _parse_list(setting.origin, setting.key, setting.value) if several else setting.value
            typed.append(Setting(setting.origin, setting.key, value))
        execution = {name: values.pop(name) for name in _EXECUTION}
        return command(request=Request(typed, execution), **values)

    with_request.__name__, with_request.__doc__ = command.__name__, command.__doc__
    with_request.__annotations__ = {name: annotation for name, annotation, _ in parameters}
    with_request.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, annotation, default in parameters
        ]
    )
    return with_request


def setting_help(key: str) -> str:
    """Return the description of a setting in the schema.

    Example:
        >>> setting_help("train.lr")
        'Learning rate.'
    """
    group, _, name = key.partition(".")
    of_group: Any = RunConfig.__dataclass_fields__[group].default_factory
    return str(of_group.__dataclass_fields__[name].default.description)


def _parse_list(flag: str, key: str, text: str) -> Any:
    """Parse comma-separated values; a single one is not a list.

    Example:
        >>> _parse_list("--lr", "train.lr", "0.01,0.03"), _parse_list("--norm", "norm.name", "cn")
        ([0.01, 0.03], 'cn')
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{flag} {show_value(text)}: has an empty value. Use values with commas between.")
    values = parts if key in _TEXTS else [parse_assignment(f"{key}={part}")[1] for part in parts]  # "none" is a norm
    return values if len(values) > 1 else values[0]


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
    launcher: Launcher | None = create_launcher(name, options)
    return launcher
