"""Measure the way of one run: the functions, files and frames between `bench.run` and the loss of its strategy.

    python -m tools.run_path            counts of a warm run of ten steps
    python -m tools.run_path --list     also every function, by file

The counts are those of the package's own code. Frames are without those of comprehensions. The first call, which
imports modules and decodes data, is not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import contnorm
from contnorm import bench

PACKAGE = str(Path(contnorm.__file__).parent)
LOSS = "bench/strategies/replay.py"


@dataclass
class Calls:
    """The calls of functions of the package."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    depth: int = 0  # own frames of the deepest call
    loss_stack: list[str] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        self.counts[file, frame.f_code.co_qualname] += 1
        stack = _own_frames(frame)
        self.depth = max(self.depth, len(stack))
        if file.endswith(LOSS) and frame.f_code.co_name == "loss" and not self.loss_stack:
            self.loss_stack = stack


def _own_frames(frame: FrameType | None) -> list[str]:
    stack = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            stack.append(f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return stack[::-1]


def measure(call: Callable[[], object]) -> Calls:
    """Return the calls of a function, without those of its first execution."""
    call()
    calls = Calls()
    sys.setprofile(calls)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list every function")
    arguments = parser.parse_args()
    stream = bench.load_stream("permuted-mnist", source="digits", tasks=2, train_per_task=50)
    calls = measure(lambda: bench.run(stream, norm="cn", strategy="er", lanes=1))
    files = {file for file, _ in calls.counts}
    named = [key for key in calls.counts if not key[1].endswith(">")]  # without comprehensions and lambdas
    print(f"functions {len(named)}, with comprehensions {len(calls.counts)}, files {len(files)}")
    print(f"calls {calls.counts.total()}")
    print(f"own frames: deepest {calls.depth}, Strategy.loss {len(calls.loss_stack)}")
    print("\n".join(f"  {line}" for line in calls.loss_stack))
    if arguments.list:
        for file in sorted(files):
            names = [f"{name} {count}" for (own, name), count in sorted(calls.counts.items()) if own == file]
            print(f"{file[len(PACKAGE) + 1 :]}: {', '.join(names)}")


if __name__ == "__main__":
    main()
