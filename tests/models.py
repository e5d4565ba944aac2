"""Networks for the tests: a residual network with nested modules, and stand-ins for layers of other libraries."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a norm in its shortcut: two norms at one depth."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(nn.Module):
    """A small ResNet-18: 20 norm layers at 17 depths."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(Block(a, b, 1 if i == 0 else 2), Block(b, b)) for i, (a, b) in enumerate(pairwise(widths))
        )
        self.head = nn.ModuleDict({"linear": nn.Linear(8 * width, classes)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        y: Tensor = self.head["linear"](x.mean((2, 3)))
        return y


class BatchNormAct2d(nn.BatchNorm2d):
    """Stand-in for timm's: norm, dropout and activation in its own forward."""

    def __init__(self, num_features: int, act: nn.Module | None = None) -> None:
        super().__init__(num_features)
        self.drop = nn.Identity()
        self.act = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


class FrozenBatchNorm2d(nn.Module):
    """Stand-in for torchvision's: moments and affine parameters are constant buffers."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.5), ("bias", 0.2), ("running_mean", 0.3), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return y


class ScaledBatchNorm2d(nn.BatchNorm2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class RenamedBatchNorm2d(nn.BatchNorm2d):
    """A subclass that changes only the name."""


class UnknownNorm(nn.Module):
    """A norm without a base class of torch's; only its buffers show that it is a norm."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.batch_norm(x, self.running_mean, self.running_var, training=self.training)
        return y
