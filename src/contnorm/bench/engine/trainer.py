"""A lane: one run in progress. Everything that must survive a restart is in its `state`.

A lane is a config, a seed, a plan, a model, an optimizer and, where the strategy stores logits, a memory of them. Its
step is gather, augment, forward, loss, backward, update, scatter, from rows of index tensors; the package draws no
random number in it and no value goes to the host, so it can be captured as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.bf16_weights import HalfWeights
from contnorm.bench.engine.code_state import (
    UNREADABLE,
    CodeState,
    isolate_modules,
    network_state,
    register_modules,
    strategy_state,
)
from contnorm.bench.engine.optimizers import build_optimizer, load_optimizer_state, optimizer_state
from contnorm.bench.engine.plan_cache import Plans
from contnorm.bench.engine.preflight import try_out
from contnorm.bench.engine.step_tensors import Row, Rows, rows_of, samples_of
from contnorm.bench.engine.user_random import has_drawn, seeded_generators
from contnorm.bench.models import MODELS, build_model
from contnorm.bench.plan import Step
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies import Batch, Head, build_strategy
from contnorm.bench.strategies.user_strategy import checked_answer
from contnorm.bench.streams.image_store import Feed, Pictures, Window
from contnorm.bench.streams.transforms import DeviceStream
from contnorm.bench.user_code import is_own_code, loaded_modules
from contnorm.kernels.side_stream import Beside, weights_beside

__all__ = ["Lane", "LossNotFiniteError"]

RUNNING_MOMENTS = ("running_mean", "running_var")


class LossNotFiniteError(Exception):
    """A lane's loss turned into infinity or not-a-number; the run can't go on."""


class Lane:
    """One run in progress.

    Args:
        config: Its settings, resolved.
        seed: Its seed.
        source: Its data set.
        device: Where it runs.
        pictures: The data set there, to share with other lanes; its own where none is given.
        plans: What is shown, likewise.
        any_norm: Whether a network of the user's own may have other norms than the settings name, since the lane is
            not for a run that is recorded.
    """

    def __init__(
        self,
        config: RunConfig,
        seed: int,
        source: Source,
        device: torch.device,
        pictures: Pictures | None = None,
        plans: Plans | None = None,
        any_norm: bool = False,
    ) -> None:
        self.config, self.seed, self.device = config, seed, device
        isolate_modules()
        with self._seeded("strategy"):
            self.strategy = build_strategy(config.strategy)
        self._strategy_modules = _user_modules(config.strategy.name)
        stream, self.plan = (plans or Plans(source)).of(config, seed, self.strategy.draws)
        self.data = DeviceStream(stream, device, pictures)
        self.feed = self._feed()
        self.head = Head(self.data.competing)
        self.own_head = self._own_head()
        self.model = self._fresh_model(any_norm)
        self._model_modules = _user_modules(config.model.name)
        # A network of the user's own may look at its weights in ways of its own: there, autocast casts them.
        ours_in_half = config.train.precision == "bf16" and config.model.name in MODELS
        self.half = HalfWeights(self.model) if ours_in_half else None
        self.optimizer = build_optimizer(config.train, self.model, device)
        slots = self.plan.slots if self.strategy.stores_logits else 0
        self.logits = torch.zeros(slots + 1, stream.outputs, device=device)  # the last row takes what is not kept
        self.beside: Beside | None = None  # where weight gradients are made, if not among the rest
        self.done = 0  # steps
        self.draws_random = False  # whether user code has drawn random numbers in a step; looked for on a GPU
        self.fresh_code_state = self.code_state()
        register_modules()

    def _feed(self) -> Feed:
        """How the images of a step come to the device."""
        gallery = self.data.pictures.train
        return Feed(gallery) if gallery.whole else Window(gallery, [self._images(step) for step in self.plan.steps])

    def _own_head(self) -> Head | None:
        """In class-incremental learning the same outputs, with the task known; for evaluation alone."""
        stream = self.data.stream
        if self.config.stream.scenario != "class":
            return None
        own = torch.zeros(stream.tasks, stream.outputs, dtype=torch.bool)
        for items in (stream.train, stream.test):
            own[torch.from_numpy(items.task), torch.from_numpy(items.label)] = True
        return Head(own.to(self.device))

    def _images(self, step: Step) -> NDArray[np.int64]:
        """The images of a step: of the stream, then of each draw."""
        found: NDArray[np.int64] = self.data.stream.train.image[np.concatenate([step.stream, *step.replay])]
        return found

    def _fresh_model(self, any_norm: bool) -> nn.Module:
        stream = self.data.stream
        shape = stream.source.train_images.shape[1:]
        with seeded_generators(seed_for(self.seed, "init"), torch.device("cpu")):
            model = build_model(self.config.model, self.config.norm, shape, stream.outputs, len(self.plan.steps))
            try_out(model, self.config, self.plan, shape, stream.outputs, any_norm)
        model = model.to(self.device)
        if self.device.type == "cuda":  # as tensor cores like it, and as images come; there it is done in no time
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def rows(self, start: int, end: int) -> Rows:
        """The rows of steps of one shape, on the device."""
        steps = self.plan.steps[start:end]
        places = self.feed.places(list(self.data.stream.train.image[samples_of(steps)]), start)
        return rows_of(steps, places, self.data.stream.train, len(self.logits) - 1, self.device)

    def step(self) -> Tensor:
        """The next step of the plan; gives its loss, still on the device."""
        loss = self.learn(self.rows(self.done, self.done + 1).at(0))
        self.done += 1
        return loss

    def learn(self, row: Row) -> Tensor:
        """One step from one row of indices; gives its loss, still on the device."""
        write, stream, replay = self._batches(row)
        self.model.train()
        self.optimizer.zero_grad()
        if self.half is not None:
            self.half.refresh()
        with weights_beside(self.beside), self._seeded(f"step {self.done}"):
            with self.autocast():
                loss, logits = self._loss(stream, replay)
            loss.backward()  # type: ignore[no-untyped-call]
            self._look_for_draws()
        if self.half is not None:
            self.half.bring_gradients()
        if self.config.train.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.train.clip_value)
        self.optimizer.step()
        if logits is not None:
            self.logits.index_copy_(0, write, logits)
        return loss.detach()

    def _loss(self, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        answer = self.strategy.loss(self.half or self.model, self.head, stream, replay)
        name = self.config.strategy.name
        if is_own_code(name):
            return checked_answer(name, answer, self.strategy.stores_logits, self.head, stream)
        return answer

    @contextmanager
    def _seeded(self, purpose: str) -> Iterator[None]:
        """Settle what user code draws from global generators; a CUDA graph is captured of code that draws nothing."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or not (is_own_code(self.config.strategy.name) or is_own_code(self.config.model.name)):
            yield
            return
        with seeded_generators(seed_for(self.seed, purpose), self.device):
            yield

    def _look_for_draws(self) -> None:
        """Note on a GPU whether user code draws random numbers in a step: these would be the same in every replay."""
        if self.device.type != "cuda" or self.draws_random or torch.cuda.is_current_stream_capturing():
            return
        if is_own_code(self.config.strategy.name) or is_own_code(self.config.model.name):
            self.draws_random = has_drawn(seed_for(self.seed, f"step {self.done}"), self.device)

    def _batches(self, row: Row) -> tuple[Tensor, Batch, tuple[Batch, ...]]:
        """The slots to write to, the samples of the stream, and those of each replay draw."""
        x = self.data.seen(self.feed.pixels, row.image, row.task, row.views)
        label = self.data.train.label[row.label] if self.data.stream.several_labels else row.label
        parts = zip(*(torch.split(t, list(row.sizes)) for t in (x, label, row.task, row.slots)), strict=True)
        (x, label, task, write), *draws = parts
        replay = tuple(
            Batch(x, label, task, self.logits[slots] if self.strategy.stores_logits else None)
            for x, label, task, slots in draws
        )
        return write, Batch(x, label, task), replay

    def check(self, loss: float) -> float:
        """The loss of the step just done; refuses one that is not finite, with the likely cause."""
        if not math.isfinite(loss):
            raise LossNotFiniteError(
                f"seed {self.seed}: the loss is {loss} at step {self.done} of {len(self.plan.steps)} (task "
                f"{self.plan.steps[self.done - 1].task}). Most likely the learning rate of {self.config.train.lr} is "
                f"too high for norm {self.config.norm.name!r}."
            )
        return loss

    def nonfinite_tensor(self) -> str | None:
        """The name of the first trained parameter or running moment that has NaN or infinity in it; None for none.

        A loss shows a bad update only in the step after it. Parameters that are not trained are not checked: a network
        of the user's own may have infinity there on purpose, as in a mask.
        """
        tensors: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tensors |= {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(RUNNING_MOMENTS)}
        if not tensors:
            return None
        finite = torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors.values()]).tolist()
        return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None)

    def autocast(self) -> AbstractContextManager[object]:
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """All tensors that must survive a restart; the step number goes beside them."""
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        remembered = optimizer_state(self.optimizer, self.model)
        optimizer = {f"optimizer.{name}": tensor for name, tensor in remembered.items()}
        return {**model, **optimizer, "memory.logits": self.logits[:-1]}

    def code_state(self) -> CodeState:
        """Digests of what user code keeps outside of `state`; empty for strategies and networks of the package."""
        digests: CodeState = {}
        if is_own_code(self.config.strategy.name):
            state = strategy_state(self.strategy, self._strategy_modules, self.head)
            digests |= {f"strategy {name}": digest for name, digest in state.items()}
            if not is_own_code(self.config.model.name):  # the strategy may have changed it in ways that are not saved
                state = network_state(self.model, self._strategy_modules)
                of_model = {name: digest for name, digest in state.items() if f"strategy {name}" not in digests}
                digests |= {f"strategy model.{name}": digest for name, digest in of_model.items()}
        if is_own_code(self.config.model.name):
            state = network_state(self.model, self._model_modules)
            digests |= {f"model {name}": digest for name, digest in state.items()}
        return digests

    def code_changes(self) -> list[str]:
        """What user code keeps outside of `state` that is not as it was when the code was loaded."""
        now, fresh = self.code_state(), self.fresh_code_state
        return [name for name in {**fresh, **now} if now.get(name) != fresh.get(name) or now[name] == UNREADABLE]

    def load(self, state: dict[str, Tensor], done: int) -> None:
        """Go on from a state and the number of steps it was taken after."""
        own, remembered = (
            {name.removeprefix(of): t for name, t in state.items() if name.startswith(of)}
            for of in ("model.", "optimizer.")
        )
        self.model.load_state_dict(own)
        load_optimizer_state(self.optimizer, self.model, remembered)
        self.logits[:-1].copy_(state["memory.logits"])
        self.done = done


def _user_modules(name: str) -> dict[str, ModuleType]:
    """The modules of user code that were just loaded; another lane may load them anew."""
    return loaded_modules(name) if is_own_code(name) else {}
