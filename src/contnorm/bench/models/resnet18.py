"""The paper's network for small images: ResNet-18 with a 3x3 stem."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from contnorm.bench.models.norm_layers import NormMaker, normed_relu
from contnorm.kernels.side_stream import Convolution
from contnorm.kernels.triton.max_pool import StemPool

__all__ = ["ResNet18"]


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, norm: NormMaker) -> None:
        super().__init__()
        self.conv1, self.norm1 = Convolution(width_in, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.norm2 = Convolution(width, width, 3, 1, 1, bias=False), norm(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(Convolution(width_in, width, 1, stride, bias=False), norm(width))

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
        self.conv, self.norm = Convolution(channels, width, 3, 1, 1, bias=False), norm(width)
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
