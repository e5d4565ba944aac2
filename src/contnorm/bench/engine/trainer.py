"""The trainer of one run. `Trainer.state` holds everything that must survive a restart.

A trainer has a config, a seed, a plan, a model, an optimizer and, if the strategy stores logits, a memory of logits.
One training step consists of gather, augment, forward, loss, backward, update and scatter, and reads its indices from
tensors. The package draws no random numbers in a step and copies no value to the host, so a step can be captured as a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.code_state import (
    UNREADABLE,
    CodeState,
    has_drawn,
    isolate_modules,
    network_state,
    register_modules,
    seeded_generators,
    strategy_state,
)
from contnorm.bench.engine.optimizers import build_optimizer, load_optimizer_state, optimizer_state
from contnorm.bench.engine.precision import Bf16Weights
from contnorm.bench.engine.preflight import check_network
from contnorm.bench.engine.step_tensors import StepIndices, StepTable, build_step_table, samples_of
from contnorm.bench.models.build import MODELS, build_model
from contnorm.bench.plan import PlanCache, Step
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies.base import Batch, OutputMask
from contnorm.bench.strategies.build import build_strategy, check_loss
from contnorm.bench.streams.image_store import DeviceImages, ImageFeed, PrefetchedFeed
from contnorm.bench.streams.transforms import DeviceStream
from contnorm.bench.user_code import is_user_code, loaded_modules
from contnorm.kernels.side_stream import SideStream, side_stream_gradients

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
    ) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.has_user_strategy, self.has_user_model = map(is_user_code, (config.strategy.name, config.model.name))
        self.has_user_code = self.has_user_strategy or self.has_user_model
        if self.has_user_code or is_user_code(config.memory.kind):
            isolate_modules()
        with self._seeded("strategy"):
            self.strategy = build_strategy(config.strategy)
        self._strategy_modules = loaded_modules(config.strategy.name) if self.has_user_strategy else {}
        stream, self.plan = (plans or PlanCache(source)).of(config, seed, self.strategy.draws)
        self.data = DeviceStream(stream, device, pictures)
        self.feed = self._feed()
        self.head = OutputMask(self.data.competing)
        self.task_mask = self._task_mask()
        self.model = self._fresh_model(any_norm)
        self._model_modules = loaded_modules(config.model.name) if self.has_user_model else {}
        # A user-defined network may access its weights in any way, so there autocast casts them.
        use_bf16_copies = config.train.precision == "bf16" and config.model.name in MODELS
        self.bf16_weights = Bf16Weights(self.model) if use_bf16_copies else None
        self.optimizer = build_optimizer(config.train, self.model, device)
        slots = self.plan.slots if self.strategy.stores_logits else 0
        self.logits = torch.zeros(slots + 1, stream.outputs, device=device)  # last row: samples that are not stored
        self.side_stream: SideStream | None = None  # side stream for weight gradients, if used
        self.done = 0  # steps
        self.draws_random = False  # whether user code draws random numbers in a step; checked on a GPU only
        self.fresh_code_state: CodeState = {}  # of user code when it was loaded
        if self.has_user_code:
            self.fresh_code_state = self.code_state()
            register_modules()

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

    def _fresh_model(self, any_norm: bool) -> nn.Module:
        stream = self.data.sequence
        shape = stream.source.train_images.shape[1:]
        with seeded_generators(seed_for(self.seed, "init"), torch.device("cpu")):
            model = build_model(self.config.model, self.config.norm, shape, stream.outputs, len(self.plan.steps))
            check_network(model, self.config, self.plan, shape, stream.outputs, any_norm)
        model = model.to(self.device)
        if self.device.type == "cuda":  # the layout that tensor cores need and images have
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def rows(self, start: int, end: int) -> StepTable:
        """Return the index tensors of steps ``start`` to ``end``, which must have the same shape, on the device."""
        steps, items = self.plan.steps[start:end], self.data.sequence.train
        samples = samples_of(steps)
        places = self.feed.places(list(items.image[samples]), start)
        return build_step_table(steps, samples, places, items, len(self.logits) - 1, self.device)

    def step(self) -> Tensor:
        """Do the next step of the plan; returns the loss as a tensor on the device."""
        loss = self.learn(self.rows(self.done, self.done + 1).at(0))
        self.done += 1
        return loss

    def learn(self, row: StepIndices) -> Tensor:
        """Do one training step on the samples of a row; returns the loss as a tensor on the device."""
        write, stream, replay = self._batches(row)
        self.model.train()
        self.optimizer.zero_grad()
        if self.bf16_weights is not None:
            self.bf16_weights.refresh()
        with side_stream_gradients(self.side_stream), self._seeded(f"step {self.done}"):
            with self.autocast():
                answer = self.strategy.loss(self.bf16_weights or self.model, self.head, stream, replay)
                loss, logits = self._checked(answer, stream) if self.has_user_strategy else answer
            loss.backward()  # type: ignore[no-untyped-call]
            if self.has_user_code:
                self._check_for_draws()
        if self.bf16_weights is not None:
            self.bf16_weights.add_gradients()
        if self.config.train.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.train.clip_value)
        self.optimizer.step()
        if logits is not None:
            self.logits.index_copy_(0, write, logits)
        return loss.detach()

    def _checked(self, answer: object, stream: Batch) -> tuple[Tensor, Tensor | None]:
        """Check the result of a user-defined loss."""
        return check_loss(self.config.strategy.name, answer, self.strategy.stores_logits, self.head, stream)

    @contextmanager
    def _seeded(self, purpose: str) -> Iterator[None]:
        """Seed the global generators for user code; not in a graph capture, since captured code draws nothing."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or not self.has_user_code:
            yield
            return
        with seeded_generators(seed_for(self.seed, purpose), self.device):
            yield

    def _check_for_draws(self) -> None:
        """Record whether user code draws random numbers in a step; every graph replay would draw the same ones."""
        if self.device.type != "cuda" or self.draws_random or torch.cuda.is_current_stream_capturing():
            return
        self.draws_random = has_drawn(seed_for(self.seed, f"step {self.done}"), self.device)

    def _batches(self, row: StepIndices) -> tuple[Tensor, Batch, tuple[Batch, ...]]:
        """Return the memory slots to write to, the batch of the stream, and the batch of each replay draw."""
        x = self.data.seen(self.feed.pixels, row.image, row.task, row.views)
        label = self.data.train.label[row.label] if self.data.sequence.multi_label else row.label
        parts = zip(*(torch.split(t, list(row.sizes)) for t in (x, label, row.task, row.slots)), strict=True)
        (x, label, task, write), *draws = parts
        replay = tuple(
            Batch(x, label, task, self.logits[slots] if self.strategy.stores_logits else None)
            for x, label, task, slots in draws
        )
        return write, Batch(x, label, task), replay

    def nonfinite_tensor(self) -> str | None:
        """Return the name of the first trained parameter or running moment that is not finite; None if there is none.

        The loss shows a bad update only one step later. Parameters that are not trained are not checked: a
        user-defined network may contain infinity on purpose, as in a mask.
        """
        tensors: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tensors |= {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(RUNNING_MOMENTS)}
        if not tensors:
            return None
        finite = torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors.values()]).tolist()
        return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run's precision."""
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that must survive a restart. The number of steps done is saved separately."""
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        of_optimizer = optimizer_state(self.optimizer, self.model)
        optimizer = {f"optimizer.{name}": tensor for name, tensor in of_optimizer.items()}
        return {**model, **optimizer, "memory.logits": self.logits[:-1]}

    def code_state(self) -> CodeState:
        """Return digests of the state that user code has outside of `state`; empty without user code."""
        digests: CodeState = {}
        if self.has_user_strategy:
            state = strategy_state(self.strategy, self._strategy_modules, self.head)
            digests |= {f"strategy {name}": digest for name, digest in state.items()}
            if not self.has_user_model:  # the strategy may change it in unsaved ways
                state = network_state(self.model, self._strategy_modules)
                of_model = {name: digest for name, digest in state.items() if f"strategy {name}" not in digests}
                digests |= {f"strategy model.{name}": digest for name, digest in of_model.items()}
        if self.has_user_model:
            state = network_state(self.model, self._model_modules)
            digests |= {f"model {name}": digest for name, digest in state.items()}
        return digests

    def code_changes(self) -> list[str]:
        """Return the names of user-code state outside of `state` that has changed since the code was loaded."""
        now, fresh = self.code_state(), self.fresh_code_state
        return [name for name in {**fresh, **now} if now.get(name) != fresh.get(name) or now[name] == UNREADABLE]

    def load(self, state: dict[str, Tensor], done: int) -> None:
        """Resume from a state that was saved after ``done`` steps."""
        model, optimizer = (
            {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            for prefix in ("model.", "optimizer.")
        )
        self.model.load_state_dict(model)
        load_optimizer_state(self.optimizer, self.model, optimizer)
        self.logits[:-1].copy_(state["memory.logits"])
        self.done = done
