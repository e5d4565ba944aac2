"""Resolve the settings of a run: check them once, add defaults, find the data set and fill in hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contnorm.bench.components import find_component
from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import SOURCES, describe_layouts, find_layout
from contnorm.bench.data.store import find_stored, list_stored, read_manifest
from contnorm.bench.memories import resolve_memory
from contnorm.bench.models.pretrained import weights_hash
from contnorm.bench.models.user_norms import resolve_user_norm
from contnorm.bench.strategies import resolve_strategy
from contnorm.bench.streams.tasks import STREAMS, StreamSpec, check_stream
from contnorm.errors import UserError, unknown

__all__ = ["find_source", "resolve"]

# Settings that `resolve` fills in, with the setting that names the file and an example of it.
_FILLED_IN = {
    "strategy.code": "strategy.name=path/to/file.py:Name",
    "memory.code": "memory.kind=path/to/file.py:Name",
    "model.code": "model.name=path/to/file.py:Name",
    "norm.code": "norm.name=path/to/file.py:Name",
    "model.weights_hash": "model.weights=path/to/file",
}


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """Resolve the settings of a run: user settings override the stream's defaults, which override the global ones.

    Args:
        values: Nested settings of the user.
        data_root: Folder of data sets.

    Raises:
        UserError: For an invalid or contradictory setting, a missing data set or weights file, or an unusable strategy.
    """
    config = apply_defaults(values)
    _check_not_filled_in(values)
    spec = STREAMS[config.stream.name]
    config = replace(config, stream=replace(config.stream, source=find_source(spec, config.stream.source, data_root)))
    if config.model.weights is not None:
        weights = weights_hash(config.model.weights, config.model.name)
        config = replace(config, model=replace(config.model, weights_hash=weights))
    check_stream(config.stream)
    _check_evaluation(config, spec)
    strategy = resolve_strategy(config.strategy, values.get("strategy", {}))
    return replace(config, strategy=strategy, memory=resolve_memory(config.memory), norm=resolve_user_norm(config.norm))


def _check_evaluation(config: RunConfig, spec: StreamSpec) -> None:
    if spec.kind == "multi-label" and config.evaluate.ahead:
        raise UserError(
            f"evaluate.ahead=true: {spec.name} is multi-label, and its scores do not cover tasks not learned yet. Use "
            f"evaluate.ahead=false."
        )
    _check_evaluation_moments(config, spec)


def _check_evaluation_moments(config: RunConfig, spec: StreamSpec) -> None:
    """Reject moments and weights that need tasks where the learner knows none."""
    evaluate, scenario = config.evaluate, config.stream.scenario
    if evaluate.moments == "task" and scenario not in ("task", "class"):
        what = "is multi-label" if spec.kind == "multi-label" else f"has stream.scenario={scenario}"
        raise UserError(
            f"evaluate.moments=task: {spec.name} {what}, and its evaluation does not know the task of a sample. Use "
            f"evaluate.moments=running (--eval-moments running), or a task- or class-incremental stream."
        )
    if evaluate.weights != "plain" and evaluate.moments != "memory":
        raise UserError(
            f"evaluate.weights={evaluate.weights}: only evaluate.moments=memory has weights, and evaluate.moments is "
            f"{evaluate.moments}. Add --eval-moments memory, or leave evaluate.weights out."
        )
    if evaluate.weights != "plain" and scenario == "free":
        raise UserError(
            f"evaluate.weights={evaluate.weights}: stream {spec.name!r} is task-free, so that stored samples have no "
            f"task. Use evaluate.weights=plain."
        )


def _check_not_filled_in(values: Mapping[str, Any]) -> None:
    for key, setting in _FILLED_IN.items():
        group, _, name = key.partition(".")
        value = values.get(group, {}).get(name)
        named = str(values.get(group, {}).get("kind" if group == "memory" else "name"))
        if value is not None and find_component(group, named, value) is None:
            raise UserError(f"config: {key}={value!r} is computed and can't be set. Leave it out and set {setting}.")


def find_source(spec: StreamSpec, requested: str | None, root: Path) -> str:
    """Find the data set of a stream: the requested one if the stream can use it, or the first that is on disk."""
    if spec.kind == "user":
        if requested is None:
            raise UserError(
                f"stream {spec.name!r}: has no data. Make it in Python with bench.Stream.from_{spec.name}, or add a "
                f"data set with `contnorm data add NAME` and use its name as the stream."
            )
        stored = find_stored(requested, root)
        return requested if stored is None else str(read_manifest(stored)["name"])
    is_multilabel = spec.kind == "multi-label"
    if requested is None and spec.sources:
        return _first_available(spec.sources, root)
    if requested is None:
        raise UserError(
            f"stream {spec.name}: stream.source is not set. Use --set stream.source=NAME, where NAME is a data set or "
            f"its folder; `contnorm data NAME --csv FILE` builds one."
        )
    if requested in spec.sources or (is_multilabel and find_stored(requested, root)):
        return requested
    others = [name for name in list_stored(root) if name not in spec.sources] if is_multilabel else []
    if spec.sources or others:
        raise unknown(f"stream.source for {spec.name}:", requested, [*spec.sources, *others])
    raise UserError(
        f"stream.source={requested!r}: there is no {spec.name} data set under {root}. Build it with `contnorm data "
        f"{requested} --csv FILE --images DIR`, or set root= or --data-root."
    )


def _first_available(names: Sequence[str], root: Path) -> str:
    for name in names:
        spec = SOURCES[name]
        if not spec.layouts or find_layout(spec, root) is not None:
            return name
    first = SOURCES[names[0]]
    action = f"Build it with {first.built_with}" if first.built_with else "Put it there"
    fetch = "" if first.built_with else ", and can fetch what is public"
    raise UserError(
        f"no {first.name} under {root}. Looked for {describe_layouts(first)}. {action}, or set root=, --data-root or "
        f"CONTNORM_DATA; `contnorm data {first.name}` says more{fetch}."
    )
