"""What a logger remembers about a run, in a small file, to continue its log and not to log it twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from contnorm.bench.loggers.base import LoggedRun

__all__ = ["LogState"]


@dataclass(frozen=True)
class LogState:
    """The state of a run's log.

    Attributes:
        id: Identifier of the run in the log, if it has one.
        step: Last step that was logged.
        names: Metrics that were logged at this step.
        status: As in `Logger.end`; ``"running"`` before.
        record: Seal of the record that the log was made of; None if it was made while the run was executed.
    """

    id: str = ""
    step: int = -1
    names: tuple[str, ...] = ()
    status: str = "running"
    record: str | None = None

    @classmethod
    def read(cls, path: Path) -> LogState | None:
        """Read a state; None if there is none, or if it is unreadable.

        Example:
            >>> LogState.read(Path("no such file")) is None
            True
        """
        try:
            raw = json.loads(path.read_text())
            return cls(str(raw["id"]), int(raw["step"]), tuple(raw["names"]), str(raw["status"]), raw["record"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the state; a process that is killed meanwhile leaves the old one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_text(json.dumps(asdict(self)))
        os.replace(draft, path)

    def with_metrics(self, step: int, names: Iterable[str]) -> LogState:
        """Return the state after metrics were logged at a step."""
        earlier = self.names if step == self.step else ()
        return replace(self, step=step, names=(*earlier, *names))

    def not_logged(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that the log does not have yet.

        Example:
            >>> LogState(step=40, names=("loss",)).not_logged(40, {"loss": 0.5, "accuracy/task_0": 90.0})
            {'accuracy/task_0': 90.0}
        """
        if step < self.step:
            return {}
        return {name: value for name, value in values.items() if step > self.step or name not in self.names}

    def is_complete(self, run: LoggedRun) -> bool:
        """Whether this is the complete log of the record that ``run`` is made of."""
        return run.record is not None and self.status in ("finished", "diverged") and self.record in (None, run.record)
