"""The `power` command: numbers of seeds from recorded runs, and invalid input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from contnorm import bench

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = DOCS / "records" / "runs" / "split-cifar100-fresh-seeds.jsonl.gz"
Power = Callable[..., tuple[int, str, str]]


@pytest.fixture
def power(contnorm: Power) -> Power:
    return partial(contnorm, "power")


def cells(out: str) -> list[list[str]]:
    """Rows of the printed table."""
    return [line.split() for line in out.splitlines() if line[:1].isdigit()]


def test_table_in_the_documentation_is_the_printed_one(power: Power) -> None:
    code, out, err = power(RECORDS, "norm=bn", "norm=cn", "--where", "strategy=er")
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    assert code == 0 and not err
    assert f"```text\n{printed}\n```" in (DOCS / "howto" / "run-the-bench.md").read_text()


def test_command_prints_what_python_returns(power: Power) -> None:
    options = ("--difference", 1, "--difference", 3, "--cases", 20, "--power", 0.9, "--score", "fm")
    _, out, _ = power("norm=bn", "norm=cn", "--where", "strategy=er", "--runs", RECORDS, *options)
    runs = bench.load_runs(RECORDS).where("strategy=er")
    table = bench.power(runs.where(norm="bn"), runs.where(norm="cn"), "fm", differences=[1, 3], cases=20, power=0.9)
    assert cells(out) == [[f"{row.difference:g}", str(row.fixed), str(row.staged)] for row in table.rows]
    assert out.startswith("FM, ") and "probability of 90 %, at an error rate of 5 % over 20 comparisons" in out


def test_more_cases_and_smaller_differences_need_more_seeds() -> None:
    runs = bench.load_runs(RECORDS).where("strategy=er")
    pair = runs.where(norm="bn"), runs.where(norm="cn")
    one, many = bench.power(*pair), bench.power(*pair, cases=40)
    for rows in (one.rows, many.rows):
        assert [row.fixed for row in rows] == sorted((row.fixed or 0 for row in rows), reverse=True)
        assert all((row.staged or 0) >= (row.fixed or 0) for row in rows)
    assert all((b.fixed or 0) > (a.fixed or 0) for a, b in zip(one.rows, many.rows, strict=True))
    differences = bench.compare(*pair).differences
    mean = sum(differences) / len(differences)
    variance = sum((value - mean) ** 2 for value in differences) / (len(differences) - 1)
    assert one.std == pytest.approx(variance**0.5) and one.std_interval.holds(one.std)


def test_margin_out_of_reach_is_stated(power: Power) -> None:
    arguments = (RECORDS, "norm=bn", "norm=cn", "--where", "strategy=er")
    assert "equivalence within 0.1 is not to be expected" in power(*arguments, "--margin", 0.1)[1]
    assert "with 16 seeds the interval is" in power(*arguments, "--max-seeds", 20)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("norm=bn", "norm=cn", "--margin", "-1"), "margin=-1.0: use a number of points above 0."),
        (("norm=bn", "norm=cn", "--difference", "0"), "difference=0.0: use a number of points above 0."),
        (("norm=bn", "norm=cn", "--cases", "0"), "cases=0: use a whole number from 1 to 1,000,000."),
        (("norm=bn", "norm=cn", "--max-seeds", "7"), "max_seeds=7: use 8 or more"),
        (("norm=bn", "norm=cn", "--power", "1"), "power=1.0: use a number between 0 and 1."),
        (("norm=bn", "norm=cn", "--score", "nope"), "score 'nope': use one that both experiments have"),
        (("norm=bn", "norm=cn", "--difference", "much"), "Invalid value for '--difference'"),
        (("norm=bn", "norm=bn"), "all recorded differences are equal"),
        (("norm=bn",), "power: expected two runs, got 1. For example: contnorm power norm=bn norm=cn"),
        (("norm=bn", "norm=nope"), "nope"),
        (("norm=bn", "norm=cn,seed<101"), "needs two shared seeds or more, got 1"),
    ],
)
def test_invalid_input_is_one_line(power: Power, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = power(*arguments, "--runs", RECORDS, "--where", "strategy=er")
    assert code == 2 and not out and message in err and err.count("\n") == 1
