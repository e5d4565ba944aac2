"""Build the network of a run by name: a built-in one or a user's."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from torch import nn

from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models.mlp import MLP
from contnorm.bench.models.norm_layers import NormMaker, mark_norms, norm_maker
from contnorm.bench.models.pretrained import load_pretrained
from contnorm.bench.models.registry import NETWORKS
from contnorm.bench.models.resnet import DEPTHS, DeepResNet, ResNet18
from contnorm.bench.user_code import is_own_code, load_own_code, own_error
from contnorm.checks import GroupsError
from contnorm.errors import UserError, unknown
from contnorm.registry import find_norm

__all__ = ["MODELS", "build_model"]

MODELS = tuple(NETWORKS)


def build_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, int, int], outputs: int, total_steps: int
) -> nn.Module:
    """Build the network of a run, initialized from torch's generator, and load the weights of its settings, if any.

    A user's network is named as ``path/to/file.py:make``; ``make(shape, outputs, norm)`` is called with the shape of an
    image, the number of outputs, and a function ``norm(channels)`` that creates the run's 2d norm.
    """
    network = _initialized(config, norm, shape, outputs, total_steps)
    if config.weights is not None:
        load_pretrained(network, config)
    return network


def _initialized(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, int, int], outputs: int, total_steps: int
) -> nn.Module:
    try:
        if is_own_code(config.name):
            return _user_model(config.name, shape, outputs, mark_norms(norm_maker(norm, 2, total_steps)))
        if config.name == "mlp":
            inputs = shape[0] * shape[1] * shape[2]
            return MLP(inputs, outputs, config.width, norm_maker(norm, 1, total_steps))
        if config.name == "resnet18":
            return ResNet18(shape[0], outputs, config.width, norm_maker(norm, 2, total_steps), config.stem)
        if config.name in DEPTHS:
            maker = norm_maker(norm, 2, total_steps)
            return DeepResNet(config.name, shape[0], outputs, config.width, maker, config.stem)
    except GroupsError as error:
        raise UserError(f"{error}{_common_groups(config, norm, shape, outputs, total_steps)}") from error
    except ValueError as error:  # an unknown norm, or a setting that the norm does not accept
        raise UserError(str(error)) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise UserError(
            f"model.width={config.width}: a {config.name} of this width does not fit into memory. Use a smaller width."
        ) from error
    raise unknown("model", config.name, [*MODELS, "path/to/file.py:make"])


def _common_groups(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, int, int], outputs: int, total_steps: int
) -> str:
    """Message with the largest number of groups that divides the channels of every layer; empty if unknown."""
    spec, _ = find_norm(norm.name)
    try:
        network = _initialized(config, replace(norm, name=spec.name, groups=1), shape, outputs, total_steps)
    except UserError:
        return ""
    channels = (
        getattr(m, "num_features", getattr(m, "num_channels", None))
        for m in network.modules()
        if hasattr(m, "num_groups")
    )
    widths = [width for width in channels if isinstance(width, int)]
    return f" The largest number that divides every layer of the network is {gcd(*widths)}." if widths else ""


def _user_model(name: str, shape: tuple[int, int, int], outputs: int, norm: NormMaker) -> nn.Module:
    make = load_own_code(name, "model")
    try:
        model = make(shape, outputs, norm) if callable(make) else None
    except Exception as error:
        raise own_error(error, "model", name, "called with (shape, outputs, norm)") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r}: calling it with (shape, outputs, norm) must return a Module, got {model!r}.")
    return model
