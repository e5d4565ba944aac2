"""Normalization layers for continual learning, with continual normalization (CN) as the main one.

>>> import torch, contnorm as cn
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64))
>>> cn.convert_norm(model, "cn", num_groups=32)[1]
ContinualNorm2d(64, num_groups=32, eps=1e-05, momentum=0.1)

The public names are those of ``contnorm.api``. They are imported at their first use, and torch with them, so that the
command line and readers of records start quickly.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.api import *  # noqa: F403

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(import_module("contnorm.api"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *import_module("contnorm.api").__all__]
