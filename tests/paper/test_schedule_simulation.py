"""The simulated time of the whole paper: the scheduler, the costs, and the numbers of the page."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from contnorm.paper.schedule_simulation import (
    GPUS,
    LANES,
    WIDTHS_ON,
    choose_lanes,
    format_schedules,
    format_widths,
    load_costs,
    paper_jobs,
    simulate,
)

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "concepts" / "scaling.md"


def units(seconds: list[float]) -> list[tuple[float, tuple[()]]]:
    return [(each, ()) for each in sorted(seconds, reverse=True)]


def shortest(seconds: list[float], gpus: int) -> float:
    """The optimum over all assignments."""
    return min(
        max(sum(s for s, g in zip(seconds, chosen, strict=True) if g == gpu) for gpu in range(gpus))
        for chosen in itertools.product(range(gpus), repeat=len(seconds))
    )


def test_longest_first_is_within_the_proven_bound_of_the_optimum() -> None:
    rng = random.Random(0)
    for _ in range(20):
        gpus, seconds = rng.choice([2, 3]), [rng.uniform(1, 10) for _ in range(7)]
        time, busy = simulate(units(seconds), gpus, start=0.0, load=0.0)
        best = shortest(seconds, gpus)
        assert busy == pytest.approx(sum(seconds))
        assert best <= time * (1 + 1e-12) and time <= (4 / 3 - 1 / (3 * gpus)) * best * (1 + 1e-12)


def test_start_and_data_are_paid_once_by_each_worker() -> None:
    jobs = [job for job in paper_jobs(seeds=1) if job.config.stream.name == "split-cifar10"][:2]
    work = [(10.0, (job,)) for job in jobs]
    assert simulate(work, 1, start=7.0, load=2.0)[0] == 7 + 2 + 10 + 10
    assert simulate(work, 2, start=7.0, load=2.0)[0] == 7 + 2 + 10
    assert simulate(work, 9, start=7.0, load=2.0)[0] == 7 + 2 + 10


@pytest.mark.slow
def test_page_has_the_numbers_of_the_committed_records() -> None:
    """If records were added, run the command of the page again and copy its tables."""
    page = PAGE.read_text()
    files = re.findall(r"docs/records/\S+\.jsonl\.gz", page[page.index("```sh") :].partition("\n```\n")[0])
    jobs, costs = paper_jobs(), load_costs(ROOT / file for file in files)
    assert f"{len(jobs):,} runs" in page
    assert format_schedules([choose_lanes(jobs, costs, gpus) for gpus in GPUS]) in page
    widths = [choose_lanes(jobs, costs, WIDTHS_ON, [lanes]) for lanes in LANES]
    assert format_widths(widths) in page
    by_gpus = {gpus: choose_lanes(jobs, costs, gpus) for gpus in (16, 64, 256, 512)}
    assert f"train {100 * (by_gpus[64].busy / widths[-1].busy - 1):.0f} % longer than with 16 lanes" in page
    assert by_gpus[16].utilization > 0.9, "up to 16 GPUs the speedup is proportional"
    assert by_gpus[256].seconds == by_gpus[512].seconds, "from 256 GPUs on nothing is gained"
    longest = max({job.config for job in jobs}, key=costs.seconds)
    assert (longest.model.name, longest.stream.name) == ("resnet101", "nus-wideseq")
    assert by_gpus[512].seconds == pytest.approx(costs.seconds(longest) + 20 + 5)
    assert by_gpus[512].utilization < 1 / 3
