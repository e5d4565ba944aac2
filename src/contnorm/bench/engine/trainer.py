"""The trainer of one run. `Trainer.state` holds everything that must survive a restart.

A trainer has a config, a seed, a plan, a model, an optimizer, a strategy and, if the strategy stores logits, a memory
of logits. One training step consists of gather, augment, forward, loss, backward, update and scatter, and reads its
indices from tensors. The package draws no random numbers in a step and copies no value to the host, so a step can be
captured as a CUDA graph. Hooks at task boundaries run between captured steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.engine.norm_hooks import NormHooks
from contnorm.bench.engine.optimizers import build_optimizer, load_optimizer_state, optimizer_state
from contnorm.bench.engine.preflight import check_moment_settings, check_network
from contnorm.bench.engine.step_tensors import StepIndices, StepTable, build_step_table, samples_of, stretch_end
from contnorm.bench.engine.strategy_hooks import TASK_HOOKS, check_hooks, hooks_of, task_info, task_items
from contnorm.bench.engine.user_code import UserComponents, seeded_generators
from contnorm.bench.models.build import MODELS, build_model
from contnorm.bench.plan import PlanCache, Step
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies.base import Batch, OutputMask, TaskData, tagged_passes
from contnorm.bench.strategies.build import build_strategy, check_loss
from contnorm.bench.streams.device import DeviceImages, DeviceStream, ImageFeed, PrefetchedFeed
from contnorm.convert.detect import holds_moments
from contnorm.errors import UserCodeError, UserError
from contnorm.kernels.convolution import EMPTY, Convolution, ConvolutionTable, table_for, using_table
from contnorm.kernels.triton.availability import can_launch
from contnorm.tags import BatchTags, batch_tags

__all__ = ["Trainer"]

RUNNING_MOMENTS = ("running_mean", "running_var")


class Trainer:
    """One run in progress.

    Args:
        config: The resolved settings.
        seed: The seed.
        source: The data set.
        device: The device to train on.
        pictures: The images on the device, to share with other trainers. Default: loaded for this trainer.
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
        pictures: DeviceImages | None = None,
        plans: PlanCache | None = None,
        any_norm: bool = False,
        memory_moments: bool = False,
    ) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.memory_moments = memory_moments
        self.user_code = UserComponents(config, seed, device)
        self.has_user_strategy = "strategy" in self.user_code.parts
        self.has_user_model = bool(self.user_code.parts.keys() & {"model", "norm"})
        self.has_user_code = bool(self.user_code.parts)
        self.has_package_network = config.model.name in MODELS and not self.has_user_model  # with a norm of the package
        plans = plans or PlanCache(source)
        with self.user_code.seeded("strategy"):
            self.strategy = build_strategy(config.strategy)
        self._hooks = hooks_of(self.strategy)
        stream, self.plan = plans.of(config, seed, self.strategy.draws)
        self.data = DeviceStream(stream, device, pictures)
        self.head = OutputMask(self.data.competing)
        self.task_mask = self._task_mask()
        self.model, self.norm_hooks = self._fresh_model(plans, any_norm)
        self.feed = self._feed()
        check_hooks(config, stream, self.strategy, self.norm_hooks)
        check_moment_settings(self.model, config, self.plan, stream)
        self._tags_batches = self.norm_hooks.need_tags or self.has_user_strategy
        self.optimizer = build_optimizer(config.train, self.model, device)
        self.convolutions = self._convolution_table()
        slots = self.plan.slots if self.strategy.stores_logits else 0
        self.logits = torch.zeros(slots + 1, stream.outputs, device=device)  # last row: samples that are not stored
        self.task_moments: dict[int, dict[str, Tensor]] = {}  # running moments at the end of tasks, for evaluation
        self.done = 0  # steps
        self.hooks_done = 0  # calls at task boundaries: the start and the end of each task
        self._rows: tuple[int, int, StepTable] | None = None  # first and end step of rows on the device
        self._replayed: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by sizes of a step
        with self.user_code.seeded("strategy setup"), self.user_code.errors("in setup()"):
            self.strategy.attach(self.model, self.head, self.device)
        self._check_strategy_state()

    def _check_strategy_state(self) -> None:
        wrong = next((name for name, t in self.strategy.state_dict().items() if not isinstance(t, Tensor)), None)
        if wrong is not None:
            raise UserCodeError(
                f"strategy {self.config.strategy.name!r}: {wrong} in its state_dict() is no tensor, so a checkpoint "
                f"can't contain it."
            )

    @property
    def has_task_hooks(self) -> bool:
        """Whether the strategy or a layer of the network has a hook at task boundaries."""
        return self.norm_hooks.on_tasks or bool(self._hooks & TASK_HOOKS)

    def _convolution_table(self) -> ConvolutionTable:
        """Return the table of convolutions of a new run; empty if cuDNN computes all of them."""
        train, dtypes = self.config.train, {"tf32": "float32", "bf16": "bfloat16"}
        by_triton = train.convolutions == "auto" and train.deterministic and train.precision in dtypes
        if not by_triton or not any(isinstance(module, Convolution) for module in self.model.modules()):
            return EMPTY
        return table_for(self.device).only(dtypes[train.precision])

    def _feed(self) -> ImageFeed:
        """Return the feed that copies the images of a step to the device."""
        gallery = self.data.pictures.train
        return (
            ImageFeed(gallery)
            if gallery.whole
            else PrefetchedFeed(gallery, [self._images(step) for step in self.plan.steps])
        )

    def _task_mask(self) -> OutputMask | None:
        """Return the head for task-aware evaluation of class-incremental streams; None for other scenarios."""
        stream = self.data.sequence
        if self.config.stream.scenario != "class":
            return None
        mask = torch.zeros(stream.tasks, stream.outputs, dtype=torch.bool)
        for items in (stream.train, stream.test):
            mask[torch.from_numpy(items.task), torch.from_numpy(items.label)] = True
        return OutputMask(mask.to(self.device))

    def _images(self, step: Step) -> NDArray[np.int64]:
        """Return the image numbers of a step: those of the stream, then those of each replay draw."""
        images: NDArray[np.int64] = self.data.sequence.train.image[np.concatenate([step.stream, *step.replay])]
        return images

    def _fresh_model(self, plans: PlanCache, any_norm: bool) -> tuple[nn.Module, NormHooks]:
        """Return the network and the hooks of its layers; adds the extra draw that they request to the plan."""
        stream = self.data.sequence
        shape = stream.source.train_images.shape[1:]
        with seeded_generators(seed_for(self.seed, "init"), torch.device("cpu")):
            model = build_model(self.config.model, self.config.norm, shape, stream.outputs, len(self.plan.steps))
            hooks = NormHooks(model, self.config.norm.name)
            if hooks.extra_draw is not None:
                _, self.plan = plans.of(self.config, self.seed, self.strategy.draws, hooks.extra_draw)
            check_network(model, self.config, self.plan, shape, stream.outputs, any_norm)
        model = model.to(self.device)
        if self.device.type == "cuda":  # the layout that tensor cores need and images have
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, hooks

    def rows(self, start: int, end: int) -> StepTable:
        """Return the index tensors of steps ``start`` to ``end``, which must have the same shape, on the device."""
        steps, items = self.plan.steps[start:end], self.data.sequence.train
        samples = samples_of(steps)
        places = self.feed.places(list(items.image[samples]), start)
        return build_step_table(steps, samples, places, items, len(self.logits) - 1, self.device)

    def step(self) -> Tensor:
        """Do the next step of the plan; returns the loss as a tensor on the device."""
        step = self.done
        if "on_step_start" in self._hooks:
            with self.user_code.seeded(f"start of step {step}"), self.user_code.errors(f"in on_step_start({step})"):
                self.strategy.on_step_start(step)
        loss = self.learn(self._row())
        self.done += 1
        if "on_step_end" in self._hooks:
            with self.user_code.seeded(f"end of step {step}"), self.user_code.errors(f"in on_step_end({step})"):
                self.strategy.on_step_end(step, loss)
        return loss

    def _row(self) -> StepIndices:
        """Return the row of the next step. On a GPU, rows are copied for as many steps as possible."""
        if self._rows is None or not self._rows[0] <= self.done < self._rows[1]:
            end = self.done + 1
            if self.device.type == "cuda":
                end = self.feed.reach(self.done, stretch_end(self.plan.steps, self.done))
            self._rows = self.done, end, self.rows(self.done, end)
        first, _, table = self._rows
        return table.at(self.done - first)

    def learn(self, row: StepIndices) -> Tensor:
        """Do one training step on the samples of a row; returns the loss as a tensor on the device."""
        write, stream, replay, extra = self._batches(row)
        self._set_training_mode()
        self.optimizer.zero_grad()
        purpose = f"step {self.done}"
        with self.user_code.seeded(purpose):
            with using_table(self.convolutions):
                with self.autocast():
                    loss, logits = self._loss(stream, replay, extra)
                loss.backward()  # type: ignore[no-untyped-call]
            if "after_backward" in self._hooks:
                self._after_backward()
            if self.has_user_code:
                self.user_code.check_for_draws(purpose)
            if self.has_user_strategy:
                self._check_for_gradients()
        if self.config.train.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.train.clip_value)
        self.optimizer.step()
        if logits is not None:
            self.logits.index_copy_(0, write, logits)
        return loss.detach()

    @property
    def freeze_step(self) -> int | None:
        """Number of steps after which running moments are frozen; None if they are not."""
        after, ends = self.config.norm.freeze_after, self.plan.ends
        return None if after is None or after > len(ends) else ends[after - 1]

    def is_frozen(self, step: int) -> bool:
        """Whether running moments are frozen in a step."""
        return self.freeze_step is not None and step >= self.freeze_step

    def _set_training_mode(self) -> None:
        """Set training mode; layers with frozen moments are in evaluation mode, in which they use the moments."""
        self.model.train()
        if self.is_frozen(self.done):
            for module in self.model.modules():
                if holds_moments(module):
                    module.eval()

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

    def _loss(self, stream: Batch, replay: tuple[Batch, ...], extra: Batch | None) -> tuple[Tensor, Tensor | None]:
        """Return the loss of the strategy and of the norm layers, and the logits to store."""
        tagged = tagged_passes()
        if extra is not None:
            assert extra.replayed is not None
            tags = BatchTags(extra.replayed, extra.task, is_extra=True, extra_size=len(extra), stream_size=0)
            with torch.no_grad(), batch_tags(tags):
                self.model(extra.x)
        try:
            answer = self.strategy.loss(self.model, self.head, stream, *replay)
        except Exception as error:
            if self.norm_hooks.need_tags and tagged_passes() == tagged and not isinstance(error, UserError):
                raise self._no_tags() from error
            raise
        if self.norm_hooks.need_tags and tagged_passes() == tagged:
            raise self._no_tags()
        loss, logits = self._checked(answer, stream) if self.has_user_strategy else answer
        if self.norm_hooks.has_losses:
            loss = loss + self.norm_hooks.auxiliary_loss()
        return loss, logits

    def _no_tags(self) -> UserCodeError:
        return UserCodeError(
            f"strategy {self.config.strategy.name!r}: its loss calls model(x) without the tags of the batch, which "
            f"norm {self.config.norm.name!r} needs. Call bench.forward(model, batch) instead."
        )

    def _after_backward(self) -> None:
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        given = dict(grads)
        with torch.no_grad():
            answer = self.strategy.after_backward(grads)  # type: ignore[func-returns-value]
        replaced = next((name for name in {**given, **grads} if grads.get(name) is not given.get(name)), None)
        if answer is not None or replaced is not None:
            what = "returns a value" if replaced is None else f"sets grads[{replaced!r}] to another object"
            raise UserCodeError(
                f"strategy {self.config.strategy.name!r}: after_backward {what}, which changes no gradient. Change "
                f"gradients in place, such as with grads[name].copy_(...)."
            )

    def _check_for_gradients(self) -> None:
        """Raise an error if no parameter has a gradient, since the step would change nothing."""
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise UserCodeError(
                f"strategy {self.config.strategy.name!r}: after its step no parameter of the network has a gradient. "
                f"Compute the loss from model(x), and keep the gradients in after_backward."
            )

    def start_task(self, task: int) -> bool:
        """Call the hooks before the first step of a task, unless they were called; returns whether they were now."""
        if not self.has_task_hooks or self.hooks_done > 2 * task:
            return False
        with self._in_hook(f"on_task_start of task {task}"):
            self.norm_hooks.start_task(task)
            self.strategy.on_task_start(task_info(self.data.sequence, self.plan, task))
        self.hooks_done = 2 * task + 1
        return True

    def end_task(self, task: int) -> bool:
        """Call the hooks after the last step of a task, unless they were called; returns whether they were now."""
        if not self.has_task_hooks or self.hooks_done > 2 * task + 1:
            return False
        with self._in_hook(f"on_task_end of task {task}"):
            self.norm_hooks.end_task(task)
            info, items = task_info(self.data.sequence, self.plan, task), task_items(self.plan, task)
            self.strategy.on_task_end(info, TaskData(self.data, items.to(self.device)))
        self.hooks_done = 2 * task + 2
        return True

    @contextmanager
    def _in_hook(self, name: str) -> Iterator[None]:
        """The context of a hook: seeded generators, the network in training mode and gradients, which are dropped."""
        was_training = self.model.training
        self._set_training_mode()
        with self.user_code.seeded(name), self.user_code.errors(f"in {name}"), torch.enable_grad():
            yield
        if self.strategy.model is not self.model:
            raise UserCodeError(
                f"strategy {self.config.strategy.name!r}: {name} sets self.model to another network, which would not "
                f"be trained. Change the network in place, such as with self.model.load_state_dict(...)."
            )
        self.model.train(was_training)
        self.optimizer.zero_grad()

    def _checked(self, answer: object, stream: Batch) -> tuple[Tensor, Tensor | None]:
        """Check the result of a user-defined loss."""
        return check_loss(self.config.strategy.name, answer, self.strategy.stores_logits, self.head, stream)

    def _batches(self, row: StepIndices) -> tuple[Tensor, Batch, tuple[Batch, ...], Batch | None]:
        """Return the memory slots to write to, the batches of the stream and of each replay draw, and the extra one."""
        x = self.data.seen(self.feed.pixels, row.image, row.task, row.views)
        label = self.data.train.label[row.label] if self.data.sequence.multi_label else row.label
        parts = [torch.split(t, list(row.sizes)) for t in (x, label, row.task, row.slots)]
        (x, label, task, write, replayed), *draws = zip(*parts, self._replayed_of(row.sizes), strict=True)
        extra, extra_size = None, 0
        if self.norm_hooks.extra_draw is not None:
            *draws, (extra_x, extra_label, extra_task, _, extra_replayed) = draws
            extra_size = len(extra_x)
            extra = Batch(extra_x, extra_label, extra_task, None, extra_replayed) if extra_size else None
        replay = tuple(
            Batch(x, label, task, self.logits[slots] if self.strategy.stores_logits else None, replayed, extra_size, 0)
            for x, label, task, slots, replayed in draws
        )
        return write, Batch(x, label, task, None, replayed, extra_size, len(x)), replay, extra

    def _replayed_of(self, sizes: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """Return for each part of a step whether its samples are replayed; made once for each shape of a step.

        None for each part if neither a norm nor the strategy reads it: tags then cost no time.
        """
        if not self._tags_batches:
            return (None,) * len(sizes)
        if sizes not in self._replayed:
            replayed = torch.arange(sum(sizes), device=self.device) >= sizes[0]
            self._replayed[sizes] = torch.split(replayed, list(sizes))
        return self._replayed[sizes]

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
        self._load_task_moments(state)
        with self.user_code.errors("in load_state_dict()"):
            self.strategy.load_state_dict(strategy)
        self.done, self.hooks_done = progress["done"], progress.get("hooks", 0)

    def _load_task_moments(self, state: dict[str, Tensor]) -> None:
        self.task_moments = {}
        for key, tensor in state.items():
            if key.startswith("moments."):
                _, task, name = key.split(".", 2)
                self.task_moments.setdefault(int(task), {})[name] = tensor.to(self.device)
