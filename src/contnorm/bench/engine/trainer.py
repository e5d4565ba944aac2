"""The trainer of one run. `Trainer.state` holds everything that must survive a restart.

A trainer has a config, a seed, a plan, a model, an optimizer, a strategy and, if the strategy stores logits, a memory
of logits. One training step consists of gather, augment, forward, loss, backward, update and scatter, and reads its
indices from tensors. The package draws no random numbers in a step and copies no value to the host, so a step can be
captured as a CUDA graph. Hooks at task boundaries run between captured steps.

The steps of a plan are an index tensor on the device: one row per step, for steps of the same shape. A captured step
reads its row with a single gather; all parts of it are views of that row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.bench.components import user_code_errors, user_parts
from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.engine.hooks import (
    STRATEGY_HOOKS,
    NormHooks,
    UserCode,
    check_network,
    check_run,
    seeded_generators,
    task_info,
    task_items,
)
from contnorm.bench.memories import NOT_STORED
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.build import build_model
from contnorm.bench.plan import Indices, PlanCache, Step
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies import build_strategy
from contnorm.bench.strategies.base import Batch, OutputMask, Strategy, TaskData, check_loss, tagged_passes
from contnorm.bench.streams.device import DeviceImages, DeviceStream, ImageFeed, PrefetchedFeed
from contnorm.bench.streams.tasks import Items
from contnorm.errors import UserCodeError, UserError
from contnorm.kernels.convolution import EMPTY, Convolution, ConvolutionTable, table_for, using_table
from contnorm.kernels.triton.launcher import can_launch
from contnorm.moments.freeze import stats_mode
from contnorm.tags import BatchTags, batch_tags

RUNNING_MOMENTS = ("running_mean", "running_var")


class Trainer:
    """One run in progress.

    Args:
        config: The resolved settings.
        seed: The seed.
        source: The data set.
        device: The device to train on.
        images: The images on the device, to share with other trainers. Default: loaded for this trainer.
        plans: A cache of plans, to share with other trainers. Default: a new one.
        any_norm: Whether user-defined networks may have other norms than the settings name. For trainers that are not
            recorded.
        memory_moments: Whether to evaluate with the moments of the replay memory too, beside those of the settings.
    """

    def __init__(
        self,
        config: RunConfig,
        seed: int,
        source: Source,
        device: torch.device,
        images: DeviceImages | None = None,
        plans: PlanCache | None = None,
        any_norm: bool = False,
        memory_moments: bool = False,
    ) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.memory_moments = memory_moments
        parts = user_parts(config)
        parts.pop("memory", None)  # the plan is made before the run
        self.user_code = UserCode(parts, seed, device) if parts else None
        # The context of a purpose in which user code draws from the global generators. The package draws nothing there.
        self.seeded: Callable[[str], AbstractContextManager[object]]
        self.seeded = nullcontext if self.user_code is None else self.user_code.seeded
        self.has_user_strategy = "strategy" in parts
        self.has_package_network = config.model.name in NETWORKS and not parts.keys() & {"model", "norm"}
        plans = plans or PlanCache(source)
        with self.seeded("strategy"):
            self.strategy = build_strategy(config.strategy)
        kind = type(self.strategy)
        self._hooks = {hook for hook in STRATEGY_HOOKS if getattr(kind, hook) is not getattr(Strategy, hook)}
        stream, self.plan = plans.of(config, seed, self.strategy.draws)
        shape = stream.source.train_images.shape[1:]
        with seeded_generators(seed_for(seed, "init"), torch.device("cpu")):
            model = build_model(config.model, config.norm, shape, stream.outputs, len(self.plan.steps))
            self.norm_hooks = NormHooks(model)
            if self.norm_hooks.request is not None:
                _, self.plan = plans.of(config, seed, self.strategy.draws, self.norm_hooks.request)
            check_network(model, config, self.plan, shape, stream.outputs, any_norm)
        check_run(model, config, self.plan, stream, self.strategy, self._hooks, self.norm_hooks)
        self.model = model.to(device)
        if device.type == "cuda":  # the layout that tensor cores need and images have
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = DeviceStream(stream, device, images)
        self.head = OutputMask(self.data.competing)
        self.task_mask: OutputMask | None = None  # for evaluation of class-incremental streams with the task known
        if config.stream.scenario == "class":
            mask = torch.zeros(stream.tasks, stream.outputs, dtype=torch.bool)
            for items in (stream.train, stream.test):
                mask[torch.from_numpy(items.task), torch.from_numpy(items.label)] = True
            self.task_mask = OutputMask(mask.to(device))
        test_samples: list[int] = np.bincount(stream.test.task, minlength=stream.tasks).tolist()
        self.test_samples = test_samples[: len(self.plan.ends)]  # one number for each task that is learned
        if self.data.images.train.whole:
            self.feed = ImageFeed(self.data.images.train)
        else:
            of_steps = [stream.train.image[np.concatenate([step.stream, *step.replay])] for step in self.plan.steps]
            self.feed = PrefetchedFeed(self.data.images.train, of_steps)
        self._tags_batches = self.norm_hooks.need_tags or self.has_user_strategy
        self.optimizer = build_optimizer(config.train, self.model, device)
        self.convolutions = EMPTY  # cuDNN computes all convolutions
        dtype = {"tf32": "float32", "bf16": "bfloat16"}.get(config.train.precision)
        has_own = any(isinstance(module, Convolution) for module in self.model.modules())
        if dtype and has_own and config.train.convolutions == "auto" and config.train.deterministic:
            self.convolutions = table_for(device).only(dtype)
        slots = self.plan.slots if self.strategy.stores_logits else 0
        self.logits = torch.zeros(slots + 1, stream.outputs, device=device)  # last row: samples that are not stored
        self.task_moments: dict[int, dict[str, Tensor]] = {}  # running moments at the end of tasks, for evaluation
        self.done = 0  # steps
        self.hooks_done = 0  # calls at task boundaries: the start and the end of each task
        self.has_task_hooks = bool(
            self.norm_hooks.task_start or self.norm_hooks.task_end or self._hooks & {"on_task_start", "on_task_end"}
        )
        after, ends = config.norm.freeze_after, self.plan.ends
        never = len(self.plan.steps) + 1
        self.freeze_step = never if after is None or after > len(ends) else ends[after - 1]  # moments are frozen then
        self._rows: tuple[int, int, StepTable] | None = None  # first and end step of rows on the device
        self._replayed: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # keys are the sizes of a step
        errors: AbstractContextManager[object] = nullcontext()
        if self.has_user_strategy:
            errors = user_code_errors(f"strategy {config.strategy.name!r}", "in setup()")
        with self.seeded("strategy setup"), errors:
            self.strategy.attach(self.model, self.head, self.device)

    def rows(self, start: int, end: int) -> StepTable:
        """Return the index tensors of steps ``start`` to ``end``, which must have the same shape, on the device."""
        steps, items = self.plan.steps[start:end], self.data.sequence.train
        samples = table_of(steps, lambda step: (step.stream, *step.replay))
        places = self.feed.places(list(items.image[samples]), start)
        return build_step_table(steps, samples, places, items, len(self.logits) - 1, self.device)

    def step(self) -> Tensor:
        """Do the next step of the plan; returns the loss as a tensor on the device."""
        step = self.done
        if "on_step_start" in self._hooks:
            with self.seeded(f"start of step {step}"):
                self.strategy.on_step_start(step)
        if self._rows is None or not self._rows[0] <= step < self._rows[1]:
            end = step + 1  # on a GPU one copy serves all steps of a stretch
            if self.device.type == "cuda":
                end = self.feed.reach(step, same_shape_end(self.plan.steps, step))
            self._rows = step, end, self.rows(step, end)
        first, _, table = self._rows
        loss = self.learn(table.at(step - first))
        self.done += 1
        if "on_step_end" in self._hooks:
            with self.seeded(f"end of step {step}"):
                self.strategy.on_step_end(step, loss)
        return loss

    def learn(self, row: StepIndices) -> Tensor:
        """Do one training step on the samples of a row; returns the loss as a tensor on the device."""
        write, stream, replay, extra = self._batches(row)
        self._set_training_mode()
        self.optimizer.zero_grad()
        with self.seeded(f"step {self.done}"):
            with using_table(self.convolutions) if self.convolutions.entries else nullcontext():
                with self.autocast():
                    if extra is not None:
                        self._show_to_norms(extra)
                    tagged = tagged_passes() if self.norm_hooks.need_tags else 0
                    answer = self.strategy.loss(self.model, self.head, stream, *replay)
                    loss, logits = self._checked(answer, stream, tagged)
                    for auxiliary_loss in self.norm_hooks.losses:
                        loss = loss + auxiliary_loss()
                loss.backward()  # type: ignore[no-untyped-call]
            if "after_backward" in self._hooks:
                grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
                with torch.no_grad():
                    self.strategy.after_backward(grads)
                for name, parameter in self.model.named_parameters():
                    parameter.grad = grads.get(name)
        if self.config.train.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.train.clip_value)
        self.optimizer.step()
        if logits is not None:
            self.logits.index_copy_(0, write, logits)
        return loss.detach()

    def _show_to_norms(self, extra: Batch) -> None:
        """Run the network on a batch for the norm layers alone."""
        assert extra.replayed is not None
        tags = BatchTags(extra.replayed, extra.task, True, extra_size=len(extra), stream_size=0)
        with torch.no_grad(), batch_tags(tags):
            self.model(extra.x)

    def _checked(self, answer: object, stream: Batch, tagged: int) -> tuple[Tensor, Tensor | None]:
        """Return loss and logits from what a strategy returned, after ``tagged`` passes with tags."""
        name = self.config.strategy.name
        if self.norm_hooks.need_tags and tagged_passes() == tagged:
            raise UserCodeError(
                f"strategy {name!r}: its loss calls model(x) without the tags of the batch, which norm "
                f"{self.config.norm.name!r} needs. Call bench.forward(model, batch)."
            )
        if self.has_user_strategy:
            answer = check_loss(name, answer, self.strategy.stores_logits, self.head, stream)
        return cast("tuple[Tensor, Tensor | None]", answer)

    def _batches(self, row: StepIndices) -> tuple[Tensor, Batch, list[Batch], Batch | None]:
        """Return the memory slots to write to, the batches of the stream and of each replay draw, and the extra one."""
        sizes = row.sizes
        if self._tags_batches and sizes not in self._replayed:  # made once for each shape of a step
            replayed = torch.arange(sum(sizes), device=self.device) >= sizes[0]
            self._replayed[sizes] = torch.split(replayed, list(sizes))
        # Without a norm or a strategy that reads them, there are no tags: they then cost no time.
        replayed_parts = self._replayed.get(sizes, (None,) * len(sizes))
        x = self.data.seen(self.feed.pixels[row.image], row.task, row.views)
        label = self.data.train.label[row.label] if self.data.sequence.multi_label else row.label
        parts = [torch.split(t, list(sizes)) for t in (x, label, row.task, row.slots)]
        (x, label, task, write, replayed), *draws = zip(*parts, replayed_parts, strict=True)
        extra, extra_size = None, 0
        if self.norm_hooks.request is not None:
            *draws, (extra_x, extra_label, extra_task, _, extra_replayed) = draws
            extra_size = len(extra_x)
            extra = Batch(extra_x, extra_label, extra_task, replayed=extra_replayed) if extra_size else None
        stream = Batch(x, label, task, replayed=replayed, extra_size=extra_size, stream_size=len(x))
        stored = self.strategy.stores_logits
        replay = [
            Batch(
                x, label, task, self.logits[slots] if stored else None, replayed, extra_size=extra_size, stream_size=0
            )
            for x, label, task, slots, replayed in draws
        ]
        return write, stream, replay, extra

    def _set_training_mode(self) -> None:
        """Set training mode; layers with frozen moments normalize with them."""
        self.model.train()
        if self.done >= self.freeze_step:
            stats_mode(self.model, "running", update=False)

    def save_moments_of(self, task: int) -> None:
        """Save the running moments as those of a task, at its end."""
        self.task_moments[task] = {name: buffer.clone() for name, buffer in self._running_moments().items()}

    @contextmanager
    def using_moments_of(self, task: int) -> Iterator[None]:
        """Replace the running moments by those saved at the end of a task; restored on exit."""
        moments = self._running_moments()
        present = {name: buffer.clone() for name, buffer in moments.items()}
        try:
            for name, buffer in moments.items():
                buffer.copy_(self.task_moments[task][name])
            yield
        finally:
            for name, buffer in moments.items():
                buffer.copy_(present[name])

    def _running_moments(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(RUNNING_MOMENTS)}

    def start_task(self, task: int) -> bool:
        """Call the hooks before the first step of a task, unless they were called; returns whether they were now."""
        if not self.has_task_hooks or self.hooks_done > 2 * task:
            return False
        with self._in_hook(f"on_task_start of task {task}"):
            for hook in self.norm_hooks.task_start:
                hook(task)
            self.strategy.on_task_start(task_info(self.data.sequence, self.plan, task))
        self.hooks_done = 2 * task + 1
        return True

    def end_task(self, task: int) -> bool:
        """Call the hooks after the last step of a task, unless they were called; returns whether they were now."""
        if not self.has_task_hooks or self.hooks_done > 2 * task + 1:
            return False
        with self._in_hook(f"on_task_end of task {task}"):
            for hook in self.norm_hooks.task_end:
                hook(task)
            info, items = task_info(self.data.sequence, self.plan, task), task_items(self.plan, task)
            self.strategy.on_task_end(info, TaskData(self.data, items.to(self.device)))
        self.hooks_done = 2 * task + 2
        return True

    @contextmanager
    def _in_hook(self, name: str) -> Iterator[None]:
        """The context of a hook: seeded generators, the network in training mode and gradients, which are dropped."""
        was_training = self.model.training
        self._set_training_mode()
        with self.seeded(name), torch.enable_grad():
            yield
        self.model.train(was_training)
        self.optimizer.zero_grad()

    def nonfinite_tensor(self) -> str | None:
        """Return the name of the first trained parameter or running moment that is not finite; None if there is none.

        The loss shows a bad update only one step later. Parameters that are not trained are not checked: a
        user-defined network may contain infinity on purpose, as in a mask.
        """
        tensors: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tensors |= self._running_moments()
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        if not tensors:
            return None
        # The largest absolute values, in a few kernels for all tensors. It is NaN where a value is.
        largest = torch._foreach_norm([tensor.detach() for tensor in tensors.values()], torch.inf)
        finite = torch.isfinite(torch.stack(largest)).tolist()
        return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run's precision."""
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that must survive a restart. `progress` returns the rest."""
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        of_optimizer = optimizer_state(self.optimizer, self.model)
        optimizer = {f"optimizer.{name}": tensor for name, tensor in of_optimizer.items()}
        strategy = {f"strategy.{name}": tensor for name, tensor in self.strategy.state_dict().items()}
        moments = {f"moments.{task}.{name}": t for task, of in self.task_moments.items() for name, t in of.items()}
        return {**model, **optimizer, "memory.logits": self.logits[:-1], **strategy, **moments}

    def progress(self) -> dict[str, Any]:
        """Return what must survive a restart besides tensors, as JSON values."""
        progress: dict[str, Any] = {"done": self.done}
        if self.convolutions:
            progress["convolutions"] = self.convolutions.to_json()
        if self.has_task_hooks:
            progress["hooks"] = self.hooks_done
        return progress

    def load(self, state: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Resume from a saved `state` and `progress`, with the table of convolutions of the checkpoint."""
        self.convolutions = ConvolutionTable.from_json(progress.get("convolutions", []))
        if self.convolutions and not can_launch(self.device):
            raise UserError(
                f"the checkpoint after step {progress['done']} needs Triton convolutions (table "
                f"{self.convolutions.digest}), which can't be launched on {self.device}. Resume it on a GPU with "
                f"Triton and a C compiler."
            )
        model, optimizer, strategy = (
            {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            for prefix in ("model.", "optimizer.", "strategy.")
        )
        self.model.load_state_dict(model)
        load_optimizer_state(self.optimizer, self.model, optimizer)
        self.logits[:-1].copy_(state["memory.logits"])
        self.task_moments = {}
        for key, tensor in state.items():
            if key.startswith("moments."):
                _, task, name = key.split(".", 2)
                self.task_moments.setdefault(int(task), {})[name] = tensor.to(self.device)
        self.strategy.load_state_dict(strategy)
        self.done, self.hooks_done = progress["done"], progress.get("hooks", 0)


class PlainSGD:
    """Stochastic gradient descent without momentum or weight decay.

    The results are bit-identical to `torch.optim.SGD`. Constructing that one imports torch's compiler, which takes
    seconds at the start of every run.

    Args:
        parameters: The parameters to update.
        lr: The learning rate.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> (3 * weight).backward()
        >>> PlainSGD([weight], lr=0.1).step()
        >>> weight.item()
        0.699999988079071
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.state: dict[nn.Parameter, dict[str, Any]] = {}  # always empty: there is no momentum

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient; on CUDA in one kernel."""
        updates = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if updates:
            torch._foreach_add_([parameter for parameter, _ in updates], [grad for _, grad in updates], alpha=-self.lr)


Optimizer = PlainSGD | torch.optim.Optimizer


def build_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """Build the optimizer of a run, with torch's defaults except for the learning rate.

    On CUDA it updates all parameters in one kernel and counts its steps on the device, so that a step can be captured.

    Example:
        >>> type(build_optimizer(TrainConfig(optimizer="adam"), nn.Linear(2, 2), torch.device("cpu"))).__name__
        'Adam'
    """
    on_gpu = device.type == "cuda"
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, fused=on_gpu, capturable=on_gpu)
    return PlainSGD(model.parameters(), config.lr)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer by name; empty before its first step, or if it has no state.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> optimizer_state(optimizer, model)
        {}
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer_state(optimizer, model))[:3]
        ['bias/exp_avg', 'bias/exp_avg_sq', 'bias/step']
    """
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    named = {f"{name}/{key}": value for name, values in states.items() for key, value in values.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the state tensors of `optimizer_state` into an optimizer of the same model.

    State of the shape of its parameter gets the memory layout of the parameter, which fused kernels require. Step
    counts go to the device if the optimizer is capturable, and to the CPU otherwise.
    """
    if isinstance(optimizer, PlainSGD):
        return
    parameters = dict(model.named_parameters())
    on_device = any(group.get("capturable") for group in optimizer.param_groups)
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        if value.shape == parameter.shape and key != "step":
            value = torch.empty_like(parameter, requires_grad=False).copy_(value)
        else:
            value = value.to(parameter.device if on_device else "cpu", copy=True)
        optimizer.state[parameter][key] = value


@dataclass(frozen=True)
class StepIndices:
    """One step. Each tensor has the samples of the stream first, then those of each replay draw.

    Attributes:
        sizes: Number of samples of the stream, and of each replay draw.
        image: Index of the image of each sample.
        label: Label of each sample; for multi-label streams the index of the item that has the labels.
        task: Task of each sample.
        slots: Memory slots that the samples of the stream are written to, then those that the draws are read from.
        views: (samples, 3) crops and flips; None without augmentation.
    """

    sizes: tuple[int, ...]
    image: Tensor
    label: Tensor
    task: Tensor
    slots: Tensor
    views: Tensor | None


@dataclass(frozen=True)
class StepTable:
    """The rows of steps of the same shape.

    Attributes:
        table: (steps, values) integers.
        sizes: Number of samples of the stream, and of each replay draw.
        augmented: Whether rows contain crops and flips.
    """

    table: Tensor
    sizes: tuple[int, ...]
    augmented: bool

    def at(self, number: int | Tensor) -> StepIndices:
        """Return one row. In a CUDA graph, its number is a tensor on the device."""
        row = self.table[number] if isinstance(number, int) else self.table.index_select(0, number).squeeze(0)
        samples = sum(self.sizes)
        image, label, task, slots, views = torch.split(row, [samples] * 4 + [len(row) - 4 * samples])
        return StepIndices(self.sizes, image, label, task, slots, views.view(samples, 3) if self.augmented else None)

    def overwrite(self, others: StepTable) -> None:
        """Copy other rows, which may be fewer, into this table in place, so that a captured step reads them."""
        self.table[: len(others.table)].copy_(others.table)


def build_step_table(
    steps: Sequence[Step],
    samples: Indices,
    images: Sequence[Indices],
    items: Items,
    spare: int,
    device: torch.device,
) -> StepTable:
    """Build the rows of steps of the same shape.

    Args:
        steps: The steps.
        samples: The items of each step: of the stream, then of each draw.
        images: For each step, the indices of the images of its samples.
        items: The items that the steps refer to.
        spare: The slot for samples that are not stored, or are overwritten in the same step.
        device: The device of the rows.
    """
    first = steps[0]
    label = items.label[samples] if items.label.ndim == 1 else samples
    slots = table_of(steps, lambda step: (step.write, *step.replay_slots))
    written = len(first.write)
    # Each slot keeps its last writer; all other samples go to the spare slot.
    order = np.argsort(slots[:, :written], axis=1, kind="stable")
    ranked = np.take_along_axis(slots[:, :written], order, axis=1)
    is_last = np.ones(ranked.shape, dtype=bool)
    is_last[:, :-1] = ranked[:, :-1] != ranked[:, 1:]
    np.put_along_axis(slots[:, :written], order, np.where(is_last & (ranked != NOT_STORED), ranked, spare), axis=1)
    columns = [np.stack(images), label, items.task[samples], slots]
    if first.stream_views is not None:
        columns.append(table_of(steps, lambda step: (step.stream_views, *(step.replay_views or ()))))
    table = np.concatenate(columns, axis=1)
    return StepTable(torch.from_numpy(table).to(device), first.sizes, first.stream_views is not None)


def table_of(steps: Sequence[Step], parts: Callable[[Step], tuple[Any, ...]]) -> Indices:
    """Return one row for each step of the same shape: its parts, such as those of the stream and of each draw.

    They are stacked in one call, since a stretch has thousands of steps.
    """
    return np.concatenate([part for step in steps for part in parts(step)]).reshape(len(steps), -1)


def same_shape_end(steps: Sequence[Step], start: int) -> int:
    """Return the end of the consecutive steps that have the shape of the step at ``start``."""
    end = start
    while end < len(steps) and steps[end].sizes == steps[start].sizes:
        end += 1
    return end
