"""Weights & Biases: one run per run, in the project ``contnorm``, grouped by the hash of the settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contnorm.bench.loggers.base import LoggedRun, Logger
from contnorm.bench.loggers.log_state import LogState
from contnorm.bench.optional_libraries import import_library
from contnorm.errors import UserError

__all__ = ["WandbLogger"]

EXTRA = "wandb"
PROJECT = "contnorm"  # unless WANDB_PROJECT is set


class WandbLogger(Logger):
    """Logs to Weights & Biases. Its environment variables, such as WANDB_MODE and WANDB_PROJECT, are respected.

    A run that resumes continues the same W&B run; steps that were logged before are skipped.

    Args:
        folder: Folder of logs; the files of W&B are in its subfolder ``wandb``.

    Raises:
        UserError: If W&B is online and has no API key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._wandb = import_library("wandb", EXTRA)
        settings = self._wandb.setup().settings  # of the environment and of the files of W&B
        self._project = settings.project or PROJECT
        if settings.mode in ("online", "shared") and not self._wandb.login(prompt=False, verify=False):
            raise UserError("wandb: there is no API key. Run `wandb login`, or set WANDB_MODE=offline.")
        self._runs: dict[str, Any] = {}
        self._states: dict[str, LogState] = {}
        self._earlier: dict[str, LogState] = {}  # of the runs that are continued

    def start(self, run: LoggedRun) -> None:
        state = LogState.read(self._state_path(run))
        if state is not None and state.is_complete(run):
            return
        continued = state is not None and (run.done > 0 or (run.record is not None and run.record == state.record))
        if state is None or not continued:
            state = LogState(f"{run.id}-{secrets.token_hex(3)}", record=run.record)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._runs[run.id] = self._wandb.init(
            project=self._project,
            dir=str(self.folder),
            id=state.id,
            resume="allow",
            name=run.name,
            group=run.hash,
            config={**run.settings, "seed": run.seed, "hash": run.hash, "provenance": dict(run.provenance)},
            reinit="create_new",  # several runs are in progress at the same time
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self._earlier[run.id] = state
        self._save(run, replace(state, status="running"))

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        if run.id not in self._runs:
            return
        new = self._earlier[run.id].not_logged(step, values)
        if new:
            self._runs[run.id].log(new, step=step)
            self._save(run, self._states[run.id].with_metrics(step, new))

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        if run.id not in self._runs:
            return
        wandb_run = self._runs.pop(run.id)
        wandb_run.summary.update({"status": status, **({"reason": reason} if reason else {})})
        wandb_run.finish(exit_code=0 if status == "finished" else 1)
        self._save(run, replace(self._states[run.id], status=status))

    def close(self) -> None:
        for wandb_run in self._runs.values():
            wandb_run.finish(exit_code=1)
        self._runs.clear()

    def _state_path(self, run: LoggedRun) -> Path:
        return self.folder / "wandb" / "contnorm" / f"{run.id}.json"

    def _save(self, run: LoggedRun, state: LogState) -> None:
        self._states[run.id] = state
        state.write(self._state_path(run))
