"""Resolve the settings of a run: merge user settings with defaults, find the data set and fill in hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.data.multilabel_store import find_stored, stored_under
from contnorm.bench.data.registry import SOURCES, find_layout, looked_for
from contnorm.bench.models.weights_files import weights_hash
from contnorm.bench.strategies import build_strategy
from contnorm.bench.streams.tasks import StreamSpec, check_stream, find_stream, stream_defaults
from contnorm.errors import UserError, unknown

__all__ = ["resolve"]


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """Resolve the settings of a run: user settings override the stream's defaults, which override the global ones."""
    requested = from_dict(values)  # checks every key and value first
    _check_not_filled_in(requested)
    spec = find_stream(requested.stream.name)
    source = merge_settings(stream_defaults(spec, requested.stream.scenario), values)["stream"].get("source")
    config = complete(values, _source(spec, source, data_root))
    if config.model.weights is not None:
        weights = weights_hash(config.model.weights, config.model.name)
        config = replace(config, model=replace(config.model, weights_hash=weights))
    check_stream(config.stream)
    _check_evaluation(config, spec)
    build_strategy(config.strategy)
    return config


def _check_evaluation(config: RunConfig, spec: StreamSpec) -> None:
    if spec.kind == "multi-label" and config.evaluate.ahead:
        raise UserError(
            f"evaluate.ahead=true: no score of {spec.name}, whose images have several labels, looks at tasks not "
            f"learned yet. Leave it out."
        )


def _check_not_filled_in(requested: RunConfig) -> None:
    for key, value, setting, example in (
        ("strategy.code", requested.strategy.code, "strategy.name", "path/to/file.py:Name"),
        ("model.code", requested.model.code, "model.name", "path/to/file.py:Name"),
        ("model.weights_hash", requested.model.weights_hash, "model.weights", "path/to/file"),
    ):
        if value is not None:
            raise UserError(
                f"config: {key}={value!r} is filled in, from the file that {setting} names. Leave it out, and set "
                f"{setting}={example}."
            )


def _source(spec: StreamSpec, requested: str | None, root: Path) -> str:
    """Requested data set if the stream can use it; by default the first of the stream's data sets that is on disk."""
    built = spec.kind == "multi-label"
    if requested is not None:
        if requested not in spec.sources and not (built and find_stored(requested, root)):
            available = [name for name in stored_under(root) if name not in spec.sources] if built else []
            if not (spec.sources or available):
                raise UserError(
                    f"stream.source={requested!r}: no set of {spec.name} pictures is built under {root}. `contnorm "
                    f"data {requested} --csv FILE --images DIR` builds one there; --data-root says where else one is."
                )
            raise unknown(f"stream.source for {spec.name}:", requested, [*spec.sources, *available])
        return requested
    if not spec.sources:
        raise UserError(
            f"stream {spec.name}: say which, with --set stream.source=NAME, or the folder it was built in. `contnorm "
            f"data NAME --csv FILE` builds one."
        )
    return _first_available(spec.sources, root)


def _first_available(names: tuple[str, ...], root: Path) -> str:
    for name in names:
        spec = SOURCES[name]
        if not spec.layouts or find_layout(spec, root) is not None:
            return name
    first = SOURCES[names[0]]
    if first.built_with:
        raise UserError(
            f"no {first.name} under {root}. Looked for {looked_for(first)}. Build it with {first.built_with}, or "
            f"say where it is with --data-root or CONTNORM_DATA; `contnorm data {first.name}` says more."
        )
    raise UserError(
        f"no {first.name} under {root}. Looked for {looked_for(first)}. Put it there, or say where it is with "
        f"--data-root or CONTNORM_DATA; `contnorm data {first.name}` says more, and can fetch what is public."
    )
