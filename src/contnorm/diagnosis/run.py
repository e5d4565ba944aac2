"""Diagnose a recorded run on its stream. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from contnorm.bench.components import own_code
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.data.dataset import compare_fingerprints
from contnorm.bench.data.registry import data_root, load_source
from contnorm.bench.engine.checkpoint import load_weights, weights_path
from contnorm.bench.engine.evaluate import classes_of, task_batches
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.run import RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Record, Store
from contnorm.bench.stats import summarize_differences, t_interval
from contnorm.diagnosis.measure import Diagnosis, diagnose, mean_diagnosis, pair_sentence
from contnorm.errors import UserError


@dataclass(frozen=True)
class RunDiagnosis:
    """Diagnosis of a recorded run.

    Attributes:
        record: Record of the run; of the first seed if several were measured.
        diagnosis: The measured effect; with several seeds the mean over them, with intervals.
        by_seed: The measured effect of each seed.
        comparison: Comparison with a second run, in words; empty if there is none.
    """

    record: Record
    diagnosis: Diagnosis
    by_seed: Mapping[int, Diagnosis]
    comparison: str = ""


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
    place = data_root(None if root is None else Path(root))
    environment = replace(options or RunOptions(), lanes=1, runs=Path(runs), data_root=place)
    first = _with_weights(run, seed, Store(Path(runs)))
    second = {} if other is None else _with_weights(other, seed, Store(Path(runs)))
    shared = sorted(first.keys() & second.keys())
    record = next(iter(first.values()))[0]
    if second:
        config = next(iter(second.values()))[0].config
        changed = differences(record.config, config)
        if not shared or not changed or not all(key.startswith("norm.") for key in changed):
            raise UserError(f"{run} and {other} must share a seed with weights and differ in their norm alone.")
    by_seed = {number: _diagnose_record(*located, environment) for number, located in first.items()}
    mean = by_seed[record.seed] if len(by_seed) == 1 else mean_diagnosis(by_seed, t_interval)
    if not second:
        return RunDiagnosis(record, mean, by_seed)
    pairs = [(by_seed[number], _diagnose_record(*second[number], environment)) for number in shared]
    names = run_names(record.config)[-1], run_names(config)[-1]
    comparison = pair_sentence(pairs, *names, interval=lambda values: summarize_differences(values).t)
    return RunDiagnosis(record, mean, by_seed, comparison)


def _with_weights(run: str | Path, seed: int | None, store: Store) -> dict[int, tuple[Record, Path]]:
    """Return the records of a run that have weights, with their paths, by seed; only of one seed if it is not None."""
    typed, found = Path(run), {}
    for record in store.find_run(str(run)).records:
        in_store = (Store(typed) if typed.is_dir() else store).path(record.config, record.seed)
        path = next((p for p in (typed, typed / f"{record.seed}.json") if p.is_file()), in_store)
        if weights_path(path).is_file() and seed in (None, record.seed):
            found[record.seed] = record, path
    if not found:
        raise UserError(f"{run}: no weights of this run were saved. Run it with --keep-weights and another --runs.")
    return found


def _diagnose_record(record: Record, path: Path, environment: RunOptions) -> Diagnosis:
    config = record.config
    if reason := own_code(config):
        raise UserError(
            f"{path}: {reason}. In Python, use contnorm.diagnose with a network of "
            f"bench.run(..., keep_weights=True).models()."
        )
    source = load_source(str(config.stream.source), environment.data_root, allow_missing=environment.allow_missing)
    recorded = record.raw.get("source", {}).get("fingerprint")
    if compare_fingerprints(recorded, source.fingerprint) == "different":
        raise UserError(f"{path}: was run on other {source.name} data. Set --data-root to the folder of that data.")
    matrix = record.matrix_of("matrix_running") or record.matrix
    learned = [matrix.at(task, task) for task in range(matrix.tasks)]
    with numerics(config.train, environment.threads):
        trainer = Trainer(config, record.seed, source, environment.torch_device, any_norm=True)
        try:
            load_weights(trainer.model, path)
            # A run with max_steps has only reached the tasks that it has accuracies of.
            return diagnose(
                trainer.model,
                [task_batches(trainer, task) for task in range(matrix.tasks)],
                test_by_task=[task_batches(trainer, task, test=True) for task in range(matrix.tasks)],
                learned=learned,
                predict=lambda model, x, task: classes_of(trainer, x, task),
            )
        except ValueError as error:  # moments that are not finite
            raise UserError(str(error)) from error
        finally:
            trainer.feed.close()
