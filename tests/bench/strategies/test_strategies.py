"""Strategies: which samples share a forward, and losses equal to those worked out by hand."""

import re
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.bench.config.schema import StrategyConfig, from_dict
from contnorm.bench.strategies import STRATEGIES, build_strategy, strategy_class
from contnorm.bench.strategies.base import Batch, OutputMask, Single, check_loss, joined
from contnorm.bench.strategies.replay import ER, DERpp
from contnorm.errors import UserCodeError, UserError

COMPETING = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)


class Watched:
    """A linear model that remembers how many samples each forward had."""

    def __init__(self) -> None:
        self.weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        self.forwards: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.forwards.append(len(x))
        return x @ self.weight


def batch(seed: int, size: int, task: int, logits: bool = False) -> Batch:
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (size,), generator=g) + 2 * task
    stored = torch.randn(size, 4, generator=g) if logits else None
    return Batch(torch.randn(size, 3, generator=g), label, torch.full((size,), task), stored)


def by_hand(model: Watched, b: Batch) -> Tensor:
    """Cross-entropy over the two outputs of each sample's own task."""
    start = 2 * int(b.task[0])
    return F.cross_entropy((b.x @ model.weight)[:, start : start + 2], b.label - start, reduction="none")


NEW, OLD, OTHER = batch(1, 5, 1), batch(2, 3, 0, logits=True), batch(3, 4, 0, logits=True)
NONE = batch(4, 0, 0, logits=True)


def test_single_is_the_cross_entropy_of_the_stream() -> None:
    model = Watched()
    loss, logits = build_strategy(StrategyConfig("single")).loss(model, OutputMask(COMPETING), NEW)
    torch.testing.assert_close(loss, by_hand(model, NEW).mean())
    assert model.forwards == [5] and logits is None


@pytest.mark.parametrize(("forward", "groups"), [("joint", [8]), ("separate", [5, 3])])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_er_forwards_and_losses(forward: str, groups: list[int], kind: str) -> None:
    model = Watched()
    config = StrategyConfig("er", forward=forward, loss=kind)  # type: ignore[arg-type]
    loss, _ = build_strategy(config).loss(model, OutputMask(COMPETING), NEW, OLD)
    new, old = by_hand(model, NEW), by_hand(model, OLD)
    torch.testing.assert_close(loss, new.mean() + old.mean() if kind == "sum" else torch.cat([new, old]).mean())
    assert model.forwards == groups


@pytest.mark.parametrize(("forward", "groups"), [("joint", [12]), ("separate", [5, 3, 4])])
@pytest.mark.parametrize(("distance", "outputs"), [("task", 2), ("all", 4)])
def test_derpp_forwards_losses_and_stored_logits(forward: str, groups: list[int], distance: str, outputs: int) -> None:
    model = Watched()
    config = StrategyConfig("derpp", forward=forward, alpha=0.3, beta=0.7, distance=distance)  # type: ignore[arg-type]
    loss, logits = build_strategy(config).loss(model, OutputMask(COMPETING), NEW, OLD, OTHER)
    assert OLD.logits is not None and logits is not None
    dark = (OLD.x @ model.weight - OLD.logits)[:, :outputs].square().mean()
    expected = by_hand(model, NEW).mean() + 0.3 * dark + 0.7 * by_hand(model, OTHER).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, NEW.x @ model.weight)
    assert model.forwards == groups


def test_distance_changes_the_hash_only_if_it_is_not_the_default() -> None:
    default, task, everything = (
        from_dict({"strategy": {"name": "derpp", **given}}).hash
        for given in ({}, {"distance": "task"}, {"distance": "all"})
    )
    assert default == task != everything
    given = DERpp(distance="all", replay=5, **{"train.lr": 0.1})
    assert given.overrides == {
        "strategy.name": "derpp", "strategy.distance": "all", "train.replay": 5, "train.lr": 0.1
    }  # fmt: skip
    assert eval(repr(given)).overrides == given.overrides


@pytest.mark.parametrize("distance", ["task", "all"])
def test_derpp_without_output_mask(distance: Literal["task", "all"]) -> None:
    model = Watched()
    head = OutputMask(torch.ones(2, 4, dtype=torch.bool))
    config = StrategyConfig("derpp", forward="separate", distance=distance)
    loss, _ = build_strategy(config).loss(model, head, NEW, OLD, OTHER)
    dark = F.mse_loss(OLD.x @ model.weight, OLD.logits)  # type: ignore[arg-type]
    rest = F.cross_entropy(NEW.x @ model.weight, NEW.label) + 0.5 * F.cross_entropy(OTHER.x @ model.weight, OTHER.label)
    torch.testing.assert_close(loss, rest + 0.2 * dark)


@pytest.mark.parametrize("name", ["er", "derpp"])
def test_empty_memory_is_the_stream_loss(name: str) -> None:
    model = Watched()
    strategy = build_strategy(StrategyConfig(name))
    loss, _ = strategy.loss(model, OutputMask(COMPETING), NEW, *(NONE,) * strategy.draws)
    torch.testing.assert_close(loss, by_hand(model, NEW).mean())
    assert model.forwards == [5]


def test_strategy_from_a_user_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from contnorm.bench import Strategy\n"
        "class Half(Strategy):\n"
        "    def loss(self, model, head, stream):\n"
        "        return head.cross_entropy(model(stream.x), stream).mean() / 2, None\n"
    )
    model = Watched()
    loss, _ = build_strategy(StrategyConfig(f"{file}:Half")).loss(model, OutputMask(COMPETING), NEW)
    torch.testing.assert_close(loss, by_hand(model, NEW).mean() / 2)
    for name, said in ((f"{file}:Third", "has no Third"), ("nowhere.py:A", "nowhere.py: can't be read")):
        with pytest.raises(UserError, match=said):
            build_strategy(StrategyConfig(name))
    with pytest.raises(UserError, match=r"unknown strategy 'derp'\. Did you mean 'derpp'"):
        build_strategy(StrategyConfig("derp"))


# What a user's loss returns


HEAD = OutputMask(torch.ones(1, 3, dtype=torch.bool))
STREAM = Batch(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
SAID = torch.ones(2, 3, requires_grad=True)  # by a model, of the stream
LOSS = SAID.sum()
LOGITS = SAID.detach()


def test_draws_are_the_arguments_of_the_loss_after_the_stream() -> None:
    class Bare(Single):
        def loss(self, model: object, head: object, stream: object) -> None: ...

    class Two(Bare):
        def loss(self, model: object, head: object, stream: object, one: object, two: object) -> None: ...

    class Wrapped(Two):
        def loss(self, *arguments: object) -> None: ...

    class Given(Wrapped):
        draws = 3

    assert [cls.draws for cls in (Single, ER, Bare, Two, Wrapped, Given)] == [0, 1, 0, 2, 2, 3]
    with pytest.raises(TypeError, match="name each batch of the memory"):
        type("Any", (Bare,), {"loss": lambda self, model, head, stream, *memory: None})


@pytest.mark.parametrize(
    ("answer", "stores", "said"),
    [
        (LOSS, True, "and the logits of the stream batch"),
        (SAID.sum(1), False, "a tensor with one number"),
        ((0.5, None), False, "a tensor with one number and a gradient"),
        ((LOSS.detach(), None), False, "and a gradient"),
        ((LOSS, LOGITS), False, "stores_logits = True"),
        ((LOSS, None), True, "logits.detach().float()"),
        ((LOSS, LOGITS[:1]), True, "of shape (2, 3)"),
        ((LOSS, SAID), True, "logits.detach().float()"),
    ],
)
def test_invalid_loss_result_is_refused(answer: object, stores: bool, said: str) -> None:
    with pytest.raises(UserCodeError, match=re.escape(said)):
        check_loss("mine.py:Mine", answer, stores, HEAD, STREAM)


@pytest.mark.parametrize("logits", [None, LOGITS])
def test_valid_loss_result_is_unchanged(logits: Tensor | None) -> None:
    loss, stored = check_loss("mine.py:Mine", (LOSS, logits), logits is not None, HEAD, STREAM)
    assert loss is LOSS and stored is logits
    assert check_loss("mine.py:Mine", LOSS, False, HEAD, STREAM) == (LOSS, None)


def test_repr_is_the_call_that_makes_a_strategy() -> None:
    assert repr(ER(replay=20, forward="separate")) == "ER(replay=20, forward='separate')"
    assert repr(Single()) == "Single()"


# Concatenation of batches: adjacent slices are not copied, others are


def base() -> Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


PARTS = {
    "cut": lambda x: x.split([2, 1, 3]),
    "in channels_last": lambda x: x.contiguous(memory_format=torch.channels_last).split([2, 4]),
    "alone": lambda x: (x,),
}
OTHERS = {
    "swapped": lambda x: x.split(3)[::-1],
    "with a gap": lambda x: (x[:2], x[3:]),
    "of two tensors": lambda x: (x[:3], x.clone()[3:]),
    "of other channels": lambda x: (x[:3, :2], x[3:, 1:]),
    "that need gradients": lambda x: x.clone().requires_grad_().split(3),
    "of every other": lambda x: (x[0:4:2], x[4:5]),
}


@pytest.mark.parametrize("kind", [*PARTS, *OTHERS])
def test_batches_are_joined_and_adjacent_slices_are_not_copied(kind: str) -> None:
    parts = {**PARTS, **OTHERS}[kind](base())
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(list(parts)))
    assert (whole.data_ptr() == parts[0].data_ptr()) == (kind in PARTS)


@pytest.mark.parametrize("name", [name for name, spec in STRATEGIES.items() if spec.own_settings])
def test_own_settings_of_the_registry_are_those_of_the_class(name: str) -> None:
    assert vars(strategy_class(name).Settings()) == STRATEGIES[name].own_settings
