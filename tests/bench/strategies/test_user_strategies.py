"""Mistakes in a strategy of one's own are told before they are learned from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.strategies.base import Batch, OutputMask, Single
from contnorm.bench.strategies.build import build_strategy, check_loss
from contnorm.bench.strategies.er import ER
from contnorm.errors import UserCodeError, UserError

HEAD = OutputMask(torch.ones(1, 3, dtype=torch.bool))
STREAM = Batch(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
SAID = torch.ones(2, 3, requires_grad=True)  # by a model, of the stream
LOSS = SAID.sum()
LOGITS = SAID.detach()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "does not define a loss. Define loss(self, model, head, stream, replay)"),
        ("def loss(self, model): ...", "its loss can't be called with (model, head, stream, replay): too many"),
        ("draws = -1\n    def loss(self, *given): ...", "draws = -1. Use a whole number, 0 for no replay"),
        ("draws = '2'\n    def loss(self, *given): ...", "draws = '2'. Use a whole number"),
        ("stores_logits = 1\n    def loss(self, *given): ...", "stores_logits = 1. Use True or False"),
    ],
    ids=["no loss", "signature", "negative", "a word", "a number"],
)
def test_invalid_strategy_class_is_refused(tmp_path: Path, body: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from contnorm.bench import Strategy\n\nclass Mine(Strategy):\n    {body}\n")
    with pytest.raises(UserError, match=re.escape(said)):
        build_strategy(StrategyConfig(f"{file}:Mine"))


@pytest.mark.parametrize(
    ("answer", "stores", "said"),
    [
        (LOSS, False, "must return (loss, logits), where logits is None unless they are stored, not a tensor of"),
        ((LOSS,), False, "not 1 values"),
        ((None, None), False, "the loss must be a tensor with one real number, not None"),
        ((0.5, None), False, "not an object of type float"),
        ((SAID.sum(1), None), False, "not a tensor of shape (2,), float32, with a gradient. Return the mean"),
        ((LOSS.detach(), None), False, "the loss has no gradient"),
        ((LOSS, LOGITS), False, "its loss returns logits, but stores_logits is False"),
        ((LOSS, None), True, "float32 of shape (2, 3), not None"),
        ((LOSS, LOGITS[:1]), True, "not a tensor of shape (1, 3), float32. Return"),
        ((LOSS, LOGITS.double()), True, "not a tensor of shape (2, 3), float64"),
        ((LOSS, SAID), True, "not a tensor of shape (2, 3), float32, with a gradient"),
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
    assert repr(object.__new__(ER)) == "ER()"
