"""The public names of ``contnorm``, which ``contnorm/__init__.py`` imports from here at their first use."""

from contnorm import functional, testing
from contnorm.convert import convert_norm, convert_sync, revert_sync
from contnorm.diagnosis.measure import diagnose
from contnorm.moments.freeze import freeze_norms, freeze_stats, frozen_stats, stats_mode, unfreeze_norms
from contnorm.moments.pooling import average_state_dicts
from contnorm.moments.reestimate import reestimate
from contnorm.norms.activation import (
    DynamicTanh1d,
    DynamicTanh2d,
    DynamicTanh3d,
    EvoNorm1d,
    EvoNorm2d,
    EvoNorm3d,
    FilterResponseNorm1d,
    FilterResponseNorm2d,
    FilterResponseNorm3d,
    NoNorm1d,
    NoNorm2d,
    NoNorm3d,
)
from contnorm.norms.balanced import (
    AdaptiveBalanceNorm1d,
    AdaptiveBalanceNorm2d,
    AdaptiveBalanceNorm3d,
    TaskBalancedNorm1d,
    TaskBalancedNorm2d,
    TaskBalancedNorm3d,
)
from contnorm.norms.batch import (
    BalancedBatchNorm1d,
    BalancedBatchNorm2d,
    BalancedBatchNorm3d,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
)
from contnorm.norms.continual import ContinualNorm1d, ContinualNorm2d, ContinualNorm3d, SyncContinualNorm
from contnorm.norms.continual import ContinualNorm2d as CN  # noqa: N817
from contnorm.norms.group import (
    GroupNorm1d,
    GroupNorm2d,
    GroupNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm1d,
    LayerNorm2d,
    LayerNorm3d,
    WSGroupNorm1d,
    WSGroupNorm2d,
    WSGroupNorm3d,
)
from contnorm.norms.robust import (
    HybridBatchNorm1d,
    HybridBatchNorm2d,
    HybridBatchNorm3d,
    InstanceAwareBatchNorm1d,
    InstanceAwareBatchNorm2d,
    InstanceAwareBatchNorm3d,
    RobustBatchNorm1d,
    RobustBatchNorm2d,
    RobustBatchNorm3d,
)
from contnorm.norms.switchable import SwitchNorm1d, SwitchNorm2d, SwitchNorm3d
from contnorm.registry import create_norm, register_norm, unregister_norm
from contnorm.spec import apply_norm_spec, load_model, norm_spec, save_model
from contnorm.summary import summarize
from contnorm.tags import BatchTags, ReplayRequest, batch_tags, current_tags

# fmt: off
__all__ = [
    "CN", "AdaptiveBalanceNorm1d", "AdaptiveBalanceNorm2d", "AdaptiveBalanceNorm3d", "BalancedBatchNorm1d",
    "BalancedBatchNorm2d", "BalancedBatchNorm3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BatchRenorm1d",
    "BatchRenorm2d", "BatchRenorm3d", "BatchTags", "ContinualNorm1d", "ContinualNorm2d", "ContinualNorm3d",
    "DynamicTanh1d", "DynamicTanh2d", "DynamicTanh3d", "EvoNorm1d", "EvoNorm2d", "EvoNorm3d",
    "FilterResponseNorm1d", "FilterResponseNorm2d", "FilterResponseNorm3d", "GroupNorm1d", "GroupNorm2d",
    "GroupNorm3d", "HybridBatchNorm1d", "HybridBatchNorm2d", "HybridBatchNorm3d", "InstanceAwareBatchNorm1d",
    "InstanceAwareBatchNorm2d", "InstanceAwareBatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "LayerNorm1d", "LayerNorm2d", "LayerNorm3d", "NoNorm1d", "NoNorm2d", "NoNorm3d", "ReplayRequest",
    "RobustBatchNorm1d", "RobustBatchNorm2d", "RobustBatchNorm3d", "SwitchNorm1d", "SwitchNorm2d", "SwitchNorm3d",
    "SyncContinualNorm", "TaskBalancedNorm1d", "TaskBalancedNorm2d", "TaskBalancedNorm3d", "WSGroupNorm1d",
    "WSGroupNorm2d", "WSGroupNorm3d", "apply_norm_spec", "average_state_dicts", "batch_tags", "convert_norm",
    "convert_sync", "create_norm", "current_tags", "diagnose", "freeze_norms", "freeze_stats", "frozen_stats",
    "functional", "load_model", "norm_spec", "reestimate", "register_norm", "revert_sync", "save_model",
    "stats_mode", "summarize", "testing", "unfreeze_norms", "unregister_norm",
]
