"""The cross-task normalization effect at a terminal: of a finished run's network, or of one from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contnorm.bench.config.diff import differences, word
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import DIGITS, Source, digits_notice, load_source
from contnorm.bench.engine.evaluate import TaskBatches, classes_of
from contnorm.bench.engine.job import Workplace
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.run_dir import edited, untrusted_in
from contnorm.bench.engine.trainer import Lane
from contnorm.bench.engine.weights import load_kept_weights, load_weights, weights_beside
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Record, Store
from contnorm.bench.trust import only_trusted
from contnorm.bench.user_code import code_files
from contnorm.cli.show import described
from contnorm.cli.tables import safe_text, say, say_on_stderr
from contnorm.diagnosis.measure import diagnose
from contnorm.diagnosis.pair import pair_sentence
from contnorm.diagnosis.result import Diagnosis
from contnorm.errors import UserError, usable

__all__ = ["Brought", "diagnose_brought", "diagnose_record", "show_diagnosis"]

ENDINGS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Brought:
    """A network from elsewhere, as typed.

    Attributes:
        model: What makes it: ``file.py:make``, or a name of ours.
        weights: A safetensors file of its state dict.
        stream: The tasks to look at it with.
        norm: The norm that ``make`` is given.
    """

    model: str
    weights: Path
    stream: str
    norm: str = "bn"


def show_diagnosis(
    given: str | Brought,
    seed: int | None,
    place: Workplace,
    out: Path | None,
    console: Console,
    beside: str | None = None,
    trusted: Iterable[Path] = (),
) -> None:
    """Print table and sentence, one more on the run beside it where one is given, and draw a figure if asked to.

    Args:
        given: A run, or a network from elsewhere, whose code is thereby named.
        seed: Which seed; None for the first.
        place: Where runs and data are, and on what device to measure.
        out: The file of the figure; None for no figure.
        console: Where to print.
        beside: A run to compare with.
        trusted: The files of code that may be executed where a record names them.
    """
    named = code_files({"model": {"name": given.model}}) if isinstance(given, Brought) else []
    with only_trusted([*trusted, *named]):
        _show_diagnosis(given, seed, place, out, console, beside)


def _show_diagnosis(
    given: str | Brought, seed: int | None, place: Workplace, out: Path | None, console: Console, beside: str | None
) -> None:
    if out is not None and out.suffix not in ENDINGS:  # told before the work, not after it
        raise UserError(f"-o {out}: a figure ends in {', '.join(ENDINGS)}.")
    pairs = _pairs(given, beside, seed, place) if beside else []  # told before the work, too
    title, found = _diagnosed(given, seed, place)
    console.print(safe_text(title), "", soft_wrap=True, sep="\n")
    console.print(f"{found.table()}\n", soft_wrap=True, markup=False, highlight=False)
    say(found.sentence, console)
    if pairs:
        console.print()
        say(_said_of(pairs, place), console)
    if out is not None:
        with usable(out, "the figure can't be written", "Say with -o where else."):
            out.parent.mkdir(parents=True, exist_ok=True)
            found.draw(out)
        console.print(safe_text(f"drawn in {out}"), soft_wrap=True)


def _diagnosed(given: str | Brought, seed: int | None, place: Workplace) -> tuple[str, Diagnosis]:
    if isinstance(given, Brought):
        return f"{given.weights} on {given.stream}", diagnose_brought(given, seed or 0, place)
    store = Store(place.runs)
    record = _of_seed(store.find(given), given, seed)
    digits = f" on {described(record.config)[0]}" if record.config.stream.source == DIGITS else ""
    title = f"{record.config.hash} seed {record.seed}{digits}"
    return title, diagnose_record(record, _path(given, record, store), place)


def diagnose_brought(given: Brought, seed: int, place: Workplace) -> Diagnosis:
    """The same for a network that was trained elsewhere; nothing is known of its past accuracies."""
    asked = {"stream": {"name": given.stream}, "model": {"name": given.model}, "norm": {"name": given.norm}}
    config = resolve(asked, place.data_root)
    source = _load(config, place)
    with _lane(config, seed, source, place) as lane:
        load_weights(lane, given.weights, "Save it with safetensors.torch.save_file(model.state_dict(), path).")
        return _on_its_stream(lane, None)


def _load(config: RunConfig, place: Workplace) -> Source:
    """The data of a run, with a notice where they are not those that its stream is named after."""
    if notice := digits_notice(config.stream.source, config.stream.name, place.data_root):
        say_on_stderr(notice)
    return load_source(str(config.stream.source), place.data_root, allow_missing=place.allow_missing)


def diagnose_record(record: Record, path: Path, place: Workplace) -> Diagnosis:
    """Moments from the training data of each task, accuracy on its test data, and past accuracies from the record.

    Args:
        record: The run.
        path: Where its record is; the weights lie beside it.
        place: Where its data is, and on what device to measure.
    """
    config = record.config
    why = untrusted_in(config) or edited(config)
    if why:
        raise UserError(f"{path}: {why}")
    source = _load(config, place)
    _check_data(record, source, path)
    with _lane(config, record.seed, source, place) as lane:
        load_kept_weights(lane, path)
        return _on_its_stream(lane, _learned(record))


@contextmanager
def _lane(config: RunConfig, seed: int, source: Source, place: Workplace) -> Iterator[Lane]:
    with numerics(config.train, place.threads):
        lane = Lane(config, seed, source, place.device, any_norm=True)
        try:
            yield lane
        finally:
            lane.feed.close()


def _on_its_stream(lane: Lane, learned: Sequence[float] | None) -> Diagnosis:
    if lane.data.stream.several_labels:
        raise UserError(
            f"diagnose: a picture of {lane.config.stream.name} has several labels, and the effect is measured in "
            f"accuracy. Use a run whose pictures have one each; `contnorm show` has the scores of this one."
        )
    tasks = range(lane.data.stream.tasks if learned is None else len(learned))  # of a capped run those it reached
    try:
        return diagnose(
            lane.model,
            [TaskBatches(lane, task) for task in tasks],
            test_by_task=[TaskBatches(lane, task, test=True) for task in tasks],
            learned=learned,
            predict=lambda model, x, task: classes_of(lane, x, task),
        )
    except ValueError as error:  # a network whose moments can't be told, or are not finite
        raise UserError(str(error)) from error


Located = tuple[Record, Path]  # a record, and where it is


def _pairs(given: str | Brought, beside: str, seed: int | None, place: Workplace) -> list[tuple[Located, Located]]:
    """Two runs that differ in their norm alone, by the seeds whose weights both have kept."""
    if isinstance(given, Brought):
        raise UserError(
            "--beside: takes a run beside a run; of a network of your own, use contnorm.diagnose in Python."
        )
    first, second = (_kept(run, seed, place) for run in (given, beside))
    configs = [next(iter(records.values()))[0].config for records in (first, second)]
    apart = differences(*configs)
    if not apart:
        raise UserError(f"--beside {beside}: is the same run. Give one with another norm.")
    others = [f"{key}={word(b)} (not {word(a)})" for key, (a, b) in apart.items() if not key.startswith("norm.")]
    if others:
        raise UserError(f"--beside {beside}: a pair differs in its norm alone, and here {', '.join(others)} too.")
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        there = [", ".join(map(str, found)) for found in (first, second)]
        raise UserError(
            f"--beside {beside}: the two share no seed whose weights were kept: {there[0]}, and {there[1]}."
        )
    return [(first[shared], second[shared]) for shared in seeds]


def _kept(given: str, seed: int | None, place: Workplace) -> dict[int, Located]:
    """The records of a run whose weights were kept, by seed; of one seed where it is typed."""
    store = Store(place.runs)
    records = store.find(given)
    wanted = records if seed is None else [_of_seed(records, given, seed)]
    located = [(record, _path(given, record, store)) for record in wanted]
    found = {record.seed: (record, path) for record, path in located if weights_beside(path).is_file()}
    if not found:
        raise UserError(f"{given}: its weights were not kept. Run it with --keep-weights into another folder of runs.")
    return found


def _said_of(pairs: Sequence[tuple[Located, Located]], place: Workplace) -> str:
    found = [tuple(diagnose_record(record, path, place) for record, path in pair) for pair in pairs]
    here, there = (described(record.config)[-1] for record, _ in pairs[0])
    return pair_sentence([(first, second) for first, second in found], here, there)


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
    matrix = record.matrix_of("matrix_running") or record.matrix
    return [matrix.at(task, task) for task in range(matrix.tasks)]


def _check_data(record: Record, source: Source, path: Path) -> None:
    was = record.raw.get("source", {}).get("fingerprint")
    if why := not_comparable(was, source.fingerprint):
        logging.getLogger("contnorm").warning(f"{path}: may be of other data than is used here: {why}.")
    if compare_fingerprints(was, source.fingerprint) is Match.DIFFERENT:
        raise UserError(
            f"{path}: was run on other {source.name} data than is found here (fingerprint {was}, here "
            f"{source.fingerprint}). Say with --data-root where that is."
        )
