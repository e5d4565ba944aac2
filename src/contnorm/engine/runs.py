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
from contnorm.engine.loop import Finished, Progress, Stopped, run_lane
from contnorm.engine.numerics import numerics
from contnorm.errors import UserError
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


@dataclass(frozen=True)
class Event:
    """Something that happened to the run of one seed."""

    seed: int
    what: Progress | Finished | Stopped | str  # a word: "recorded" where there was nothing to do
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
    config = from_dict({**merged, "stream": stream, "strategy": strategy})
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
        f"--data-root or CONTNORM_DATA."
    )


def execute(
    config: RunConfig, seeds: list[int], place: Workplace, stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Run the seeds that have no record yet, one after the other, each from its checkpoint where it has one."""
    store = Store(place.runs)
    source: Source | None = None
    for seed in seeds:
        path = store.path(config, seed)
        if path.is_file():
            yield Event(seed, "recorded", path)
            continue
        if source is None:
            assert config.stream.source is not None
            source = load_source(config.stream.source, place.data_root)
        yield from _run(config, seed, source, place, store, stop)


def _run(
    config: RunConfig, seed: int, source: Source, place: Workplace, store: Store, stop: Callable[[], bool]
) -> Iterator[Event]:
    path = store.path(config, seed)
    folder = _folder(path)
    started = time.perf_counter()
    with numerics(config.train):
        lane = Lane(config, seed, source, place.device)  # settings that can't be run fail here: nothing is written yet
        begun = {"schema": SCHEMA, "config": config.as_dict(), "seed": seed}
        write_atomically(folder / "run.json", json.dumps(begun).encode())
        checkpoints = Checkpoints(folder / "checkpoints")
        for what in run_lane(lane, checkpoints, place.checkpoint_every, stop=stop):
            if isinstance(what, Finished):
                what.found["seconds"]["all"] = time.perf_counter() - started
                store.save(config, seed, {**what.found, **_circumstances(config, source, place.device)})
                checkpoints.clear()
                (folder / "run.json").unlink()
                folder.rmdir()
            yield Event(seed, what, path)


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
