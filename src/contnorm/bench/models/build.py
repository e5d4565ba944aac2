"""Build the network of a run by name: a built-in one or a user's."""

from __future__ import annotations

import copy
import inspect
from math import prod
from typing import Any

from torch import nn

from contnorm.bench.components import components, is_user_code, load_component, user_code_errors
from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.networks import MLP, DeepResNet, ResNet18
from contnorm.bench.models.norm_layers import PART, count_norms, mark_layer, norm_maker, norm_options
from contnorm.bench.models.pretrained import load_pretrained
from contnorm.bench.models.user_norms import find_run_norm
from contnorm.convert import convert_norm
from contnorm.errors import UserError, unknown
from contnorm.norms.group import standardize_convolutions


def build_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> nn.Module:
    """Build the network of a run, initialized from torch's generator, and load the weights of its settings, if any.

    A user's network is named as ``path/to/file.py:make``; ``make(input_shape, num_outputs, norm)`` is called with the
    shape of an image, the number of outputs, and a function ``norm(channels)`` that creates the run's 2d norm.
    """
    network: nn.Module
    try:
        if config.name == "mlp":
            network = MLP(prod(shape), outputs, config.width, norm_maker(norm, 1, total_steps))
        elif config.name not in NETWORKS:
            network = _user_model(config, norm, shape, outputs, total_steps)
        elif len(shape) != 3:
            raise UserError(
                f"model {config.name!r}: needs images of shape (channels, height, width), and the samples have shape "
                f"{shape}. Use the model mlp."
            )
        else:
            arguments = shape[0], outputs, config.width, norm_maker(norm, 2, total_steps), config.stem
            network = ResNet18(*arguments) if config.name == "resnet18" else DeepResNet(config.name, *arguments)
        standardizes_weights = find_run_norm(norm)[0].standardizes_weights
    except ValueError as error:  # an unknown norm, or a setting that the norm does not accept, such as its groups
        problem = str(error).replace("num_groups", "norm.groups")
        raise UserError(f"model {config.name!r}: norm {norm.name!r}: {problem}") from error
    if standardizes_weights:
        standardize_convolutions(network, float(dict(norm.options).get("weight_eps", 1e-6)))  # type: ignore[arg-type]
    if config.weights is not None:
        load_pretrained(network, config)
    return network


def _user_model(
    config: ModelConfig, norm: NormConfig, shape: tuple[int, ...], outputs: int, total_steps: int
) -> nn.Module:
    """Build a user's network: ``make(input_shape, num_outputs)``, the same with ``norm``, or a copy of a network.

    A network that is built without ``norm``, or given as it is, has its norm layers converted to the run's norm.
    """
    name, (spec, groups) = config.name, find_run_norm(norm)
    if not is_user_code(name):
        known = [component.name for component in components("model")]
        raise unknown("model", name, [*NETWORKS, *known, "path/to/file.py:make"])
    make: Any = load_component("model", name, config.code)
    if spec.absorbs_activation and "apply_act" not in dict(norm.options):
        raise UserError(
            f"model {name!r}: norm {norm.name!r} contains an activation. Set norm.apply_act=false if the network "
            f"applies one after each norm, and true if it does not."
        )
    if isinstance(make, nn.Module):
        model, takes_norm = copy.deepcopy(make), False
    else:
        parameters = inspect.signature(make).parameters
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = sum(p.default is p.empty and p.kind in positional for p in parameters.values())
        # A third parameter with a default is the user's own, such as a width, unless it is called norm.
        takes_norm = required >= 3 or "norm" in parameters
        arguments: tuple[Any, ...] = (shape, outputs)
        if takes_norm:
            create = norm_maker(norm, 2, total_steps)
            arguments = (shape, outputs, lambda channels: mark_layer(create(channels)))
        call = f"called with (input_shape, num_outputs{', norm' if takes_norm else ''})"
        with user_code_errors(f"model {name!r}", call):
            model = make(*arguments)
        if not isinstance(model, nn.Module):
            raise UserError(f"model {name!r}: {call}, it must return a torch.nn.Module, not {model!r}.")
    if takes_norm or not count_norms(model):
        return model
    if norm.layers == "stock":
        raise ValueError("norm.layers='stock' is for the networks of this package. Use norm.layers='ours'.")
    before = set(model.modules())
    converted = convert_norm(model, spec, **norm_options(norm, spec, groups, total_steps))
    for layer in [module for module in converted.modules() if module not in before]:
        if spec.layers and not hasattr(layer, PART):
            mark_layer(layer)
    return converted
