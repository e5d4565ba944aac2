"""Networks of the paper, with a configurable norm."""

from __future__ import annotations

from contnorm.bench.models.build import MODELS, build_model
from contnorm.bench.models.deep_resnet import DeepResNet
from contnorm.bench.models.mlp import MLP
from contnorm.bench.models.norm_layers import NormMaker, norm_maker, normed_relu
from contnorm.bench.models.resnet18 import ResNet18

__all__ = ["MLP", "MODELS", "DeepResNet", "NormMaker", "ResNet18", "build_model", "norm_maker", "normed_relu"]
