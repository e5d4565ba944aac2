"""Runs by their settings: resolve them, skip what is recorded, go on where one was stopped, record what is found."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.config import RunConfig, from_dict
from contnorm.engine.checkpoint import Checkpoints
from contnorm.engine.lane import Lane
from contnorm.engine.loop import Failed, Finished, Progress, Stopped, run_lanes
from contnorm.engine.numerics import numerics
from contnorm.engine.processes import side_by_side
from contnorm.errors import UserError
from contnorm.own_code import code_hash
from contnorm.results import SCHEMA, Store, write_atomically
from contnorm.strategies import ALIASES as STRATEGY_ALIASES
from contnorm.strategies import build_strategy
from contnorm.streams.classification import TASK_FREE, find_stream
from contnorm.streams.gallery import Pictures
from contnorm.streams.sources import SOURCES, Source, find_layout, load_source, looked_for

__all__ = ["Event", "Job", "Workplace", "execute", "resolve", "unfinished"]


@dataclass(frozen=True)
class Workplace:
    """Where runs are made: none of it is part of a run's identity.

    Attributes:
        runs: The folder of records and checkpoints.
        data_root: Where data lies.
        device: Where networks learn.
        checkpoint_every: Steps between checkpoints; one is also written at each task's end.
        lanes: How many runs go side by side: in one graph on a GPU, in processes of their own on a CPU.
        threads: Of each run on a CPU; the order of sums depends on it, so it is fixed and recorded.
        whole: Whether the images go to the GPU whole; None for where they fit.
    """

    runs: Path
    data_root: Path
    device: torch.device
    checkpoint_every: int = 500
    lanes: int = 1
    threads: int = 1
    whole: bool | None = None


@dataclass(frozen=True)
class Job:
    """One run that is wanted: settings and a seed."""

    config: RunConfig
    seed: int


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    job: Job
    what: Progress | Finished | Stopped | Failed | str  # a word: "recorded" where there was nothing to do
    path: Path


def resolve(values: Mapping[str, Any], data_root: Path) -> RunConfig:
    """The settings of a run: what was asked for, over what its stream says, over the defaults."""
    asked = from_dict(values)  # every key and value is checked before anything else
    spec = find_stream(asked.stream.name)
    below = _over(spec.defaults, TASK_FREE) if asked.stream.scenario == "free" else spec.defaults
    merged = _over(below, values)
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


def execute(jobs: Sequence[Job], place: Workplace, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
    """Run the jobs that have no record yet, from their checkpoints where they have any, side by side."""
    store = Store(place.runs)
    missing = []
    for job in jobs:
        if store.has(job.config, job.seed):
            yield Event(job, "recorded", store.path(job.config, job.seed))
        else:
            missing.append(job)
    processes = min(place.lanes, len(missing)) if place.device.type == "cpu" else 1
    if processes > 1:
        for config in {job.config: None for job in missing}:  # what can't be run is told before a process is started
            Lane(config, 0, load_source(_source(config), place.data_root), place.device)
        yield from side_by_side(_one_job, [(job, tuple(missing), place) for job in missing], processes, stop)
    else:
        yield from _execute_here(missing, missing, place, stop)


def _one_job(job: tuple[Job, Sequence[Job], Workplace], stop: Callable[[], bool]) -> Iterator[Event]:
    this, asked, place = job
    return _execute_here([this], asked, place, stop)


def _execute_here(
    jobs: Sequence[Job], asked: Sequence[Job], place: Workplace, stop: Callable[[], bool]
) -> Iterator[Event]:
    """Run jobs in this process, those together that can move together; ``asked`` are all that will have their turn."""
    store = Store(place.runs)
    loaded: dict[str, tuple[Source, Pictures]] = {}
    for group in _groups(jobs, place, store):
        name = _source(group[0].config)
        if name not in loaded:
            source = load_source(name, place.data_root)
            loaded[name] = source, Pictures.of(source, place.device, place.whole)
        stopped = False
        for event in _run(group, asked, *loaded[name], place, store, stop):
            yield event
            stopped = stopped or isinstance(event.what, Stopped)
        if stopped:
            return


def _source(config: RunConfig) -> str:
    assert config.stream.source is not None  # filled in by `resolve`
    return config.stream.source


def _groups(jobs: Sequence[Job], place: Workplace, store: Store) -> Iterator[list[Job]]:
    """Jobs that can move together: of one stream and one batch size, at the same step, no more than there are lanes."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        done = Checkpoints(_folder(store.path(job.config, job.seed)) / "checkpoints").latest_step()
        key = (job.config.stream, replace(job.config.train, lr=0.0), done)
        alike.setdefault(key, []).append(job)
    together = place.lanes if place.device.type == "cuda" else 1
    for group in alike.values():
        for i in range(0, len(group), together):
            yield group[i : i + together]


def _run(
    jobs: list[Job],
    asked: Sequence[Job],
    source: Source,
    pictures: Pictures,
    place: Workplace,
    store: Store,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    started = time.perf_counter()
    with numerics(jobs[0].config.train, place.threads):
        # Settings that can't be run fail here, before anything is written.
        lanes = {Lane(job.config, job.seed, source, place.device, pictures): job for job in jobs}
        _note_begun([*jobs, *(job for job in asked if job.config == jobs[0].config)], store)
        folders = {job: _folder(store.path(job.config, job.seed)) for job in jobs}
        checkpoints = [Checkpoints(folder / "checkpoints") for folder in folders.values()]
        for lane, what in run_lanes(list(lanes), checkpoints, place.checkpoint_every, stop=stop):
            job = lanes[lane]
            if isinstance(what, Finished):
                what.found["seconds"] |= {"together": time.perf_counter() - started, "lanes": len(jobs)}
                store.save(job.config, job.seed, {**what.found, **_circumstances(job.config, source, place.device)})
            if isinstance(what, Finished | Failed):
                _clear(folders[job])
            yield Event(job, what, store.path(job.config, job.seed))


def _note_begun(jobs: Sequence[Job], store: Store) -> None:
    """Leave a note of runs to come, so that `resume` knows of those too that did not come to their turn."""
    for job in jobs:
        path = _folder(store.path(job.config, job.seed)) / "run.json"
        if not path.is_file() and not store.has(job.config, job.seed):
            begun = {"schema": SCHEMA, "config": job.config.as_dict(), "seed": job.seed}
            write_atomically(path, json.dumps(begun).encode())


def _clear(folder: Path) -> None:
    """A run that is recorded, or can't go on, needs its folder no more."""
    Checkpoints(folder / "checkpoints").clear()
    (folder / "run.json").unlink()
    folder.rmdir()


def _folder(record: Path) -> Path:
    """Where a run that is not finished keeps what it needs."""
    return record.parent / f"{record.stem}.unfinished"


def unfinished(root: Path) -> list[Job]:
    """The runs under a folder that were stopped."""
    found = []
    for path in sorted([*root.glob("**/*.unfinished/run.json"), *root.glob("run.json")]):
        raw = json.loads(path.read_text())
        if raw["schema"] > SCHEMA:
            raise UserError(f"{path}: was begun by a newer contnorm (version {raw['schema']}). Upgrade to go on.")
        if not path.parent.with_suffix(".json").is_file():  # another process may have noted a run just recorded
            found.append(Job(from_dict(raw["config"], str(path)), raw["seed"]))
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
