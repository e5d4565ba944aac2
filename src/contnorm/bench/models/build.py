"""Build the network of a run by name: a built-in one or a user's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from math import prod

from torch import nn

from contnorm.bench.components import components, is_user_code, load_component, user_code_error
from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.mlp import MLP
from contnorm.bench.models.norm_layers import (
    PART,
    count_norms,
    mark_layer,
    mark_norms,
    norm_maker,
    norm_options,
)
from contnorm.bench.models.pretrained import load_pretrained
from contnorm.bench.models.resnet import DEPTHS, DeepResNet, ResNet18
from contnorm.bench.models.user_norms import find_run_norm
from contnorm.convert.conversion import convert_norm
from contnorm.errors import GroupsError, UserError, unknown
from contnorm.norms.weight_standardization import standardize_convolutions

__all__ = ["MODELS", "build_model"]

MODELS = tuple(NETWORKS)


def build_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> nn.Module:
    """Build the network of a run, initialized from torch's generator, and load the weights of its settings, if any.

    A user's network is named as ``path/to/file.py:make``; ``make(input_shape, num_outputs, norm)`` is called with the
    shape of an image, the number of outputs, and a function ``norm(channels)`` that creates the run's 2d norm.
    """
    network = _initialized(config, norm, shape, outputs, total_steps)
    if find_run_norm(norm)[0].standardizes_weights:
        eps = dict(norm.options).get("weight_eps", 1e-6)
        standardize_convolutions(network, float(eps))  # type: ignore[arg-type]
    if config.weights is not None:
        load_pretrained(network, config)
    return network


def _initialized(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> nn.Module:
    try:
        if is_user_code(config.name):
            return _user_model(config, norm, shape, outputs, total_steps)
        if config.name == "mlp":
            return MLP(prod(shape), outputs, config.width, norm_maker(norm, 1, total_steps))
        if config.name in ("resnet18", *DEPTHS) and len(shape) != 3:
            raise UserError(
                f"model {config.name!r}: needs images of shape (channels, height, width), and the samples have shape "
                f"{shape}. Use the model mlp."
            )
        if config.name == "resnet18":
            return ResNet18(shape[0], outputs, config.width, norm_maker(norm, 2, total_steps), config.stem)
        if config.name in DEPTHS:
            maker = norm_maker(norm, 2, total_steps)
            return DeepResNet(config.name, shape[0], outputs, config.width, maker, config.stem)
    except GroupsError as error:
        raise _groups_error(config.name, norm, error) from error
    except ValueError as error:  # an unknown norm, or a setting that the norm does not accept
        raise UserError(str(error)) from error
    known = [component.name for component in components("model")]
    raise unknown("model", config.name, [*MODELS, *known, "path/to/file.py:make"])


def _groups_error(model: str, norm: NormConfig, error: GroupsError) -> UserError:
    return UserError(
        f"model {model!r}: norm {norm.name!r}: num_groups={error.num_groups} does not divide the {error.channels} "
        f"channels of a layer. Use norm.groups={error.suggestion}, or norm.groups=auto."
    )


def _user_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> nn.Module:
    """Build a user's network: ``make(input_shape, num_outputs)``, the same with ``norm``, or a copy of a network.

    A network that is built without ``norm``, or given as it is, has its norm layers converted to the run's norm.
    """
    name, make = config.name, load_component("model", config.name, config.code)
    if find_run_norm(norm)[0].absorbs_activation and "apply_act" not in dict(norm.options):
        raise UserError(
            f"model {name!r}: norm {norm.name!r} contains an activation. Set norm.apply_act=false if the network "
            f"applies one after each norm, and true if it does not."
        )
    if isinstance(make, nn.Module):
        return _converted(copy.deepcopy(make), name, norm, total_steps)
    takes_norm = _takes_norm(make)
    arguments = (shape, outputs, mark_norms(norm_maker(norm, 2, total_steps))) if takes_norm else (shape, outputs)
    call = "(input_shape, num_outputs, norm)" if takes_norm else "(input_shape, num_outputs)"
    try:
        model = make(*arguments)
    except GroupsError as error:
        raise _groups_error(name, norm, error) from error
    except Exception as error:
        raise user_code_error(error, f"model {name!r}", f"called with {call}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r}: calling it with {call} must return a torch.nn.Module, not {model!r}.")
    return model if takes_norm else _converted(model, name, norm, total_steps)


def _takes_norm(make: Callable[..., object]) -> bool:
    """Whether a function of the user takes the function that makes norm layers as its third argument."""
    parameters = inspect.signature(make).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.default is p.empty and p.kind in positional for p in parameters.values())
    # A third parameter with a default is the user's own, such as a width, unless it is called norm.
    return required >= 3 or "norm" in parameters


def _converted(model: nn.Module, name: str, norm: NormConfig, total_steps: int) -> nn.Module:
    """Convert the norm layers of a user's network to the run's norm. A network without norm layers stays as it is."""
    if not count_norms(model):
        return model
    before = set(model.modules())
    try:
        spec, _ = find_run_norm(norm)
        converted = convert_norm(model, spec, **norm_options(norm, spec, total_steps))
    except GroupsError as error:
        raise _groups_error(name, norm, error) from error
    except ValueError as error:
        raise UserError(f"model {name!r}: its norm layers can't be converted to norm {norm.name!r}: {error}") from error
    for layer in [module for module in converted.modules() if module not in before]:
        if spec.layers and not hasattr(layer, PART):
            mark_layer(layer)
    return converted
