"""Build the network of a run by name: a built-in one or a user's."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from math import prod
from typing import cast

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
from contnorm.checks import nearest_groups
from contnorm.convert.conversion import convert_norm
from contnorm.errors import GroupsError, UserCodeError, UserError, unknown
from contnorm.norms.weight_standardization import standardize_convolutions
from contnorm.registry import find_norm, numbered_name

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
        standardize_convolutions(network, float(dict(norm.options).get("weight_eps", 1e-6)))
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
        widths = _grouped_widths(config, norm, shape, outputs, total_steps) or [error.channels]
        suggestion = nearest_groups(widths, error.num_groups)
        raise UserError(f"model {config.name!r}: {_groups_message(norm, error, suggestion)}") from error
    except ValueError as error:  # an unknown norm, or a setting that the norm does not accept
        raise UserError(str(error)) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise UserError(
            f"model.width={config.width}: a {config.name} of this width does not fit into memory. Use a smaller width."
        ) from error
    known = [component.name for component in components("model")]
    raise unknown("model", config.name, [*MODELS, *known, "path/to/file.py:make"])


def _groups_message(norm: NormConfig, error: GroupsError, suggestion: int) -> str:
    """Message about a number of groups that does not divide the channels, with the setting to change."""
    if is_user_code(norm.name):
        return (
            f"norm {norm.name!r}: num_groups={error.num_groups} does not divide the {error.channels} channels of a "
            f"layer. Use norm.groups={suggestion}, or norm.groups=auto."
        )
    spec = find_norm(norm.name)[0]
    requested, possible = numbered_name(spec, error.num_groups), numbered_name(spec, suggestion)
    return (
        f"norm {requested}: num_groups={error.num_groups} does not divide the {error.channels} channels of a layer. "
        f"Use norm {possible} (norm.groups={suggestion}), which divides those of all layers, or norm.groups=auto."
    )


def _grouped_widths(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> list[int]:
    """Channels of every layer with groups; empty if unknown."""
    name = norm.name if is_user_code(norm.name) else find_norm(norm.name)[0].name
    try:
        network = _initialized(config, replace(norm, name=name, groups=1), shape, outputs, total_steps)
    except UserError:
        return []
    channels = (
        getattr(m, "num_features", getattr(m, "num_channels", None))
        for m in network.modules()
        if hasattr(m, "num_groups")
    )
    return [width for width in channels if isinstance(width, int)]


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
    signature = _signature(make)
    if not takes_norm and signature is not None and not _accepts(signature, (), 0):
        raise UserError(
            f"model {name!r}: can't be called with {call}. Write make(input_shape, num_outputs), which returns a "
            f"torch.nn.Module."
        )
    try:
        model = make(*arguments) if callable(make) else None
    except Exception as error:
        failure = user_code_error(error, "model", name, f"called with {call}")
        if not is_user_code(norm.name) and _is_of_groups(error, norm):
            example = numbered_name(find_norm(norm.name)[0], cast(GroupsError, error).suggestion)
            failure = UserCodeError(f"{failure} In a run, set norm.groups or use a norm name such as {example}.")
        raise failure from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r}: calling it with {call} must return a torch.nn.Module, not {model!r}.")
    return model if takes_norm else _converted(model, name, norm, total_steps)


def _is_of_groups(error: Exception, norm: NormConfig) -> bool:
    """Whether an error is about the number of groups of the run's norm."""
    return isinstance(error, GroupsError) and error.num_groups == (find_norm(norm.name)[1] or norm.groups)


def _signature(make: object) -> inspect.Signature | None:
    try:
        return inspect.signature(make) if callable(make) else None
    except (TypeError, ValueError):  # such as a built-in function
        return None


def _accepts(signature: inspect.Signature, *arguments: object) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _takes_norm(make: object) -> bool:
    """Whether a function of the user takes the function that makes norm layers as its third argument."""
    signature = _signature(make)
    if signature is None:
        return callable(make)
    if not _accepts(signature, (), 0, None):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.default is p.empty and p.kind in positional for p in signature.parameters.values())
    # A third parameter with a default is the user's own, such as a width, unless it is called norm.
    return required >= 3 or "norm" in signature.parameters


def _converted(model: nn.Module, name: str, norm: NormConfig, total_steps: int) -> nn.Module:
    """Convert the norm layers of a user's network to the run's norm. A network without norm layers stays as it is."""
    if not count_norms(model):
        return model
    before = set(model.modules())
    try:
        spec, _ = find_run_norm(norm)
        converted = convert_norm(model, spec, **norm_options(norm, spec, total_steps))
    except GroupsError as error:
        raise UserError(f"model {name!r}: {_groups_message(norm, error, error.suggestion)}") from error
    except ValueError as error:
        raise UserError(f"model {name!r}: its norm layers can't be converted to norm {norm.name!r}: {error}") from error
    for layer in [module for module in converted.modules() if module not in before]:
        if spec.layers and not hasattr(layer, PART):
            mark_layer(layer)
    return converted
