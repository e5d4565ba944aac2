"""`check_norm` passes norms of torch and a correct norm of a user, and each check fails for its defect."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contnorm.registry import NORMS, register_norm, unregister_norm
from contnorm.tags import current_tags
from contnorm.testing import NORM_CHECKS, NormCheckError, check_norm
from contnorm.testing.conformance import NormSubject
from tests.testing.norms import DEFECTS, CenteredNorm, Failing, StreamNorm

QUICK = [name for name, check in NORM_CHECKS.items() if not check.slow]
TORCH: dict[str, tuple[Any, dict[str, str]]] = {
    "batch": ({1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}, {}),
    "sync": (nn.SyncBatchNorm, {}),  # without a process group, which makes it a batch norm
    "group": (lambda channels, num_groups=2, affine=True: nn.GroupNorm(num_groups, channels, affine=affine), {}),
    "layer": (lambda channels: nn.GroupNorm(1, channels), {}),
    "instance": (
        {
            1: lambda channels: nn.InstanceNorm1d(channels, affine=True),
            2: lambda channels: nn.InstanceNorm2d(channels, affine=True),
            3: lambda channels: nn.InstanceNorm3d(channels, affine=True),
        },
        {"rank2": "an (N, C) input is taken for (C, L)"}
        | ({"exports": "its own error in torch.export"} if torch.__version__ < "2.8" else {}),
    ),
}


def spec_of(norm: Any, cannot: dict[str, str]) -> Any:
    register_norm("under-test", norm, cannot=cannot)
    spec = NORMS["under-test"]
    unregister_norm("under-test")
    return spec


@pytest.mark.parametrize("name", TORCH)
def test_norms_of_torch_pass(name: str) -> None:
    norm, cannot = TORCH[name]
    report = check_norm(spec_of(norm, cannot), checks=QUICK)
    assert not report.failed and len(report.passed) >= 23


def test_norms_of_torch_that_are_none_over_channels_fail() -> None:
    """LayerNorm normalizes the last dimension, and InstanceNorm has no weight by default."""
    with pytest.raises(NormCheckError, match="normalized_shape"):
        check_norm(nn.LayerNorm, checks=["output_like_input"])
    with pytest.raises(NormCheckError, match="1 of 1 checks: affine_parameters: it has no weight"):
        check_norm(nn.InstanceNorm2d, checks=["affine_parameters"])


@pytest.mark.parametrize("norm", [CenteredNorm, StreamNorm], ids=lambda norm: norm.__name__)
def test_norm_of_a_user_passes(norm: Any) -> None:
    report = check_norm(norm, checks=QUICK)
    assert not report.failed
    assert ("tags" in {result.check for result in report.passed}) and len(report.passed) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("norm", [CenteredNorm, StreamNorm, TORCH["batch"][0], TORCH["group"][0]])
def test_correct_norms_pass_the_slow_checks(norm: Any) -> None:
    report = check_norm(norm, checks=set(NORM_CHECKS) - set(QUICK))
    assert {result.check for result in report.passed} >= {"second_derivatives", "compiles"}


@pytest.mark.parametrize(("check", "norm", "words"), DEFECTS)
def test_check_catches_its_defect(check: str, norm: Any, words: str) -> None:
    (result,) = check_norm(norm, checks=[check], strict=True, raise_on_failure=False).results
    assert result.status == "failed" and words in result.reason


def test_report_has_failures_first_and_the_place_of_errors() -> None:
    report = check_norm(Failing, checks=["declared_ranks", "deterministic"], raise_on_failure=False)
    assert [line.split()[:2] for line in str(report).splitlines()[1:]] == [
        ["failed", "deterministic:"],
        ["skipped", "declared_ranks:"],
    ]
    assert "at norms.py, line " in report.failed[0].reason


def test_every_check_has_a_defective_norm() -> None:
    with_reference = {name for name in NORM_CHECKS if name.endswith("matches_reference")} | {"moments_match_reference"}
    compared = {"pickles", "declared_ranks", "exports", "exports_to_onnx", "compiles", "compiles_cumulative"}
    assert set(NORM_CHECKS) - with_reference - compared <= {check for check, _, _ in DEFECTS}


def test_reference_formula_is_compared() -> None:
    def wrong(layer: nn.Module, x: Tensor) -> tuple[Tensor, None]:
        return x.double() * 2, None

    report = check_norm("none", reference=wrong, raise_on_failure=False, checks=["training_matches_reference"])
    assert "against the reference: it differs by" in report.failed[0].reason


def test_declared_failures_are_not_failures() -> None:
    class Unweighted(nn.Module):
        cannot = {"affine_parameters": "it has none"}  # noqa: RUF012

        def __init__(self, num_features: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    report = check_norm(Unweighted, checks=["affine_parameters", "deterministic"])
    assert [r.check for r in report.declared] == ["affine_parameters"] and "it has none" in str(report)


def test_declaration_that_is_not_true_fails() -> None:
    class Careful(CenteredNorm):
        cannot = {"deterministic": "it is random"}  # noqa: RUF012

    with pytest.raises(NormCheckError, match=r"deterministic: it passes, but is declared in cannot"):
        check_norm(Careful, checks=["deterministic"])


def test_skipped_checks_are_not_run() -> None:
    report = check_norm(Failing, checks=["deterministic"], skip={"deterministic": "known"})
    assert [(r.status, r.reason) for r in report.results] == [("skipped", "known")]


@pytest.mark.parametrize(
    "arguments",
    [
        {"norm": "bn", "checks": ["nothing"]},
        {"norm": "bn", "skip": ["nothing"]},
        {"norm": nn.BatchNorm2d, "dims": [3]},
        {"norm": type("Odd", (CenteredNorm,), {"cannot": {"fly": "no wings"}})},
    ],
)
def test_unknown_names_and_dimensions_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="check_norm"):
        check_norm(**arguments)


def test_random_state_is_restored() -> None:
    before = torch.random.get_rng_state()
    check_norm("bn", checks=["deterministic", "momentum"])
    assert torch.equal(before, torch.random.get_rng_state())


class RecordingNorm(CenteredNorm):
    needs_tags = True

    def forward(self, x: Tensor) -> Tensor:
        self.tagged = current_tags(len(x)) is not None
        return super().forward(x)


def test_norm_that_needs_tags_gets_them_in_training_only() -> None:
    subject = NormSubject(spec_of(RecordingNorm, {}), (2,), torch.device("cpu"))
    layer: Any = subject.make()
    subject.run(layer, subject.data())
    assert layer.tagged
    subject.run(layer.eval(), subject.data())
    assert not layer.tagged
