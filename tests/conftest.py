"""Shared by all tests: the device they run on, and a fixed seed before each."""

import os

import pytest
import torch

from tests.integrations.conformance import Outcomes, describe, load_records, write_records

outcomes = Outcomes()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests of layers and kernels run: cpu or cuda")
    parser.addoption(
        "--record-integrations", action="store_true", help="write the records of the conformance table of integrations"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tests run on small copies of published data sets, also in processes of their own. Tests of the refusal unset it.
    os.environ["CONTNORM_ALLOW_MISSING"] = "1"
    # Two workers on two cores: threads inside each would only get in each other's way.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Add the feature of an integration that a test shows to its report, which workers send to the main process."""
    report = yield
    for mark in item.iter_markers("feature"):
        report.user_properties.append(("feature", list(mark.args)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcomes.complete |= "test_conformance.py" in report.nodeid
    if report.when == "call" or report.outcome != "passed":
        for name, value in report.user_properties:
            if name == "feature":
                outcomes.add(*value, report.outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the integrations that could not be tested here, with their last recorded run; write records if asked to."""
    config = terminalreporter.config
    untested = [raw for raw in load_records() if outcomes.complete and not outcomes.was_run(raw["framework"])]
    if untested:
        terminalreporter.section("integrations that were not tested here, and their last recorded run")
        for raw in untested:
            terminalreporter.line(describe(raw))
    if config.getoption("--record-integrations"):
        for path in write_records(outcomes, config.getoption("--device")):
            terminalreporter.line(f"wrote {path}")
