"""The settings of a run: what was asked for, over what its stream says, over the defaults; and what is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contnorm.config import RunConfig, from_dict, laid_over
from contnorm.engine.settling import settle
from contnorm.errors import UserError, unknown
from contnorm.strategies import build_strategy
from contnorm.streams.classification import StreamSpec, check_stream, find_stream, stream_defaults
from contnorm.streams.sources import SOURCES, find_layout, looked_for

__all__ = ["resolve"]


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """The settings of a run: what was asked for, over what its stream says, over the defaults."""
    asked = from_dict(values)  # every key and value is checked before anything else
    _check_not_filled_in(asked)
    spec = find_stream(asked.stream.name)
    said = laid_over(stream_defaults(spec, asked.stream.scenario), values)["stream"].get("source")
    config = settle(values, _source(spec, said, data_root))
    check_stream(config.stream)
    build_strategy(config.strategy)
    return config


def _check_not_filled_in(asked: RunConfig) -> None:
    for key, value in (("strategy.code", asked.strategy.code), ("model.code", asked.model.code)):
        if value is not None:
            group = key.partition(".")[0]
            raise UserError(
                f"config: {key}={value!r} is filled in, from the file that {group}.name names. Leave it out, and set "
                f"{group}.name=path/to/file.py:Name."
            )


def _source(spec: StreamSpec, asked: str | None, root: Path) -> str:
    """The data set asked for, where the stream is made of it; the first of the stream's that is found."""
    if asked is not None:
        if asked not in spec.sources:
            raise unknown(f"stream.source for {spec.name}:", asked, spec.sources)
        return asked
    return _first_found(spec.sources, root)


def _first_found(names: tuple[str, ...], root: Path) -> str:
    for name in names:
        spec = SOURCES[name]
        if not spec.layouts or find_layout(spec, root) is not None:
            return name
    wanted = SOURCES[names[0]]
    raise UserError(
        f"no {wanted.name} under {root}. Looked for {looked_for(wanted)}. Put it there, or say where it is with "
        f"--data-root or CONTNORM_DATA; `contnorm data {wanted.name}` says more, and can fetch what is public."
    )
