"""Shared by all tests: the device they run on, and a fixed seed before each."""

import os

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests of layers and kernels run: cpu or cuda")


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
