"""Names of the quantities of a record: scores of its matrix, drift of its moments, and time."""

from __future__ import annotations

import re
from typing import Any

from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORE_TITLES, SCORES
from contnorm.errors import UserError, unknown

__all__ = ["check_curve", "check_score", "drift_parts", "score_title"]


DRIFT = (
    "drift_mean_1",
    "drift_mean_2",
    "drift_var_1",
    "drift_var_2",
)  # of the first two norm layers; later layers have higher numbers

OTHERS = ("extra_time", "acc_so_far", "parameters")

TITLES = {"extra_time": "time over BN, %", "acc_so_far": "ACC so far"}


def check_score(name: Any, where: str) -> None:
    """Raise an error for an unknown score.

    Example:
        >>> check_score("accuracy", "recipe")
        Traceback (most recent call last):
        contnorm.errors.UserError: recipe: unknown score 'accuracy'. There are: acc, aia, fm, la, ...
    """
    known = [*SCORES, *LABEL_SCORES, *DRIFT, *OTHERS]
    if name not in known and not (isinstance(name, str) and drift_parts(name)):
        raise UserError(f"{where}: {unknown('score', str(name), known)}")


def check_curve(name: str, where: str) -> None:
    """Raise an error for a score that has no value after each task.

    Example:
        >>> check_curve("fm", "recipe")
        Traceback (most recent call last):
        contnorm.errors.UserError: recipe: 'fm' has no value after each task. Use acc_so_far, drift_mean_1, ...
    """
    if name != "acc_so_far" and not drift_parts(name):
        raise UserError(f"{where}: {name!r} has no value after each task. Use acc_so_far, {', '.join(DRIFT)}.")


def drift_parts(name: str) -> tuple[str, int] | None:
    """Moment and index of the norm layer of a drift score, counted from 0; None for other scores.

    Example:
        >>> drift_parts("drift_var_2"), drift_parts("acc")
        (('var', 1), None)
    """
    match = re.fullmatch(r"drift_(mean|var)_([1-9]\d*)", name)
    return (match[1], int(match[2]) - 1) if match else None


def score_title(name: str) -> str:
    """Column title of a score; forgetting scores other than the paper's keep their name.

    Example:
        >>> score_title("fm"), score_title("fm_mammoth"), score_title("drift_var_2")
        ('FM', 'fm_mammoth', 'var of layer 2')
    """
    parts = drift_parts(name)
    return f"{parts[0]} of layer {parts[1] + 1}" if parts else {**SCORE_TITLES, **TITLES}.get(name, name)
