"""Avalanche: a plugin that converts a strategy's norms, a metric of the norm effect, and streams as benchmarks.

Example:
    >>> from avalanche.training import Replay
    >>> from contnorm.integrations.avalanche import NormPlugin
    >>> network = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 26 * 26, 10))
    >>> strategy = Replay(
    ...     model=network,
    ...     optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
    ...     criterion=nn.CrossEntropyLoss(),
    ...     mem_size=200,
    ...     plugins=[NormPlugin("cn", num_groups=8)],
    ... )
"""

from contnorm.integrations.extras import missing_extra

try:
    from contnorm.integrations.avalanche.benchmark import RandomCropAndFlip, to_avalanche
    from contnorm.integrations.avalanche.norm_effect import NormEffect
    from contnorm.integrations.avalanche.plugin import NormPlugin
except ModuleNotFoundError as error:
    raise missing_extra("avalanche", error) from error

__all__ = ["NormEffect", "NormPlugin", "RandomCropAndFlip", "to_avalanche"]
