"""The `diagnose` command: measures the cross-task normalization effect of a finished run or of a user's network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contnorm.bench.config.defaults import differences
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_value
from contnorm.bench.data.registry import DIGITS, Source, digits_notice, load_source
from contnorm.bench.engine.checkpoint import load_run_weights, load_weights, weights_path
from contnorm.bench.engine.evaluate import TaskBatches, classes_of
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.run_dir import edited, untrusted_in
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Record, Store
from contnorm.bench.stats import summarize_differences
from contnorm.bench.user_code import code_files, only_trusted
from contnorm.cli.show import run_names
from contnorm.cli.tables import print_error, print_text, safe_text
from contnorm.diagnosis.measure import diagnose
from contnorm.diagnosis.result import Diagnosis, pair_sentence
from contnorm.errors import UserError, usable

__all__ = ["ExternalModel", "diagnose_external", "diagnose_record", "show_diagnosis"]

ENDINGS = (".svg", ".png", ".pdf")


Located = tuple[Record, Path]  # a record and its path


@dataclass(frozen=True)
class ExternalModel:
    """A network that was not trained by a run, as typed.

    Attributes:
        model: Function that creates it, as ``file.py:make``, or the name of a built-in model.
        weights: Safetensors file of its state dict.
        stream: Stream whose tasks it is measured on.
        norm: Norm that is passed to ``make``.
    """

    model: str
    weights: Path
    stream: str
    norm: str = "bn"


def show_diagnosis(
    target: str | ExternalModel,
    seed: int | None,
    place: RunEnvironment,
    out: Path | None,
    console: Console,
    other: str | None = None,
    trusted: Iterable[Path] = (),
) -> None:
    """Print the table and the summary of a diagnosis, compare it with a second run, and draw a figure.

    Args:
        target: A run, or a user's network, whose code thereby may be executed.
        seed: Seed to diagnose; None for the first one.
        place: Folders of runs and data, and the device to measure on.
        out: File of the figure; None for no figure.
        console: Terminal to print to.
        other: Second run to compare with; None for no comparison.
        trusted: Python files that may be executed if a record names them.
    """
    named = code_files({"model": {"name": target.model}}) if isinstance(target, ExternalModel) else []
    with only_trusted([*trusted, *named]):
        _show_diagnosis(target, seed, place, out, console, other)


def _show_diagnosis(
    target: str | ExternalModel,
    seed: int | None,
    place: RunEnvironment,
    out: Path | None,
    console: Console,
    other: str | None,
) -> None:
    if out is not None and out.suffix not in ENDINGS:  # checked before the measurement, which takes long
        raise UserError(f"-o {out}: the name of a figure must end in {', '.join(ENDINGS)}.")
    pairs = _pairs(target, other, seed, place) if other else []  # also raises errors before the measurement
    title, diagnosis, path = _diagnosed(target, seed, place)
    console.print(safe_text(title), "", soft_wrap=True, sep="\n")
    console.print(f"{diagnosis.table()}\n", soft_wrap=True, markup=False, highlight=False)
    print_text(diagnosis.sentence, console)
    if pairs and path is not None:
        console.print()
        print_text(_pair_summary(pairs, {path: diagnosis}, place), console)
    if out is not None:
        with usable(out, "the figure can't be written", "Use -o for another file."):
            out.parent.mkdir(parents=True, exist_ok=True)
            diagnosis.draw(out)
        console.print(safe_text(f"Figure written to {out}"), soft_wrap=True)


def _diagnosed(
    target: str | ExternalModel, seed: int | None, place: RunEnvironment
) -> tuple[str, Diagnosis, Path | None]:
    """Title, diagnosis, and path of the record if the target is a run."""
    if isinstance(target, ExternalModel):
        _print_digits_notice(_external_config(target, place), place)
        return f"{target.weights} on {target.stream}", diagnose_external(target, seed or 0, place), None
    store = place.store
    record = _of_seed(store.find(target), target, seed)
    path, config = _path(target, record, store), record.config
    _print_digits_notice(config, place)
    digits = f" on {run_names(config)[0]}" if config.stream.source == DIGITS else ""
    return f"{config.hash} seed {record.seed}{digits}", diagnose_record(record, path, place), path


def _print_digits_notice(config: RunConfig, place: RunEnvironment) -> None:
    """Print a notice if the data is the small stand-in for the data set that the stream needs."""
    if notice := digits_notice(config.stream.source, config.stream.name, place.data_root):
        print_error(notice)


def diagnose_external(model: ExternalModel, seed: int, place: RunEnvironment) -> Diagnosis:
    """Diagnose a network that was not trained by a run; its accuracies at earlier tasks are unknown."""
    config = _external_config(model, place)
    with _lane(config, seed, _load(config, place), place) as lane:
        load_weights(lane.model, model.weights, "Save it with safetensors.torch.save_file(model.state_dict(), path).")
        return _on_its_stream(lane, None)


def _external_config(model: ExternalModel, place: RunEnvironment) -> RunConfig:
    settings = {"stream": {"name": model.stream}, "model": {"name": model.model}, "norm": {"name": model.norm}}
    return resolve(settings, place.data_root)


def _load(config: RunConfig, place: RunEnvironment) -> Source:
    return load_source(str(config.stream.source), place.data_root, allow_missing=place.allow_missing)


def diagnose_record(record: Record, path: Path, place: RunEnvironment) -> Diagnosis:
    """Diagnose a run.

    Moments come from the training data of each task, accuracy from its test data, earlier accuracies from the record.

    Args:
        record: Record of the run.
        path: Path of the record; the weights are next to it.
        place: Folder of data, and the device to measure on.
    """
    config = record.config
    if reason := untrusted_in(config) or edited(config):
        raise UserError(f"{path}: {reason}")
    source = _load(config, place)
    _check_data(record, source, path)
    with _lane(config, record.seed, source, place) as lane:
        load_run_weights(lane.model, path)
        return _on_its_stream(lane, _learned(record))


@contextmanager
def _lane(config: RunConfig, seed: int, source: Source, place: RunEnvironment) -> Iterator[Trainer]:
    with numerics(config.train, place.threads):
        lane = Trainer(config, seed, source, place.device, any_norm=True)
        try:
            yield lane
        finally:
            lane.feed.close()


def _on_its_stream(lane: Trainer, learned: Sequence[float] | None) -> Diagnosis:
    if lane.data.sequence.multi_label:
        raise UserError(
            f"diagnose: images of {lane.config.stream.name} have several labels, and the effect is measured in "
            f"accuracy. Use a single-label run; `contnorm show` has the scores of this one."
        )
    # A run with max_steps has only reached the tasks that it has accuracies of.
    tasks = range(lane.data.sequence.tasks if learned is None else len(learned))
    try:
        return diagnose(
            lane.model,
            [TaskBatches(lane, task) for task in tasks],
            test_by_task=[TaskBatches(lane, task, test=True) for task in tasks],
            learned=learned,
            predict=lambda model, x, task: classes_of(lane, x, task),
        )
    except ValueError as error:  # moments that can't be found or are not finite
        raise UserError(str(error)) from error


def _pairs(
    target: str | ExternalModel, other: str, seed: int | None, place: RunEnvironment
) -> list[tuple[Located, Located]]:
    """Records of two runs that differ only in their norm, paired by the seeds whose weights both have."""
    if isinstance(target, ExternalModel):
        raise UserError("--beside compares two runs. For a network of your own, use contnorm.diagnose in Python.")
    first, second = (_with_weights(run, seed, place) for run in (target, other))
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


def _with_weights(run: str, seed: int | None, place: RunEnvironment) -> dict[int, Located]:
    """Records of a run that have weights, by seed; only of one seed if it is not None."""
    store = place.store
    records = store.find(run)
    wanted = records if seed is None else [_of_seed(records, run, seed)]
    located = [(record, _path(run, record, store)) for record in wanted]
    by_seed = {record.seed: (record, path) for record, path in located if weights_path(path).is_file()}
    if not by_seed:
        raise UserError(f"{run}: its weights were not saved. Run it with --keep-weights and another --runs folder.")
    return by_seed


def _pair_summary(
    pairs: Sequence[tuple[Located, Located]], measured: Mapping[Path, Diagnosis], place: RunEnvironment
) -> str:
    """Comparison of two runs; ``measured`` has the diagnoses that are known already, by path of the record."""

    def diagnose_one(record: Record, path: Path) -> Diagnosis:
        return measured[path] if path in measured else diagnose_record(record, path, place)

    first, second = (run_names(record.config)[-1] for record, _ in pairs[0])
    results = [(diagnose_one(*a), diagnose_one(*b)) for a, b in pairs]
    return pair_sentence(results, first, second, interval=lambda differences: summarize_differences(differences).t)


def _of_seed(records: list[Record], run: str, seed: int | None) -> Record:
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
        logging.getLogger("contnorm").warning(f"{path}: may be of other data than is used here: {reason}.")
    if compare_fingerprints(recorded, source.fingerprint) is Match.DIFFERENT:
        raise UserError(
            f"{path}: was run on other {source.name} data (fingerprint {recorded}, here {source.fingerprint}). Set "
            f"--data-root to the folder of that data."
        )
