"""The cross-task normalization effect of a finished run at a terminal: its network again, on its own data."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from contnorm.diagnosis import diagnose
from contnorm.engine.evaluate import TaskBatches, classes_of
from contnorm.engine.jobs import Workplace
from contnorm.engine.lane import Lane
from contnorm.engine.numerics import numerics
from contnorm.engine.unfinished import edited
from contnorm.engine.weights import load_weights
from contnorm.errors import UserError, usable
from contnorm.metrics.matrix import AccuracyMatrix
from contnorm.report.effect import Diagnosis
from contnorm.results import Record, Store
from contnorm.streams.sources import Source, load_source

__all__ = ["diagnose_record", "show_diagnosis"]

ENDINGS = (".svg", ".png", ".pdf")


def show_diagnosis(given: str, seed: int | None, place: Workplace, out: Path | None, console: Console) -> None:
    """Print table and sentence, and draw the figure where one is asked for."""
    if out is not None and out.suffix not in ENDINGS:  # told before the work, not after it
        raise UserError(f"-o {out}: a figure ends in {', '.join(ENDINGS)}.")
    store = Store(place.runs)
    record = _of_seed(store.find(given), given, seed)
    found = diagnose_record(record, _path(given, record, store), place)
    console.print(f"{record.config.hash} seed {record.seed}\n\n{found}", soft_wrap=True, markup=False, highlight=False)
    if out is not None:
        with usable(out, "the figure can't be written", "Say with -o where else."):
            out.parent.mkdir(parents=True, exist_ok=True)
            found.draw(out)
        console.print(f"drawn in {out}", soft_wrap=True, markup=False, highlight=False)


def diagnose_record(record: Record, path: Path, place: Workplace) -> Diagnosis:
    """Moments from the training data of each task, accuracy on its test data, and past accuracies from the record.

    Args:
        record: The run.
        path: Where its record is; the weights lie beside it.
        place: Where its data is, and on what device to measure.
    """
    config = record.config
    why = edited(config)
    if why:
        raise UserError(why)
    source = load_source(str(config.stream.source), place.data_root)
    _check_data(record, source, path)
    with numerics(config.train, place.threads):
        lane = Lane(config, record.seed, source, place.device)
        try:
            load_weights(lane, path)
            tasks = range(lane.data.stream.tasks)
            return diagnose(
                lane.model,
                [TaskBatches(lane, task) for task in tasks],
                test_by_task=[TaskBatches(lane, task, test=True) for task in tasks],
                learned=_learned(record),
                predict=lambda model, x, task: classes_of(lane, x, task),
            )
        finally:
            lane.feed.close()


def _of_seed(records: list[Record], given: str, seed: int | None) -> Record:
    for record in records:
        if seed is None or record.seed == seed:
            return record
    there = ", ".join(str(record.seed) for record in records)
    raise UserError(f"--seed {seed}: run {given!r} has the seeds {there}.")


def _path(given: str, record: Record, store: Store) -> Path:
    """Where a record was found: a run is given by its file, its folder, a folder of runs or its hash."""
    typed = Path(given)
    if typed.is_file():
        return typed
    beside = typed / f"{record.seed}.json"
    if beside.is_file():
        return beside
    return (Store(typed) if typed.is_dir() else store).path(record.config, record.seed)


def _learned(record: Record) -> list[float]:
    """With running moments, as the network was evaluated when it had just learned a task."""
    running = record.raw.get("matrix_running")
    matrix = record.matrix if running is None else AccuracyMatrix(**running)
    return [matrix.at(task, task) for task in range(matrix.tasks)]


def _check_data(record: Record, source: Source, path: Path) -> None:
    was = record.raw.get("source", {}).get("fingerprint")
    if was is not None and was != source.fingerprint:
        raise UserError(
            f"{path}: was run on other {source.name} data than is found here (fingerprint {was}, here "
            f"{source.fingerprint}). Say with --data-root where that is."
        )
