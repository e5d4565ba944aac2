"""A lane: one run in progress. Everything that must survive a restart is in its `state`.

A lane is a config, a seed, a plan, a model, an optimizer and, where the strategy stores logits, a memory of them. Its
step is gather, augment, forward, loss, backward, update, scatter; no random number is drawn in it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from contnorm.config import RunConfig
from contnorm.memories import NOT_KEPT
from contnorm.models import build_model
from contnorm.plan import Plan, Step, make_plan
from contnorm.seeds import seed_for
from contnorm.strategies import Batch, Head, build_strategy
from contnorm.streams.classification import build_stream
from contnorm.streams.sources import Source
from contnorm.streams.views import DeviceStream

__all__ = ["Lane", "LossNotFiniteError"]


class LossNotFiniteError(Exception):
    """A lane's loss turned into infinity or not-a-number; the run can't go on."""


class Lane:
    """One run in progress.

    Args:
        config: Its settings, resolved.
        seed: Its seed.
        source: Its data set.
        device: Where it runs.
    """

    def __init__(self, config: RunConfig, seed: int, source: Source, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.strategy = build_strategy(config.strategy)
        stream = build_stream(config.stream, source, seed)
        self.plan: Plan = make_plan(config, stream, seed, self.strategy.draws)
        self.data = DeviceStream(stream, device)
        self.head = Head(self.data.competing)
        self.model = self._fresh_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.train.lr)
        slots = self.plan.slots if self.strategy.stores_logits else 0
        self.logits = torch.zeros(slots, stream.outputs, device=device)
        self.done = 0  # steps

    @property
    def stream(self) -> DeviceStream:
        return self.data

    def _fresh_model(self) -> nn.Module:
        stream = self.data.stream
        shape = stream.source.train_images.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.seed, "init"))
            model = build_model(self.config.model, self.config.norm, shape, stream.outputs, len(self.plan.steps))
        return model.to(self.device)

    def step(self) -> Tensor:
        """The next step of the plan; gives its loss, still on the device."""
        step = self.plan.steps[self.done]
        stream = self._batch(step.stream, step.stream_views, None)
        replay = tuple(self._replayed(step, draw) for draw in range(self.strategy.draws))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss, logits = self.strategy.loss(self.model, self.head, stream, replay)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if logits is not None:
            self._store(step, logits)
        self.done += 1
        return loss.detach()

    def check(self, loss: Tensor) -> float:
        """The loss as a number; refuses one that is not finite, with the likely cause."""
        value = float(loss)
        if not math.isfinite(value):
            raise LossNotFiniteError(
                f"seed {self.seed}: the loss is {value} at step {self.done} of {len(self.plan.steps)} (task "
                f"{self.plan.steps[self.done - 1].task}). Most likely the learning rate of {self.config.train.lr} is "
                f"too high for norm {self.config.norm.name!r}."
            )
        return value

    def _batch(self, items: object, views: object, logits: Tensor | None) -> Batch:
        index = torch.as_tensor(items, device=self.device)
        crops = None if views is None else torch.as_tensor(views, device=self.device)
        table = self.data.train
        return Batch(self.data.train_x(index, crops), table.label[index], table.task[index], logits)

    def _replayed(self, step: Step, draw: int) -> Batch:
        slots = torch.as_tensor(step.replay_slots[draw], device=self.device)
        logits = self.logits[slots] if self.strategy.stores_logits else None
        views = None if step.replay_views is None else step.replay_views[draw]
        return self._batch(step.replay[draw], views, logits)

    def _store(self, step: Step, logits: Tensor) -> None:
        # Of two samples in one slot the later stays: keep each slot's last writer only.
        last = {int(slot): row for row, slot in enumerate(step.write) if slot != NOT_KEPT}
        if last:
            slots, rows = (torch.tensor(list(part), device=self.device) for part in (last.keys(), last.values()))
            self.logits[slots] = logits[rows]

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """All tensors that must survive a restart; the step number goes beside them."""
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        return {**named, "memory.logits": self.logits}

    def load(self, state: dict[str, Tensor], done: int) -> None:
        """Go on from a state and the number of steps it was taken after."""
        own = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
        self.model.load_state_dict(own)
        self.logits.copy_(state["memory.logits"])
        self.done = done
