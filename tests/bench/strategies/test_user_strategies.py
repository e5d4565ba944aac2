"""Mistakes in a strategy of one's own are told before they are learned from."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, OutputMask, Single
from contnorm.bench.strategies.build import check_loss
from contnorm.bench.strategies.er import ER
from contnorm.errors import UserCodeError

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


@pytest.mark.parametrize(
    ("answer", "stores", "said"),
    [
        (LOSS, False, "must return (loss, logits)"),
        ((0.5, None), False, "a tensor with a real number and a gradient"),
        ((SAID.sum(1), None), False, "a tensor with a real number"),
        ((LOSS.detach(), None), False, "and a gradient"),
        ((LOSS, LOGITS), False, "if and only if stores_logits"),
        ((LOSS, None), True, "if and only if stores_logits"),
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


def test_repr_is_the_call_that_makes_a_strategy() -> None:
    assert repr(ER(replay=20, forward="separate")) == "ER(replay=20, forward='separate')"
    assert repr(Single()) == "Single()"
