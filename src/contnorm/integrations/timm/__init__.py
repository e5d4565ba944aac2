"""Norms of this package in timm: names for ``norm_layer=``, norm-and-activation layers, and timm's model tools.

`register` adds the norms to timm's tables of layers. Models are then built with them as with timm's own:

    from contnorm.integrations.timm import register

    register()
    model = timm.create_model("efficientnet_b0", norm_layer="cn")

Many architectures of timm build a norm and the activation after it as one layer. `ContinualNormAct2d` and the other
``*Act2d`` classes are these layers: a norm of this package, then a dropout, then an activation, with the arguments of
timm's ``BatchNormAct2d`` and the state-dict keys of the norm.
"""

from contnorm.integrations.timm.layers import (
    AdaptiveBalanceNormAct2d,
    BalancedBatchNormAct2d,
    BatchRenormAct2d,
    ContinualNormAct2d,
    EvoNormAct2d,
    FilterResponseNormAct2d,
    GroupNormAct2d,
    InstanceAwareBatchNormAct2d,
    InstanceNormAct2d,
    LayerNormAct2d,
    NoNormAct2d,
    RobustBatchNormAct2d,
    SwitchNormAct2d,
    TaskBalancedNormAct2d,
)
from contnorm.integrations.timm.registration import register, registered_names, unregister

__all__ = [
    "AdaptiveBalanceNormAct2d",
    "BalancedBatchNormAct2d",
    "BatchRenormAct2d",
    "ContinualNormAct2d",
    "EvoNormAct2d",
    "FilterResponseNormAct2d",
    "GroupNormAct2d",
    "InstanceAwareBatchNormAct2d",
    "InstanceNormAct2d",
    "LayerNormAct2d",
    "NoNormAct2d",
    "RobustBatchNormAct2d",
    "SwitchNormAct2d",
    "TaskBalancedNormAct2d",
    "register",
    "registered_names",
    "unregister",
]
