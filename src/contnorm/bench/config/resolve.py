"""The settings of a run: what was asked for, over what its stream says, over the defaults; and what is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contnorm.bench.config.defaults import settle
from contnorm.bench.config.schema import RunConfig, from_dict, laid_over
from contnorm.bench.data.multilabel_store import find_stored, stored_under
from contnorm.bench.data.registry import SOURCES, find_layout, looked_for
from contnorm.bench.models.weights_files import weights_hash
from contnorm.bench.strategies import build_strategy
from contnorm.bench.streams.tasks import StreamSpec, check_stream, find_stream, stream_defaults
from contnorm.errors import UserError, unknown

__all__ = ["resolve"]


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """The settings of a run: what was asked for, over what its stream says, over the defaults."""
    asked = from_dict(values)  # every key and value is checked before anything else
    _check_not_filled_in(asked)
    spec = find_stream(asked.stream.name)
    said = laid_over(stream_defaults(spec, asked.stream.scenario), values)["stream"].get("source")
    config = settle(values, _source(spec, said, data_root))
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


def _check_not_filled_in(asked: RunConfig) -> None:
    for key, value, by, such in (
        ("strategy.code", asked.strategy.code, "strategy.name", "path/to/file.py:Name"),
        ("model.code", asked.model.code, "model.name", "path/to/file.py:Name"),
        ("model.weights_hash", asked.model.weights_hash, "model.weights", "path/to/file"),
    ):
        if value is not None:
            raise UserError(
                f"config: {key}={value!r} is filled in, from the file that {by} names. Leave it out, and set "
                f"{by}={such}."
            )


def _source(spec: StreamSpec, asked: str | None, root: Path) -> str:
    """The data set asked for, where the stream is made of it; the first of the stream's that is found."""
    built = spec.kind == "multi-label"
    if asked is not None:
        if asked not in spec.sources and not (built and find_stored(asked, root)):
            there = [own for own in stored_under(root) if own not in spec.sources] if built else []
            if not (spec.sources or there):
                raise UserError(
                    f"stream.source={asked!r}: no set of {spec.name} pictures is built under {root}. `contnorm data "
                    f"{asked} --csv FILE --images DIR` builds one there; --data-root says where else one is."
                )
            raise unknown(f"stream.source for {spec.name}:", asked, [*spec.sources, *there])
        return asked
    if not spec.sources:
        raise UserError(
            f"stream {spec.name}: say which, with --set stream.source=NAME, or the folder it was built in. `contnorm "
            f"data NAME --csv FILE` builds one."
        )
    return _first_found(spec.sources, root)


def _first_found(names: tuple[str, ...], root: Path) -> str:
    for name in names:
        spec = SOURCES[name]
        if not spec.layouts or find_layout(spec, root) is not None:
            return name
    wanted = SOURCES[names[0]]
    if wanted.built_with:
        raise UserError(
            f"no {wanted.name} under {root}. Looked for {looked_for(wanted)}. Build it with {wanted.built_with}, or "
            f"say where it is with --data-root or CONTNORM_DATA; `contnorm data {wanted.name}` says more."
        )
    raise UserError(
        f"no {wanted.name} under {root}. Looked for {looked_for(wanted)}. Put it there, or say where it is with "
        f"--data-root or CONTNORM_DATA; `contnorm data {wanted.name}` says more, and can fetch what is public."
    )
