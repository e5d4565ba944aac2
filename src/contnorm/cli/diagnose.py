"""The `diagnose` command: measures the cross-task normalization effect of a finished run or of a user's network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contnorm.bench.config.defaults import differences
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_value
from contnorm.bench.data.registry import DIGITS, Source, digits_notice, load_source
from contnorm.bench.engine.evaluate import TaskBatches, classes_of
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.run_dir import edited, untrusted_in
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.engine.weights import load_run_weights, load_weights, weights_path
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Record, Store
from contnorm.bench.stats.paired import summed_up
from contnorm.bench.trust import only_trusted
from contnorm.bench.user_code import code_files
from contnorm.cli.show import described
from contnorm.cli.tables import safe_text, say, say_on_stderr
from contnorm.diagnosis.measure import diagnose
from contnorm.diagnosis.result import Diagnosis, pair_sentence
from contnorm.errors import UserError, usable

__all__ = ["Brought", "diagnose_brought", "diagnose_record", "show_diagnosis"]

ENDINGS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Brought:
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
    given: str | Brought,
    seed: int | None,
    place: RunEnvironment,
    out: Path | None,
    console: Console,
    beside: str | None = None,
    trusted: Iterable[Path] = (),
) -> None:
    """Print the table and the summary of a diagnosis, compare it with a second run, and draw a figure.

    Args:
        given: A run, or a user's network, whose code thereby may be executed.
        seed: Seed to diagnose; None for the first one.
        place: Folders of runs and data, and the device to measure on.
        out: File of the figure; None for no figure.
        console: Terminal to print to.
        beside: Second run to compare with; None for no comparison.
        trusted: Python files that may be executed if a record names them.
    """
    named = code_files({"model": {"name": given.model}}) if isinstance(given, Brought) else []
    with only_trusted([*trusted, *named]):
        _show_diagnosis(given, seed, place, out, console, beside)


def _show_diagnosis(
    target: str | Brought,
    seed: int | None,
    place: RunEnvironment,
    out: Path | None,
    console: Console,
    other: str | None,
) -> None:
    if out is not None and out.suffix not in ENDINGS:  # checked before the measurement, which takes long
        raise UserError(f"-o {out}: a figure ends in {', '.join(ENDINGS)}.")
    pairs = _pairs(target, other, seed, place) if other else []  # also raises errors before the measurement
    title, diagnosis = _diagnosed(target, seed, place)
    console.print(safe_text(title), "", soft_wrap=True, sep="\n")
    console.print(f"{diagnosis.table()}\n", soft_wrap=True, markup=False, highlight=False)
    say(diagnosis.sentence, console)
    if pairs:
        console.print()
        say(_pair_summary(pairs, place), console)
    if out is not None:
        with usable(out, "the figure can't be written", "Say with -o where else."):
            out.parent.mkdir(parents=True, exist_ok=True)
            diagnosis.draw(out)
        console.print(safe_text(f"drawn in {out}"), soft_wrap=True)


def _diagnosed(target: str | Brought, seed: int | None, place: RunEnvironment) -> tuple[str, Diagnosis]:
    if isinstance(target, Brought):
        return f"{target.weights} on {target.stream}", diagnose_brought(target, seed or 0, place)
    store = Store(place.runs)
    record = _of_seed(store.find(target), target, seed)
    digits = f" on {described(record.config)[0]}" if record.config.stream.source == DIGITS else ""
    title = f"{record.config.hash} seed {record.seed}{digits}"
    return title, diagnose_record(record, _path(target, record, store), place)


def diagnose_brought(given: Brought, seed: int, place: RunEnvironment) -> Diagnosis:
    """Diagnose a network that was not trained by a run; its accuracies at earlier tasks are unknown."""
    settings = {"stream": {"name": given.stream}, "model": {"name": given.model}, "norm": {"name": given.norm}}
    config = resolve(settings, place.data_root)
    source = _load(config, place)
    with _lane(config, seed, source, place) as lane:
        load_weights(lane, given.weights, "Save it with safetensors.torch.save_file(model.state_dict(), path).")
        return _on_its_stream(lane, None)


def _load(config: RunConfig, place: RunEnvironment) -> Source:
    """Load the data of a run; prints a notice if it is the small stand-in for the data set that the stream needs."""
    if notice := digits_notice(config.stream.source, config.stream.name, place.data_root):
        say_on_stderr(notice)
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
    why = untrusted_in(config) or edited(config)
    if why:
        raise UserError(f"{path}: {why}")
    source = _load(config, place)
    _check_data(record, source, path)
    with _lane(config, record.seed, source, place) as lane:
        load_run_weights(lane, path)
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
            f"diagnose: a picture of {lane.config.stream.name} has several labels, and the effect is measured in "
            f"accuracy. Use a run whose pictures have one each; `contnorm show` has the scores of this one."
        )
    tasks = range(
        lane.data.sequence.tasks if learned is None else len(learned)
    )  # of a run with max_steps, the tasks that it reached
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


Located = tuple[Record, Path]  # a record and its path


def _pairs(target: str | Brought, other: str, seed: int | None, place: RunEnvironment) -> list[tuple[Located, Located]]:
    """Records of two runs that differ only in their norm, paired by the seeds whose weights both have."""
    if isinstance(target, Brought):
        raise UserError(
            "--beside: takes a run beside a run; of a network of your own, use contnorm.diagnose in Python."
        )
    first, second = (_with_weights(run, seed, place) for run in (target, other))
    configs = [next(iter(records.values()))[0].config for records in (first, second)]
    apart = differences(*configs)
    if not apart:
        raise UserError(f"--beside {other}: is the same run. Give one with another norm.")
    others = [
        f"{key}={format_value(b)} (not {format_value(a)})"
        for key, (a, b) in apart.items()
        if not key.startswith("norm.")
    ]
    if others:
        raise UserError(f"--beside {other}: a pair differs in its norm alone, and here {', '.join(others)} too.")
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        there = [", ".join(map(str, by_seed)) for by_seed in (first, second)]
        raise UserError(f"--beside {other}: the two share no seed whose weights were kept: {there[0]}, and {there[1]}.")
    return [(first[shared], second[shared]) for shared in seeds]


def _with_weights(run: str, seed: int | None, place: RunEnvironment) -> dict[int, Located]:
    """Records of a run that have weights, by seed; only of one seed if it is not None."""
    store = Store(place.runs)
    records = store.find(run)
    wanted = records if seed is None else [_of_seed(records, run, seed)]
    located = [(record, _path(run, record, store)) for record in wanted]
    by_seed = {record.seed: (record, path) for record, path in located if weights_path(path).is_file()}
    if not by_seed:
        raise UserError(f"{run}: its weights were not kept. Run it with --keep-weights into another folder of runs.")
    return by_seed


def _pair_summary(pairs: Sequence[tuple[Located, Located]], place: RunEnvironment) -> str:
    diagnoses = [tuple(diagnose_record(record, path, place) for record, path in pair) for pair in pairs]
    here, there = (described(record.config)[-1] for record, _ in pairs[0])
    pairs_of_results = [(first, second) for first, second in diagnoses]
    return pair_sentence(pairs_of_results, here, there, interval=lambda differences: summed_up(differences).t)


def _of_seed(records: list[Record], run: str, seed: int | None) -> Record:
    for record in records:
        if seed is None or record.seed == seed:
            return record
    there = ", ".join(str(record.seed) for record in records)
    raise UserError(f"--seed {seed}: run {run!r} has the seeds {there}.")


def _path(run: str, record: Record, store: Store) -> Path:
    """Path of a record of a run that was typed as a file, a run's folder, a folder of runs or a hash."""
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
    if why := not_comparable(recorded, source.fingerprint):
        logging.getLogger("contnorm").warning(f"{path}: may be of other data than is used here: {why}.")
    if compare_fingerprints(recorded, source.fingerprint) is Match.DIFFERENT:
        raise UserError(
            f"{path}: was run on other {source.name} data than is found here (fingerprint {recorded}, here "
            f"{source.fingerprint}). Say with --data-root where that is."
        )
