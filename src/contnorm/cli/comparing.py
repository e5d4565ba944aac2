"""Two settings side by side: in what they differ, and by how much, paired over the seeds both have. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from contnorm.cli.settings import differences, word
from contnorm.cli.showing import GROUPS_SHOWN, SHOWN, SHOWN_OF_LABELS, described
from contnorm.comparison.intervals import bootstrap_interval, effect_size, t_interval
from contnorm.comparison.words import spread
from contnorm.errors import UserError
from contnorm.metrics.matrix import score
from contnorm.results import Record

__all__ = ["show_comparison"]

# Settings that decide which samples are learned and tested; the rest leaves them as they are.
SAMPLES = {
    "stream.name",
    "stream.source",
    "stream.tasks",
    "stream.train_per_task",
    "stream.test_per_task",
    "stream.class_order",
    "stream.part",
    "train.partial",
    "train.passes",
}


def show_comparison(a: list[Record], b: list[Record], console: Console) -> None:
    """What differs in the settings, then the scores, with the 95 % interval of the mean difference."""
    first, second = ({r.seed: r for r in records} for records in (a, b))
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise UserError(f"the two runs share no seed: {sorted(first)} and {sorted(second)}.")
    pairs = [(first[seed], second[seed]) for seed in seeds]
    if pairs[0][0].several_labels != pairs[0][1].several_labels:
        raise UserError("the images of one run have several labels, those of the other one: they share no score.")
    apart = _other_samples(*pairs[0])
    _show_settings(*pairs[0], console)
    if apart:
        console.print(Text(f"warning: A and B did not see the same samples ({apart}), so seeds pair nothing."))
    console.print("", _table(pairs))
    console.print(Text(_footer(len(seeds), paired=not apart)))


def _footer(seeds: int, paired: bool) -> str:
    """How the differences were made.

    Example:
        >>> _footer(1, paired=True), _footer(1, paired=False)
        ('1 seed, paired; B less A.', '1 seed, not paired; B less A.')
    """
    how = "paired" if paired else "not paired"
    if seeds == 1:
        return f"1 seed, {how}; B less A."
    method = (
        "The interval is Student's t, two-sided, and beside it one by drawing the seeds' differences again; the effect "
        "is the mean of the differences over their deviation."
    )
    return f"{seeds} seeds, {how}; B less A. {method}"


def _show_settings(a: Record, b: Record, console: Console) -> None:
    for letter, record in (("A", a), ("B", b)):
        console.print(Text(f"{letter}  {record.config.hash}  {' '.join(described(record.config))}"))
    apart = differences(a.config, b.config)
    console.print(Text("they differ in" if apart else "they differ in no setting"))
    for key, (old, new) in apart.items():
        console.print(Text(f"  {key}: {word(old)} -> {word(new)}"))


def _other_samples(a: Record, b: Record) -> str:
    """Why the samples of two runs are not the same; empty where they are."""
    apart = differences(a.config, b.config).keys() & SAMPLES
    if apart:
        return ", ".join(sorted(apart))
    files = {record.raw.get("source", {}).get("fingerprint") for record in (a, b)} - {None}
    return f"{a.config.stream.source} was read from other files" if len(files) > 1 else ""


def _table(pairs: list[tuple[Record, Record]]) -> Table:
    heads = ("score", "A", "B", "B - A", "95 % interval", "bootstrap", "effect")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for title, value in _scores(*pairs[0]).items():
        ours, theirs = ([value(record) for record in side] for side in zip(*pairs, strict=True))
        apart = [y - x for x, y in zip(ours, theirs, strict=True)]
        found = bootstrap_interval(apart)
        drawn = "-" if found is None else str(found)
        table.add_row(title, spread(ours), spread(theirs), spread(apart), interval(apart), drawn, effect(apart))
    return table


def _scores(a: Record, b: Record) -> dict[str, Callable[[Record], float]]:
    """What is compared, by title: like with like where networks were evaluated with running and with exact moments.

    Where images have several labels, the scores of all labels and of each group of them.
    """
    if not a.several_labels:
        shared = a.evaluated.keys() & b.evaluated.keys()
        if not shared:  # one with running, one with exact moments: it stands among the differences
            return {title: partial(Record.score, name=name) for name, title in SHOWN.items()}
        return {
            title if way == "running" else f"{title}, exact moments": partial(_score_of, way=way, name=name)
            for way in ("running", "oracle")
            if way in shared
            for name, title in SHOWN.items()
        }
    return {
        title if labels == "overall" else f"{title}, {labels}": partial(Record.score, name=name, group=labels)
        for name, title in SHOWN_OF_LABELS.items()
        for labels in GROUPS_SHOWN
    }


def _score_of(record: Record, way: str, name: str) -> float:
    return score(record.evaluated[way], name)


def interval(differences: list[float]) -> str:
    """Where the mean difference lies, 95 % of the time; none for one seed.

    Example:
        >>> interval([1.0, 2.0, 3.0]), interval([1.0])
        ('-0.48 to +4.48', 'one seed has none')
    """
    if len(differences) < 2:
        return "one seed has none"
    found = t_interval(differences)
    return "-" if found is None else str(found)


def effect(differences: list[float]) -> str:
    """The mean of the differences over their standard deviation; none for one seed, or where all are the same.

    Example:
        >>> effect([1.0, 2.0, 3.0]), effect([1.0]), effect([2.0, 2.0])
        ('+2.00', '-', '-')
    """
    found = effect_size(differences)
    return "-" if math.isnan(found) else f"{found:+.2f}"
