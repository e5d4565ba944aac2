"""Checks of a norm as a module: copies, transforms, conversion, tags of the bench, compiler and export."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from contnorm.convert.conversion import convert_norm
from contnorm.tags import ReplayRequest, batch_tags
from contnorm.testing.subject import CHANNELS, DIM_OF_RANK, SHAPES, CheckSkipped, NormSubject, assert_close, norm_check
from contnorm.testing.value_checks import MODES

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


_BALANCES = ("none", "class", "task")


def _definers(layer: nn.Module, name: str) -> list[Any]:
    return [module for module in layer.modules() if getattr(module, name, None) is not None]


@norm_check()
def tags(subject: NormSubject) -> None:
    """A norm with ``needs_tags = True`` trains with tags, and without them works or raises an error that names tags.

    In evaluation there are no tags. A norm without ``needs_tags`` gives the same output with and without them.
    """
    x = subject.data()
    if not subject.needs_tags:
        for training, mode in MODES:
            with subject.tags(len(x)):
                tagged = subject.make().train(training)(x)
            if not torch.equal(tagged, subject.make().train(training)(x)):
                raise AssertionError(f"tags change its output in {mode} mode, but it does not set needs_tags = True.")
        return
    with subject.tags(len(x)):
        y = subject.make()(x)
    if y.shape != x.shape or not y.isfinite().all():
        raise AssertionError(f"its output with tags has shape {tuple(y.shape)}, or values that are not finite.")
    subject.make().eval()(x)
    try:
        with batch_tags(None):
            subject.make()(x)
    except (ValueError, RuntimeError) as error:
        if "tags" not in str(error):
            raise AssertionError(
                f"without tags it raises {type(error).__name__}: {error}. The message must say that it needs tags."
            ) from error


@norm_check()
def task_hooks(subject: NormSubject) -> None:
    """``on_task_start`` and ``on_task_end``, if defined, take the number of a task; ``state_dict()`` stays complete."""
    layer = subject.make()
    hooked = [*_definers(layer, "on_task_start"), *_definers(layer, "on_task_end")]
    if not hooked:
        raise CheckSkipped("it defines neither on_task_start nor on_task_end")
    for task in range(2):
        for module in _definers(layer, "on_task_start"):
            module.on_task_start(task)
        subject.run(layer, subject.data(seed=task))
        for module in _definers(layer, "on_task_end"):
            module.on_task_end(task)
    other = subject.make_new().to(subject.device)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = subject.data(seed=5)
    if not torch.equal(subject.run(other.eval(), x), subject.run(layer.eval(), x)):
        raise AssertionError("what its task hooks change is not in its state_dict(), so a resumed run would differ.")


@norm_check()
def auxiliary_loss(subject: NormSubject) -> None:
    """``auxiliary_loss()``, if defined, returns a finite scalar tensor after a forward pass."""
    layer = subject.make()
    if any(isinstance(getattr(type(module), "auxiliary_loss", None), property) for module in layer.modules()):
        raise AssertionError("its auxiliary_loss is a property and not a method.")
    modules = _definers(layer, "auxiliary_loss")
    if not modules:
        raise CheckSkipped("it does not define auxiliary_loss")
    x = subject.data().requires_grad_()
    with subject.tags(len(x)):
        y = layer(x)
    total = y.sum()
    for module in modules:
        loss = module.auxiliary_loss()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.isfinite().all():
            raise AssertionError(f"its auxiliary_loss() returns {loss!r} and not a finite tensor with one element.")
        if not loss.requires_grad:
            raise AssertionError("its auxiliary_loss() has no gradient, so that it has no effect on training.")
        total = total + loss.reshape(())
    total.backward()


@norm_check()
def replay_request(subject: NormSubject) -> None:
    """``replay_request``, if defined, is a `ReplayRequest`, and the extra batch passes without gradients."""
    layer = subject.make()
    modules = _definers(layer, "replay_request")
    if not modules:
        raise CheckSkipped("it does not define replay_request")
    for module in modules:
        request = module.replay_request
        if not isinstance(request, ReplayRequest) or request.balance not in _BALANCES:
            shown = request if not inspect.ismethod(request) else "a method"
            raise AssertionError(f"its replay_request is {shown!r} and not a contnorm.ReplayRequest.")
        if request.size is not None and (not isinstance(request.size, int) or request.size < 1):
            raise AssertionError(f"its replay_request has size={request.size!r}. Use a whole number, or None.")
    x = subject.data()
    with torch.no_grad(), subject.tags(len(x), is_extra=True):
        layer(x)
    subject.run(layer, x)


@norm_check(slow=True)
def compiles(subject: NormSubject) -> None:
    """``torch.compile`` gives the same output, gradients and moments, in one graph unless it needs tags."""
    _check_compiled(subject, {})


@norm_check(strict=True, slow=True)
def compiles_cumulative(subject: NormSubject) -> None:
    """``torch.compile`` compiles it in one graph also with ``momentum=None``."""
    subject.require_moments()
    subject.require_options("momentum")
    _check_compiled(subject, {"momentum": None})


def _check_compiled(subject: NormSubject, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, twin = subject.make(**options), subject.make(**options)
    compiled = torch.compile(twin, fullgraph=not subject.needs_tags, backend="aot_eager")
    for training in (True, False):
        results = []
        for module, layer in ((plain, plain), (compiled, twin)):
            layer.train(training).zero_grad()
            x = subject.data().requires_grad_()
            with subject.tags(len(x)):
                y = module(x)
            torch.autograd.backward((y * subject.data(seed=2)).sum())
            results.append([y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
        for expected, actual in zip(*results, strict=True):
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def _exportable(subject: NormSubject) -> torch.nn.Module:
    layer = subject.make()
    subject.run(layer, subject.data())
    return layer.eval()


@norm_check()
def exports(subject: NormSubject) -> None:
    """``torch.export`` exports it in evaluation mode with a batch of any size."""
    layer = _exportable(subject)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (subject.data(),), dynamic_shapes=({0: batch},))
    x = subject.data(seed=1, size=7)
    assert_close(program.module()(x), layer(x), 1e-5, "the output of the exported program")


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Suppress warnings, such as about other libraries that are not installed."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@norm_check(slow=True)
def exports_to_onnx(subject: NormSubject) -> None:
    """ONNX Runtime reproduces its output in evaluation mode with a batch of any size."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise CheckSkipped(f"{missing[0]} is not installed")
    runtime: Any = import_module("onnxruntime")
    layer = _exportable(subject).cpu()
    batch = torch.export.Dim("batch", min=2, max=64)
    data = subject.data().cpu()
    with _quiet(logging.getLogger("torch.onnx")):
        program = torch.onnx.export(layer, (data,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (2, 7):
        x = subject.data(seed=1, size=size).cpu()
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close(torch.from_numpy(y), subject.expected(layer, x)[0], 1e-5, "the output of ONNX Runtime")
