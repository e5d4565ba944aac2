"""What norm stands where in a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.detect import Recognized, recognize
from contnorm.moments.freeze import is_frozen

__all__ = ["NormRow", "NormSummary", "summarize"]


@dataclass(frozen=True)
class NormRow:
    """One norm layer: where it stands, what it is, and how it is set."""

    layer: str
    norm: str
    kind: str
    channels: str
    groups: str
    eps: str
    momentum: str
    state: str


@dataclass(frozen=True)
class NormSummary:
    """A table that prints itself; iterating gives its rows."""

    model: str
    rows: tuple[NormRow, ...]

    def __iter__(self) -> Iterator[NormRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.model}: no norm layers"
        heads = ("layer", "norm", "class", "channels", "groups", "eps", "momentum", "state")
        table = [heads, *(astuple(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        right = {"channels", "groups", "eps", "momentum"}
        lines = [
            "  ".join(
                cell.rjust(width) if head in right else cell.ljust(width)
                for head, cell, width in zip(heads, row, widths, strict=True)
            ).rstrip()
            for row in table
        ]
        counted = Counter(row.norm for row in self.rows)
        total = ", ".join(f"{count} {norm}" for norm, count in counted.items())
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], f"{self.model}: {total}"])

    __repr__ = __str__


def summarize(model: nn.Module) -> NormSummary:
    """What norm stands where in a model, as a table that prints itself.

    A layer reached by several names is listed once, by the first. ``?`` is a layer that normalizes in a way unknown
    here; ``one group`` and ``one channel a group`` mark group steps that are a layer norm and an instance norm.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GroupNorm(4, 16)).eval()
        >>> summarize(model)
        layer  norm  class        channels  groups    eps  momentum  state
        ------------------------------------------------------------------
        1      bn    BatchNorm1d        16       -  1e-05       0.1  eval
        2      gn    GroupNorm          16       4  1e-05         -  eval
        Sequential: 1 bn, 1 gn
    """
    rows = []
    for name, module in check_model(model, "summarize").named_modules():
        found = recognize(module)
        if found is not None:
            rows.append(_row(name, module, found if isinstance(found, Recognized) else None))
    return NormSummary(type(model).__name__, tuple(rows))


def _row(name: str, module: nn.Module, found: Recognized | None) -> NormRow:
    options = found.options if found else {}
    return NormRow(
        layer=name or "(the model)",
        norm=found.norm if found else "?",
        kind=type(module).__name__,
        channels=str(found.channels if found else getattr(module, "num_features", 0) or "?"),
        groups=str(options.get("num_groups", "-")),
        eps=_short(options.get("eps")),
        momentum=str(options["momentum"]) if "momentum" in options else "-",
        state=_state(module, found),
    )


def _extreme_groups(found: Recognized | None) -> list[str]:
    """Marks groups that make layer or instance norm of a group step, as one group does, or one for each channel."""
    groups = found.options.get("num_groups") if found else None
    if found is None or not isinstance(groups, int) or found.channels == 1:
        return []
    return {1: ["one group"], found.channels: ["one channel a group"]}.get(groups, [])


def _short(eps: object) -> str:
    return f"{eps:g}" if isinstance(eps, float) else "-"


def _state(module: nn.Module, found: Recognized | None) -> str:
    words = ["train" if module.training else "eval"]
    if getattr(module, "use_running", False) or (found and found.constant):
        words.append("constant")
    elif is_frozen(module):
        words.append("frozen")
    if found and found.synced:
        words.append("synced")
    words += _extreme_groups(found)
    if found and found.acts:
        words.append("then acts")
    return ", ".join(words)
