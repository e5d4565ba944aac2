"""The names of what can be read off a record: scores of its matrix, drift of its moments, time."""

from __future__ import annotations

import re
from typing import Any

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.errors import UserError, unknown

__all__ = ["check_curve", "check_score", "drift_parts", "title_of"]

DRIFT = ("drift_mean_1", "drift_mean_2", "drift_var_1", "drift_var_2")  # of the first layers; further ones count on
OTHERS = ("extra_time", "acc_so_far", "parameters")
TITLES = {
    "acc": "ACC", "la": "LA", "fm": "FM", "extra_time": "time over BN, %", "acc_so_far": "ACC so far",
    "c_f1": "C-F1", "o_f1": "O-F1", "map": "mAP", "fm_c_f1": "FM C-F1", "fm_o_f1": "FM O-F1", "fm_map": "FM mAP",
}  # fmt: skip


def check_score(name: Any, where: str) -> None:
    """Refuse what is no score.

    Example:
        >>> check_score("accuracy", "recipe")
        Traceback (most recent call last):
        contnorm.errors.UserError: recipe: unknown score 'accuracy'. There are: acc, fm, la, ...
    """
    known = [*SCORES, *LABEL_SCORES, *DRIFT, *OTHERS]
    if name not in known and not (isinstance(name, str) and drift_parts(name)):
        raise UserError(f"{where}: {unknown('score', str(name), known)}")


def check_curve(name: str, where: str) -> None:
    """Refuse a score that has no value after each task.

    Example:
        >>> check_curve("fm", "recipe")
        Traceback (most recent call last):
        contnorm.errors.UserError: recipe: 'fm' has no value after each task. Use acc_so_far, drift_mean_1, ...
    """
    if name != "acc_so_far" and not drift_parts(name):
        raise UserError(f"{where}: {name!r} has no value after each task. Use acc_so_far, {', '.join(DRIFT)}.")


def drift_parts(name: str) -> tuple[str, int] | None:
    """Which moment, and of which norm layer, counted from 0.

    Example:
        >>> drift_parts("drift_var_2"), drift_parts("acc")
        (('var', 1), None)
    """
    found = re.fullmatch(r"drift_(mean|var)_([1-9]\d*)", name)
    return (found[1], int(found[2]) - 1) if found else None


def title_of(name: str) -> str:
    """As it is printed; a forgetting score of another definition than the paper's by its own name.

    Example:
        >>> title_of("fm"), title_of("fm_mammoth"), title_of("drift_var_2")
        ('FM', 'fm_mammoth', 'var of layer 2')
    """
    parts = drift_parts(name)
    return f"{parts[0]} of layer {parts[1] + 1}" if parts else TITLES.get(name, name)
