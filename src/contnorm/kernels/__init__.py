"""Implementations of the norms. Continual normalization has five, selected by name:

- `reference` is the definition: torch's group norm and batch norm, which lose precision at large means.
- `pivoted` calls the same two operators on the data minus a pivot, and is accurate at any mean.
- `analytic` is one pass for statistics and one multiply-add with a hand-written backward, accurate at any mean.
- `triton` is `analytic` fused into one to three GPU kernels for each of forward and backward
  (`kernels/triton`), accurate at any mean.
- `cpp` is `analytic` compiled for the CPU (`kernels/cpp.py`), accurate at any mean, for float32 and bfloat16. It is
  compiled at its first use, which takes a few seconds and needs a C++ compiler on Linux, and cached in the folder
  ``contnorm/cpp`` of ``$XDG_CACHE_HOME`` or ``~/.cache``.

The paper's variants (reversed order, tied parameters) have no closed form here. For them, every name but `reference` is
`pivoted`.

`auto` selects the fastest accurate implementation. On CUDA that is `triton`, wherever it can run. On a CPU it is `cpp`
for inputs of at least 65536 values, if it can be compiled and no compiler, exporter or transform of torch is active.
Elsewhere, each torch operator of `analytic` is a separate pass over the data, which is slower in training than
`pivoted` (docs/benchmarks.md), so `auto` is `pivoted`. It is `analytic` under `torch.compile`, which fuses these
operators, and in evaluation, where the batch step is a constant affine map that group norm can apply.
``kernel="pivoted"`` or ``CONTNORM_KERNEL=pivoted`` avoids compilation.

Group norm has a Triton kernel too (`kernels/triton/group_norm.py`). The other norms are computed with torch operators.
"""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

Kernel = Literal["auto", "reference", "pivoted", "analytic", "triton", "cpp"]
Order = Literal["gn_bn", "bn_gn"]
KERNELS = get_args(Kernel)
ORDERS = get_args(Order)

VARIABLE = "CONTNORM_KERNEL"


def resolve_kernel(kernel: str | None) -> Kernel:
    """Return the kernel name: the argument, or if it is None, ``CONTNORM_KERNEL``, or if it is not set, ``"auto"``.

    An unknown or empty name raises a ValueError. An empty environment variable counts as not set.

    Whether ``"triton"`` or ``"cpp"`` can run is checked when there is an input (`contnorm.functional.continual_norm`).

    Example:
        >>> resolve_kernel(None), resolve_kernel("analytic")
        ('auto', 'analytic')
    """
    name = kernel if kernel is not None else os.environ.get(VARIABLE) or "auto"
    if name not in KERNELS:
        where = VARIABLE if kernel is None else "kernel"
        raise ValueError(f"{where}={name!r} is unknown. Use one of {', '.join(KERNELS)}.")
    return cast(Kernel, name)


def check_order(order: str) -> None:
    """Raise if the order of the two steps is not one of `Order`."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown. Use 'gn_bn' (continual normalization) or 'bn_gn'.")
