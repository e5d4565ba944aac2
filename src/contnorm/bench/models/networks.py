"""Networks: a multilayer perceptron for digits, ResNet-18 with a 3x3 stem, and ResNet-34, -50 and -101 with a 7x7 stem.

`DeepResNet` has the parameter names and shapes of torchvision. State dicts of torchvision and timm therefore load
unchanged, with any norm. In the bottleneck the stride is in the 3x3 convolution, as in those libraries and unlike in
the original paper.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from contnorm.bench.models.norm_layers import NormMaker
from contnorm.kernels.convolution import Convolution
from contnorm.norms.activation import linear_norm, normed_relu


class MLP(nn.Module):
    """Two hidden layers with a norm before each ReLU.

    Example:
        >>> MLP(784, 10, 100, norm=nn.BatchNorm1d)(torch.randn(4, 1, 28, 28)).shape
        torch.Size([4, 10])
    """

    def __init__(self, inputs: int, outputs: int, width: int, norm: NormMaker) -> None:
        super().__init__()
        self.architecture = "mlp"
        self.fc1, self.norm1 = nn.Linear(inputs, width), norm(width)
        self.fc2, self.norm2 = nn.Linear(width, width), norm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = normed_relu(self.norm1, self.fc1(x.flatten(1)))
        x = normed_relu(self.norm2, self.fc2(x))
        y: Tensor = self.head(x)
        return y


class _Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    widens = 1

    def __init__(self, width_in: int, width: int, stride: int, norm: NormMaker) -> None:
        super().__init__()
        self.conv1, self.bn1 = Convolution(width_in, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = Convolution(width, width, 3, 1, 1, bias=False), linear_norm(norm(width))
        self.downsample = _shortcut(width_in, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = normed_relu(self.bn1, self.conv1(x))
        return normed_relu(self.bn2, self.conv2(y), x if self.downsample is None else self.downsample(x))


class _Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions that reduce and expand the channels, and a shortcut."""

    widens = 4

    def __init__(self, width_in: int, width: int, stride: int, norm: NormMaker) -> None:
        super().__init__()
        wide = width * self.widens
        self.conv1, self.bn1 = Convolution(width_in, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = Convolution(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = Convolution(width, wide, 1, bias=False), linear_norm(norm(wide))
        self.downsample = _shortcut(width_in, wide, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = normed_relu(self.bn1, self.conv1(x))
        y = normed_relu(self.bn2, self.conv2(y))
        return normed_relu(self.bn3, self.conv3(y), x if self.downsample is None else self.downsample(x))


def _shortcut(width_in: int, width: int, stride: int, norm: NormMaker) -> nn.Sequential | None:
    """Projection of a block's input to the shape of its output; None if the shapes are equal."""
    if stride == 1 and width_in == width:
        return None
    return nn.Sequential(Convolution(width_in, width, 1, stride, bias=False), linear_norm(norm(width)))


# By name: the block class and the number of blocks in each stage.
DEPTHS: dict[str, tuple[type[_Basic | _Bottleneck], tuple[int, int, int, int]]] = {
    "resnet34": (_Basic, (3, 4, 6, 3)),
    "resnet50": (_Bottleneck, (3, 4, 6, 3)),
    "resnet101": (_Bottleneck, (3, 4, 23, 3)),
}


class DeepResNet(nn.Module):
    """ResNet-34, -50 or -101: 36, 53 or 104 norm layers.

    Args:
        name: One of `DEPTHS`.
        channels: Channels of the images.
        outputs: Number of outputs.
        width: Filters of the stem; 64 for published weights.
        norm: Creates a norm for a number of channels.
        stem: ``"pool"`` has a max-pool after the first convolution, ``"plain"`` has none.

    Example:
        >>> network = DeepResNet("resnet50", 3, 70, 8, norm=nn.BatchNorm2d)
        >>> network(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 70])
        >>> sum("running_mean" in name for name in network.state_dict())
        53
    """

    def __init__(
        self,
        name: str,
        channels: int,
        outputs: int,
        width: int,
        norm: NormMaker,
        stem: Literal["pool", "plain"] = "pool",
    ) -> None:
        super().__init__()
        block, numbers = DEPTHS[name]
        # What shapes of weights do not tell: the place of the stride in bottlenecks (v1.5), and the stem.
        self.architecture = f"{name}{'-v1.5' if block is _Bottleneck else ''}, stem={stem}"
        self.conv1, self.bn1 = Convolution(channels, width, 7, 2, 3, bias=False), norm(width)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1) if stem == "pool" else nn.Identity()
        before = width
        stages = []
        for stage, number in enumerate(numbers):
            inside = width * 2**stage
            first = block(before, inside, 2 if stage else 1, norm)
            before = inside * block.widens
            stages.append(nn.Sequential(first, *(block(before, inside, 1, norm) for _ in range(number - 1))))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(before, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(normed_relu(self.bn1, self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, norm: NormMaker) -> None:
        super().__init__()
        self.conv1, self.norm1 = Convolution(width_in, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.norm2 = Convolution(width, width, 3, 1, 1, bias=False), linear_norm(norm(width))
        self.shortcut = _shortcut(width_in, width, stride, norm) or nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        y = normed_relu(self.norm1, self.conv1(x))
        return normed_relu(self.norm2, self.conv2(y), self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem: 20 norm layers.

    Args:
        channels: Channels of the images.
        outputs: Number of outputs.
        width: Filters of the first stage.
        norm: Creates a norm for a number of channels.
        stem: ``"pool"`` has a max-pool after the first convolution, ``"plain"`` has none.

    Example:
        >>> ResNet18(3, 10, 8, norm=nn.BatchNorm2d)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: int, outputs: int, width: int, norm: NormMaker, stem: Literal["pool", "plain"] = "pool"
    ) -> None:
        super().__init__()
        self.architecture = f"resnet18, stem={stem}"
        self.conv, self.norm = Convolution(channels, width, 3, 1, 1, bias=False), norm(width)
        self.pool: nn.Module = nn.MaxPool2d(3, 2, 1) if stem == "pool" else nn.Identity()
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
