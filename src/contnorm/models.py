"""Networks of the paper, with the norm passed in by name: the MLP for digits, and ResNet-18 for small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.catalog import find_norm
from contnorm.config import ModelConfig, NormConfig
from contnorm.errors import UserError, unknown
from contnorm.factory import Dim, create_norm
from contnorm.kernels.max_pool import StemPool
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import stock_norm
from contnorm.own_code import is_own_code, load_own_code, own_error

__all__ = ["MLP", "MODELS", "NormMaker", "ResNet18", "build_model", "norm_maker"]

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """How to make a norm for so many channels, from the settings of a run."""
    spec, groups = find_norm(config.name, "norm.name")
    if config.layers == "stock":
        return _stock_maker(spec.name, groups, config, dim)
    options: dict[str, object] = {}
    if spec.grouped:
        options["num_groups"] = groups or config.groups
    if config.momentum is not None and spec.keeps_moments:
        options["momentum"] = None if config.momentum == "cumulative" else config.momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    return lambda channels: create_norm(spec.name, channels, dim=dim, **options)


def _stock_maker(name: str, groups: int | None, config: NormConfig, dim: Dim) -> NormMaker:
    of_groups = groups or config.groups
    if isinstance(of_groups, str) or config.momentum == "cumulative":
        raise ValueError(
            "norm.layers='stock': torch's layers take groups by number and momentum as one, so norm.groups='auto' and "
            "norm.momentum='cumulative' are for ours alone."
        )
    momentum = 0.1 if config.momentum is None else config.momentum
    return lambda channels: stock_norm(name, channels, dim, of_groups, momentum)


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; continual norm does it in its own kernel, where it has one."""
    if isinstance(norm, ContinualNormBase):
        y: Tensor = norm(x, residual, relu=True)
        return y
    y = norm(x)
    return F.relu(y if residual is None else y + residual)


class MLP(nn.Module):
    """Two hidden layers, each normalized before its ReLU.

    Example:
        >>> MLP(784, 10, 100, norm=nn.BatchNorm1d)(torch.randn(4, 1, 28, 28)).shape
        torch.Size([4, 10])
    """

    def __init__(self, inputs: int, outputs: int, width: int, norm: NormMaker) -> None:
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(inputs, width), norm(width)
        self.fc2, self.norm2 = nn.Linear(width, width), norm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = normed_relu(self.norm1, self.fc1(x.flatten(1)))
        x = normed_relu(self.norm2, self.fc2(x))
        y: Tensor = self.head(x)
        return y


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, norm: NormMaker) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = normed_relu(self.norm1, self.conv1(x))
        return normed_relu(self.norm2, self.conv2(y), self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem: 20 norm layers.

    Args:
        channels: Of the images.
        outputs: Of the network.
        width: Filters of the first stage.
        norm: Makes a norm for so many channels.
        stem: ``"pool"`` has a max-pool after the first convolution, ``"plain"`` has none.

    Example:
        >>> ResNet18(3, 10, 8, norm=nn.BatchNorm2d)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: int, outputs: int, width: int, norm: NormMaker, stem: Literal["pool", "plain"] = "pool"
    ) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, width, 3, 1, 1, bias=False), norm(width)
        self.pool: nn.Module = StemPool() if stem == "pool" else nn.Identity()
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(_Block(before, width * 2**stage, stride, norm))
                before = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(normed_relu(self.norm, self.conv(x)))
        x = self.blocks(x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


MODELS = ("mlp", "resnet18")


def build_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, int, int], outputs: int, total_steps: int
) -> nn.Module:
    """The network of a run, freshly initialized from torch's generator.

    A network of a user's own is named as ``path/to/file.py:make``; ``make(shape, outputs, norm)`` is called with the
    shape of an image, the number of outputs, and ``norm(channels)`` that makes the run's 2d norm.
    """
    try:
        if is_own_code(config.name):
            return _own_model(config.name, shape, outputs, norm_maker(norm, 2, total_steps))
        if config.name == "mlp":
            inputs = shape[0] * shape[1] * shape[2]
            return MLP(inputs, outputs, config.width, norm_maker(norm, 1, total_steps))
        if config.name == "resnet18":
            return ResNet18(shape[0], outputs, config.width, norm_maker(norm, 2, total_steps), config.stem)
    except ValueError as error:  # groups that don't divide the channels, an unknown norm
        raise UserError(str(error)) from error
    raise unknown("model", config.name, [*MODELS, "path/to/file.py:make"])


def _own_model(name: str, shape: tuple[int, int, int], outputs: int, norm: NormMaker) -> nn.Module:
    make = load_own_code(name, "model")
    try:
        model = make(shape, outputs, norm) if callable(make) else None
    except Exception as error:
        raise own_error(error, "model", name, "called with (shape, outputs, norm)") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r}: calling it with (shape, outputs, norm) should give a Module, not {model!r}.")
    return model
