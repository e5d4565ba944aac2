"""Libraries that only some components of the bench need: loggers, launchers, exports."""

from __future__ import annotations

import importlib
from typing import Any

from contnorm.errors import UserError

__all__ = ["import_library"]


def import_library(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: Name of the module.
        extra: The optional dependency of this package that installs it.

    Example:
        >>> import_library("no_such_library", "wandb")
        Traceback (most recent call last):
        contnorm.errors.UserError: wandb: needs no_such_library. Install it with: pip install "contnorm[wandb]"
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise UserError(f'{extra}: needs {missing}. Install it with: pip install "contnorm[{extra}]"') from error
