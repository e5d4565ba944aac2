"""The paper's network for digits: a multilayer perceptron."""

from __future__ import annotations

from torch import Tensor, nn

from contnorm.bench.models.norm_layers import NormMaker
from contnorm.norms.activation import normed_relu


class MLP(nn.Module):
    """Two hidden layers with a norm before each ReLU.

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
