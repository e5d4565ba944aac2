"""Running moments that a conversion keeps for another signal: marked, warned of once, and cleared by new moments."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from tests.models import FrozenBatchNorm2d, ResNet

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def trained(norm: str = "bn", small: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) if small else ResNet()
    cn.convert_norm(model, norm, **options)
    for _ in range(3):
        model(torch.randn(6, 3, 16, 16))
    return model


def stale(model: nn.Module) -> int:
    return sum("stale moments" in row.state for row in cn.summarize(model))


def warned(run: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return sum("stale" in str(warning.message) for warning in seen)


@pytest.mark.parametrize(
    ("source", "target", "is_other"),
    [
        ("bn", "cn", True),
        ("cn", "bn", True),
        ("cn", "bn_gn", True),
        ("cn", "cn_tied", True),
        ("bn", "brn", False),
        ("bn", "bn_gn", False),
        ("sn", "bnt", False),
        ("bn", "gn", False),
    ],
)
def test_moments_are_stale_if_the_new_norm_normalizes_another_signal(source: str, target: str, is_other: bool) -> None:
    groups = [{"num_groups": 4} if any(part in norm for part in ("cn", "gn")) else {} for norm in (source, target)]
    model = cn.convert_norm(trained(source, **groups[0]), target, **groups[1]).eval()
    assert stale(model) == 20 * is_other
    assert [warned(lambda: model(X)), warned(lambda: model(X))] == [is_other, 0]


def test_other_groups_are_another_signal_and_synchronization_is_none() -> None:
    model = trained("cn", num_groups="auto")
    assert stale(cn.revert_sync(cn.convert_sync(model))) == 0
    assert stale(cn.convert_norm(model, "cn", num_groups=1)) == 20


def test_untrained_layers_have_no_stale_moments() -> None:
    model = cn.convert_norm(ResNet(), "cn", num_groups=2).eval()
    assert stale(model) == 0 and not warned(lambda: model(X))
    group = cn.convert_norm(nn.Sequential(nn.BatchNorm2d(3)), "gn", num_groups=3)
    assert not warned(lambda: cn.convert_norm(copy.deepcopy(group), "bn").eval()(X))
    nn.init.constant_(group[0].bias, 0.5)  # trained with a norm that has no moments
    assert warned(lambda: cn.convert_norm(group, "bn").eval()(X)) == 1 == stale(group)
    published = trained()
    for name, buffer in published.named_buffers():
        if "num_batches_tracked" in name:
            buffer.zero_()  # as in weights that were saved without a counter
    assert stale(cn.convert_norm(published, "cn", num_groups=2)) == 20


def test_undoing_a_conversion_restores_the_output_and_clears_the_mark() -> None:
    model = trained()
    expected = copy.deepcopy(model).eval()(X)
    for steps in (["cn", "bn"], ["cn", "cn_tied", "bn"]):
        for norm in steps:
            cn.convert_norm(model, norm, **({} if norm == "bn" else {"num_groups": 2}))
        assert stale(model) == 0 and torch.equal(copy.deepcopy(model).eval()(X), expected)
    cn.convert_norm(model, "cn", num_groups=2).train()(X)
    assert stale(cn.convert_norm(model, "bn")) == 20  # its moments are now of both signals


def test_reestimate_clears_the_mark_and_restores_it() -> None:
    model = cn.convert_norm(trained(), "cn", num_groups=2).eval()
    with cn.reestimate(model, [X]):
        assert stale(model) == 0 and not warned(lambda: model(X))
    assert stale(model) == 20 and warned(lambda: model(X)) == 1
    with pytest.raises(ValueError, match="no data"):
        cn.reestimate(model, [])
    assert stale(model) == 20
    cn.reestimate(model, [X])
    assert stale(model) == 0


def test_training_clears_the_mark_when_old_moments_weigh_less_than_one_percent() -> None:
    model = cn.convert_norm(trained(small=True), "cn", num_groups=2)
    for batches in range(1, 45):
        model(X)
        assert stale(model) == (1 if 0.9**batches >= 0.01 else 0)
    assert stale(model) == 0 and not warned(lambda: model.eval()(X))
    average = cn.convert_norm(trained(small=True), "cn", num_groups=2, momentum=None)
    for _ in range(10):
        average(X)
    assert stale(average) == 1  # 3 of 13 batches


def test_copies_and_files_have_the_mark(tmp_path: Path) -> None:
    model = cn.convert_norm(trained(), "cn", num_groups=2).eval()
    cn.save_model(model, tmp_path / "model.safetensors")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies += [cn.load_model(ResNet(), tmp_path / "model.safetensors").eval()]
    for each in (*copies, model):  # none of them has warned for another
        assert stale(each) == 20
        assert [warned(lambda: each(X)), warned(lambda: each(X))] == [1, 0]  # noqa: B023
    cn.load_model(model, tmp_path / "model.safetensors")
    state = cn.reestimate(model, [X]) and model.state_dict()
    assert stale(cn.convert_norm(trained(), "cn", num_groups=2)) == 20
    loaded = cn.convert_norm(trained(), "cn", num_groups=2)
    loaded.load_state_dict(state)
    assert stale(loaded) == 0


def test_the_warning_is_where_running_moments_are_used() -> None:
    batch, running = (cn.convert_norm(trained(), "cn", num_groups=2) for _ in range(2))
    assert warned(lambda: batch(X)) == 0
    cn.stats_mode(batch.eval(), "batch", update=False)
    assert warned(lambda: batch(X)) == 0
    cn.freeze_norms(running)
    assert warned(lambda: running(X)) == 1
    constant = cn.convert_norm(nn.Sequential(FrozenBatchNorm2d(8)), "cn", num_groups=2)
    assert warned(lambda: constant(torch.randn(2, 8, 3, 3))) == 1


@pytest.mark.slow
def test_marked_layers_compile_export_and_map() -> None:
    model = cn.convert_norm(trained(small=True), "cn", num_groups=2).eval()
    expected = copy.deepcopy(model)(X)
    assert stale(model) == 1
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), expected)
    torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), expected)
    parameters, buffers = torch.func.stack_module_state([copy.deepcopy(model), model])  # type: ignore[list-item]

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, (parameters, buffers), X)
        return output

    torch.testing.assert_close(torch.vmap(run)(parameters, buffers)[0], expected)
    assert warned(lambda: model(X)) == 1


# --- other words of a conversion ------------------------------------------------------------------------------------


def test_channels_per_group_is_a_number_of_groups_for_each_layer() -> None:
    model = cn.convert_norm(trained("cn", num_groups=2), "gn", channels_per_group=4)
    assert {int(row.channels) // int(row.groups) for row in cn.summarize(model)} == {4}
    assert cn.create_norm("cn", 24, channels_per_group=8).num_groups == 3
    for options in ({"channels_per_group": 5}, {"channels_per_group": 0}, {"channels_per_group": 4, "num_groups": 2}):
        with pytest.raises(ValueError, match="channels_per_group"):
            cn.convert_norm(model, "gn", **options)
    with pytest.raises(TypeError, match="channels_per_group"):
        cn.create_norm("bn", 24, channels_per_group=8)


def test_an_optimizer_that_misses_new_parameters_is_reported() -> None:
    model, other = ResNet(), ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cn.convert_norm(model, "cn", num_groups=2)
    cn.convert_norm(other, "sn")  # it has no optimizer
    with pytest.warns(UserWarning, match=r"mean_weight, var_weight.*SGD"):
        cn.convert_norm(model, "sn")
    assert len(optimizer.param_groups) == 1
