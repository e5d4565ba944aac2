"""Checks of a norm as a module: copies, checkpoints, devices, functional transforms, conversion."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, cast

import torch
from torch import Tensor, nn

from contnorm.convert.conversion import convert_norm
from contnorm.testing.checks import norm_check
from contnorm.testing.subject import CHANNELS, DIM_OF_RANK, SHAPES, CheckSkipped, NormSubject, assert_close

_STOCK: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _trained(subject: NormSubject) -> nn.Module:
    layer = subject.make()
    subject.run(layer, subject.data())
    return layer


def _assert_twin(subject: NormSubject, twin: nn.Module, layer: nn.Module, what: str) -> None:
    x = subject.data(seed=2)
    for (name, a), b in zip(layer.state_dict().items(), twin.state_dict().values(), strict=True):
        if a.data_ptr() == b.data_ptr() and a.numel():
            raise AssertionError(f"{what} shares {name} with the layer.")
        if not torch.equal(a, b):
            raise AssertionError(f"{what} has another {name}.")
    for training in (False, True):  # training last: it changes moments
        a, b = (subject.run(copy.deepcopy(each).train(training), x) for each in (layer, twin))
        if not torch.equal(a, b):
            raise AssertionError(f"{what} gives other outputs {'in training' if training else 'in evaluation'} mode.")


@norm_check()
def copies(subject: NormSubject) -> None:
    """A deep copy has the same state and output, and shares no tensor with the layer."""
    layer = _trained(subject)
    _assert_twin(subject, copy.deepcopy(layer), layer, "its copy")


@norm_check()
def pickles(subject: NormSubject) -> None:
    """A layer that is pickled, or saved with ``torch.save``, has the same state and output after loading."""
    layer = _trained(subject)
    if "<locals>" in type(layer).__qualname__ or type(layer).__module__ == "__main__":
        raise CheckSkipped("its class is not defined in a module, where pickle finds it")
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    _assert_twin(subject, pickle.loads(pickle.dumps(layer)), layer, "the layer from pickle")
    _assert_twin(subject, torch.load(file, weights_only=False), layer, "the layer from torch.load")


@norm_check()
def state_dict_restores(subject: NormSubject) -> None:
    """Its ``state_dict()`` restores a new layer, so that checkpoints are complete."""
    layer, other = _trained(subject), subject.make_new().to(subject.device)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    _assert_twin(subject, other, layer, "a new layer with its state_dict()")


@norm_check(strict=True)
def batch_norm_keys(subject: NormSubject) -> None:
    """A norm with running moments loads the checkpoint of torch's batch norm, and the other way round."""
    subject.require_moments()
    stock, layer = _STOCK[DIM_OF_RANK[subject.rank]](CHANNELS).to(subject.device), subject.make()
    stock(subject.data())
    if list(layer.state_dict()) != list(stock.state_dict()):
        raise AssertionError(f"its state_dict() has {', '.join(layer.state_dict())}, unlike a batch norm's.")
    layer.load_state_dict(stock.state_dict())
    other = _STOCK[DIM_OF_RANK[subject.rank]](CHANNELS).to(subject.device)
    other.load_state_dict(layer.state_dict())
    for name, value in stock.state_dict().items():
        if not torch.equal(layer.state_dict()[name], value) or not torch.equal(other.state_dict()[name], value):
            raise AssertionError(f"its {name} is not that of the batch norm's checkpoint it loaded.")


@norm_check()
def moves_all_tensors(subject: NormSubject) -> None:
    """``to`` moves all its tensors to another dtype and device, and its forward follows."""
    layer = subject.make().to(torch.float64)
    wrong = [name for name, t in layer.state_dict().items() if t.dtype not in (torch.float64, torch.int64)]
    if wrong:
        raise AssertionError(f"{wrong[0]} is not converted by to(torch.float64).")
    layer.to("meta")
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    wrong = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if wrong:
        raise AssertionError(f"{wrong[0]} is not moved by to('meta').")
    if subject.needs_tags:
        return
    shape = SHAPES[subject.rank]
    y: Tensor = layer(torch.empty(shape, device="meta", dtype=torch.float64))
    if tuple(y.shape) != shape:
        raise AssertionError(f"its output on the meta device has shape {tuple(y.shape)}, and not {shape}.")


@norm_check()
def device_and_dtype(subject: NormSubject) -> None:
    """Its constructor creates all tensors on ``device``, and parameters in ``dtype``."""
    subject.require_options("device", "dtype")
    layer = subject.make(device="meta", dtype=torch.float64)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if not tensor.is_meta:
            raise AssertionError("a tensor is not created on the device that the constructor gets.")
    if any(parameter.dtype != torch.float64 for parameter in layer.parameters()):
        raise AssertionError("a parameter does not have the dtype that the constructor gets.")


@norm_check()
def functional_call(subject: NormSubject) -> None:
    """``torch.func.functional_call`` runs it with other parameters."""
    layer, twin, x = subject.make(), subject.make(), subject.data()
    other = {name: parameter * 2 for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    with subject.tags(len(x)):
        y = torch.func.functional_call(layer, other, (x,))
    assert_close(y, subject.run(twin, x), 1e-6, "its output in functional_call")


@norm_check()
def vmap(subject: NormSubject) -> None:
    """``torch.func.vmap`` and ``grad`` work over an ensemble of layers, in evaluation and without tracking."""
    for training in (True, False):
        options: dict[str, Any] = {}
        if training and subject.has_moments:
            if not subject.accepts("track_running_stats"):
                continue  # vmap can't update buffers
            options["track_running_stats"] = False
        layers = [subject.make(**options).train(training) for _ in range(3)]
        for i, layer in enumerate(layers):
            with torch.no_grad():
                for tensor in (*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())):
                    tensor.add_(0.1 * i)
        _check_ensemble(subject, layers)


def _check_ensemble(subject: NormSubject, layers: list[nn.Module]) -> None:
    parameters, buffers = torch.func.stack_module_state(layers) if list(layers[0].parameters()) else ({}, {})
    batches = torch.stack([subject.data(seed=i) for i in range(3)])
    slope = subject.data(seed=20)

    def loss(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layers[0], (parameters, buffers), (x,))
        return (y * slope).sum()

    with subject.tags(batches.shape[1]):
        together = torch.func.vmap(torch.func.grad(loss, argnums=2), in_dims=(0, 0, 0))(parameters, buffers, batches)
    for i, layer in enumerate(layers):
        x = batches[i].clone().requires_grad_()
        with subject.tags(len(x)):
            (layer(x) * slope).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(together[i], x.grad, rtol=1e-4, atol=1e-5)


@norm_check()
def conversion(subject: NormSubject) -> None:
    """`contnorm.convert_norm` replaces torch's batch norm by it, and keeps the weight as the same object."""
    dim = DIM_OF_RANK[subject.rank]
    model = nn.Sequential(_STOCK[dim](CHANNELS)).to(subject.device)
    model(subject.data(seed=1))
    old: Any = model[0]
    groups: dict[str, Any] = {"num_groups": 2} if subject.spec.grouped else {}
    convert_norm(model, subject.spec, **{**groups, **subject.options})
    new: Any = model[0]
    if type(new) is not subject.layer_class:
        raise AssertionError(f"the converted layer is {type(new).__name__} and not {subject.layer_class.__name__}.")
    weight = new._parameters.get("weight")
    if weight is not None and weight.shape == old.weight.shape and weight is not old.weight:
        raise AssertionError("its weight after a conversion is not that of the batch norm.")
    if subject.has_moments and new.running_mean.shape == old.running_mean.shape:
        assert_close(cast(Tensor, new.running_mean), old.running_mean, 0.0, "its running_mean after a conversion")
    subject.run(new, subject.data())
