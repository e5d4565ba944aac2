"""Networks of the paper, with the norm passed in by name."""

from __future__ import annotations

from contnorm.models.building import MODELS, build_model
from contnorm.models.deep_resnet import DeepResNet
from contnorm.models.mlp import MLP
from contnorm.models.norms import NormMaker, norm_maker, normed_relu
from contnorm.models.resnet18 import ResNet18

__all__ = ["MLP", "MODELS", "DeepResNet", "NormMaker", "ResNet18", "build_model", "norm_maker", "normed_relu"]
