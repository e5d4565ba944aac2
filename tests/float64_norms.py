"""Independent float64 formulas of all norms in numpy, written from their definitions.

Deliberately slow and plain: two-pass moments, no pivots, no shared code with the package. There is
one class for each norm of the registry; the conformance tests fail for a norm without one.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Setting:
    """Arguments of a norm's formula other than the input."""

    weight: Array | None = None
    bias: Array | None = None
    eps: float = 1e-5
    groups: int = 1
    extra: dict[str, Array] = field(default_factory=dict)


def spread(table: Array, rank: int) -> Array:
    """Reshape a (C,) or (N, C) table to broadcast over an input of this rank."""
    rows = table if table.ndim == 2 else table[None]
    return rows.reshape(rows.shape + (1,) * (rank - 2))


def affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * spread(weight, x.ndim)
    return x if bias is None else x + spread(bias, x.ndim)


def channel_moments(x: Array) -> tuple[Array, Array, int]:
    axes = tuple(i for i in range(x.ndim) if i != 1)
    mean = x.mean(axes)
    var = ((x - spread(mean, x.ndim)) ** 2).mean(axes)
    return mean, var, x.size // x.shape[1]


def group_normalized(x: Array, groups: int, eps: float) -> Array:
    slabs = x.reshape(x.shape[0], groups, -1)
    mean = slabs.mean(2, keepdims=True)
    var = ((slabs - mean) ** 2).mean(2, keepdims=True)
    return ((slabs - mean) / np.sqrt(var + eps)).reshape(x.shape)


def batch_normalized(x: Array, mean: Array, var: Array, eps: float) -> Array:
    return (x - spread(mean, x.ndim)) / np.sqrt(spread(var, x.ndim) + eps)


class Batch:
    """BN, and the base of the others, which override the signal or the normalization."""

    def signal(self, x: Array, s: Setting) -> Array:
        return x

    def finish(self, z: Array, mean: Array, var: Array, s: Setting) -> Array:
        return affine(batch_normalized(z, mean, var, s.eps), s.weight, s.bias)

    def train(self, x: Array, s: Setting) -> tuple[Array, Array, Array]:
        """Return the output, the mean, and the variance as stored in the buffers."""
        z = self.signal(x, s)
        mean, var, count = channel_moments(z)
        return self.finish(z, mean, var, s), mean, self.stored(var, count)

    def evaluate(self, x: Array, mean: Array, var: Array, s: Setting) -> Array:
        return self.finish(self.signal(x, s), mean, var, s)

    def stored(self, var: Array, count: int) -> Array:
        return var * count / (count - 1)

    def moved(self, old: tuple[Array, Array], new: tuple[Array, Array], share: float) -> tuple[Array, Array]:
        return (1 - share) * old[0] + share * new[0], (1 - share) * old[1] + share * new[1]


class Continual(Batch):
    def signal(self, x: Array, s: Setting) -> Array:
        return group_normalized(x, s.groups, s.eps)


class ContinualTied(Batch):
    def signal(self, x: Array, s: Setting) -> Array:
        return affine(group_normalized(x, s.groups, s.eps), s.weight, s.bias)


class BatchThenGroup(Batch):
    def finish(self, z: Array, mean: Array, var: Array, s: Setting) -> Array:
        return affine(group_normalized(batch_normalized(z, mean, var, s.eps), s.groups, s.eps), s.weight, s.bias)


class BatchThenGroupTied(Batch):
    def finish(self, z: Array, mean: Array, var: Array, s: Setting) -> Array:
        first = affine(batch_normalized(z, mean, var, s.eps), s.weight, s.bias)
        return affine(group_normalized(first, s.groups, s.eps), s.weight, s.bias)


class Renorm(Batch):
    """With r = 1 and d = 0 unless ``extra`` gives them: the published schedule's first 5,000 batches."""

    def finish(self, z: Array, mean: Array, var: Array, s: Setting) -> Array:
        out = (z - spread(mean, z.ndim)) / (np.sqrt(spread(var, z.ndim)) + s.eps)
        out = out * spread(s.extra.get("r", np.ones_like(mean)), z.ndim)
        out = out + spread(s.extra.get("d", np.zeros_like(mean)), z.ndim)
        return affine(out, s.weight, s.bias)

    def stored(self, var: Array, count: int) -> Array:
        return var

    def moved(self, old: tuple[Array, Array], new: tuple[Array, Array], share: float) -> tuple[Array, Array]:
        mean, std = super().moved((old[0], np.sqrt(old[1])), (new[0], np.sqrt(new[1])), share)
        return mean, std**2


class Switch(Batch):
    """IN's variance is unbiased; LN's and BN's are computed from it. With one position, only LN and BN are mixed."""

    def rows(self, x: Array) -> tuple[Array, Array]:
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        mean = flat.mean(2)
        var = flat.var(2, ddof=1) if flat.shape[2] > 1 else np.zeros_like(mean)
        return mean, var

    def train(self, x: Array, s: Setting) -> tuple[Array, Array, Array]:
        mean_in, var_in = self.rows(x)
        mean = mean_in.mean(0)
        var = (var_in + (mean_in - mean) ** 2).mean(0)
        return self.evaluate(x, mean, var, s), mean, var

    def evaluate(self, x: Array, mean: Array, var: Array, s: Setting) -> Array:
        mean_in, var_in = self.rows(x)
        mean_ln = mean_in.mean(1, keepdims=True)
        var_ln = (var_in + (mean_in - mean_ln) ** 2).mean(1, keepdims=True)
        single = x.size == x.shape[0] * x.shape[1]

        def mix(logits: Array, one: Array, two: Array, three: Array) -> Array:
            raw = np.exp(logits[1:] if single else logits)
            share = raw / raw.sum()
            return share[-2] * two + share[-1] * three + (0 if single else share[0] * one)

        mixed_mean = mix(s.extra["mean_weight"], mean_in, mean_ln, mean[None])
        mixed_var = mix(s.extra["var_weight"], var_in, var_ln, var[None])
        out = (x - spread(mixed_mean, x.ndim)) / np.sqrt(spread(mixed_var, x.ndim) + s.eps)
        return affine(out, s.weight, s.bias)


class AdaptiveBalance(Batch):
    """AdaB2N before the first task starts: BN without Bessel's correction. tests/norms/test_adaptive.py has more."""

    def stored(self, var: Array, count: int) -> Array:
        return var


class Robust(Batch):
    """The moments in force are those after the update, which the output is computed with; the variance is biased."""

    def mixed(self, x: Array, old: tuple[Array, Array], share: float, s: Setting) -> tuple[Array, tuple[Array, Array]]:
        mean, var, _ = channel_moments(x)
        new = self.moved(old, (mean, var), share)
        return self.finish(x, *new, s), new


class Hybrid(Batch):
    """A mixture of the running and the batch moments with a share for each channel, before the running ones follow."""

    def mixed(self, x: Array, old: tuple[Array, Array], share: float, s: Setting) -> tuple[Array, tuple[Array, Array]]:
        a = 1 / (1 + np.exp(-s.extra["distribution_factor"]))
        mean, var, count = channel_moments(x)
        y = self.finish(x, (1 - a) * old[0] + a * mean, (1 - a) * old[1] + a * var, s)
        return y, self.moved(old, (mean, self.stored(var, count)), share)


class InstanceAware(Batch):
    """Unbiased variances of the batch and of each sample; one position gives no moments of a sample."""

    def train(self, x: Array, s: Setting) -> tuple[Array, Array, Array]:
        mean, var, count = channel_moments(x)
        var = var * count / (count - 1)
        return self.evaluate(x, mean, var, s), mean, var

    def evaluate(self, x: Array, mean: Array, var: Array, s: Setting) -> Array:
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        positions = flat.shape[2]
        if positions == 1:
            return self.finish(x, mean, var, s)
        k = float(s.extra["k"])
        mean_error = np.sqrt((var + s.eps) / positions)
        var_error = (var + s.eps) * np.sqrt(2 / (positions - 1))
        out = np.empty_like(flat)
        for n in range(flat.shape[0]):
            for c in range(flat.shape[1]):
                row = flat[n, c]
                m = mean[c] + self.shrunk(row.mean() - mean[c], k * mean_error[c])
                v = var[c] + self.shrunk(row.var(ddof=1) - var[c], k * var_error[c])
                out[n, c] = (row - m) / np.sqrt(max(v, 0.0) + s.eps)
        return affine(out.reshape(x.shape), s.weight, s.bias)

    def shrunk(self, value: float, limit: float) -> float:
        if value > limit:
            return value - limit
        return value + limit if value < -limit else 0.0


class OfSamples:
    """Norms of each sample: no moments, and the same in both modes."""

    def groups(self, x: Array, s: Setting) -> int:
        return s.groups

    def train(self, x: Array, s: Setting) -> tuple[Array, None, None]:
        return affine(group_normalized(x, self.groups(x, s), s.eps), s.weight, s.bias), None, None


class Layer(OfSamples):
    def groups(self, x: Array, s: Setting) -> int:
        return 1


class Instance(OfSamples):
    def groups(self, x: Array, s: Setting) -> int:
        return x.shape[1]


class Nothing(OfSamples):
    def train(self, x: Array, s: Setting) -> tuple[Array, None, None]:
        return x, None, None


class EvoS0(OfSamples):
    """x * sigmoid(v x) / std of the group, then affine; without v, x / std."""

    def train(self, x: Array, s: Setting) -> tuple[Array, None, None]:
        slabs = x.reshape(x.shape[0], s.groups, -1)
        std = np.sqrt(((slabs - slabs.mean(2, keepdims=True)) ** 2).mean(2, keepdims=True) + s.eps)
        y = (slabs / std).reshape(x.shape)
        if s.extra.get("v") is not None:
            y = y / (1 + np.exp(-spread(s.extra["v"], x.ndim) * x))
        return affine(y, s.weight, s.bias), None, None


class FilterResponse(OfSamples):
    """x / sqrt(mean of squares of the channel + eps), affine, then the larger of this and tau."""

    def train(self, x: Array, s: Setting) -> tuple[Array, None, None]:
        power = (x.reshape(*x.shape[:2], -1) ** 2).mean(2)
        y = affine(x / np.sqrt(spread(power, x.ndim) + s.eps), s.weight, s.bias)
        if s.extra.get("tau") is not None:
            y = np.maximum(y, spread(s.extra["tau"], x.ndim))
        return y, None, None


class DynamicTanh(OfSamples):
    """tanh(alpha x), then affine."""

    def train(self, x: Array, s: Setting) -> tuple[Array, None, None]:
        return affine(np.tanh(s.extra["alpha"] * x), s.weight, s.bias), None, None


FLOAT64_NORMS: dict[str, Batch | OfSamples] = {
    "none": Nothing(),
    "bn": Batch(),
    "ln": Layer(),
    "in": Instance(),
    "gn": OfSamples(),
    "brn": Renorm(),
    "sn": Switch(),
    "cn": Continual(),
    "bn_gn": BatchThenGroup(),
    "cn_tied": ContinualTied(),
    "bn_gn_tied": BatchThenGroupTied(),
    "adab2n": AdaptiveBalance(),
    "tbbn": Batch(),  # before the second task; tests/norms/test_task_balanced.py has later ones
    "bnt": Batch(),
    "iabn": InstanceAware(),
    "rbn": Robust(),
    "hbn": Hybrid(),
    "evonorm_s0": EvoS0(),
    "frn": FilterResponse(),
    "gn_ws": OfSamples(),
    "dyt": DynamicTanh(),
}
