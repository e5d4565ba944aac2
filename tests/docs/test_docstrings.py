"""Public names have a docstring with an example, which the doctests run."""

import pytest

import contnorm as cn
from contnorm import functional, testing
from tests.docs.pages import ROOT


@pytest.mark.parametrize("public", cn.__all__)
def test_public_names_are_documented_with_an_example(public: str) -> None:
    thing = getattr(cn, public)
    assert thing.__doc__ and ">>>" in thing.__doc__, f"contnorm.{public} needs a docstring with an example"


@pytest.mark.parametrize("public", sorted(set(testing.__all__) - {"NORM_CHECKS"}))  # a dict has no docstring
def test_names_of_testing_are_documented_with_an_example(public: str) -> None:
    page = (ROOT / "docs" / "howto" / "bring-your-own-norm.md").read_text()
    assert ">>>" in (getattr(testing, public).__doc__ or "")
    assert f"`{public}`" in page or f"testing.{public}" in page, f"bring-your-own-norm.md does not name {public}"


@pytest.mark.parametrize("public", functional.__all__)
def test_functions_are_documented_with_an_example(public: str) -> None:
    assert ">>>" in (getattr(functional, public).__doc__ or "")
