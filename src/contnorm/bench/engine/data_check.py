"""Comparison of the data on disk with the data of recorded runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from contnorm.bench.data.store import find_stored, read_manifest
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Store
from contnorm.bench.signals import raise_on_stop
from contnorm.errors import UserError

__all__ = ["DataCheck"]


class DataCheck:
    """Warns about records of other data than is on disk now. Such runs are not repeated.

    Args:
        environment: The environment of the runs.
        prepare: Called with the name of a data set before it is loaded.
    """

    def __init__(self, environment: RunEnvironment, prepare: Callable[[str], object] | None) -> None:
        self.environment, self.prepare = environment, prepare
        self._fingerprints: dict[str, str | None] = {}

    def check(self, job: Job, store: Store) -> None:
        """Warn if the data on disk is not that of a job's record."""
        name, path = job.source, store.path(job.config, job.seed)
        now = self._fingerprint(name)
        if now is None:
            return
        try:
            record = store.load_run(job.config, job.seed)
        except UserError as error:  # one broken record must not stop the other runs
            logging.getLogger("contnorm").warning(str(error))
            return
        was, data = record.raw.get("source", {}).get("fingerprint"), f"{name} in {self.environment.data_root}"
        if compare_fingerprints(was, now) is Match.DIFFERENT:
            logging.getLogger("contnorm").warning(
                f"{path}: is of other data (fingerprint {was}) than {data} ({now}), and is not run again. Move it "
                f"away, or use another folder for runs (--runs), to run it on this data."
            )
        elif find_stored(name, self.environment.data_root) and (why := not_comparable(was, now)):
            logging.getLogger("contnorm").warning(f"{path}: may be of other data than {data}: {why}.")

    def _fingerprint(self, name: str) -> str | None:
        """Return the fingerprint of a data set on disk; None if it is missing or can't be used."""
        if name not in self._fingerprints:
            try:
                self._fingerprints[name] = self._load(name)
            except UserError:  # a record can be shown without its data
                self._fingerprints[name] = None
        return self._fingerprints[name]

    def _load(self, name: str) -> str:
        folder = find_stored(name, self.environment.data_root)
        if folder is not None:
            return str(read_manifest(folder)["fingerprint"])
        with raise_on_stop():
            if self.prepare is not None:
                self.prepare(name)
            return self.environment.load(name).fingerprint
