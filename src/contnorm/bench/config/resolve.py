"""Resolve the settings of a run: check them once, add defaults, find the data set and fill in hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contnorm.bench.components import find_component
from contnorm.bench.config.defaults import FILLED_IN, apply_defaults
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import find_stored, list_stored, read_manifest
from contnorm.bench.data.registry import SOURCES, describe_layouts, find_layout
from contnorm.bench.memories import resolve_memory
from contnorm.bench.models.pretrained import weights_hash
from contnorm.bench.models.user_norms import resolve_user_norm
from contnorm.bench.strategies import resolve_strategy
from contnorm.bench.streams.tasks import STREAMS, StreamSpec, check_stream
from contnorm.errors import UserError, unknown


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """Resolve the settings of a run: user settings override the stream's defaults, which override the global ones.

    Args:
        values: Nested settings of the user.
        data_root: Folder of data sets.

    Raises:
        UserError: For an invalid or contradictory setting, a missing data set or weights file, or an unusable strategy.
    """
    config = apply_defaults(values)
    for key in FILLED_IN:
        group, _, name = key.partition(".")
        given = values.get(group, {})
        named = str(given.get("kind" if group == "memory" else "name"))
        if given.get(name) is not None and find_component(group, named, given[name]) is None:
            raise UserError(f"config: {key}={given[name]!r} is computed and can't be set. Leave it out.")
    spec = STREAMS[config.stream.name]
    config = replace(config, stream=replace(config.stream, source=find_source(spec, config.stream.source, data_root)))
    if config.model.weights is not None:
        weights = weights_hash(config.model.weights, config.model.name)
        config = replace(config, model=replace(config.model, weights_hash=weights))
    check_stream(config.stream)
    evaluate, scenario = config.evaluate, config.stream.scenario
    if spec.kind == "multi-label" and evaluate.ahead:
        raise UserError(f"evaluate.ahead=true: {spec.name} is multi-label. Use evaluate.ahead=false.")
    if config.stream.blur and config.train.passes > 1:
        raise UserError(
            f"train.passes={config.train.passes}: stream.blur={config.stream.blur:g} leaves no tasks to repeat. Use "
            f"train.passes=1, or train.updates for several steps per batch."
        )
    if evaluate.moments == "task" and scenario not in ("task", "class"):
        raise UserError(f"evaluate.moments=task: {spec.name} does not tell the task of a test sample. Use running.")
    if evaluate.weights != "plain" and (evaluate.moments != "memory" or scenario == "free"):
        raise UserError(
            f"evaluate.weights={evaluate.weights}: needs evaluate.moments=memory, and a stream with tasks. Use plain."
        )
    strategy = resolve_strategy(config.strategy, values.get("strategy", {}))
    return replace(config, strategy=strategy, memory=resolve_memory(config.memory), norm=resolve_user_norm(config.norm))


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
    if requested is None and spec.sources:
        return _first_available(spec.sources, root)
    is_stored = spec.kind == "multi-label" and requested is not None and find_stored(requested, root) is not None
    if requested is not None and (requested in spec.sources or is_stored):
        return requested
    others = list_stored(root) if spec.kind == "multi-label" else []
    if requested is None or not (spec.sources or others):
        raise UserError(
            f"stream {spec.name}: there is no data set stream.source={requested} under {root}. Build one: "
            f"`contnorm data NAME --csv FILE --images DIR`, and set stream.source=NAME."
        )
    raise unknown(f"stream.source for {spec.name}:", requested, dict.fromkeys([*spec.sources, *others]))


def _first_available(names: Sequence[str], root: Path) -> str:
    for name in names:
        spec = SOURCES[name]
        if not spec.layouts or find_layout(spec, root) is not None:
            return name
    first = SOURCES[names[0]]
    action = f"Build it with {first.built_with}" if first.built_with else "Put it there"
    raise UserError(
        f"no {first.name} under {root}. Looked for {describe_layouts(first)}. {action}, or set root=, --data-root or "
        f"CONTNORM_DATA; see `contnorm data {first.name}`."
    )
