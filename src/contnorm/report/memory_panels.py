"""Figure of class shares in the memory compared with the stream, with one panel per task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.escape import escape_html
from contnorm.bench.memory_stats import Census
from contnorm.bench.records import Record
from contnorm.report.plot import COLOURS

__all__ = ["has_memory", "memory_panels"]

WIDTH, LEFT, RIGHT, TOP = 640, 58, 14, 40
PANEL, GAP = 92, 16  # height of a panel, and the gap between two
BELOW = 62  # room for the axis label and the legend
MARKS = (0.0, 1.0, 5.0, 10.0, 20.0, 40.0, 60.0, 100.0)
LABEL = "class, from the one the stream showed most to the one it showed least"

Shares = list[float]  # by class, in percent of all labels


def has_memory(record: Record) -> bool:
    """Whether a record has the content of its run's memory."""
    census = record.raw.get("census")
    return census is not None and census["capacity"] > 0


def memory_panels(records: Sequence[Record], title: str) -> str:
    """Percentage of each class among the labels in the memory and in the stream so far, averaged over seeds."""
    censuses = [Census.from_json(record.raw["census"]) for record in records]
    held, shown = (
        [_mean_shares([getattr(c, name)[task] for c in censuses]) for task in range(min(len(c.held) for c in censuses))]
        for name in ("held", "shown")
    )
    order = sorted((c for c, share in enumerate(shown[-1]) if share), key=lambda c: (-shown[-1][c], c))
    top = max(max(row) for row in (*held, *shown)) * 1.05 or 1.0  # 1.0 if nothing was shown, as in a run of no steps
    height = TOP + (PANEL + GAP) * len(held) + BELOW
    says = f"{title}. {_summary(records[0], held[-1], shown[-1])}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape_html(says)}" '
            f'viewBox="0 0 {WIDTH} {height}" font-size="12" fill="currentColor">',
            f'<text x="{WIDTH / 2:g}" y="16" font-size="14" text-anchor="middle">{escape_html(title)}</text>',
            *(
                line
                for task, (memory, stream) in enumerate(zip(held, shown, strict=True))
                for line in _panel(task, [memory[c] for c in order], [stream[c] for c in order], top)
            ),
            *_below(TOP + (PANEL + GAP) * len(held) - GAP),
            "</svg>",
        ]
    )


def _mean_shares(counts: Sequence[Sequence[int]]) -> Shares:
    """Mean over seeds of each class's percentage; zeros if there are no labels yet."""
    rows = [[100 * count / (sum(row) or 1) for count in row] for row in counts]
    return [fmean(column) for column in zip(*rows, strict=True)]


def _summary(record: Record, held: Shares, shown: Shares) -> str:
    groups = record.raw["classes"]["groups"]
    parts = []
    for group in GROUPS:
        in_stream, in_memory = (
            sum(s for s, name in zip(row, groups, strict=True) if name == group) for row in (shown, held)
        )
        parts.append(
            f"{group} classes {in_memory:.1f} percent of the memory's labels and {in_stream:.1f} of the stream's"
        )
    return f"At the end: {'; '.join(parts)}."


def _panel(task: int, memory: Shares, stream: Shares, top: float) -> Iterator[str]:
    first = TOP + (PANEL + GAP) * task
    floor, room = first + PANEL, (WIDTH - LEFT - RIGHT) / max(len(memory), 1)

    def y(share: float) -> float:  # square-root scale: rare classes stay visible, and zero stays zero
        return floor - PANEL * math.sqrt(share / top)

    for place, share in enumerate(memory):
        if share:
            size = f'width="{0.8 * room:.1f}" height="{floor - y(share):.1f}"'
            yield f'<rect x="{LEFT + (place + 0.1) * room:.1f}" y="{y(share):.1f}" {size} fill="{COLOURS[0]}"/>'
    steps = (f"{LEFT + (p + end) * room:.1f},{y(share):.1f}" for p, share in enumerate(stream) for end in (0, 1))
    yield f'<polyline points="{" ".join(steps)}" fill="none" stroke="{COLOURS[1]}" stroke-width="1.8"/>'
    yield f'<path d="M{LEFT} {first}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="currentColor"/>'
    yield f'<text x="{WIDTH - RIGHT}" y="{first + 10}" text-anchor="end">after task {task + 1}</text>'
    last = math.inf
    for mark in (mark for mark in MARKS if mark <= top):
        if last - y(mark) >= 13:  # skip ticks whose labels would overlap
            last = y(mark)
            yield f'<path d="M{LEFT} {last:.1f}h-4" stroke="currentColor"/>'
            yield f'<text x="{LEFT - 7}" y="{last + 4:.1f}" text-anchor="end">{mark:g}</text>'


def _below(floor: int) -> Iterator[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:g}" y="{floor + 20}" text-anchor="middle">{LABEL}</text>'
    turned = f'transform="translate(14 {(TOP + floor) / 2:g}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle">percent of all labels, root scale</text>'
    y = floor + 46
    yield f'<rect x="{LEFT + 4}" y="{y - 10}" width="14" height="12" fill="{COLOURS[0]}"/>'
    yield f'<text x="{LEFT + 30}" y="{y}">in the memory</text>'
    yield f'<path d="M{LEFT + 160} {y - 4}h22" stroke="{COLOURS[1]}" stroke-width="1.8"/>'
    yield f'<text x="{LEFT + 190}" y="{y}">in the stream so far</text>'
