"""Compare two experiments over the seeds that both have: from records, or from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from contnorm.bench.config.defaults import resolved_settings, run_names, varying
from contnorm.bench.config.schema import SHORT_KEYS, RunConfig, flatten_settings, format_value
from contnorm.bench.data.dataset import compare_fingerprints
from contnorm.bench.records import Record
from contnorm.bench.selection import setting_keys
from contnorm.bench.sequential import ALPHA, FIRST_SEED, LAST_LOOK, MARGIN, Verdict, decide_differences, with_chance
from contnorm.bench.streams.tasks import STREAMS
from contnorm.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

NOT_SAME_DATA = "a and b did not use the same data: {}. Compare experiments of the same stream."
SHOWN = 4  # settings, and values of a setting, that a message names
# Settings that determine which samples are trained and tested on, and how predictions are counted.
DATA_KEYS = {
    "stream.name",
    "stream.source",
    "stream.tasks",
    "stream.train_per_task",
    "stream.test_per_task",
    "stream.class_order",
    "stream.scenario",
    "stream.part",
    "stream.holdout",
    "stream.blur",
    "train.partial",
    "train.passes",
    "train.max_steps",
}
Moments = str | tuple[str | None, str | None]


class HasRecords(Protocol):
    """An object with records, such as a `bench.Result` or `bench.Runs`."""

    @property
    def records(self) -> list[Record]: ...


Numbers: TypeAlias = "Sequence[float] | Mapping[int, float] | pd.Series[Any]"
Scores = dict[int, float]  # by seed
Experiment: TypeAlias = "HasRecords | Iterable[Record] | Numbers"


def compare(
    a: Experiment | pd.DataFrame,
    b: Experiment | None = None,
    score: str | None = None,
    *,
    by: str | None = None,
    seed: str = "seed",
    moments: Moments | None = None,
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = LAST_LOOK,
    first_seed: int | None = None,
) -> Verdict:
    """Compare two experiments: a score of ``a`` minus that of ``b``, paired over the seeds that both have.

    Experiments of the bench are compared by the seeds from 100 on; lower seeds are exploratory, since settings may have
    been chosen with them. Of plain numbers all shared seeds count, in order, and are numbered from 0 in the verdict.
    `contnorm.bench.sequential` has the rule.

    Args:
        a, b: Results of `bench.run`, selections of `bench.load_runs`, or records, each of one experiment. Or scores:
            two arrays in the same order of seeds, or mappings or Series by seed. Or a DataFrame as ``a`` alone.
        score: Name of the score, such as ``"acc"``, ``"aia"`` (the mean over the stream) or ``"fm"``; by default the
            first one. Of a DataFrame the column.
        by, seed: Columns of a DataFrame: one with the two names to compare, the first one minus the other, and one with
            the seeds.
        moments: Evaluation to compare, such as ``"running"`` or ``"memory"``, or one of each experiment. By default
            that of each experiment's settings, ``evaluate.moments``.
        margin: Largest absolute difference that counts as equivalent, in percentage points.
        cases: Number of comparisons that are decided together; alpha is divided among them.
        alpha: Probability of any wrong sign in all these comparisons.
        max_seeds: Limit of the looks.
        first_seed: First seed that counts.

    Raises:
        UserError: If the experiments are of different data or are the same, have no seed or no score in common, or if
            one of them is several experiments.

    Example:
        >>> cn, bn = [72.1, 71.4, 73.0, 72.2], [70.9, 71.0, 71.7, 70.8]
        >>> compare(cn, bn).outcome, round(compare(cn * 4, bn * 4).mean, 2)
        ('undecided', 1.07)
        >>> print(compare(cn * 4, bn * 4))
        a is higher than b in score by 1.07 points (interval +0.75 to +1.40, 16 seeds).
        >>> import pandas
        >>> columns = {"norm": ["cn"] * 16 + ["bn"] * 16, "seed": [*range(16)] * 2, "acc": cn * 4 + bn * 4}
        >>> frame = pandas.DataFrame(columns)
        >>> compare(frame, by="norm", score="acc").sentence
        'cn is higher than bn in ACC by 1.07 points (interval +0.75 to +1.40, 16 seeds).'
    """
    rule: dict[str, Any] = {"margin": margin, "cases": cases, "alpha": alpha, "max_seeds": max_seeds}
    if hasattr(a, "columns"):
        first, second, names = _from_frame(a, by, seed, score)
    elif b is None:
        raise UserError("b=None: pass two experiments, or a DataFrame with by=.")
    else:
        first, second, names = _numbers(a), _numbers(b), ("a", "b")
        if first and second and len(first) != len(second) and not (hasattr(a, "keys") and hasattr(b, "keys")):
            raise UserError(f"{len(first)} and {len(second)} scores: arrays are paired by place. Pass them by seed.")
    if first is None or second is None:
        rule["first_seed"] = FIRST_SEED if first_seed is None else first_seed
        return _compare_records(a, b, score, moments, rule)
    if margin >= 1 and all(0 <= value <= 1 for scores in (first, second) for value in scores.values()):
        raise UserError(f"all scores lie between 0 and 1: pass percent, or a margin= below 1 instead of {margin:g}.")
    if first_seed is None:  # all seeds count, in order
        seeds = sorted(first.keys() & second.keys())
        first, second = ({place: scores[s] for place, s in enumerate(seeds)} for scores in (first, second))
    return compare_scores(first, second, score or "score", names, first_seed=first_seed or 0, **rule)


def compare_scores(
    a: Mapping[int, float],
    b: Mapping[int, float],
    score: str,
    names: tuple[str, str],
    *,
    diverged: Iterable[int] = (),
    chance: float | None = None,
    **rule: Any,
) -> Verdict:
    """Decide from scores by seed; ``rule`` are arguments of `decide_differences`.

    Args:
        a, b: The scores.
        score, names: Names in sentences.
        diverged: Seeds of which a run diverged.
        chance: Chance level of the score, for `Verdict.at_chance`.

    Raises:
        UserError: If no seed has both scores.

    Example:
        >>> compare_scores({100: 71.0}, {100: 70.0, 101: 69.0}, "acc", ("cn", "bn")).differences
        {100: 1.0}
    """
    lost = set(diverged)
    shared = {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}
    if not shared and not lost:
        raise UserError(f"the experiments have no seed in common: {sorted(a)} and {sorted(b)}. Use the same seeds.")
    verdict = decide_differences(shared, score=score, names=names, diverged=lost, **rule)
    if lost and chance is not None:
        full = [with_chance(scores, lost - scores.keys(), chance) for scores in (a, b)]
        differences = {seed: full[0][seed] - full[1][seed] for seed in sorted(full[0].keys() & full[1].keys())}
        at_chance = decide_differences(differences, score=score, names=names, **rule)
        verdict = replace(verdict, at_chance=at_chance)
    return replace(verdict, scores=(dict(a), dict(b)))


def _from_frame(
    frame: Any, by: str | None, seed: str, score: str | None
) -> tuple[Scores | None, Scores | None, tuple[str, str]]:
    if by is None or score is None:
        raise UserError(
            "a DataFrame needs by= and score=: the columns of the two names to compare and of their scores."
        )
    if missing := [column for column in (by, seed, score) if column not in frame.columns]:
        raise UserError(f"the DataFrame has no column {missing[0]!r}. Columns: {', '.join(map(str, frame.columns))}.")
    names = list(dict.fromkeys(frame[by]))
    if len(names) != 2:
        raise UserError(f"by={by!r}: the column has {len(names)} values, but a comparison is of two. Select two.")
    sides = [frame[frame[by] == name].set_index(seed)[score] for name in names]
    if not all(side.index.is_unique for side in sides):
        raise UserError(f"seed={seed!r}: some seeds occur twice. Select the rows of one experiment for each name.")
    return dict(sides[0]), dict(sides[1]), (str(names[0]), str(names[1]))


def _numbers(side: Any) -> Scores | None:
    """Scores by seed if they are plain numbers; a Series has its seeds as index."""
    if hasattr(side, "to_dict") and not hasattr(side, "records"):
        side = side.to_dict()
    if isinstance(side, Mapping):
        return dict(side) if all(isinstance(value, Real) for value in side.values()) else None
    values: list[Any] = list(side) if isinstance(side, Sequence) or hasattr(side, "__array__") else [None]
    if not all(isinstance(value, Real) for value in values):
        return None
    return {place: float(value) for place, value in enumerate(values)}


def _compare_records(a: Any, b: Any, score: str | None, moments: Moments | None, rule: Mapping[str, Any]) -> Verdict:
    first, second = _by_seed(a, "a"), _by_seed(b, "b")
    one, other = next(iter(first.values())), next(iter(second.values()))
    evaluations = moments if isinstance(moments, tuple) else (moments, moments)
    check_experiments(
        one.config, other.config, *(getattr(side, "objects", ()) for side in (a, b)), evaluations=evaluations
    )
    if different := data_difference(list(first.values()), list(second.values())):
        raise UserError(NOT_SAME_DATA.format(different))
    scores, others = (
        {seed: scores_of(record, kind) for seed, record in side.items()}
        for side, kind in zip((first, second), evaluations, strict=True)
    )
    known = [name for name in next(iter(scores.values())) if all(name in some for some in others.values())]
    name = score or (known[0] if known else "acc")
    if name not in known:
        raise UserError(f"score {name!r}: use one that both experiments have: {', '.join(known)}.")
    ours, theirs = ({seed: some[name] for seed, some in side.items()} for side in (scores, others))
    shared = ours.keys() & theirs.keys()
    if shared and all(math.isnan(ours[seed] - theirs[seed]) for seed in shared):
        raise UserError(f"score {name!r} has no value in these runs, such as the forgetting of a single task.")
    lost = diverged_seeds(a, one.hash) | diverged_seeds(b, other.hash)
    compared = [  # with the moments that are compared
        replace(record.config, evaluate=replace(record.config.evaluate, moments=cast(Any, kind)))
        if kind
        else record.config
        for record, kind in zip((one, other), evaluations, strict=True)
    ]
    names = experiment_names(compared[0], compared[1])
    if one.hash == other.hash and evaluations[0] != evaluations[1]:  # two evaluations of the same runs
        names = f"{evaluations[0]} moments", f"{evaluations[1]} moments"
    verdict = compare_scores(ours, theirs, name, names, diverged=lost, chance=chance_level(one, name), **rule)
    return replace(verdict, a=tuple(first.values()), b=tuple(second.values()))


def check_experiments(
    a: RunConfig, b: RunConfig, *objects: Collection[Any], evaluations: tuple[str | None, str | None] = (None, None)
) -> None:
    """Reject two experiments that can't be compared.

    Args:
        a, b: Their settings.
        objects: Their Python objects. Two objects without a tag may have the same name, so the same hash.
        evaluations: Moments of the evaluation of each.

    Raises:
        UserError: If they are of different data, or the same experiment.
    """
    if different := _data_settings(a, b):
        raise UserError(NOT_SAME_DATA.format(different))
    if a.hash == b.hash and not any(objects) and evaluations[0] == evaluations[1]:
        raise UserError(f"a and b are the same experiment ({a.hash}). Compare experiments that differ.")


def data_difference(a: Sequence[Record], b: Sequence[Record]) -> str:
    """Why the runs of two experiments can't be compared seed by seed: their data differs. Empty if they can be.

    Runs with ``max_steps`` are smoke tests, which are compared with each other only.

    Example:
        >>> data_difference([], [])
        ''
    """
    if not a or not b:
        return ""
    if different := _data_settings(a[0].config, b[0].config):
        return different
    by_seed = {record.seed: record for record in b}
    pairs = [(record, by_seed[record.seed]) for record in a if record.seed in by_seed]
    for one, other in pairs or product(a, b):
        prints = [(record.raw.get("source") or {}).get("fingerprint") for record in (one, other)]
        if compare_fingerprints(*prints) == "different":
            return f"{one.config.stream.source} has different content"
        if one.counted.tasks != other.counted.tasks:
            return f"the first {one.counted.tasks} and the first {other.counted.tasks} tasks"
        if one.multi_label != other.multi_label:
            return "one is multi-label"
    return ""


def _data_settings(a: RunConfig, b: RunConfig) -> str:
    first, second = resolved_settings(a), resolved_settings(b)
    keys = sorted(key for key in DATA_KEYS if first.get(key) != second.get(key))
    return ", ".join(f"{key} is {format_value(first.get(key))} and {format_value(second.get(key))}" for key in keys)


def diverged_seeds(runs: Any, hash: str) -> set[int]:
    """Seeds of a result, or of the runs with a hash in a selection, that diverged; none of records alone.

    Example:
        >>> diverged_seeds([], "75cc28")
        set()
    """
    diverged = getattr(runs, "diverged", ())
    return set(diverged) if isinstance(diverged, Mapping) else {run.seed for run in diverged if run.hash == hash}


def chance_level(record: Record, score: str) -> float | None:
    """Chance level of ACC and of the mean over the stream; None for other scores, or if it is unknown."""
    spec = STREAMS.get(record.config.stream.name)
    if score not in ("acc", "aia", "la") or spec is None or not spec.per_task:
        return None
    competing = resolved_settings(record.config)["stream.scenario"] in ("class", "free")
    return 100 / spec.per_task / (record.counted.tasks if competing else 1)


def scores_of(record: Record, moments: str | None = None) -> dict[str, float]:
    """Return every score of a record that its measurements allow, by name; in percent.

    Args:
        record: The record.
        moments: Evaluation, such as ``"running"`` or ``"memory"``; None for that of the settings.
    """
    if moments is None:
        return record.counted.scores()
    if moments not in record.evaluated:
        known = ", ".join(record.evaluated)
        raise UserError(f"run {record.hash} was not evaluated with {moments} moments, but with {known}.")
    scores: dict[str, float] = record.evaluated[moments].scores()
    return scores


def differing_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Keys of settings in which two experiments differ, apart from defaults of their streams and strategies.

    Groups do not count if the norms differ and one of them has no groups.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> differing_keys(from_dict({"norm": {"name": "bn"}}), from_dict({"norm": {"name": "cn"}, "train": {"lr": 1}}))
        ['norm.name', 'train.lr']
    """
    first, second = resolved_settings(a), resolved_settings(b)
    keys = [key for key in varying([a, b]) if first.get(key) != second.get(key)]
    if first["norm.name"] != second["norm.name"] and None in (first["norm.groups"], second["norm.groups"]):
        keys = [key for key in keys if key not in ("norm.groups", "norm.auto_channels")]
    order = setting_keys()
    return sorted(keys, key=lambda key: order.index(key) if key in order else len(order))


def experiment_names(a: RunConfig, b: RunConfig) -> tuple[str, str]:
    """Names that distinguish two experiments: their norms, or the settings in which they differ; at most a few.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> bn, cn = (from_dict({"norm": {"name": name}}) for name in ("bn", "cn"))
        >>> experiment_names(cn, bn), experiment_names(bn, from_dict({"train": {"lr": 0.1}}))
        (('cn32', 'bn'), ('lr=0.03', 'lr=0.1'))
    """
    keys = differing_keys(a, b)
    norms = run_names(a)[-1], run_names(b)[-1]
    in_label = ("norm.name", "norm.groups", "norm.auto_channels", "norm.freeze_after")
    if norms[0] != norms[1] and all(key in in_label for key in keys):
        return norms
    if not 1 <= len(keys) <= SHOWN:
        return "a", "b"
    first, second = (
        ", ".join(f"{short_key(key)}={format_value(resolved_settings(config).get(key))}" for key in keys)
        for config in (a, b)
    )
    return first, second


def short_key(key: str) -> str:
    """Shortest key that selects a setting.

    Example:
        >>> short_key("norm.name"), short_key("train.lr"), short_key("strategy.code")
        ('norm', 'lr', 'strategy.code')
    """
    for short, full in SHORT_KEYS.items():
        if full == key:
            return short
    name = key.rpartition(".")[2]
    return name if [setting.rpartition(".")[2] for setting in setting_keys()].count(name) == 1 else key


def _by_seed(runs: Any, name: str) -> dict[int, Record]:
    records: list[Any] = list(runs) if isinstance(runs, Iterable) else list(getattr(runs, "records", [runs]))
    if not records:
        raise UserError(f"{name} has no records to compare.")
    if not all(isinstance(record, Record) for record in records):
        raise UserError(
            f"{name}={runs!r}: use a result of bench.run, a selection of bench.load_runs, records, or scores."
        )
    configs = list({record.config.hash: record.config for record in records}.values())
    if len(configs) > 1:
        raise UserError(
            f"{name} has records of {len(configs)} experiments, which differ in {list_variations(configs)}. Select "
            f"one with where(...)."
        )
    return {record.seed: record for record in records}


def list_variations(configs: Sequence[RunConfig]) -> str:
    """Settings in which experiments differ, with their values.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> list_variations([from_dict({"train": {"lr": lr}}) for lr in (0.03, 0.1)])
        'train.lr (0.03, 0.1)'
    """
    settings = [flatten_settings(config.as_dict()) for config in configs]
    known = dict.fromkeys(key for of_run in settings for key in of_run)  # components may have own settings
    # Defaults differ between streams and strategies; they are named only if nothing else differs.
    chosen = varying(configs)
    keys = [key for key in known if key in chosen] or [
        key for key in known if len({format_value(values.get(key)) for values in settings}) > 1
    ]
    variations = []
    for key in keys[:SHOWN]:
        values = list(dict.fromkeys(format_value(of_run.get(key)) for of_run in settings))
        variations.append(f"{key} ({', '.join([*values[:SHOWN], *(['...'] if len(values) > SHOWN else [])])})")
    rest = [f"{len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return ", ".join([*variations, *rest])
