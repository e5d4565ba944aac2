"""Lightning: synchronized norms, callbacks for running moments, and checkpoints that say which norms a model has.

The classes work with ``lightning.pytorch`` and with ``pytorch_lightning``, whose classes differ although their code is
the same. Whichever of them is installed is used, and both if both are.
"""

from contnorm.integrations.lightning.checkpoints import SPEC_KEY, SavesNorms
from contnorm.integrations.lightning.moments import FreezeMoments, ReestimateMoments
from contnorm.integrations.lightning.norm_effect import NormEffect
from contnorm.integrations.lightning.sync import SyncNorms

__all__ = ["SPEC_KEY", "FreezeMoments", "NormEffect", "ReestimateMoments", "SavesNorms", "SyncNorms"]
