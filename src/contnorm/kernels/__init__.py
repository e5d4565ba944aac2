"""The arithmetic of continual normalization, written more than once; this file picks one.

`reference` is the meaning: torch's two stock calls. `analytic` is one pass of statistics and one multiply-add with a
hand-written backward, right also where the stock calls cancel. A fused GPU kernel takes the name `triton`.
"""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

__all__ = ["Kernel", "Order", "kernel_from_environment"]

Kernel = Literal["auto", "reference", "analytic"]
Order = Literal["gn_bn", "bn_gn"]

VARIABLE = "CONTNORM_KERNEL"


def kernel_from_environment() -> Kernel:
    """The kernel asked for in ``CONTNORM_KERNEL``, or ``"auto"``.

    Example:
        >>> kernel_from_environment()
        'auto'
    """
    asked = os.environ.get(VARIABLE, "auto") or "auto"
    if asked == "triton":
        raise ValueError(f"{VARIABLE}=triton: this build has no Triton kernel. Unset it, or use 'analytic'.")
    if asked not in get_args(Kernel):
        raise ValueError(f"{VARIABLE}={asked!r} is unknown. Use one of {', '.join(get_args(Kernel))}, or unset it.")
    return cast(Kernel, asked)
