"""Base classes of the norm layers, and arithmetic that several norms share."""

from __future__ import annotations

from collections import deque
from inspect import signature
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from contnorm.checks import check_batch, check_eps, check_input, check_number, statistics_dtype, updates_moments, widest
from contnorm.kernels.pivot import per_channel, row_pivot
from contnorm.registry import Dim

RANKS: dict[Dim, tuple[int, ...]] = {1: (2, 3), 2: (4,), 3: (5,)}  # ranks of the input of 1d, 2d and 3d layers
INPUT = "the input"  # what running moments are those of, unless the class says otherwise
STALE = "_contnorm_stale"  # the attribute of a layer whose running moments are of another signal than it normalizes
ALWAYS_SHOWN = ("num_groups", "eps", "momentum")  # other arguments are shown if they differ from their defaults


class NormLayer(nn.Module):
    """Base of all norm layers: a layer over (N, C, *) that checks its input, with weight and bias per channel.

    A class for input of one dimension is defined as ``class MyNorm2d(MyNorm, dim=2)``. ``ranks`` lists the input ranks
    that it accepts; ``num_features`` is its number of channels.
    ``has_triton_kernels`` tells whether the layer uses Triton kernels of this package on a GPU, which are compiled
    before their first run. ``own_tensors`` names the parameters and buffers that batch norm does not have; conversion
    keeps them if the old and the new layer have them.
    ``fuses_relu`` tells whether ``forward`` also takes a residual and whether to apply ReLU; it is read from the
    signature, since a subclass may have a ``forward`` of its own.
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)
    has_triton_kernels: ClassVar[bool] = False
    own_tensors: ClassVar[tuple[str, ...]] = ()
    # The norm of a class that only applies its submodules `drop` and `act` after it, or has other arguments.
    normalizes_as: ClassVar[type[nn.Module]]
    fuses_relu: ClassVar[bool] = False
    num_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init_subclass__(cls, dim: Dim | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if dim is not None:
            cls.ranks = RANKS[dim]
        cls.fuses_relu = {"residual", "relu"} <= signature(cls.forward).parameters.keys()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not `super`: the package's batch norm also derives from torch's
        self.num_features = num_features
        self.eps = check_eps(eps)
        self.affine = affine
        for name, create in (("weight", torch.ones), ("bias", torch.zeros)):
            value = nn.Parameter(create(num_features, device=device, dtype=dtype)) if affine else None
            self.register_parameter(name, value)

    def reset_parameters(self) -> None:
        """Set weight and bias to the initial values."""
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            if (parameter := self._parameters.get(name)) is not None:
                nn.init.constant_(parameter, value)

    def _check(self, x: Tensor) -> None:
        """Check the shape of an input. The functional form checks the rest."""
        if x.dim() not in self.ranks or x.shape[1] != self.num_features:
            ranks = " or ".join(f"{rank}-d" for rank in self.ranks)
            raise ValueError(
                f"{type(self).__name__}({self.num_features}): expected {ranks} input with {self.num_features} channels "
                f"in dimension 1, got shape {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        arguments = signature(getattr(self, "normalizes_as", type(self))).parameters.values()
        fields = [f"{self.num_features}"]
        for argument in sorted(arguments, key=lambda argument: argument.kind is not argument.KEYWORD_ONLY):
            name, default = argument.name, argument.default
            value = getattr(self, name, default)
            usual = value == default or value == getattr(type(self), name, default)
            if default is not argument.empty and (name in ALWAYS_SHOWN or not usual):
                fields.append(f"{name}={value!r}")
        return ", ".join(fields)


class MomentNorm(NormLayer):
    """Base of the norms with running moments: batch norm's arguments, buffers and state-dict keys.

    Training and evaluation mode have the same meaning as in torch's batch norm. `contnorm.stats_mode` sets three
    further states: ``stats_frozen`` (running moments are not updated), ``use_running`` (training mode also normalizes
    with the running moments, as torchvision's FrozenBatchNorm2d does) and ``use_batch`` (evaluation mode does what
    training mode does). Unlike in torch, ``momentum=None`` does not synchronize with the host.

    It is no subclass of torch's batch norm: tools that look for batch norms by class, to fold them into convolutions,
    to replace them or to re-estimate their moments, are wrong about these layers and leave them alone.
    """

    _version = 2  # version of the state dict, as in torch: with a counter
    initial_var: ClassVar[float] = 1.0  # initial value of `running_var`
    mixes_moments: ClassVar[bool] = False  # whether the output in training depends on the running moments
    momentum: float | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    stats_frozen: bool = False
    use_running: bool = False
    use_batch: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        NormLayer.__init__(self, num_features, eps, affine, device, dtype)
        self.momentum = None if momentum is None else check_number(momentum, 0, "momentum", 1)
        self.track_running_stats = track_running_stats
        for name in ("running_mean", "running_var"):
            vector = torch.empty(num_features, device=device, dtype=dtype) if track_running_stats else None
            self.register_buffer(name, vector)
        counter = torch.tensor(0, dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", counter)
        self._add_tensors(device, dtype)
        self.reset_parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. A forward that gradient checkpointing repeats has the moments of the first, and updates none."""
        if not recomputes():
            if (self.mixes_moments or self.use_running) and not self.stats_frozen and self.training:
                remember_buffers(self, *args, **kwargs)
            return super().__call__(*args, **kwargs)
        own = dict(self._buffers)
        # Copies that are updated take the same path as the first forward, which saved the same tensors.
        self._buffers.update(first_buffers(self, *args, **kwargs))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._buffers.update(own)

    def _add_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Add the parameters and buffers that batch norm does not have."""

    def reset_running_stats(self) -> None:
        """Set the running moments and their counter to the initial values."""
        if self.stats_frozen:
            raise RuntimeError(
                f"{type(self).__name__}: its running moments are frozen and can't be reset. "
                f"Call contnorm.unfreeze_norms(model) first."
            )
        for name, value in (("running_mean", 0.0), ("running_var", self.initial_var), ("num_batches_tracked", 0)):
            if (buffer := self._buffers[name]) is not None:
                buffer.fill_(value)
        self.__dict__.pop(STALE, None)

    def reset_parameters(self) -> None:
        """Set weight, bias and running moments to the initial values."""
        self.reset_running_stats()
        super().reset_parameters()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *lists: Any
    ) -> None:
        key = f"{prefix}num_batches_tracked"
        if (local_metadata.get("version") or 1) < 2 and self.num_batches_tracked is not None and key not in state_dict:
            # Batch norm had no counter before torch 0.4.1, and many published weights have none.
            is_meta = self.num_batches_tracked.is_meta
            state_dict[key] = torch.tensor(0) if is_meta else self.num_batches_tracked
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)
        if f"{prefix}running_mean" in state_dict:
            self.__dict__.pop(STALE, None)

    @property
    def signal(self) -> str:
        """What the running moments are those of."""
        return INPUT

    def _normalize_with(self, function: Any, x: Tensor, updates: bool | None = None, **options: Any) -> Tensor:
        """Check and normalize an input with a functional form, which updates the running moments; count the batch.

        ``updates`` tells whether this batch updates them, by default as the state of the layer says. The options are
        further arguments of the function, or other values of those that all have.
        """
        self._check(x)
        by_batch = self._normalizes_with_batch()
        updates = self._updates_moments() if updates is None else updates
        needed = updates or not by_batch
        arguments = {
            "running_mean": self.running_mean if needed else None,
            "running_var": self.running_var if needed else None,
            "weight": self.weight,
            "bias": self.bias,
            "training": by_batch,
            "momentum": self._weight_of_moving_batch() if updates else 0.0,
            "eps": self.eps,
        }
        y: Tensor = function(x, **{**arguments, **options})
        if updates:
            self._count(x)
        return y

    def _normalizes_with_batch(self) -> bool:
        return ((self.training or self.use_batch) and not self.use_running) or self.running_mean is None

    def _updates_moments(self) -> bool:
        return (
            (self.training or self.use_batch)
            and self.track_running_stats
            and not self.stats_frozen
            and not self.use_running
            and self.running_mean is not None
        )

    def _weight_of_moving_batch(self) -> float | Tensor:
        """Return the weight of the current batch in the running moments, if they are updated."""
        if self.momentum is None:
            if self.num_batches_tracked is None:
                raise ValueError(f"{type(self).__name__}: momentum=None needs the counter num_batches_tracked.")
            return widest(self.num_batches_tracked + 1).reciprocal()
        return self.momentum

    def _count(self, x: Tensor) -> None:
        """Count a batch after its forward; empty batches, and batches that raised an error, are not counted."""
        if x.numel() and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and biased variance that an input adds to the running moments, (C,) each, in float64.

        On a device without float64 they are in float32.
        """
        return channel_moments(widest(x))

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        """Return the value of ``running_var`` for data of this biased variance and count: the unbiased variance."""
        return unbiased(var, count)

    def normalizing_variance(self, var: Tensor, count: float) -> Tensor:
        """Return the variance that training normalizes data of this biased variance and count with: the biased one."""
        return var

    def extra_repr(self) -> str:
        states = [f"{name}=True" for name in ("stats_frozen", "use_running", "use_batch") if getattr(self, name)]
        return ", ".join([super().extra_repr(), *states])


# --- gradient checkpointing ------------------------------------------------------------------------------------------

_Kept = deque[tuple[Tensor, dict[str, Tensor]]]
_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()  # the buffers before the latest forwards of a layer


def recomputes() -> bool:
    """Whether this forward runs inside of a backward pass, as gradient checkpointing repeats it."""
    # torch.utils.checkpoint asks the same. The compiler repeats operators of the graph and no code.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def remember_buffers(layer: nn.Module, input: Tensor, *_: object, **__: object) -> None:
    """Keep copies of the buffers of a layer for a repetition of the forward of this input."""
    if not torch.compiler.is_compiling() and isinstance(input, Tensor):
        _KEPT.setdefault(layer, deque(maxlen=8)).appendleft((_some_values(input), _copies(layer)))


def first_buffers(layer: nn.Module, input: Tensor, *_: object, **__: object) -> dict[str, Tensor]:
    """Return copies of the buffers of a layer, as they were before the last forward of this input if that was kept."""
    values = _some_values(input)
    kept = [(others, copies) for others, copies in _KEPT.get(layer, ()) if others.shape == values.shape]
    if not kept:
        return _copies(layer)
    distances = torch.stack([(others - values).abs().sum() for others, _ in kept])
    nearest = distances.argmin(0, keepdim=True)  # the first of equal ones; stays on the device
    return {name: torch.stack([copies[name] for _, copies in kept])[nearest].squeeze(0) for name in kept[0][1]}


def _copies(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer._buffers.items() if buffer is not None}


def _some_values(x: Tensor) -> Tensor:
    """Return one value of each sample and channel, which tell the inputs of a layer apart: in the middle."""
    return x.detach()[tuple(slice(None) if i < 2 else slice(n // 2, n // 2 + 1) for i, n in enumerate(x.shape))].clone()


# --- functions that several norms share -----------------------------------------------------------------------------


def check_arguments(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | Tensor,
    eps: float,
) -> tuple[float | Tensor, float, bool]:
    """Check the arguments of a functional form with running moments.

    Returns momentum, eps, and whether the batch is normalized with its own moments: as in torch, it is in training, and
    in evaluation without running moments. A momentum that is a tensor is not read, which would synchronize with it.
    """
    check_input(x, running_mean, running_var, weight, bias)
    if (running_mean is None) != (running_var is None):
        raise ValueError("give both running_mean and running_var, or neither.")
    if not isinstance(momentum, Tensor):
        momentum = check_number(momentum, 0, "momentum", 1)
    eps = check_eps(eps)
    by_batch = training or running_mean is None
    if by_batch and x.numel():
        check_batch(x, eps)
    return momentum, eps, by_batch


def update_moments(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float | Tensor
) -> None:
    """Update the running moments in place; with a momentum of 0 they do not change, even if the batch has NaNs."""
    if running_mean is None or running_var is None or not updates_moments(running_mean, momentum):
        return
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, var)):
            weight = momentum.to(new.dtype) if isinstance(momentum, Tensor) else momentum
            running.copy_(torch.lerp(running.to(new.dtype), new.detach(), weight))


def keep_values(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of tensors of one shape that a compiled backward pass does not compute again.

    It may recompute values of the forward pass from buffers of a layer, such as the running moments and the counter of
    batches, which have changed by then. It does not recompute a concatenation.
    """
    return torch.stack(tensors).unbind()


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel, (C,) each."""
    var, mean = torch.var_mean(x, dim=[i for i in range(x.dim()) if i != 1], correction=0)
    return mean, var


def unbiased(var: Tensor, count: float) -> Tensor:
    """Convert a biased variance of ``count`` values to the unbiased one; for a single value, return it unchanged."""
    return var * (count / (count - 1)) if count > 1 else var


def apply_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply each channel by the weight and add the bias, if they are not None."""
    if weight is not None:
        x = x * per_channel(weight.to(x.dtype), x.dim())
    return x if bias is None else x + per_channel(bias.to(x.dtype), x.dim())


def empty_like_input(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return the output for an empty batch, connected to the parameters so that their gradients are zeros."""
    y = x.clone()
    for parameter in parameters:
        if parameter is not None:
            y = y + parameter.sum().to(x.dtype)
    return y


class RowMoments(NamedTuple):
    """The input minus a pivot for each row (one sample, one channel), and the moments of the rows.

    The tables are in float64, because they are small; in float32 on a device without float64.
    """

    shifted: Tensor  # (N, C, *)
    pivot: Tensor  # (N, C), float64
    mean: Tensor  # (N, C), float64, of the input itself
    var: Tensor  # (N, C), float64, unbiased; zero where a row has one position


def has_one_position(x: Tensor) -> bool:
    """Whether a row (one sample, one channel) has a single position.

    Example:
        >>> has_one_position(torch.zeros(4, 8)), has_one_position(torch.zeros(4, 8, 3))
        (True, False)
    """
    return x.numel() == x.shape[0] * x.shape[1]


def row_moments(x: Tensor) -> RowMoments:
    """Return the moments of each row.

    Example:
        >>> rows = row_moments(torch.tensor([[[0.0, 2.0]]]))
        >>> rows.mean.item(), rows.var.item()
        (1.0, 2.0)
    """
    wide = x.to(statistics_dtype(x))
    single = has_one_position(x)
    # The pivot of a row with one position is its value. With a pivot of zero, the mean, rounded to the dtype of the
    # data, would be subtracted from the data itself, and a large mean would cause cancellation.
    pivot = wide.detach().reshape(x.shape[0], x.shape[1]) if single else row_pivot(x)
    shifted = wide - per_channel(pivot, x.dim())
    if single:
        off = shifted.reshape(x.shape[0], x.shape[1])
        var = torch.zeros_like(off)
    else:
        var, off = torch.var_mean(shifted, dim=tuple(range(2, x.dim())), correction=1)
    return RowMoments(shifted, widest(pivot), widest(pivot) + widest(off), widest(var))


def normalize_rows(
    x: Tensor, rows: RowMoments, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize with a mean and variance for each row, (N, C) or (C,) in float64, then apply weight and bias.

    Example:
        >>> x = torch.tensor([[[0.0, 2.0]]])
        >>> rows = row_moments(x)
        >>> normalize_rows(x, rows, rows.mean, rows.var / 2, None, None, 0.0)
        tensor([[[-1.,  1.]]])
    """
    dtype, rank = statistics_dtype(x), x.dim()
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    centred = rows.shifted - per_channel((mean - rows.pivot).to(dtype), rank)
    y = centred * per_channel(scale.to(dtype), rank)
    if bias is not None:
        y = y + per_channel(bias.to(dtype), rank)
    return y.to(x.dtype)
