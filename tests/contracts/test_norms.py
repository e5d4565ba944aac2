"""Conformance of every norm of the registry, with `contnorm.testing`, and the messages of this package's layers.

A norm added to the registry needs no new test, only a formula in `tests/float64_norms.py`. Features that a norm does
not support are declared in its registry entry (`cannot`), with the reason, and the checks must fail there.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from contnorm import stats_mode
from contnorm.kernels.cpp import unavailable_reason
from contnorm.registry import NORMS, NormInfo
from contnorm.testing import NORM_CHECKS, check_norm
from contnorm.testing.conformance import CHANNELS, NormSubject
from tests.contracts.formulas import reference, setting
from tests.float64_norms import FLOAT64_NORMS

# Every norm, and continual normalization also with the implementations that `auto` does not select in training, or for
# large inputs only.
OPTIONS: dict[str, dict[str, object]] = {
    **{name: {} for name in NORMS},
    "cn-analytic": {"kernel": "analytic"},
    "cn-cpp": {},
}
SLOW = [name for name, check in NORM_CHECKS.items() if check.slow]
QUICK = [name for name in NORM_CHECKS if name not in SLOW]
# The quick checks in three parts, so that no test takes a second.
CHECKS = [QUICK[part::3] for part in range(3)] + [pytest.param([name], marks=pytest.mark.slow) for name in SLOW]

every_norm = pytest.mark.parametrize("spec", NORMS.values(), ids=NORMS)
every_moment_norm = pytest.mark.parametrize(
    "spec", [s for s in NORMS.values() if s.keeps_moments], ids=lambda s: s.name
)


def subject(spec: NormInfo) -> NormSubject:
    return NormSubject(spec, (1, 2, 3), torch.device("cpu"), reference(spec))


def make(spec: NormInfo, rank: int = 4, **options: Any) -> Any:
    return subject(spec).make(rank, **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda checks: checks[0])
def test_conforms(checks: list[str], name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cn-cpp":
        if (reason := unavailable_reason()) is not None:
            pytest.skip(reason)
        monkeypatch.setattr("contnorm.kernels.cpp.SMALLEST", 1)
    spec = NORMS[name.partition("-")[0]]
    check_norm(spec, checks=checks, options=OPTIONS[name], reference=reference(spec), strict=True, device=device)


def test_few_checks_are_skipped() -> None:
    """Only those that do not apply: a check that skips everything would check nothing."""
    skipped = {
        result.check
        for result in check_norm(
            "cn",
            checks=QUICK,
            reference=reference(NORMS["cn"]),
            strict=True,
        ).skipped
    }
    assert skipped == {"declared_ranks", "task_hooks", "auxiliary_loss", "replay_request", "update_bn"}


@every_norm
def test_has_a_float64_reference(spec: NormInfo) -> None:
    assert spec.name in FLOAT64_NORMS, f"write the float64 formula of {spec.name!r} in tests/float64_norms.py"


def test_float64_references_have_all_parameters() -> None:
    """The reference gets each parameter of each norm; add a new kind of parameter to `setting`."""
    for spec in NORMS.values():
        layer = make(spec)
        known = {"weight", "bias", *setting(layer).extra}
        assert {name for name, _ in layer.named_parameters()} <= known


# --- layers of this package ----------------------------------------------------------------------------------------


@every_moment_norm
def test_one_value_per_channel_raises_as_in_torch(spec: NormInfo) -> None:
    layer, x = make(spec, 2), subject(spec).data(2, size=1)
    for one in (layer, nn.BatchNorm1d(CHANNELS)):
        with pytest.raises(ValueError, match="Expected more than 1 value"):
            one(x)
    assert layer.num_batches_tracked.item() == 0  # a batch that raises is not counted
    assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))


@every_norm
def test_repr_shows_class_and_options(spec: NormInfo) -> None:
    shown = repr(make(spec))
    assert str(CHANNELS) in shown
    assert not spec.grouped or "num_groups=2" in shown
    assert all(f"{key}={value!r}" in shown for key, value in spec.preset.items())
    assert repr(copy.deepcopy(make(spec))) == shown


@every_moment_norm
def test_frozen_moments_cannot_be_reset(spec: NormInfo) -> None:
    layer = make(spec)
    layer.stats_frozen = True
    with pytest.raises(RuntimeError, match="frozen and can't be reset"):
        layer.reset_running_stats()


@every_moment_norm
def test_use_running_normalizes_with_constants(spec: NormInfo, device: torch.device) -> None:
    """`use_running`, the conversion of FrozenBatchNorm2d: training equals evaluation, and nothing is updated."""
    layer, x = make(spec).to(device), subject(spec).data().to(device)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    expected, _ = reference(spec)(layer.eval(), x)
    layer.use_running = True
    torch.testing.assert_close(layer.train()(x).double().cpu(), expected, rtol=2e-6, atol=2e-6)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@every_norm
def test_wrong_input_raises(spec: NormInfo) -> None:
    layer = make(spec)
    with pytest.raises(ValueError, match=r"expected 4-d input with 8 channels .* got shape \(6, 8\)"):
        layer(subject(spec).data(2))
    with pytest.raises(ValueError, match=r"expected 4-d input with 8 channels .* got shape \(2, 3, 4, 4\)"):
        layer(torch.zeros(2, 3, 4, 4))
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match="expected a floating-point input"):
            layer(torch.zeros(2, 8, 4, 4).to(dtype))


@every_moment_norm
def test_layers_without_batch_counter_match_torch(spec: NormInfo) -> None:
    """Torch's batch norm accepts a counter of None: moments are updated, and nothing is counted."""
    layer, twin, x = make(spec), make(spec), subject(spec).data()
    layer.num_batches_tracked = None
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(layer.running_mean, twin.running_mean)
    cumulative = make(spec, momentum=None)
    cumulative.num_batches_tracked = None
    with pytest.raises(ValueError, match="momentum=None needs the counter"):
        cumulative(x)


OWN_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adab2n": [{"kappa": 1.5}, {"lam": -0.1}, {"ada_t0": 100}],
    "bnt": [{"balanced_size": 0}],
    "brn": [{"r_max": 0.5}, {"d_max": float("inf")}, {"total_steps": 0}],
    "cn": [{"order": "bn"}, {"kernel": "fast"}],
    "dyt": [{"alpha_init": -1.0}],
    "iabn": [{"k": float("nan")}],
}


@every_norm
def test_wrong_arguments_raise(spec: NormInfo) -> None:
    wrong: list[dict[str, Any]] = [{"eps": -1e-5}, {"eps": 8}] if spec.name not in ("none", "dyt") else []
    wrong += [{"momentum": 1.5}, {"momentum": -0.1}] if spec.keeps_moments else []
    wrong += [{"num_groups": 3}, {"num_groups": 0}, {"num_groups": "many"}] if spec.grouped else []
    for options in wrong + OWN_OPTIONS.get(spec.name, []):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(spec, **options)


@pytest.mark.parametrize("reentrant", [False, True])
@every_moment_norm
def test_checkpointing_updates_moments_once(spec: NormInfo, reentrant: bool) -> None:
    """Gradients are those of a plain pass, also of norms whose moments take part in training; so are the moments."""
    options = {"total_steps": 10} if spec.name == "brn" else {}
    plain, twin = (make(spec, **options).train() for _ in range(2))
    for layer in (plain, twin):
        for seed in range(4):  # after the first steps of the ramps of batch renorm
            layer(subject(spec).data(seed=seed))
    for seed in (8, 8, 9):  # the same batch in two steps: each has the moments of its own forward
        grads = []
        for layer, runs in ((plain, plain), (twin, partial(checkpoint, twin, use_reentrant=reentrant))):
            inputs = [subject(spec).data(seed=seed + 10 * i).requires_grad_() for i in range(2)]
            outputs = [runs(x) for x in inputs]  # two forwards before the backward, as of a batch and its replay
            torch.autograd.backward(outputs, [subject(spec).data(seed=i) for i in range(2)])
            grads.append([x.grad for x in inputs] + [p.grad.clone() for p in layer.parameters() if p.grad is not None])
        for expected, actual in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected)  # sums of two gradients, in either order
    for expected, actual in zip(plain.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("wraps", [False, True])
def test_gradients_through_running_moments_that_are_updated(wraps: bool) -> None:
    """With ``stats_mode(model, "running")``, backward has the moments that normalized the batch, before the update."""
    layer, x = make(NORMS["bn"]).train(), subject(NORMS["bn"]).data().requires_grad_()
    expected = (layer.weight / (layer.running_var + layer.eps).sqrt()).detach()
    stats_mode(layer, "running")
    (checkpoint(layer, x, use_reentrant=False) if wraps else layer(x)).sum().backward()
    assert x.grad is not None and int(layer.num_batches_tracked) == 1
    torch.testing.assert_close(x.grad, expected[:, None, None].expand_as(x[0]).expand_as(x))


@pytest.mark.parametrize("name", ["cn", "bn_gn", "sn", "iabn", "hbn"])
def test_exports_for_any_batch_and_size_of_images(name: str) -> None:
    """``torch.export`` takes the place of ``torch.jit.trace``, which is tied to the size of its example."""
    model, dynamic = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), make(NORMS[name])).eval(), torch.export.Dim.DYNAMIC
    program = torch.export.export(
        model, (torch.randn(4, 3, 9, 9),), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},)
    )
    x = torch.randn(7, 3, 12, 11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)  # float32, another order of sums
