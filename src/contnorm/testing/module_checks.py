"""Checks of running moments, and of a norm as a module: copies, transforms, conversion, tags, compiler, export."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from contnorm.convert import convert_norm
from contnorm.moments.freeze import freeze_stats
from contnorm.tags import ReplayRequest, batch_tags
from contnorm.testing.conformance import CHANNELS, SHAPES, CheckSkipped, NormSubject, assert_close, norm_check, require
from contnorm.testing.value_checks import FLOAT32, MODES, STOCK, assert_all_close, assert_same_state, gradients_of

_MOMENTS = ("running_mean", "running_var")


@norm_check()
def moments_updated(subject: NormSubject) -> None:
    """A batch in training moves the running moments, and counts in ``num_batches_tracked`` if there is one."""
    subject.require_moments()
    for rank in subject.ranks:
        layer: Any = subject.make(rank)
        before = copy.deepcopy(layer.state_dict())
        for seed in range(2):
            subject.run(layer, subject.data(rank, seed))
        for name in _MOMENTS:
            value = getattr(layer, name)
            require(not torch.equal(value, before[name]), f"its {name} does not change in training.")
            require(
                not value.requires_grad and value.isfinite().all(),
                f"its {name} after two batches requires a gradient, or has values that are not finite.",
            )
        _check_count(layer, 2, "after two batches")


def _check_count(layer: nn.Module, batches: int, when: str) -> None:
    count = getattr(layer, "num_batches_tracked", None)
    if isinstance(count, Tensor):
        require(count.item() == batches, f"its num_batches_tracked is {count.item()} {when}, and not {batches}.")


@norm_check()
def evaluation_uses_running_moments(subject: NormSubject) -> None:
    """In evaluation it normalizes with its running moments, in training with those of the batch."""
    subject.require_moments()
    layer: Any = subject.make()
    x = subject.data()
    in_training = subject.run(layer, x)
    in_evaluation = subject.run(layer.eval(), x)
    same = torch.allclose(in_training, in_evaluation, rtol=1e-3, atol=1e-3)
    require(not same, "its output after one batch is the same in training and evaluation mode.")
    for name in _MOMENTS:
        moved = copy.deepcopy(layer)
        getattr(moved, name).add_(1)
        same = torch.allclose(subject.run(moved, x), in_evaluation, rtol=1e-4, atol=1e-4)
        require(not same, f"its output in evaluation mode does not depend on {name}.")


@norm_check()
def momentum(subject: NormSubject) -> None:
    """``momentum`` is the weight of the newest batch in the running mean; None averages all batches equally."""
    subject.require_moments()
    subject.require_options("momentum")

    def mean_after(momentum: float | None, *seeds: int) -> Tensor:
        layer: Any = subject.make(momentum=momentum)
        for seed in seeds:
            subject.run(layer, subject.data(seed=seed))
        return layer.running_mean.double()  # type: ignore[no-any-return]

    start, first, second = mean_after(0.5), mean_after(1.0, 0), mean_after(1.0, 1)
    assert_close(mean_after(0.0, 0), start, 0.0, "its running_mean with momentum=0, against its initial value")
    expected = 0.7 * (0.7 * start + 0.3 * first) + 0.3 * second
    assert_close(mean_after(0.3, 0, 1), expected, FLOAT32, "its running_mean after two batches with momentum=0.3")
    require(
        subject.averages_batches,
        "momentum=None, the equal average of all batches, raises an error. If that is intended, declare "
        'cannot = {"momentum": "the reason"}.',
    )
    assert_close(
        mean_after(None, 0, 1), (first + second) / 2, FLOAT32, "its running_mean after two batches with momentum=None"
    )


@norm_check()
def moments_match_reference(subject: NormSubject) -> None:
    """With any momentum, its running moments over several batches are those of the reference formula."""
    subject.require_moments()
    subject.require_options("momentum")
    subject.require_reference()
    for value in (0.0, 0.3, 1.0, None):
        layer: Any = subject.make(momentum=value)
        for seed in range(4):
            x = subject.data(seed=seed)
            _, moments = subject.expected(layer, x)
            assert moments is not None
            subject.run(layer, x)
            for name, expected in zip(_MOMENTS, moments, strict=True):
                assert_close(getattr(layer, name), expected, FLOAT32, f"its {name} with momentum={value}")
        _check_count(layer, 4, "after four batches")


@norm_check()
def reset_moments(subject: NormSubject) -> None:
    """``reset_running_stats()``, if it has one, restores the initial moments."""
    subject.require_moments()
    layer: Any = subject.make()
    if not hasattr(layer, "reset_running_stats"):
        raise CheckSkipped("it has no reset_running_stats")
    before = copy.deepcopy(layer.state_dict())
    subject.run(layer, subject.data())
    layer.reset_running_stats()
    assert_same_state(layer, before, "in reset_running_stats, against its initial value")


@norm_check()
def without_tracking(subject: NormSubject) -> None:
    """With ``track_running_stats=False`` it has no running moments and normalizes with the batch in both modes."""
    subject.require_moments()
    subject.require_options("track_running_stats")
    for rank in subject.ranks:
        layer: Any = subject.make(rank, track_running_stats=False)
        x = subject.data(rank)
        absent = layer.running_mean is None and layer.running_var is None
        require(absent, "it has running moments with track_running_stats=False.")
        expected = subject.expected(layer, x)[0]
        for training in (True, False):
            assert_close(subject.run(layer.train(training), x), expected, FLOAT32, "its output without tracking")


@norm_check()
def without_affine(subject: NormSubject) -> None:
    """With ``affine=False`` it has no weight and bias, and the same output as with a weight of 1 and a bias of 0."""
    subject.require_options("affine")
    for rank in subject.ranks:
        layer: Any = subject.make(rank, affine=False)
        x = subject.data(rank)
        require(layer.weight is None and layer.bias is None, "it has a weight or a bias with affine=False.")
        plain: Any = subject.make(rank)
        plain.load_state_dict(layer.state_dict(), strict=False)  # other parameters, if any
        with torch.no_grad():
            plain.weight.fill_(1)
            if plain.bias is not None:
                plain.bias.fill_(0)
        expected, _ = subject.expected(layer, x)  # by the reference formula, if there is one
        y = subject.run(layer, x)
        assert_close(y, expected, FLOAT32, "its output with affine=False")
        assert_close(y, subject.run(plain, x), FLOAT32, "its output with affine=False, against weight 1 and bias 0")


@norm_check()
def tracking_disabled_later(subject: NormSubject) -> None:
    """If ``track_running_stats`` is set to False on a layer, as tools do, training updates no moments."""
    subject.require_moments()
    layer: Any = subject.make()
    if not hasattr(layer, "track_running_stats"):
        raise CheckSkipped("it has no attribute track_running_stats")
    x = subject.data()
    subject.run(layer, x)
    expected, _ = subject.expected(layer, x)
    before = copy.deepcopy(layer.state_dict())
    layer.track_running_stats = False
    assert_close(subject.run(layer, x), expected, FLOAT32, "its output in training with track_running_stats = False")
    assert_same_state(layer, before, "with track_running_stats = False")


@norm_check()
def frozen_moments(subject: NormSubject) -> None:
    """`contnorm.freeze_stats` stops updates of its moments, and releases them again."""
    subject.require_moments()
    layer: Any = subject.make()
    subject.run(layer, subject.data())
    before = copy.deepcopy(layer.state_dict())
    freeze_stats(layer)
    subject.run(copy.deepcopy(layer), subject.data(seed=3))  # a copy stays frozen, and shares no moments
    for mode in (True, False, True):
        subject.run(layer.train(mode), subject.data(seed=3))
    assert_same_state(layer, before, "while its moments are frozen")
    freeze_stats(layer, False)
    subject.run(layer, subject.data(seed=3))
    same = torch.equal(layer.running_mean, before["running_mean"])
    require(not same, "its running_mean does not change after freeze_stats(layer, False).")
    _check_count(layer, 2, "after two batches, and three while its moments were frozen")


@norm_check()
def update_bn(subject: NormSubject) -> None:
    """``torch.optim.swa_utils.update_bn``, for subclasses of torch's batch norms, sets the average of all batches."""
    if not isinstance(subject.make(), _BatchNorm):
        raise CheckSkipped("it does not derive from a batch norm of torch")
    subject.require_moments()
    subject.require_options("momentum")
    layer: Any = subject.make()
    batches = [subject.data(seed=seed) for seed in range(3)]
    usual = layer.momentum
    layer.train()
    with subject.tags(len(batches[0])):
        torch.optim.swa_utils.update_bn(batches, torch.nn.Sequential(layer), device=subject.device)
    means = []
    for x in batches:
        single: Any = subject.make(momentum=1.0)
        subject.run(single, x)
        means.append(single.running_mean.double())
    assert_close(layer.running_mean, torch.stack(means).mean(0), FLOAT32, "its running_mean after update_bn")
    _check_count(layer, 3, "after update_bn over three batches")
    require(layer.momentum == usual, f"its momentum is {layer.momentum} after update_bn, and was {usual}.")


# --- as a module ----------------------------------------------------------------------------------------------------


def _trained(subject: NormSubject) -> nn.Module:
    layer = subject.make()
    subject.run(layer, subject.data())
    return layer


def _assert_twin(subject: NormSubject, twin: nn.Module, layer: nn.Module, what: str) -> None:
    x = subject.data(seed=2)
    for (name, a), b in zip(layer.state_dict().items(), twin.state_dict().values(), strict=True):
        require(a.data_ptr() != b.data_ptr() or not a.numel(), f"{what} shares {name} with the layer.")
        require(torch.equal(a, b), f"{what} has another {name}.")
    for training, mode in MODES:
        a, b = (subject.run(copy.deepcopy(each).train(training), x) for each in (layer, twin))
        require(torch.equal(a, b), f"{what} gives other outputs in {mode} mode.")


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
    stock, other = (STOCK[subject.rank](CHANNELS).to(subject.device) for _ in range(2))
    stock(subject.data())
    layer = subject.make()
    same = list(layer.state_dict()) == list(stock.state_dict())
    require(same, f"its state_dict() has {', '.join(layer.state_dict())}, unlike a batch norm's.")
    layer.load_state_dict(stock.state_dict())
    other.load_state_dict(layer.state_dict())
    for name, value in stock.state_dict().items():
        same = torch.equal(layer.state_dict()[name], value) and torch.equal(other.state_dict()[name], value)
        require(same, f"its {name} is not that of the batch norm's checkpoint it loaded.")


@norm_check()
def moves_all_tensors(subject: NormSubject) -> None:
    """``to`` moves all its tensors to another dtype and device, and its forward follows."""
    layer = subject.make().to(torch.float64)
    for name, tensor in layer.state_dict().items():
        require(tensor.dtype in (torch.float64, torch.int64), f"{name} is not converted by to(torch.float64).")
    layer.to("meta")
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        require(tensor.is_meta, f"{name} is not moved by to('meta').")
    if not subject.needs_tags:
        shape = SHAPES[subject.rank]
        y: Tensor = layer(torch.empty(shape, device="meta", dtype=torch.float64))
        require(y.shape == shape, f"its output on the meta device has shape {tuple(y.shape)}, and not {shape}.")


@norm_check()
def device_and_dtype(subject: NormSubject) -> None:
    """Its constructor creates all tensors on ``device``, and parameters in ``dtype``."""
    subject.require_options("device", "dtype")
    layer = subject.make(device="meta", dtype=torch.float64)
    placed = all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    require(placed, "a tensor is not created on the device that the constructor gets.")
    typed = all(parameter.dtype == torch.float64 for parameter in layer.parameters())
    require(typed, "a parameter does not have the dtype that the constructor gets.")


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
    slope, batches = subject.data(seed=20), torch.stack([subject.data(seed=i) for i in range(3)])
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

        def loss(parameters: Any, buffers: Any, x: Tensor, layer: nn.Module = layers[0]) -> Tensor:
            y: Tensor = torch.func.functional_call(layer, (parameters, buffers), (x,))
            return (y * slope).sum()

        state = torch.func.stack_module_state(layers) if list(layers[0].parameters()) else ({}, {})
        with subject.tags(batches.shape[1]):
            together = torch.func.vmap(torch.func.grad(loss, argnums=2), in_dims=(0, 0, 0))(*state, batches)
            for i, layer in enumerate(layers):
                x = batches[i].clone().requires_grad_()
                (layer(x) * slope).sum().backward()
                torch.testing.assert_close(together[i], x.grad, rtol=1e-4, atol=1e-5)


@norm_check()
def conversion(subject: NormSubject) -> None:
    """`contnorm.convert_norm` replaces torch's batch norm by it, and keeps the weight as the same object."""
    model = nn.Sequential(STOCK[subject.rank](CHANNELS)).to(subject.device)
    model(subject.data(seed=1))
    old: Any = model[0]
    groups: dict[str, Any] = {"num_groups": 2} if subject.spec.grouped else {}
    convert_norm(model, subject.spec, **{**groups, **subject.options})
    new: Any = model[0]
    cls = type(subject.make())
    require(type(new) is cls, f"the converted layer is {type(new).__name__} and not {cls.__name__}.")
    weight = new._parameters.get("weight")
    if weight is not None and weight.shape == old.weight.shape:
        require(weight is old.weight, "its weight after a conversion is not that of the batch norm.")
    if subject.has_moments and new.running_mean.shape == old.running_mean.shape:
        assert_close(new.running_mean, old.running_mean, 0.0, "its running_mean after a conversion")
    subject.run(new, subject.data())


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
            same = torch.equal(tagged, subject.make().train(training)(x))
            require(same, f"tags change its output in {mode} mode, but it does not set needs_tags = True.")
        return
    with subject.tags(len(x)):
        y = subject.make()(x)
    good = y.shape == x.shape and y.isfinite().all()
    require(good, f"its output with tags has shape {tuple(y.shape)}, or values that are not finite.")
    subject.make().eval()(x)
    try:
        with batch_tags(None):
            subject.make()(x)
    except (ValueError, RuntimeError) as error:
        require("tags" in str(error), f"without tags it raises {error!r}. The message must say that it needs tags.")


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
    same = torch.equal(subject.run(other.eval(), x), subject.run(layer.eval(), x))
    require(same, "what its task hooks change is not in its state_dict(), so a resumed run would differ.")


@norm_check()
def auxiliary_loss(subject: NormSubject) -> None:
    """``auxiliary_loss()``, if defined, returns a finite scalar tensor after a forward pass."""
    layer = subject.make()
    modules = _definers(layer, "auxiliary_loss")
    if not modules:
        raise CheckSkipped("it does not define auxiliary_loss")
    x = subject.data().requires_grad_()
    with subject.tags(len(x)):
        y = layer(x)
    total = y.sum()
    for module in modules:
        loss = module.auxiliary_loss()
        good = isinstance(loss, Tensor) and loss.numel() == 1 and loss.isfinite().all()
        require(good, f"its auxiliary_loss() returns {loss!r} and not a finite tensor with one element.")
        require(loss.requires_grad, "its auxiliary_loss() has no gradient, so that it has no effect on training.")
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
        good = isinstance(request, ReplayRequest) and request.balance in ("none", "class", "task")
        require(good, f"its replay_request is {request!r} and not a contnorm.ReplayRequest.")
        good = request.size is None or (isinstance(request.size, int) and request.size > 0)
        require(good, f"its replay_request has size={request.size!r}. Use a whole number, or None.")
    x = subject.data()
    with torch.no_grad(), subject.tags(len(x), is_extra=True):
        layer(x)
    subject.run(layer, x)


@norm_check()
def gradient_checkpointing(subject: NormSubject) -> None:
    """Its gradients under ``torch.utils.checkpoint`` are those without, also if it ran twice before the backward."""
    if subject.needs_tags:
        raise CheckSkipped("it needs tags, which a backward pass does not have")
    for reentrant in (False, True):
        results = []
        for call in (None, lambda layer, x, form=reentrant: checkpoint(layer, x, use_reentrant=form)):
            layer, inputs = subject.make(), [subject.data(seed=seed).requires_grad_() for seed in range(2)]
            subject.run(layer, subject.data(seed=2))
            outputs = [layer(x) if call is None else call(layer, x) for x in inputs]
            torch.autograd.backward(outputs, [subject.data(seed=5), subject.data(seed=6)])
            results.append([*outputs, *(tensor.grad for tensor in (*inputs, *layer.parameters()))])
        plain, repeated = results
        assert_all_close(repeated, plain, f"its gradients under a checkpoint with use_reentrant={reentrant}")


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
        expected = gradients_of(subject, plain.train(training), subject.data().requires_grad_())
        actual = gradients_of(subject, twin.train(training), subject.data().requires_grad_(), compiled)
        assert_all_close([*actual, *twin.buffers()], [*expected, *plain.buffers()], "its results when compiled")


def _exportable(subject: NormSubject) -> nn.Module:
    layer = subject.make()
    subject.run(layer, subject.data())
    return layer.eval()


@norm_check()
def exports(subject: NormSubject) -> None:
    """``torch.export`` exports it in evaluation mode with a batch of any size."""
    layer = _exportable(subject)
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (subject.data(),), dynamic_shapes=({0: batch},), strict=False)
    x = subject.data(seed=1, size=7)
    assert_close(program.module()(x), layer(x), 1e-5, "the output of the exported program")


@norm_check(slow=True)
def exports_to_onnx(subject: NormSubject) -> None:
    """ONNX Runtime reproduces its output in evaluation mode with a batch of any size."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise CheckSkipped(f"{missing[0]} is not installed")
    layer = _exportable(subject).cpu()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of libraries that are not installed
    try:
        program = torch.onnx.export(layer, (subject.data().cpu(),), dynamo=True, dynamic_shapes=shapes, verbose=False)
    finally:
        logger.setLevel(level)
    assert program is not None
    runtime: Any = import_module("onnxruntime")
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (2, 7):
        x = subject.data(seed=1, size=size).cpu()
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close(torch.from_numpy(y), subject.expected(layer, x)[0], 1e-5, "the output of ONNX Runtime")
