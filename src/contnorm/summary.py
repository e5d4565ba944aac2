"""Tabular summary of the norm layers of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.detect import DetectedNorm, detect_norm
from contnorm.moments.freeze import is_frozen

__all__ = ["NormRow", "NormSummary", "summarize"]


@dataclass(frozen=True)
class NormRow:
    """One norm layer: its name in the model, its norm, its class, its options and its state."""

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
    """Table of norm layers. Printing it shows the table; iterating over it yields its rows."""

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
    """List the norm layers of a model in a printable table.

    A layer that is registered under several names is listed once, under the first. The norm ``?`` marks a layer that
    normalizes but is not a known norm. ``one group`` and ``one channel a group`` mark group steps that are equivalent
    to layer norm and instance norm.

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
        result = detect_norm(module)
        if result is not None:
            rows.append(_row(name, module, result if isinstance(result, DetectedNorm) else None))
    return NormSummary(type(model).__name__, tuple(rows))


def _row(name: str, module: nn.Module, detected: DetectedNorm | None) -> NormRow:
    options = detected.options if detected else {}
    return NormRow(
        layer=name or "(the model)",
        norm=detected.norm if detected else "?",
        kind=type(module).__name__,
        channels=str(detected.channels if detected else getattr(module, "num_features", 0) or "?"),
        groups=str(options.get("num_groups", "-")),
        eps=_short(options.get("eps")),
        momentum=str(options["momentum"]) if "momentum" in options else "-",
        state=_state(module, detected),
    )


def _extreme_groups(detected: DetectedNorm | None) -> list[str]:
    """Return a mark if the number of groups makes the group step a layer norm or an instance norm."""
    groups = detected.options.get("num_groups") if detected else None
    if detected is None or not isinstance(groups, int) or detected.channels == 1:
        return []
    return {1: ["one group"], detected.channels: ["one channel a group"]}.get(groups, [])


def _short(eps: object) -> str:
    return f"{eps:g}" if isinstance(eps, float) else "-"


def _state(module: nn.Module, detected: DetectedNorm | None) -> str:
    words = ["train" if module.training else "eval"]
    if getattr(module, "use_running", False) or (detected and detected.constant):
        words.append("constant")
    elif is_frozen(module):
        words.append("frozen")
    if detected and detected.synced:
        words.append("synced")
    words += _extreme_groups(detected)
    if detected and detected.per_position:
        words.append("each position")
    if detected and detected.acts:
        words.append("then acts")
    return ", ".join(words)
