"""Functional forms of all norms, with the arguments of their torch counterparts.

Example:
    >>> import torch, contnorm as cn
    >>> x = torch.randn(8, 64, 4, 4)
    >>> cn.functional.continual_norm(x, None, None, None, None, training=True, num_groups=8).shape
    torch.Size([8, 64, 4, 4])
"""

from contnorm.norms.activation import dynamic_tanh, evonorm_s0, filter_response_norm
from contnorm.norms.balanced import adaptive_balance_norm, task_balanced_batch_norm
from contnorm.norms.batch import batch_norm, batch_renorm
from contnorm.norms.continual import continual_norm
from contnorm.norms.group import group_norm, instance_norm, layer_norm
from contnorm.norms.robust import hybrid_batch_norm, instance_aware_batch_norm, robust_batch_norm
from contnorm.norms.switchable import switch_norm

__all__ = [
    "adaptive_balance_norm",
    "batch_norm",
    "batch_renorm",
    "continual_norm",
    "dynamic_tanh",
    "evonorm_s0",
    "filter_response_norm",
    "group_norm",
    "hybrid_batch_norm",
    "instance_aware_batch_norm",
    "instance_norm",
    "layer_norm",
    "robust_batch_norm",
    "switch_norm",
    "task_balanced_batch_norm",
]
