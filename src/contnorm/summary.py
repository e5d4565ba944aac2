"""Tabular summary of the norm layers of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from contnorm.detect import DetectedNorm, detect_norm
from contnorm.moments.freeze import stale_moments, stats_state
from contnorm.norms.base import MomentNorm


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
    """Table of norm layers. Printing it shows the table; iterating over it yields its rows.

    ``no_batch_norms`` are the norms with running moments that tools which look for torch's batch norms leave alone.
    """

    model: str
    rows: tuple[NormRow, ...]
    no_batch_norms: tuple[str, ...] = ()

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
        lines.append(f"{self.model}: " + ", ".join(f"{count} {norm}" for norm, count in counted.items()))
        if self.no_batch_norms:
            lines.append(
                f"update_bn, convert_sync_batchnorm and freezing by class skip {', '.join(self.no_batch_norms)}: use "
                f"reestimate, convert_sync and freeze_norms."
            )
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

    __repr__ = __str__


def summarize(model: nn.Module) -> NormSummary:
    """List the norm layers of a model in a printable table.

    A layer that is registered under several names is listed once, under the first. The norm ``?`` marks a layer that
    normalizes but is not a known norm. The state says what `stats_mode` set: ``frozen`` (no updates), ``constant``
    (running moments in both modes, no updates), ``running moments`` or ``batch moments`` (in both modes). ``stale
    moments`` are those of the signal of another norm, kept by a conversion. ``one group`` and ``one channel a group``
    mark group steps that are equivalent to layer norm and instance norm.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GroupNorm(4, 16)).eval()
        >>> summarize(model)
        layer  norm  class        channels  groups    eps  momentum  state
        ------------------------------------------------------------------
        1      bn    BatchNorm1d        16       -  1e-05       0.1  eval
        2      gn    GroupNorm          16       4  1e-05         -  eval
        Sequential: 1 bn, 1 gn
    """
    rows, skipped = [], {}
    for name, module in model.named_modules():
        result = detect_norm(module)
        if result is None:
            continue
        rows.append(_row(name, module, result if isinstance(result, DetectedNorm) else None))
        if isinstance(module, MomentNorm) and not isinstance(module, _BatchNorm):
            skipped[rows[-1].norm] = True
    return NormSummary(type(model).__name__, tuple(rows), tuple(skipped))


def _row(name: str, module: nn.Module, detected: DetectedNorm | None) -> NormRow:
    options = detected.options if detected else {}
    eps, groups = options.get("eps"), options.get("num_groups")
    state = ["train" if module.training else "eval"]
    normalize, update = ("running", False) if detected and detected.constant else stats_state(module)
    if normalize == "running" and not update:
        state.append("constant")
    else:
        state += [f"{normalize} moments"] * bool(normalize) + ["frozen"] * (not update)
    if stale_moments(module):
        state.append("stale moments")
    if detected:
        if detected.synced:
            state.append("synced")
        if detected.channels > 1 and groups in (1, detected.channels):
            state.append("one group" if groups == 1 else "one channel a group")
        if detected.per_position:
            state.append("each position")
        if detected.acts:
            state.append("then acts")
    return NormRow(
        layer=name or "(the model)",
        norm=detected.norm if detected else "?",
        kind=type(module).__name__,
        channels=str(detected.channels if detected else getattr(module, "num_features", 0) or "?"),
        groups=str(options.get("num_groups", "-")),
        eps=f"{eps:g}" if isinstance(eps, float) else "-",
        momentum=str(options["momentum"]) if "momentum" in options else "-",
        state=", ".join(state),
    )
