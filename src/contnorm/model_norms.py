"""The norm spec of a model, which says what its state dict does not, and conversion of a model to match a spec.

The state dicts of batch norm and of continual norm have the same keys and shapes, for any number of groups and either
order of the steps. `norm_spec` describes all norm layers of a model in plain JSON, to be stored with the weights;
`apply_norm_spec` converts the norm layers of a newly built model accordingly, so that the weights mean the same.

A spec is a dict of this form::

    {"format": "contnorm.norm_spec", "version": 1,
     "norms": {path: {"norm": "cn", "dim": 2, "num_features": 64, "options": {"eps": 1e-05, "num_groups": 8, ...},
                      "parameters": ["weight", "bias"], "running_moments": true, "constant": false, "frozen": false,
                      "synced": false, "has_act": false, "also_at": [other paths of a shared layer]}},
     "activations": {path: {"shared": false, "also_at": []}},
     "convolutions": {path: {"weight_eps": 1e-06, "also_at": []}}}

``activations`` are those that norms such as EvoNorm-S0 replace, and ``convolutions`` those with standardized weights;
the norms that caused it have their paths in ``absorbed`` and ``standardized``. A layer that is not in the registry has
``"norm": null`` and its ``class``. Device, dtype, training mode and the kernel that computes a layer are not in a spec:
like the process group of synchronized layers, they are those of the model that it is applied to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.description import ModelTree, describe_with_neighbours
from contnorm.convert.match import MatchPlan, format_problems
from contnorm.convert.spec_format import FORMAT, VERSION, check_spec

__all__ = ["apply_norm_spec", "norm_spec", "norms_applied"]


def norm_spec(model: nn.Module) -> dict[str, Any]:
    """Describe all norm layers of a model in plain JSON: what decides their output and is not in the state dict.

    The spec contains the norm, dimension, channels and options of each layer (groups, order, tied, eps, momentum and
    all others), whether its moments are frozen or constant and whether it is synchronized, the activations that norms
    have absorbed, and the convolutions with standardized weights. A layer that the model has at several paths is
    described once. A layer of an unknown class is named with its class.

    Args:
        model: The model; it is not changed.

    Returns:
        A dict that ``json.dumps`` accepts, for `apply_norm_spec`.

    Raises:
        ValueError: If a norm layer is lazy, so that its channels are unknown.

    Example:
        >>> import contnorm as cn
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), cn.ContinualNorm2d(64, num_groups=8))
        >>> spec = cn.norm_spec(model)
        >>> spec["norms"]["1"]["norm"], spec["norms"]["1"]["options"]["num_groups"]
        ('cn', 8)
        >>> stock = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
        >>> cn.apply_norm_spec(stock, spec)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> cn.norm_spec(stock) == spec
        True
    """
    tree = ModelTree.of(check_model(model, "norm_spec"), "norm_spec")
    return {
        "format": FORMAT,
        "version": VERSION,
        "norms": {norm.path: describe_with_neighbours(norm, tree) for norm in tree.norms.values()},
        "activations": {
            tree.paths[module][0]: {"shared": module.shared, "also_at": tree.paths[module][1:]}
            for module in tree.wrappers
        },
        "convolutions": {
            tree.paths[module][0]: {"weight_eps": cast(Any, module).weight_eps, "also_at": tree.paths[module][1:]}
            for module in tree.standardized
        },
    }


def apply_norm_spec(model: nn.Module, spec: Mapping[str, Any]) -> nn.Module:
    """Convert the norm layers of a model to those that a spec describes, in place.

    Afterwards, ``norm_spec(model)`` equals the spec, and the model can load the weights that were saved with it. Layers
    that match already are not replaced; frozen moments are frozen or released. As in `convert_norm`, parameters and
    moments of the replaced layers are kept as the same objects wherever both layers have them. The model needs the
    norm layers of the spec at the same paths, with the same channels, whichever norms they are.

    Args:
        model: The model, such as a newly built one with batch norm.
        spec: A spec of `norm_spec`, which may have been stored as JSON.

    Returns:
        The model. If it is itself a norm layer, its replacement.

    Raises:
        TypeError: If the spec is not a dict.
        ValueError: If the spec is of another format or version, or does not fit the model. The message names what does
            not fit, and the model is unchanged.

    Example:
        >>> import contnorm as cn
        >>> spec = cn.norm_spec(cn.freeze_stats(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))))
        >>> model = cn.apply_norm_spec(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), spec)
        >>> cn.summarize(model).rows[0].state
        'train, frozen'
    """
    return _matching_plan(model, spec).execute()


@contextmanager
def norms_applied(model: nn.Module, spec: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Context manager that applies a spec, and puts the old layers back if its block raises.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(8))
        >>> frozen = norm_spec(model)
        >>> frozen["norms"]["0"]["frozen"] = True
        >>> with norms_applied(model, frozen) as changed:
        ...     print(norm_spec(changed) == frozen)
        True
    """
    before = norm_spec(model)
    plan = _matching_plan(model, spec)
    changed = plan.execute()
    try:
        yield changed
    except BaseException:
        _matching_plan(plan.swap_back(changed), before).execute()
        raise


def _matching_plan(model: nn.Module, spec: Mapping[str, Any]) -> MatchPlan:
    """Prepare the changes of a model; raise if the spec does not fit."""
    tree = ModelTree.of(check_model(model, "apply_norm_spec"), "apply_norm_spec")
    plan = MatchPlan(tree, check_spec(spec))
    plan.prepare()
    if plan.problems:
        raise ValueError(
            f"apply_norm_spec: the spec does not fit {type(model).__name__}: "
            f"{_wrapper_misfit(plan) or format_problems(plan.problems)}. The model is unchanged."
        )
    return plan


def _wrapper_misfit(plan: MatchPlan) -> str:
    """Return that the paths differ by the prefix of a wrapper, with which one of the two models was given."""
    spec, model = set(plan.spec["norms"]), {norm.path for norm in plan.tree.norms.values()}
    for prefix, wrapper in (("module.", "DistributedDataParallel"), ("_orig_mod.", "torch.compile")):
        if spec == {prefix + path for path in model}:
            return f"it describes a model inside of {wrapper}; call norm_spec or save_model with model.{prefix[:-1]}"
        if model == {prefix + path for path in spec}:
            return f"the model is inside of {wrapper}; give model.{prefix[:-1]}"
    return ""
