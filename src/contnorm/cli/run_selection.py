"""The runs that a command selects by path, hash and conditions, and the unfinished ones among them. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from contnorm.bench.archives import is_archive
from contnorm.bench.record_sets import RecordSet, drop_duplicates, drop_finished
from contnorm.bench.records import NoFinishedRunError, Store
from contnorm.bench.runs import Runs
from contnorm.bench.selection import RunLike, no_match, setting_keys
from contnorm.bench.unfinished import UnfinishedRun, unfinished_runs
from contnorm.errors import UserError

__all__ = ["find_unfinished", "load_selection", "naming_unfinished", "no_runs", "unfinished_lines"]


def load_selection(
    store: Store,
    names: Sequence[str] | None,
    where: Sequence[str],
    unfinished: Sequence[UnfinishedRun] = (),
    need_scores: bool = True,
) -> tuple[Runs, list[str]]:
    """Load the records with some names, or all, that meet all conditions; and the keys of all settings in the store.

    Args:
        store: Records in which hashes are searched.
        names: Paths, or prefixes of run hashes; None for all records of the store.
        where: Conditions.
        unfinished: Unfinished runs, which the message names if there are no others.
        need_scores: Whether at least one run must have finished; otherwise diverged runs suffice.

    Raises:
        UserError: If no such run is selected, with the reason.
    """
    with naming_unfinished(store.root):
        parts = [store.search(name) for name in names] if names else [store.load_all()]
    problems = list(dict.fromkeys(problem for part in parts for problem in part.problems))
    records = drop_duplicates([record for part in parts for record in part.records], problems)
    finished = {(record.hash, record.seed) for record in records}
    diverged = drop_finished((run for part in parts for run in part.diverged_runs), finished)
    every = Runs.of(RecordSet(records, problems, diverged))
    if not every.records and (need_scores or not every.diverged):
        raise UserError("; ".join(problems) or no_runs(store.root, bool(every.diverged), unfinished))
    items: list[RunLike] = [*every.records, *every.diverged]
    keys = setting_keys(items)
    selected = every.where(*where)
    if need_scores and selected.diverged and not selected.records:
        raise UserError(f"all runs with {' '.join(where)} diverged, so they have no scores.")
    if not selected.records and not selected.diverged:
        raise UserError(no_match(items, where))
    return selected, keys


def no_runs(root: Path, diverged: bool, unfinished: Sequence[UnfinishedRun] = ()) -> str:
    """Message about a folder without finished runs."""
    lines = unfinished_lines(unfinished)
    hint = lines[0] if lines else "Make one: contnorm run --norm cn"
    return f"no finished runs under {root}{', all diverged' if diverged else ''}. {hint}"


def find_unfinished(names: Sequence[str] | None, root: Path) -> list[UnfinishedRun]:
    """Unfinished runs under a folder, or among the runs with some names."""
    if not names:
        return [] if is_archive(root) else unfinished_runs(root)
    by_folder: dict[Path, UnfinishedRun] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            runs = unfinished_runs(path)
        else:
            runs = [] if path.exists() else [run for run in unfinished_runs(root) if run.hash.startswith(name)]
        by_folder |= {run.folder: run for run in runs}
    return list(by_folder.values())


def unfinished_lines(unfinished: Sequence[UnfinishedRun]) -> list[str]:
    """One line that counts unfinished runs and names the command that resumes them; none without such runs.

    Example:
        >>> unfinished_lines([UnfinishedRun(Path("runs/75cc0f1e2d3b/0.unfinished"), None, 20, False, {})])
        ['1 unfinished run (1 stopped). Resume with: contnorm resume --runs runs']
    """
    if not unfinished:
        return []
    stopped = [run for run in unfinished if not run.running]
    numbers = {"in progress": len(unfinished) - len(stopped), "stopped": len(stopped)}
    counts = [f"{count} {name}" for name, count in numbers.items() if count]
    runs = f"{len(unfinished)} unfinished run{'' if len(unfinished) == 1 else 's'}"
    # The folders of these runs: runs that are named by their path need not be in the folder of --runs.
    folders = dict.fromkeys(str(run.folder.parent.parent) for run in stopped)
    commands = " and ".join(f"contnorm resume --runs {shlex.quote(folder)}" for folder in folders)
    return [f"{runs} ({', '.join(counts)}).{f' Resume with: {commands}' if stopped else ''}"]


@contextmanager
def naming_unfinished(root: Path) -> Iterator[None]:
    """If a query in the block matches unfinished runs only, say so in its error, with the command that resumes them."""
    try:
        yield
    except NoFinishedRunError as error:
        if lines := unfinished_lines(find_unfinished([error.query], root)):
            raise UserError(f"{error.reason} {lines[0]}") from None
        raise
