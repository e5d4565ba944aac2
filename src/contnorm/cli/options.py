"""Options of the commands that run: those of settings, from the schema, and those that say how runs are executed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contnorm import bench
from contnorm.bench.components import create_launcher
from contnorm.bench.config.defaults import refuse_code
from contnorm.bench.config.schema import (
    field_of,
    flatten_settings,
    merge_settings,
    nest_settings,
    parse_assignment,
    parse_assignments,
    read_toml,
)
from contnorm.cli.common import DataRoot, RunsFolder, collection_paused

if TYPE_CHECKING:
    from contnorm.bench import RunOptions, Stream

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


def _option(kind: Any, text: str, *names: str, default: Any = None, **more: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=text, **more)], default


# How runs are executed: the annotation and the default of each option, by the name of the argument.
EXECUTION: dict[str, tuple[Any, Any]] = {
    "device": _option(str | None, "Device: cpu (the default), cuda, or a GPU by its index, such as cuda:1."),
    "devices": _option(str | None, "GPUs of this machine to use in parallel, such as 0,1,2,3, or all."),
    "lanes": _option(int | None, "Number of parallel runs. Default: 8 on a GPU, one per core on a CPU."),
    "threads": _option(int | None, "CPU threads per run, by default 1. Changing it changes results slightly."),
    "memory_moments": _option(
        bool,
        "Evaluate with the moments of the replay memory too, beside --eval-moments; the run has the same hash.",
        "--memory-moments",
        default=False,
    ),
    "runs": (RunsFolder, Path("runs")),
    "data_root": (DataRoot, None),
    "allow_missing": _option(
        bool, "Accept a published data set with missing images; noted in the record.", "--allow-missing", default=False
    ),
    "log": _option(
        list[str] | None, "Log metrics while the runs train: csv, tensorboard, wandb or mlflow; repeatable."
    ),
    "log_every": _option(int, "Steps between the losses that are logged.", default=50),
    "log_dir": _option(Path | None, "Folder of logs. Default: next to the runs folder, as runs-logs."),
    "launcher": _option(str | None, "Where to execute the runs: local, ray, ...; see `contnorm ls launchers`."),
    "launcher_set": _option(
        list[str] | None,
        "Option of the launcher, such as address=auto or retries=5; repeatable.",
        metavar="KEY=VALUE",
    ),
}
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "config": _option(Path | None, "TOML file of settings."),
    "set_": _option(
        list[str] | None,
        "Any setting, such as strategy.forward=separate; or its values, as train.batch=5,10; repeatable.",
        "--set",
        metavar="KEY=VALUE",
    ),
}


def takes_options(*names: str, settings: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command options of `EXECUTION`, which it gets as the dictionary ``execution``.

    Args:
        names: Names of the options.
        settings: Whether it has those of settings too. It gets what was typed as ``typed``, by dotted key; several
            values of a setting are a list. The settings file is in ``execution["config"]``.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters
        flags: dict[str, tuple[Any, Any]] = {}
        for flag, key in FLAGS.items() if settings else ():
            default = f" Default: {DEFAULTS[key]}." if key in DEFAULTS else ""
            flags[flag.replace("-", "_")] = _option(str | None, f"{field_of(key).description}{default}", f"--{flag}")
        given = {name: (one.annotation, one.default) for name, one in own.items() if name not in ("typed", "execution")}
        execution = {name: EXECUTION[name] for name in names} | (_SETTINGS if settings else {})

        def call(**values: Any) -> Any:
            typed = {key: values.pop(flag.replace("-", "_")) for flag, key in FLAGS.items()} if settings else {}
            typed = {key: _parse_list(key, text) for key, text in typed.items() if text is not None}
            chosen = {name: values.pop(name) for name in execution}
            for key, value in parse_assignments(chosen.pop("set_", None) or ()).items():
                several = isinstance(value, str) and "," in value and key not in _TEXTS
                typed[key] = _parse_list(key, value) if several else value
            options = dict(map(parse_assignment, chosen.pop("launcher_set", None) or ()))
            if chosen.get("launcher") or options:
                chosen["launcher"] = create_launcher(chosen["launcher"] or "local", options)
            return command(execution=chosen, **({"typed": typed} if settings else {}), **values)

        shown = {**flags, **given, **execution}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__annotations__ = {name: annotation for name, (annotation, _) in shown.items()}
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in shown.items()
        ]
        parameters.sort(key=lambda one: one.default is not inspect.Parameter.empty)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _parse_list(key: str, text: str) -> Any:
    """Parse comma-separated values; a single one is not a list.

    Example:
        >>> _parse_list("train.lr", "0.01,0.03"), _parse_list("norm.name", "cn")
        ([0.01, 0.03], 'cn')
    """
    parts = [part.strip() for part in text.split(",")]
    values = parts if key in _TEXTS else [parse_assignment(f"{key}={part}")[1] for part in parts]  # "none" is a norm
    return values if len(values) > 1 else values[0]


def load_stream(typed: Mapping[str, Any], execution: Mapping[str, Any]) -> tuple[Stream, dict[str, Any]]:
    """Load the stream of what was typed; returns it with the arguments of `bench.run`.

    What was typed overrides the settings file, which overrides the defaults of options.
    """
    arguments = dict(execution)
    root, missing, config = (arguments.pop(name) for name in ("data_root", "allow_missing", "config"))
    in_file = {} if config is None else read_toml(config)
    nested = nest_settings(typed)
    refuse_code(merge_settings(in_file, nested), nested, str(config))
    values = flatten_settings(merge_settings(merge_settings(nest_settings(DEFAULTS), in_file), nested))
    of_stream = {
        key: value for key, value in values.items() if key.startswith("stream.") and not isinstance(value, list)
    }
    with collection_paused():
        stream = {key.partition(".")[2]: value for key, value in of_stream.items()}
        loaded = bench.load_stream(root=root, allow_missing=missing, **stream)
    return loaded, {"settings": {key: value for key, value in values.items() if key not in of_stream}, **arguments}


def run_options(execution: Mapping[str, Any]) -> RunOptions:
    """Return the options of execution for the functions of `contnorm.paper`, which take the folders apart."""
    names = ("device", "devices", "lanes", "threads", "memory_moments", "allow_missing", "launcher")
    with collection_paused():
        return bench.RunOptions(**{name: execution[name] for name in names if execution[name] is not None})
