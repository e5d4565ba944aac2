"""The arithmetic of norms, written more than once; this file names the ways. Those of continual normalization:

- `reference` is the meaning: torch's two stock calls, which cancel at large means.
- `pivoted` is the same two calls on the data less a pivot, right at any mean.
- `analytic` is one pass of statistics and one multiply-add with a hand-written backward, right at any mean.
- `triton` is `analytic` fused into one to three GPU kernels each way (`kernels/fused`), right at any mean. The paper's
  variants have no closed form here: theirs is a kernel for the group step, beside torch's batch norm (`variants`).

`auto` takes the fastest that is right. On CUDA that is `triton`, wherever it can run. Elsewhere `analytic`, written in
torch operators, each of them a pass of its own, is not it in training: forward and backward it takes 1.5 to 2.6 times
as long as `pivoted` on two CPU cores (docs/deviations.md), so `auto` is `pivoted`. In evaluation, where the batch step
is a constant map that group norm can apply, `auto` is `analytic`.

Batch renorm and switchable norm are written twice: in torch's operators, beside their functions, and in a few GPU
kernels (`kernels/rows`). To them `auto` is the kernels on CUDA and torch's operators elsewhere, `triton` the kernels
wherever they can run, and every other name torch's operators.
"""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

__all__ = ["Kernel", "Order", "check_order", "chosen_kernel"]

Kernel = Literal["auto", "reference", "pivoted", "analytic", "triton"]
Order = Literal["gn_bn", "bn_gn"]
KERNELS = get_args(Kernel)
ORDERS = get_args(Order)

VARIABLE = "CONTNORM_KERNEL"


def chosen_kernel(kernel: str | None, caller: str) -> Kernel:
    """The kernel named by the argument; if that is None by ``CONTNORM_KERNEL``; if that is not set ``"auto"``.

    Any other name raises a ValueError, an empty argument too; an empty variable counts as not set.

    Whether ``"triton"`` can run is known when there is an input: see `contnorm.functional.continual_norm`.

    Example:
        >>> chosen_kernel(None, "demo"), chosen_kernel("analytic", "demo")
        ('auto', 'analytic')
    """
    asked = kernel if kernel is not None else os.environ.get(VARIABLE) or "auto"
    if asked not in KERNELS:
        where = f"{caller}: {VARIABLE if kernel is None else 'kernel'}={asked!r}"
        raise ValueError(f"{where} is unknown. Use one of {', '.join(KERNELS)}.")
    return cast(Kernel, asked)


def check_order(order: str, caller: str) -> None:
    """Refuse an order of the two steps that is not one of `Order`."""
    if order not in ORDERS:
        raise ValueError(f"{caller}: order={order!r} is unknown. Use 'gn_bn' (continual normalization) or 'bn_gn'.")
