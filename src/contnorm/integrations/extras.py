"""The optional dependencies of each integration, and the error for one that is not installed."""

from __future__ import annotations

__all__ = ["EXTRAS", "missing_extra"]

# The framework of each integration, and how to install it. mammoth is no package: it is used from its own checkout.
EXTRAS = {
    "avalanche": 'pip install "contnorm[avalanche]"',
    "hub": 'pip install "contnorm[hub]"',
    "lightning": 'pip install "contnorm[lightning]"',
    "mammoth": "git clone https://github.com/aimagelab/mammoth, and run Python in that folder",
    "optuna": 'pip install "contnorm[optuna]"',
    "timm": 'pip install "contnorm[timm]"',
    "transformers": 'pip install "contnorm[transformers]"',
}


def missing_extra(integration: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error for an integration whose framework is not installed.

    Args:
        integration: Name of the module in ``contnorm.integrations``.
        error: The error of the import.

    Example:
        >>> print(missing_extra("timm", ModuleNotFoundError("No module named 'timm'", name="timm")))
        contnorm.integrations.timm needs timm. Install it with: pip install "contnorm[timm]"
    """
    message = f"contnorm.integrations.{integration} needs {error.name}. Install it with: {EXTRAS[integration]}"
    if error.name is None:  # the framework is installed, and raised the error itself: transformers for any error
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        message = f"contnorm.integrations.{integration}: the installed framework can't be imported: {reason}"
    return ModuleNotFoundError(message, name=error.name)
