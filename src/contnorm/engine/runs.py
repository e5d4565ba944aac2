"""Runs by their settings: resolve them, skip what is recorded, go on where one was stopped, record what is found."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.config import RunConfig, from_dict
from contnorm.engine.checkpoint import Checkpoints
from contnorm.engine.lane import Lane
from contnorm.engine.loop import Failed, Finished, Progress, Stopped, run_lanes
from contnorm.engine.numerics import numerics
from contnorm.errors import UserError
from contnorm.own_code import code_hash
from contnorm.results import SCHEMA, Store, write_atomically
from contnorm.strategies import ALIASES as STRATEGY_ALIASES
from contnorm.strategies import build_strategy
from contnorm.streams.classification import find_stream
from contnorm.streams.sources import SOURCES, Source, find_layout, load_source, looked_for

__all__ = ["Event", "Workplace", "execute", "resolve", "unfinished"]


@dataclass(frozen=True)
class Workplace:
    """Where runs are made: none of it is part of a run's identity."""

    runs: Path
    data_root: Path
    device: torch.device
    checkpoint_every: int = 500
    lanes: int = 1  # seeds side by side


@dataclass(frozen=True)
class Event:
    """Something that happened to the run of one seed."""

    seed: int
    what: Progress | Finished | Stopped | Failed | str  # a word: "recorded" where there was nothing to do
    path: Path


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """The settings of a run: what was asked for, over what its stream says, over the defaults."""
    asked = from_dict(values)  # every key and value is checked before anything else
    spec = find_stream(asked.stream.name)
    merged = _over(spec.defaults, values)
    stream = {**merged.get("stream", {}), "name": spec.name}
    stream["source"] = stream.get("source") or _first_found(spec.sources, data_root)
    name = asked.strategy.name.lower()
    strategy = {**merged.get("strategy", {}), "name": STRATEGY_ALIASES.get(name, asked.strategy.name)}
    strategy["code"] = code_hash(strategy["name"])
    model = {**merged.get("model", {})}
    model["code"] = code_hash(model.get("name", ""))
    config = from_dict({**merged, "stream": stream, "strategy": strategy, "model": model})
    build_strategy(config.strategy)
    return config


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _over(merged[key], value) if both else value
    return merged


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


def execute(
    config: RunConfig, seeds: list[int], place: Workplace, stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Run the seeds that have no record yet, from their checkpoints where they have any, side by side on a GPU."""
    store = Store(place.runs)
    missing = []
    for seed in seeds:
        if store.has(config, seed):
            yield Event(seed, "recorded", store.path(config, seed))
        else:
            missing.append(seed)
    if not missing:
        return
    assert config.stream.source is not None
    source = load_source(config.stream.source, place.data_root)
    waiting = set(missing)
    for group in _groups(config, missing, place, store):
        asked, waiting = waiting, waiting - set(group)
        for event in _run(config, group, sorted(asked), source, place, store, stop):
            yield event
            if isinstance(event.what, Stopped) and event.seed == group[-1]:
                return


def _groups(config: RunConfig, seeds: list[int], place: Workplace, store: Store) -> Iterator[list[int]]:
    """Seeds that can move together: those at the same step, and no more than there are lanes."""
    at: dict[int, list[int]] = {}
    for seed in seeds:
        latest = Checkpoints(_folder(store.path(config, seed)) / "checkpoints").latest()
        at.setdefault(0 if latest is None else latest.progress["done"], []).append(seed)
    for together in at.values():
        for i in range(0, len(together), place.lanes):
            yield together[i : i + place.lanes]


def _run(
    config: RunConfig,
    seeds: list[int],
    asked: list[int],
    source: Source,
    place: Workplace,
    store: Store,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    started = time.perf_counter()
    with numerics(config.train):
        # Settings that can't be run fail here, before anything is written.
        lanes = [Lane(config, seed, source, place.device) for seed in seeds]
        folders = {seed: _folder(store.path(config, seed)) for seed in seeds}
        for seed in asked:  # all of them, so that `resume` knows of those that did not come to their turn
            begun = {"schema": SCHEMA, "config": config.as_dict(), "seed": seed}
            write_atomically(_folder(store.path(config, seed)) / "run.json", json.dumps(begun).encode())
        checkpoints = [Checkpoints(folder / "checkpoints") for folder in folders.values()]
        for lane, what in run_lanes(lanes, checkpoints, place.checkpoint_every, stop=stop):
            if isinstance(what, Finished):
                what.found["seconds"] |= {"together": time.perf_counter() - started, "lanes": len(seeds)}
                store.save(config, lane.seed, {**what.found, **_circumstances(config, source, place.device)})
            if isinstance(what, Finished | Failed):
                _clear(folders[lane.seed])
            yield Event(lane.seed, what, store.path(config, lane.seed))


def _clear(folder: Path) -> None:
    """A run that is recorded, or can't go on, needs its folder no more."""
    Checkpoints(folder / "checkpoints").clear()
    (folder / "run.json").unlink()
    folder.rmdir()


def _folder(record: Path) -> Path:
    """Where a run that is not finished keeps what it needs."""
    return record.parent / f"{record.stem}.unfinished"


def unfinished(root: Path) -> list[tuple[RunConfig, int]]:
    """The runs under a folder that were stopped: their settings and seeds."""
    found = []
    for path in sorted([*root.glob("**/*.unfinished/run.json"), *root.glob("run.json")]):
        raw = json.loads(path.read_text())
        if raw["schema"] > SCHEMA:
            raise UserError(f"{path}: was begun by a newer contnorm (version {raw['schema']}). Upgrade to go on.")
        found.append((from_dict(raw["config"], str(path)), raw["seed"]))
    return found


def _circumstances(config: RunConfig, source: Source, device: torch.device) -> dict[str, Any]:
    """What a number depends on besides its settings."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": {
            "contnorm": contnorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "device": {"kind": device.type, "name": name, "threads": torch.get_num_threads()},
        "precision": config.train.precision,
        "deterministic": config.train.deterministic,
        "source": {"name": source.name, "fingerprint": source.fingerprint},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the package's own checkout, with a mark where it was changed; None outside one."""
    here = Path(__file__).resolve().parent
    ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
