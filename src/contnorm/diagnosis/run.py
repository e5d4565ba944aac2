"""Diagnose a recorded run, or saved weights of a network, on its stream. Needs torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from contnorm.bench.api.execution import RunOptions, run_environment
from contnorm.bench.components import own_code
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_value
from contnorm.bench.data.registry import Source, digits_notice, load_source
from contnorm.bench.engine.checkpoint import load_run_weights, load_weights, weights_path
from contnorm.bench.engine.evaluate import TaskBatches, classes_of
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.run_dir import edited
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Record, Store
from contnorm.bench.stats import summarize_differences, t_interval
from contnorm.diagnosis.measure import diagnose
from contnorm.diagnosis.result import Diagnosis, mean_diagnosis, pair_sentence
from contnorm.errors import UserError

__all__ = ["RunDiagnosis", "diagnose_record", "diagnose_run", "diagnose_weights"]

log = logging.getLogger("contnorm")

Located = tuple[Record, Path]  # a record and its path


@dataclass(frozen=True)
class RunDiagnosis:
    """Diagnosis of a recorded run.

    Attributes:
        record: Record of the run; of the first seed if several were measured.
        path: Path of the record.
        diagnosis: The measured effect; with several seeds the mean over them, with intervals.
        comparison: Comparison with a second run, in words; empty if there is none.
        by_seed: The measured effect of each seed.
    """

    record: Record
    path: Path
    diagnosis: Diagnosis
    comparison: str = ""
    by_seed: Mapping[int, Diagnosis] = field(default_factory=dict)


def diagnose_run(
    run: str | Path,
    *,
    seed: int | None = None,
    other: str | Path | None = None,
    runs: str | Path = "runs",
    root: str | Path | None = None,
    options: RunOptions | None = None,
) -> RunDiagnosis:
    """Measure the cross-task normalization effect of a run that was made with ``keep_weights=True``.

    Moments come from the training data of each task, accuracy from its test data, earlier accuracies from the record.

    Args:
        run: The run: a path of a record or a folder, or a prefix of the run hash.
        seed: Seed to diagnose; None for all whose weights were saved. With several, the result is their mean, with
            95 % intervals (Student's t) of the points recovered and of the change of the last task.
        other: Second run that differs only in its norm: both are measured on all seeds whose weights both have, and
            compared.
        runs: Folder of records, in which a hash is searched.
        root: Folder of data sets; None for the default one.
        options: Device, threads and whether images may be missing; None for the defaults.

    Raises:
        UserError: If the run, its weights or its data can't be used.

    Example:
        >>> import logging, tempfile; logging.getLogger("contnorm").setLevel("ERROR")
        >>> from contnorm import bench
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     result = bench.run(stream, norm="bn", runs=runs, keep_weights=True)
        ...     diagnosis = diagnose_run(result.records[0].hash, runs=runs).diagnosis
        >>> len(diagnosis.tasks)
        2
    """
    environment = _environment(Path(runs), options, root)
    store = Store(Path(runs))
    pairs = _pairs(str(run), str(other), seed, store) if other else []  # errors before the measurement
    located = _seeds_to_measure(str(run), seed, store)
    _warn_of_digits(located[0][0].config, environment)
    measured = {path: diagnose_record(record, path, environment) for record, path in located}
    comparison = _pair_summary(pairs, measured, environment) if pairs else ""
    by_seed = {record.seed: measured[path] for record, path in located}
    return RunDiagnosis(*located[0], _summary(by_seed), comparison, by_seed)


def _seeds_to_measure(run: str, seed: int | None, store: Store) -> list[Located]:
    """Records of a run that have weights, or the one of a seed."""
    records = store.find_run(run).records
    wanted = records if seed is None else [_of_seed(records, run, seed)]
    located = [(record, _path(run, record, store)) for record in wanted]
    if any(record.counted.tasks != wanted[0].counted.tasks for record in wanted):
        raise UserError(f"{run}: its seeds reached different numbers of tasks. Name one with --seed.")
    # Without any weights the first seed is measured, which says how to save them.
    return [(record, path) for record, path in located if weights_path(path).is_file()] or located[:1]


def _summary(by_seed: Mapping[int, Diagnosis]) -> Diagnosis:
    if len(by_seed) == 1:
        return next(iter(by_seed.values()))
    return mean_diagnosis(by_seed, t_interval)


def diagnose_weights(
    model: str,
    weights: str | Path,
    stream: str,
    *,
    norm: str = "bn",
    seed: int = 0,
    root: str | Path | None = None,
    options: RunOptions | None = None,
) -> Diagnosis:
    """Measure the cross-task normalization effect of a network that was not trained by a run.

    Its accuracies at earlier tasks are unknown. `contnorm.diagnose` does the same for a module and any data.

    Args:
        model: Function that makes the network, as ``file.py:make``, or the name of a built-in one. The file thereby may
            be executed.
        weights: Safetensors file of its state dict.
        stream: Name of the stream whose tasks it is measured on.
        norm: Norm that is passed to ``make``.
        seed: Seed of the tasks.
        root: Folder of data sets; None for the default one.
        options: Device, threads and whether images may be missing; None for the defaults.
    """
    environment = _environment(Path("runs"), options, root)
    settings = {"stream": {"name": stream}, "model": {"name": model}, "norm": {"name": norm}}
    config = resolve(settings, environment.data_root)
    _warn_of_digits(config, environment)
    with _trainer(config, seed, _load(config, environment), environment) as trainer:
        load_weights(
            trainer.model, Path(weights), "Save it with safetensors.torch.save_file(model.state_dict(), path)."
        )
        return _on_its_stream(trainer, None)


def _environment(runs: Path, options: RunOptions | None, root: str | Path | None) -> RunEnvironment:
    options = replace(options or RunOptions(), lanes=1)
    return run_environment(runs, options, None if root is None else Path(root))


def _warn_of_digits(config: RunConfig, environment: RunEnvironment) -> None:
    """Warn if the data is the small stand-in for the data set that the stream needs."""
    if notice := digits_notice(config.stream.source, config.stream.name, environment.data_root):
        log.warning(notice)


def _load(config: RunConfig, environment: RunEnvironment) -> Source:
    return load_source(str(config.stream.source), environment.data_root, allow_missing=environment.allow_missing)


def diagnose_record(record: Record, path: Path, environment: RunEnvironment) -> Diagnosis:
    """Diagnose a run.

    Moments come from the training data of each task, accuracy from its test data, earlier accuracies from the record.

    Args:
        record: Record of the run.
        path: Path of the record; the weights are next to it.
        environment: Folder of data, and the device to measure on.
    """
    config = record.config
    if reason := own_code(config):
        raise UserError(f"{path}: {reason}. Name it with --model, --weights and --stream.")
    if reason := edited(config):
        raise UserError(f"{path}: {reason}")
    source = _load(config, environment)
    _check_data(record, source, path)
    with _trainer(config, record.seed, source, environment) as trainer:
        load_run_weights(trainer.model, path)
        return _on_its_stream(trainer, _learned(record))


@contextmanager
def _trainer(config: RunConfig, seed: int, source: Source, environment: RunEnvironment) -> Iterator[Trainer]:
    with numerics(config.train, environment.threads):
        trainer = Trainer(config, seed, source, environment.device, any_norm=True)
        try:
            yield trainer
        finally:
            trainer.feed.close()


def _on_its_stream(trainer: Trainer, learned: Sequence[float] | None) -> Diagnosis:
    if trainer.data.sequence.multi_label:
        raise UserError(
            f"diagnose: images of {trainer.config.stream.name} have several labels, and the effect is measured in "
            f"accuracy. Use a single-label run; `contnorm show` has the scores of this one."
        )
    # A run with max_steps has only reached the tasks that it has accuracies of.
    tasks = range(trainer.data.sequence.tasks if learned is None else len(learned))
    try:
        return diagnose(
            trainer.model,
            [TaskBatches(trainer, task) for task in tasks],
            test_by_task=[TaskBatches(trainer, task, test=True) for task in tasks],
            learned=learned,
            predict=lambda model, x, task: classes_of(trainer, x, task),
        )
    except ValueError as error:  # moments that can't be found or are not finite
        raise UserError(str(error)) from error


def _pairs(run: str, other: str, seed: int | None, store: Store) -> list[tuple[Located, Located]]:
    """Records of two runs that differ only in their norm, paired by the seeds whose weights both have."""
    first, second = (_with_weights(name, seed, store) for name in (run, other))
    configs = [next(iter(records.values()))[0].config for records in (first, second)]
    differing = differences(*configs)
    if not differing:
        raise UserError(f"--beside {other}: is the same run. Name a run with another norm.")
    others = [
        f"{key}={format_value(b)} (not {format_value(a)})"
        for key, (a, b) in differing.items()
        if not key.startswith("norm.")
    ]
    if others:
        raise UserError(f"--beside {other}: must differ only in its norm, but differs in {', '.join(others)}.")
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        a, b = (", ".join(map(str, by_seed)) for by_seed in (first, second))
        raise UserError(f"--beside {other}: the runs share no seed with weights. Their seeds are {a} and {b}.")
    return [(first[shared], second[shared]) for shared in seeds]


def _with_weights(run: str, seed: int | None, store: Store) -> dict[int, Located]:
    """Records of a run that have weights, by seed; only of one seed if it is not None."""
    records = store.find_run(run).records
    wanted = records if seed is None else [_of_seed(records, run, seed)]
    located = [(record, _path(run, record, store)) for record in wanted]
    by_seed = {record.seed: (record, path) for record, path in located if weights_path(path).is_file()}
    if not by_seed:
        raise UserError(f"{run}: its weights were not saved. Run it with --keep-weights and another --runs folder.")
    return by_seed


def _pair_summary(
    pairs: Sequence[tuple[Located, Located]], measured: Mapping[Path, Diagnosis], environment: RunEnvironment
) -> str:
    """Comparison of two runs; ``measured`` has the diagnoses that are known already, by path of the record."""

    def diagnose_one(record: Record, path: Path) -> Diagnosis:
        return measured[path] if path in measured else diagnose_record(record, path, environment)

    first, second = (run_names(record.config)[-1] for record, _ in pairs[0])
    results = [(diagnose_one(*a), diagnose_one(*b)) for a, b in pairs]
    return pair_sentence(results, first, second, interval=lambda differences: summarize_differences(differences).t)


def _of_seed(records: Sequence[Record], run: str, seed: int | None) -> Record:
    for record in records:
        if seed is None or record.seed == seed:
            return record
    seeds = ", ".join(str(record.seed) for record in records)
    raise UserError(f"--seed {seed}: run {run!r} has the seeds {seeds}.")


def _path(run: str, record: Record, store: Store) -> Path:
    """Path of a record of a run that was typed as a file, a run's folder, a folder of runs or a hash."""
    if record.path is not None and not record.path.is_file():
        raise UserError(f"{record.path}: archives have no weights. Use the folder that the run was recorded in.")
    typed = Path(run)
    if typed.is_file():
        return typed
    in_folder = typed / f"{record.seed}.json"
    if in_folder.is_file():
        return in_folder
    return (Store(typed) if typed.is_dir() else store).path(record.config, record.seed)


def _learned(record: Record) -> list[float]:
    """Accuracy on each task just after it was learned, with running moments."""
    matrix = record.matrix_of("matrix_running") or record.matrix
    return [matrix.at(task, task) for task in range(matrix.tasks)]


def _check_data(record: Record, source: Source, path: Path) -> None:
    recorded = record.raw.get("source", {}).get("fingerprint")
    if reason := not_comparable(recorded, source.fingerprint):
        log.warning(f"{path}: may be of other data than is used here: {reason}.")
    if compare_fingerprints(recorded, source.fingerprint) is Match.DIFFERENT:
        raise UserError(
            f"{path}: was run on other {source.name} data (fingerprint {recorded}, here {source.fingerprint}). Set "
            f"--data-root to the folder of that data."
        )
