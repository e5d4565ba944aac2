"""Strategies: the base class, what `loss` and the hooks receive, passes of the network, and training without replay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.bench.config.schema import StrategyConfig, resolve_options
from contnorm.errors import UserCodeError, UserError
from contnorm.tags import BatchTags, batch_tags

if TYPE_CHECKING:
    from contnorm.bench.streams.device import DeviceStream

Model = Callable[[Tensor], Tensor]
# Names of settings that are no own settings of a strategy, with their keys.
_KEYS = {f.name: f"strategy.{f.name}" for f in fields(StrategyConfig) if f.name not in ("name", "code", "options")}
_KEYS["replay"] = "train.replay"


@dataclass(frozen=True)
class Batch:
    """Inputs of the network with their labels and tasks; ``y`` is another name of the labels.

    Example:
        >>> batch = Batch(torch.zeros(2, 3, 8, 8), label=torch.tensor([4, 5]), task=torch.tensor([2, 2]))
        >>> len(batch), batch.y.tolist()
        (2, [4, 5])
    """

    x: Tensor
    label: Tensor  # (B,) class indices; (B, outputs) of 0 and 1 for multi-label data
    task: Tensor  # (B,)
    logits: Tensor | None = None  # (B, outputs) stored with the sample in the memory; replayed samples only
    replayed: Tensor | None = None  # (B,) bool: whether each sample comes from the memory
    extra_size: int = 0  # samples of the extra batch that a norm requested for this step
    stream_size: int | None = None  # samples of the stream, if they come before those of the memory; None if unknown

    @property
    def y(self) -> Tensor:
        """The labels."""
        return self.label

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class TaskInfo:
    """A task of the stream.

    Attributes:
        number: Number of the task, from 0.
        classes: The outputs of the network that are labels in the task.
        tasks: Number of tasks in the run.

    Example:
        >>> task = TaskInfo(number=4, classes=(8, 9), tasks=5)
        >>> task.number == task.tasks - 1  # the last one
        True
    """

    number: int
    classes: tuple[int, ...]
    tasks: int


class TaskData:
    """The training samples of a task that was learned, in the order of the steps, each once and without augmentation.

    Args:
        stream: The stream on its device.
        items: Indices of the training items.

    Example:
        >>> class Counting(Strategy):
        ...     def on_task_end(self, task, data):
        ...         self.samples = sum(len(batch) for batch in data.batches(64))  # equal to len(data)
    """

    def __init__(self, stream: DeviceStream, items: Tensor) -> None:
        self._stream, self._items = stream, items

    def __len__(self) -> int:
        return len(self._items)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield batches on the device; the last one may be smaller.

        Args:
            size: Samples per batch.
        """
        table = self._stream.train
        for items in torch.split(self._items, size):
            replayed = torch.zeros(len(items), dtype=torch.bool, device=items.device)
            yield Batch(self._stream.train_x(items), table.label[items], table.task[items], replayed=replayed)


class OutputMask:
    """Mask of the outputs that compete for a sample, by its task.

    Example:
        >>> head = OutputMask(torch.tensor([[True, True, False], [False, False, True]]))
        >>> head(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))
        tensor([[1., 2., -inf]])
    """

    def __init__(self, competing: Tensor) -> None:
        self.competing = competing
        self.resting = ~competing
        self.all_compete = bool(competing.all())

    def __call__(self, logits: Tensor, task: Tensor) -> Tensor:
        """Logits, with minus infinity for outputs that do not compete."""
        if self.all_compete:
            return logits
        return logits.masked_fill(self.resting[task], float("-inf"))

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """(B,) loss of each sample; for multi-label data, binary cross-entropy averaged over the outputs."""
        if batch.label.ndim == 2:
            labels = batch.label.to(torch.float32)
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)
        return F.cross_entropy(self(logits.float(), batch.task), batch.label, reduction="none")

    def squared_error(self, logits: Tensor, target: Tensor, task: Tensor) -> Tensor:
        """(B,) mean squared error to stored logits over the competing outputs."""
        error = (logits.float() - target).square()
        if self.all_compete:
            return error.mean(1)
        mask = self.competing[task]
        return (error * mask).sum(1) / mask.sum(1)


class Strategy(nn.Module):
    """Base class of all strategies.

    A subclass defines `loss`. It may declare own settings as a dataclass ``Settings``, create tensors and modules in
    `setup`, and define the hooks below. Its state is its ``state_dict()``, which checkpoints contain: buffers,
    parameters, modules, and what ``get_extra_state`` returns as a tensor.

    Args:
        config: Settings of a run, which the engine passes; for `bench.run`, use the keywords instead.
        **settings: The strategy's own settings, those of every strategy, or ``replay``, by name; any setting by dotted
            key.

    Attributes:
        name: Name of a strategy of this package; empty for others.
        draws: Number of independent replay draws per step: the arguments of `loss` after ``stream``. A class whose
            `loss` has ``*args`` sets it, or inherits it.
        stores_logits: Whether the logits of a sample are stored with it in the memory.
        multi_label: Whether multi-label streams are supported.
        Settings: A dataclass of the strategy's own settings; None if it has none.
        config: Settings that every strategy has.
        settings: The strategy's own settings, an object of ``Settings``.
        overrides: The settings of a run that were given to this object, by dotted key.
        model: The network, no part of the state. This attribute and the next two are available from `setup` on.
        head: Mask of the outputs that compete.
        device: The device of the network.

    Example:
        >>> class HalfLoss(Strategy):
        ...     def loss(self, model, head, stream):
        ...         return head.cross_entropy(forward(model, stream), stream).mean() / 2
        >>> HalfLoss.draws  # without replay
        0
    """

    name: ClassVar[str] = ""
    draws: ClassVar[int] = 0
    stores_logits: ClassVar[bool] = False
    multi_label: ClassVar[bool] = True
    Settings: ClassVar[Any] = None

    model: nn.Module
    head: OutputMask
    device: torch.device

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `loss` has one argument for each replay draw. Of *args the number is not known, unless a parent class says it.
        kinds = [parameter.kind for parameter in inspect.signature(cls.loss).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            cls.draws = len(kinds) - len(("self", "model", "head", "stream"))
        elif (
            "loss" in vars(cls) and len(kinds) >= len(("self", "model", "head", "stream", "*memory")) and not cls.draws
        ):
            raise TypeError(f"{cls.__name__}.loss: name each batch of the memory, as in (model, head, stream, memory).")

    def __init__(self, config: StrategyConfig | None = None, **settings: Any) -> None:
        super().__init__()
        keys = {name: _KEYS.get(name, name if "." in name else f"strategy.{name}") for name in settings}
        own = {name: value for name, value in settings.items() if "." not in name and name not in _KEYS}
        config = config or StrategyConfig()
        self.configure(replace(config, options=tuple(sorted({**dict(config.options), **own}.items()))))
        given = {keys[name]: value for name, value in settings.items() if value is not None or name in own}
        self.overrides = {**({"strategy.name": self.name} if self.name else {}), **given}

    def configure(self, config: StrategyConfig) -> None:
        """Set ``config`` and ``settings`` to those of a run."""
        self.config = replace(config, options=resolve_options("strategy", config, type(self)))
        self.settings: Any = None if self.Settings is None else self.Settings(**dict(self.config.options))

    def attach(self, model: nn.Module, head: OutputMask, device: torch.device) -> None:
        """Set ``model``, ``head`` and ``device``, and call `setup`."""
        vars(self).update(model=model, head=head, device=device)  # not as a submodule, which would be state
        self.setup()
        self.to(device)

    def __repr__(self) -> str:
        """Return the call that makes this strategy.

        Example:
            >>> Single(**{"train.lr": 0.1})
            Single(**{'train.lr': 0.1})
        """
        short = {key: name for name, key in _KEYS.items()}
        own = {short.get(key, key.removeprefix("strategy.")): value for key, value in self.overrides.items()}
        settings = [f"{name}={value!r}" for name, value in own.items() if "." not in name and name != "name"]
        if dotted := {name: value for name, value in own.items() if "." in name}:
            settings.append(f"**{dotted!r}")
        return f"{type(self).__name__}({', '.join(settings)})"

    def setup(self) -> None:
        """Create tensors and modules; called once, when the network is on its device, before the first step."""

    def loss(
        self, model: Model, head: OutputMask, stream: Batch, *memory: Any, **_: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Loss of a step; with the logits of the stream batch if ``stores_logits`` is True.

        Args:
            model: The network: a function from inputs to logits.
            head: Mask of the outputs that compete, with the losses that respect it.
            stream: The batch of the stream.
            *memory: One batch of the memory for each of ``draws``; a batch is empty while the memory is.
        """
        raise UserError(f"{type(self).__name__} must define loss(self, model, head, stream).")

    def after_backward(self, grads: dict[str, Tensor]) -> None:
        """Called after the backward pass of every step, before gradients are clipped and the weights are updated.

        It is captured with the step and runs without gradients. Update tensors in place.

        Args:
            grads: The gradients by parameter name. They may be changed in place.
        """

    def on_task_start(self, task: TaskInfo) -> None:
        """Called before the first step of each task."""

    def on_task_end(self, task: TaskInfo, data: TaskData) -> None:
        """Called after the last step of each task, before its evaluation.

        Args:
            task: The task.
            data: Its training samples.
        """

    def on_step_start(self, step: int) -> None:
        """Called before every step, with the number of steps done; requires ``train.graph=off``."""

    def on_step_end(self, step: int, loss: Tensor) -> None:
        """Called after every step, with the number of steps done and the loss; requires ``train.graph=off``."""


class Single(Strategy):
    """Fine-tuning on the stream without replay.

    Example:
        >>> Single().draws
        0
    """

    name = "single"

    def loss(self, model: Model, head: OutputMask, stream: Batch) -> tuple[Tensor, Tensor | None]:
        return head.cross_entropy(forward(model, stream), stream).mean(), None


_passes = 0  # calls of `forward`: the engine checks that a strategy makes some if a norm needs tags


def tagged_passes() -> int:
    """Return the number of calls of `forward` with tags in this process."""
    return _passes


def forward(model: Model, batch: Batch) -> Tensor:
    """Run the network on a batch, with its tags for norm layers that need them.

    Args:
        model: The network.
        batch: The batch: the stream's, a replayed one, or several `together`.

    Returns:
        The logits, ``model(batch.x)``.

    Example:
        >>> batch = Batch(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0, 0]))
        >>> forward(torch.nn.Linear(3, 2), batch).shape
        torch.Size([2, 2])
    """
    if batch.replayed is None:
        return model(batch.x)
    global _passes
    _passes += 1
    tags = BatchTags(batch.replayed, batch.task, extra_size=batch.extra_size, stream_size=batch.stream_size)
    with batch_tags(tags):
        return model(batch.x)


def together(*batches: Batch) -> Batch:
    """Concatenate batches in order, for one forward pass; stored logits are dropped.

    The engine gathers all images of a step into one tensor and passes slices of it to the strategy. Concatenating
    these slices copies nothing: the result is a view of the original tensor.

    Example:
        >>> x, label = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> parts = [Batch(x[:1], label[:1], label[:1]), Batch(x[1:], label[1:], label[1:])]
        >>> together(*parts).x.data_ptr() == x.data_ptr()
        True
    """
    x, label, task = (
        joined([b.x for b in batches]),
        joined([b.label for b in batches]),
        joined([b.task for b in batches]),
    )
    replayed = [batch.replayed for batch in batches if batch.replayed is not None]
    known = joined(replayed) if len(replayed) == len(batches) else None
    # Norms with statistics for stream and memory need to know where the stream ends, also if users join more batches.
    stream_size: int | None = 0  # None if it is unknown, or if samples of the stream do not come first
    for number, batch in enumerate(batches):
        if stream_size is not None:
            comes_first = not batch.stream_size or stream_size == sum(map(len, batches[:number]))
            stream_size = stream_size + batch.stream_size if batch.stream_size is not None and comes_first else None
    return Batch(x, label, task, replayed=known, extra_size=batches[0].extra_size, stream_size=stream_size)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension; consecutive slices of one tensor become a view of it."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if (
            part.requires_grad
            or part.storage_offset() != end
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or (part.stride(), part.shape[1:], part.dtype) != (first.stride(), first.shape[1:], first.dtype)
        ):
            return torch.cat(list(parts))
        end += len(part) * part.stride(0)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def check_loss(
    name: str, answer: object, stores_logits: bool, head: OutputMask, stream: Batch
) -> tuple[Tensor, Tensor | None]:
    """Check what the loss of a user's strategy returns, which could otherwise fail elsewhere or stay unnoticed.

    Example:
        >>> batch, head = Batch(torch.zeros(2, 1), *torch.zeros(2, 2)), OutputMask(torch.ones(1, 3, dtype=torch.bool))
        >>> check_loss("mine.py:Mine", torch.zeros(2), False, head, batch)
        Traceback (most recent call last):
        contnorm.errors.UserCodeError: strategy 'mine.py:Mine': its loss must return a tensor with one number and a ...
    """
    if isinstance(answer, Tensor) and not stores_logits:
        answer = answer, None
    loss, logits = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
    shape = (len(stream), head.competing.shape[1])
    fits = logits is None and not stores_logits
    if stores_logits and isinstance(logits, Tensor):
        fits = logits.shape == shape and not logits.requires_grad and logits.dtype == torch.float32
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and fits):
        stored = f", and the logits of the stream batch, of shape {shape}, as logits.detach().float()"
        raise UserCodeError(
            f"strategy {name!r}: its loss must return a tensor with one number and a gradient"
            f"{stored if stores_logits else '; logits are stored with stores_logits = True only'}."
        )
    return loss, logits
