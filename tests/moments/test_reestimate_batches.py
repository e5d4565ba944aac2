"""Batches that are mappings: passed as keyword arguments, without labels and without unknown keys."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn


class Classifier(nn.Module):
    """Takes a batch as the image models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, pixel_values: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert labels is None, "the labels are not needed"
        if mask is not None:
            pixel_values = pixel_values * mask
        return {"logits": self.head(self.norm(pixel_values).mean((2, 3)))}


X = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(3)) * 2 + 1
LABELS = torch.tensor([0, 1] * 4)


def measured(model: nn.Module, batches: Any, **options: Any) -> Tensor:
    with cn.reestimate(model, batches, **options) as done:
        (moments,) = done.moments.values()
    return moments.new_mean


@pytest.mark.parametrize("mapping", [dict, UserDict])
@pytest.mark.parametrize("labels", ["labels", "label", "label_ids"])
def test_mapping_is_passed_as_keywords_without_labels(mapping: type, labels: str) -> None:
    batches = [
        mapping({"pixel_values": x, labels: y, "idx": 1}) for x, y in zip(X.split(3), LABELS.split(3), strict=True)
    ]
    torch.testing.assert_close(measured(Classifier(), batches), X.mean((0, 2, 3)))


def test_other_arguments_of_forward_are_passed() -> None:
    batches = [{"mask": torch.full((4, 1, 1, 1), 3.0), "pixel_values": x} for x in X.split(4)]
    torch.testing.assert_close(measured(Classifier(), batches), 3 * X.mean((0, 2, 3)))


def test_weights_may_use_keys_that_forward_does_not_take() -> None:
    task = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    batches = [{"pixel_values": x, "task": t} for x, t in zip(X.split(5), task.split(5), strict=True)]
    weights = torch.tensor([1 / 6, 1 / 2])
    mean = (X[:6].mean((0, 2, 3)) + X[6:].mean((0, 2, 3))) / 2
    torch.testing.assert_close(measured(Classifier(), batches, weights=lambda b: weights[b["task"]]), mean)


class NeedsLabels(Classifier):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(pixel_values + labels.view(-1, 1, 1, 1))


class AnyKeyword(Classifier):
    def forward(self, **batch: Any) -> Any:  # type: ignore[override]
        return super().forward(batch.pop("pixel_values"), **batch)


def test_labels_are_passed_where_forward_requires_them() -> None:
    expected = (X + LABELS.view(-1, 1, 1, 1)).mean((0, 2, 3))
    torch.testing.assert_close(measured(NeedsLabels(), [{"pixel_values": X, "labels": LABELS}]), expected)


def test_forward_with_any_keyword_gets_no_labels() -> None:
    torch.testing.assert_close(measured(AnyKeyword(), [{"pixel_values": X, "labels": LABELS}]), X.mean((0, 2, 3)))


def test_wrappers_of_torch_are_seen_through() -> None:
    batches = [{"pixel_values": X, "labels": LABELS, "idx": 1}]
    for wrapped in (nn.DataParallel(Classifier()), torch.compile(Classifier(), backend="eager")):
        torch.testing.assert_close(measured(wrapped, batches), X.mean((0, 2, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [{"image": X}, {"labels": LABELS}, {"mask": X}, {}])
def test_keys_that_do_not_fit_raise_and_change_nothing(batch: dict[str, Tensor]) -> None:
    model = Classifier()
    with pytest.raises(TypeError, match=r"the keys \[.*\], and Classifier.forward takes .*'pixel_values'.*Give call="):
        cn.reestimate(model, [batch])
    assert torch.equal(model.norm.running_mean, torch.zeros(3))
    torch.testing.assert_close(
        measured(model, [{"image": X}], call=lambda m, b: m(b["image"] + 1)), X.mean((0, 2, 3)) + 1
    )
