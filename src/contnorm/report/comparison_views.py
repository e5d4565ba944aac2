"""The comparison of norms that opens a report: as tables for all formats, as CSV, and as a part of the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from contnorm.bench.config.sources import format_settings
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.sequential import Verdict, score_title
from contnorm.paper.format import spread
from contnorm.paper.record_remarks import data_part, data_remarks
from contnorm.report import record_figures
from contnorm.report.norm_comparison import (
    MOST_FOR_ALL_PAIRS,
    ON_TEST,
    ONE_SETTING,
    BestSetting,
    Difference,
    Experiment,
    NormRuns,
    has_exact_moments,
)
from contnorm.report.page import ComparisonView, RowGroup, Table, TableCell
from contnorm.report.record_figures import MOST_CURVES
from contnorm.report.text_tables import TextDocument, TextTable, csv_text

__all__ = ["comparison_csv", "comparison_notes", "comparison_sheet", "comparison_view", "headline"]

DIFFERENCE_HEADS = ("difference", "points", "interval", "seeds", "verdict")
HOW_COMPARED = (
    "Runs are compared if stream, strategy, memory, network and number of epochs are the same. Of the other settings, "
    "each norm has its best: that with the highest mean of the first score over seeds. A setting with a diverged seed, "
    "or with fewer than half of the seeds of another one of its norm, is chosen only if there is no other."
)
HOW_PAIRED = (
    "Differences are paired over the seeds that both have. The comparisons of a table are decided together, by the "
    "seeds from 100 on, with looks at 16, 24, 32, ... and 128 seeds; their intervals allow for both. With fewer seeds "
    "there is no verdict, and the interval is an ordinary 95 % interval."
)
EXACT_MOMENTS = "An asterisk marks evaluation with exact moments instead of running ones."


def comparison_sheet(experiments: Sequence[Experiment], lead: Sequence[str] = ()) -> TextDocument:
    """Document with the tables of all experiments; ``lead`` are sentences at its top."""
    blocks = [block for experiment in experiments for block in _blocks(experiment)]
    return TextDocument("comparison", "Comparison of the norms", blocks, [*lead, *comparison_notes(experiments)])


def comparison_notes(experiments: Sequence[Experiment]) -> list[str]:
    """Notes on how runs are compared, as far as they apply."""
    exact = any(has_exact_moments(setting.norm) for one in experiments for setting in one.settings)
    paired = any(one.differences for one in experiments)
    several = any(len(one.settings) > 1 for one in experiments) or len(experiments) > 1
    return [
        *([HOW_COMPARED] if several else []),
        *([HOW_PAIRED] if paired else []),
        *([EXACT_MOMENTS] if exact else []),
    ]


def _blocks(experiment: Experiment) -> Iterator[TextTable]:
    title = experiment.title
    yield TextTable(
        f"{title}: best setting of each norm", *_best_table(experiment), (headline(experiment), *_notes(experiment))
    )
    if experiment.differences:
        rows = [_difference_row(experiment, one) for one in experiment.differences]
        yield TextTable(f"{title}: paired differences", DIFFERENCE_HEADS, rows, _difference_notes(experiment))
    yield _curve_table(experiment)
    if len(experiment.rates) > 1:
        yield TextTable(f"{title}: {_score_title(experiment)} by learning rate", *_rate_table(experiment))


def _score_title(experiment: Experiment) -> str:
    return score_title(experiment.score_names[0])


def headline(experiment: Experiment) -> str:
    """Sentences on the norm with the highest score, and whether it differs from the next one."""
    sentences = [f"{_highest_score(experiment)}."]
    sentences += [_sentence(experiment, difference) for difference in experiment.differences[:1]]
    return " ".join(sentences)


def _short_headline(experiment: Experiment) -> str:
    """The same in one line, for a list of experiments."""
    parts = [_highest_score(experiment)]
    for one in experiment.differences[:1]:
        mean = "" if one.verdict is None else f" {one.verdict.mean:+.2f} points,"
        parts.append(f"minus {one.b.norm}:{mean} {_outcome(one)}")
    return "; ".join(parts) + "."


def _highest_score(experiment: Experiment) -> str:
    settings, name = experiment.chosen, experiment.score_names[0]
    first = settings[0]  # an experiment has a finished run
    scores = list(first.seed_scores(name).values())
    seeds = f"{len(scores)} seed{'' if len(scores) == 1 else 's'}"
    exact = any(has_exact_moments(setting.norm) for setting in settings) and not has_exact_moments(first.norm)
    several = sum(has_exact_moments(setting.norm) == has_exact_moments(first.norm) for setting in settings) > 1
    what = f"{'Highest ' if several else ''}{_score_title(experiment)}{' without exact moments' if exact else ''}"
    return f"{what}: {spread(scores)} with {experiment.name(first)} ({seeds})"


def _sentence(experiment: Experiment, difference: Difference) -> str:
    if difference.verdict is None:
        return f"{difference.a.norm} and {difference.b.norm} have no seed in common, so they are not compared."
    return difference.verdict.sentence


def _outcome(difference: Difference) -> str:
    """Outcome of a paired difference in a few words."""
    verdict = difference.verdict
    if verdict is None:
        return "no shared seeds"
    return (
        verdict.outcome
        if verdict.outcome in ("equivalent", "undecided")
        else f"{difference.a.norm} is {verdict.outcome}"
    )


def _best_table(experiment: Experiment) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the best settings."""
    others = any(len(experiment.values(setting)) > 1 for setting in experiment.chosen)
    heads = ["norm", "lr", *(["other settings"] if others else []), *map(score_title, experiment.score_names)]
    rows = [_best_row(experiment, best, others) for best in experiment.best]
    return [*heads, "seeds", "settings tried", "chosen on"], rows


def _best_row(experiment: Experiment, best: BestSetting, others: bool) -> list[str]:
    setting = best.setting
    if setting is None:
        empty = ["-", *(["-"] if others else []), "diverged", *["-"] * (len(experiment.score_names) - 1)]
        return [best.norm, *empty, "0", str(best.tried), best.chosen_on if best.tried == 1 else "-"]
    _, *more = experiment.values(setting)
    scores = [spread(list(setting.seed_scores(name).values())) for name in experiment.score_names]
    names = [best.norm, f"{setting.lr:g}", *([", ".join(more) or "-"] if others else [])]
    return [*names, *scores, str(len(setting.scores)), str(best.tried), best.chosen_on]


def _difference_row(experiment: Experiment, difference: Difference) -> list[str]:
    verdict, name = difference.verdict, _difference_name(experiment, difference)
    if verdict is None:
        return [name, "-", "-", "0", _outcome(difference)]
    interval = verdict.interval or verdict.uncorrected
    seeds = verdict.seeds or len(verdict.differences)
    return [name, f"{verdict.mean:+.2f}", str(interval or "-"), str(seeds), _outcome(difference)]


def _difference_name(experiment: Experiment, difference: Difference) -> str:
    """Both norms, with the settings in which they differ."""
    a, b = (experiment.values(setting) for setting in (difference.a, difference.b))
    first, second = ([value for value in own if value not in other] for own, other in ((a, b), (b, a)))
    words = (
        f"{setting.norm} ({', '.join(values)})" if values else setting.norm
        for setting, values in ((difference.a, first), (difference.b, second))
    )
    return " minus ".join(words)


def _difference_notes(experiment: Experiment) -> tuple[str, ...]:
    if len(experiment.chosen) <= MOST_FOR_ALL_PAIRS:
        return ()
    norm = experiment.chosen[0].norm
    return (f"{norm}, the first norm above, minus each other norm. contnorm compare compares any two runs.",)


def _notes(experiment: Experiment) -> tuple[str, ...]:
    """Notes on the selection, the shared settings, diverged runs and the data."""
    shared = format_settings(experiment.shared, experiment.shared)
    records = experiment.records
    parts = dict.fromkeys(part for record in records if (part := data_part(record)))
    return (
        _selection_note(experiment),
        *([f"Changed from the defaults in all runs: {shared}."] if shared else []),
        *_divergence_notes(experiment),
        *_length_notes(experiment),
        *(f"Some runs used {part}." for part in parts),
        *data_remarks(records),
    )


def _selection_note(experiment: Experiment) -> str:
    chosen_on = {best.chosen_on for best in experiment.best}
    name = _score_title(experiment)
    if chosen_on == {ONE_SETTING}:
        return "Nothing was chosen: each norm was run with one setting."
    if ON_TEST in chosen_on:
        return (
            f"Settings were chosen by {name} on the test tasks, so the scores of the chosen ones are too high, and the "
            "more so the more settings were tried. Choose on validation tasks for an unbiased comparison."
        )
    if experiment.validation:
        return (
            f"These are validation runs: settings were chosen by the same {name} that is shown, which is too high for "
            "the chosen ones. Run these settings on the test tasks for an unbiased comparison."
        )
    data = " and ".join(sorted(chosen_on - {ONE_SETTING}))
    return f"Settings were chosen by {name} on {data}; the scores are on the test tasks."


def _divergence_notes(experiment: Experiment) -> Iterator[str]:
    diverged = [setting for setting in experiment.settings if setting.diverged]
    words = [
        f"{experiment.name(one)} ({len(one.diverged)} of {len(one.diverged | one.scores.keys())} seeds)"
        for one in diverged
    ]
    if words:
        yield f"Diverged: {'; '.join(words)}."


def _length_notes(experiment: Experiment) -> Iterator[str]:
    lengths = {len(curve) for setting in experiment.chosen for curve in setting.curves.values()}
    if len(lengths) > 1:
        reached = f"{min(lengths)} to {max(lengths)} tasks"
        yield f"The runs reached {reached} (--max-steps), so their scores are not comparable."


def _curve_table(experiment: Experiment) -> TextTable:
    """Score on the tasks so far, after each task."""
    curves = {name: _common_part(setting) for name, setting in _drawn(experiment).items()}
    tasks = max((len(points) for points in curves.values()), default=0)
    heads = ["setting", *(f"task {task + 1}" for task in range(tasks))]
    rows = [[name, *map(spread, points), *["-"] * (tasks - len(points))] for name, points in curves.items()]
    return TextTable(_curve_title(experiment), heads, rows)


def _common_part(setting: NormRuns) -> list[list[float]]:
    """Values of all seeds after each task that all reached."""
    return [list(values) for values in zip(*setting.curves.values(), strict=False)]


def _curve_label(experiment: Experiment) -> str:
    return "mAP" if experiment.score_names[0] == "map" else "accuracy"


def _drawn(experiment: Experiment) -> dict[str, NormRuns]:
    """Settings whose curves are shown, by name: the first ones of `_candidates`, which has the others too."""
    return {experiment.name(setting): setting for setting in _candidates(experiment)[:MOST_CURVES]}


def _candidates(experiment: Experiment) -> list[NormRuns]:
    """The best setting of each norm; of a single norm all settings, from the highest mean to the lowest."""
    if len(experiment.chosen) != 1:
        return experiment.chosen
    name = experiment.score_names[0]
    return sorted((one for one in experiment.settings if one.scores), key=lambda one: -one.mean(name))


def _curve_title(experiment: Experiment) -> str:
    total = len(_candidates(experiment))
    part = f", the {MOST_CURVES} highest of {total} settings" if total > MOST_CURVES else ""
    return f"{experiment.title}: {_curve_label(experiment)} after each task{part}"


def _rate_table(experiment: Experiment) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: the score of each norm at each learning rate."""
    rates, name = experiment.rates, experiment.score_names[0]
    rows = []
    for norm in [setting.norm for setting in experiment.chosen]:
        by_rate = experiment.best_by_rate(norm)
        rows.append([norm, *(_rate_cell(by_rate[rate], name) if rate in by_rate else "-" for rate in rates)])
    return ["norm", *(f"lr={rate:g}" for rate in rates)], rows


def _rate_cell(setting: NormRuns, name: str) -> str:
    if not setting.scores:
        return "diverged"
    text = spread(list(setting.seed_scores(name).values()))
    return f"{text}, {len(setting.diverged)} diverged" if setting.diverged else text


def comparison_view(experiment: Experiment, number: int, is_folded: bool = False) -> ComparisonView:
    """Part of the page for an experiment; a folded one has no figures."""
    heads, rows = _best_table(experiment)
    tables = [Table("Best setting of each norm", heads, [_cells(rows)], _notes(experiment))]
    if experiment.differences:
        group = RowGroup("", [_difference_cells(experiment, one) for one in experiment.differences])
        tables.append(Table("Paired differences", DIFFERENCE_HEADS, [group], _difference_notes(experiment)))
    curves = _curve_table(experiment)
    folded = [
        Table(f"Numbers: {_curve_label(experiment)} after each task", curves.heads, [_cells(curves.rows)], (), True)
    ]
    if len(experiment.rates) > 1:
        heads, rows = _rate_table(experiment)
        folded.append(Table(f"Numbers: {_score_title(experiment)} by learning rate", heads, [_cells(rows)], (), True))
    figures = [] if is_folded else list(_figures(experiment))
    name = f"comparison-{number}"
    sentences, line = headline(experiment), _short_headline(experiment)
    return ComparisonView(name, experiment.title, sentences, line, tables, figures, folded, is_folded)


def _cells(rows: Sequence[Sequence[str]]) -> RowGroup:
    return RowGroup("", [list(map(TableCell, row)) for row in rows])


def _difference_cells(experiment: Experiment, difference: Difference) -> list[TableCell]:
    *cells, verdict = _difference_row(experiment, difference)
    return [*map(TableCell, cells), TableCell("", verdict=verdict, color=_color(difference.verdict))]


def _color(verdict: Verdict | None) -> str:
    """CSS class of a verdict."""
    word = "" if verdict is None else verdict.outcome.partition(",")[0]
    return {"higher": "above", "lower": "below"}.get(word, "undecided")


def _figures(experiment: Experiment) -> Iterator[str]:
    settings = _drawn(experiment)
    curves = {name: list(setting.curves.values()) for name, setting in settings.items()}
    if not curves:
        return
    tasks = max(len(curve) for some in curves.values() for curve in some)
    label = _curve_label(experiment)
    if tasks > 1:
        yield record_figures.curves_over_tasks(
            curves, _curve_title(experiment), f"{label} on the tasks so far (percent)"
        )
    if len(experiment.rates) > 1:
        yield record_figures.score_by_rate(_points(experiment), experiment.title, _score_title(experiment))
    pairs = {
        _difference_name(experiment, one): list(one.verdict.differences.values())
        for one in experiment.differences
        if one.verdict is not None
    }
    if pairs:
        title = f"{experiment.title}: paired differences at the best settings"
        yield record_figures.paired_differences(pairs, title, f"points of {_score_title(experiment)}")


def _points(experiment: Experiment) -> dict[str, list[tuple[float, float, float]]]:
    """Learning rate, mean and standard deviation of the norms, by their names in the legend."""
    name = experiment.score_names[0]
    points = {}
    for norm in [setting.norm for setting in experiment.chosen][:MOST_CURVES]:
        by_rate = {rate: one for rate, one in experiment.best_by_rate(norm).items() if one.scores}
        spreads = {rate: spread_over_seeds(list(one.seed_scores(name).values())) for rate, one in by_rate.items()}
        points[f"norm={norm}"] = [
            (rate, mean, 0.0 if math.isnan(std) else std) for rate, (mean, std) in spreads.items()
        ]
    return points


def comparison_csv(experiments: Sequence[Experiment]) -> str:
    """CSV with one line per norm and experiment: its best setting, and the first norm minus it; not rounded."""
    heads = [
        "experiment", "norm", "settings", "score", "seeds", "mean", "std", "tried", "chosen_on",
        "minus_from", "difference", "low", "high", "pairs", "decided",
    ]  # fmt: skip
    rows = [row for experiment in experiments for row in _csv_rows(experiment)]
    return csv_text(heads, rows)


def _csv_rows(experiment: Experiment) -> Iterator[list[object]]:
    name = experiment.score_names[0]
    against: Mapping[str, Difference] = {
        one.b.norm: one for one in experiment.differences if one.a is experiment.chosen[0]
    }
    for best in experiment.best:
        setting = best.setting
        if setting is None:
            yield [experiment.title, best.norm, None, name, 0, None, None, best.tried, best.chosen_on, *[None] * 6]
            continue
        values = list(setting.seed_scores(name).values())
        _, std = spread_over_seeds(values)
        numbers: list[object] = [len(values), fmean(values), None if math.isnan(std) else std]
        settings = " ".join(experiment.values(setting))
        place: list[object] = [experiment.title, best.norm, settings, name]
        yield [*place, *numbers, best.tried, best.chosen_on, *_csv_difference(against.get(best.norm))]


def _csv_difference(difference: Difference | None) -> list[object]:
    if difference is None or difference.verdict is None:
        return [None] * 6
    verdict = difference.verdict
    interval = verdict.interval or (None, None)
    return [difference.a.norm, verdict.mean, *interval, verdict.pairs, verdict.is_decided]
