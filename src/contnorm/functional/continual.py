"""Continual normalization (Pham et al., ICLR 2022): group norm without affine, then batch norm.

Differs from the two stock calls in one thing: it is right at large means, where they cancel. See `kernels/pivot.py`.
"""

from __future__ import annotations

from torch import Tensor

from contnorm.checks import check_batch, check_eps, check_group_size, check_input, check_moments, resolve_groups
from contnorm.functional.batch import ANY_RANK, empty_like_input, update_moments, uses_batch_moments
from contnorm.kernels import Kernel, Order, analytic, chosen_kernel, reference

__all__ = ["continual_norm"]


def continual_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    num_groups: int | str = 32,
    *,
    order: Order = "gn_bn",
    tied: bool = False,
    kernel: Kernel | None = None,
    caller: str = "continual_norm",
) -> Tensor:
    r"""Group normalization without affine, then batch normalization with it.

    .. math:: y = \gamma \, \mathrm{BN}_{1,0}(\mathrm{GN}_{1,0}(x; G)) + \beta

    Args:
        x: (N, C) or (N, C, *).
        running_mean: (C,), moments of the group-normalized signal (of the input for ``order="bn_gn"``), updated in
            place when ``training``.
        running_var: (C,), likewise, with the unbiased variance.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch; without running moments it always is.
        momentum: The weight of this batch in the running moments; a 0-dim tensor keeps it on the device.
        eps: Added to both variances.
        num_groups: A divisor of C, or ``"auto"``.
        order: ``"gn_bn"`` is CN; ``"bn_gn"`` the paper's other order, with the affine in the second step.
        tied: Use the one pair of weight and bias in both steps.
        kernel: Which arithmetic to use; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.
        caller: Whom an error message names.

    Example:
        >>> x = torch.tensor([[0.0, 2.0], [1.0, 9.0], [6.0, 5.0]])
        >>> continual_norm(x, None, None, training=True, eps=1e-12, num_groups=1)
        tensor([[-0.7071,  0.7071],
                [-0.7071,  0.7071],
                [ 1.4142, -1.4142]])
    """
    known = running_mean if running_mean is not None else weight
    check_input(x, ANY_RANK, None if known is None else known.shape[0], caller)
    check_eps(eps, caller)
    check_moments(running_mean, running_var, caller)
    groups = resolve_groups(num_groups, x.shape[1], x.dim(), caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    check_group_size(x, groups, caller)
    chosen = chosen_kernel(kernel, caller)
    pivot = chosen != "reference"
    closed_form = order == "gn_bn" and not tied  # the variants have none: they are the two calls, less a pivot

    if not uses_batch_moments(training, running_mean):
        assert running_mean is not None and running_var is not None
        if closed_form and chosen in ("auto", "analytic"):
            return analytic.evaluate(x, running_mean, running_var, weight, bias, eps, groups)
        return reference.evaluate(
            x, running_mean, running_var, weight, bias, eps, groups, order=order, tied=tied, pivot=pivot
        )

    check_batch(x, eps, caller)
    tracked = running_mean is not None
    found: reference.BatchMoments | None
    if closed_form and chosen == "analytic":
        y, found = analytic.train(x, weight, bias, eps, groups)
    else:
        y, found = reference.train(x, weight, bias, eps, groups, order=order, tied=tied, pivot=pivot, moments=tracked)
    if found is not None:
        update_moments(running_mean, running_var, found.mean, found.var, momentum)
    return y
