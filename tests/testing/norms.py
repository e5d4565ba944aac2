"""Norms of a user for the tests of `check_norm`: two correct ones, and one with a defect for each check."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.tags import ReplayRequest, current_tags


def spread(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.dim() - 2))


class CenteredNorm(nn.Module):
    """Subtracts the mean over the channels and scales."""

    def __init__(self, num_features: int, scale: float = 1.0) -> None:
        super().__init__()
        self.num_features, self.scale = num_features, scale
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        y = (wide - wide.mean(1, keepdim=True)) * self.scale
        return (y * spread(self.weight, x) + spread(self.bias, x)).to(x.dtype)


class Fading(CenteredNorm):
    """Scales less in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.9
        return super().forward(x)


class StreamNorm(nn.BatchNorm2d):
    """Batch norm with the moments of the samples that are not replayed, and every part of the protocol."""

    needs_tags = True
    replay_request = ReplayRequest(size=4, balance="class")

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.register_buffer("tasks", torch.zeros((), dtype=torch.int64))
        self.penalty: Tensor | None = None

    def on_task_start(self, task: int) -> None:
        self.tasks.fill_(task)  # type: ignore[operator]

    def on_task_end(self, task: int) -> None:
        self.tasks.add_(1)  # type: ignore[operator]

    def auxiliary_loss(self) -> Tensor:
        penalty, self.penalty = self.penalty, None  # it is not state, and would prevent copies
        assert penalty is not None
        return penalty

    def forward(self, x: Tensor) -> Tensor:
        tags = current_tags(len(x)) if self.training else None
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None
        wide = x.double() if x.dtype == torch.float64 else x.float()
        if self.training:
            if tags is None:
                raise RuntimeError("StreamNorm: needs the tags of the batch in training. Open contnorm.batch_tags.")
            share = (~tags.replayed).to(wide.dtype).reshape(-1, 1, 1, 1)
            count = share.sum() * x.shape[2] * x.shape[3]
            batch_mean = (wide * share).sum((0, 2, 3)) / count
            batch_var = ((wide - spread(batch_mean, x)).square() * share).sum((0, 2, 3)) / count
            self.penalty = batch_mean.square().mean()
            if self.track_running_stats and not tags.is_extra:
                self._update(batch_mean.detach(), batch_var.detach())
            mean, var = batch_mean, batch_var
        y = (wide - spread(mean, x)) * (spread(var, x) + self.eps).rsqrt()
        return (y * spread(self.weight, x) + spread(self.bias, x)).to(x.dtype)

    def _update(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        share = self.momentum if self.momentum is not None else (self.num_batches_tracked + 1).double().reciprocal()
        self.num_batches_tracked.add_(1)
        for old, new in ((self.running_mean, mean), (self.running_var, var)):
            old.copy_((1 - share) * old + share * new)


class Unweighted(CenteredNorm):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Widening(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class Counting(CenteredNorm):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)  # type: ignore[operator]
        return super().forward(x)


class AlwaysOfBatch(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


class InPlace(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class Noisy(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(()) * 0.1


class ByStorage(CenteredNorm):
    """Reads the memory of the input without its strides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset()))


class Packing(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class NeedsInputGradient(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.requires_grad else y.detach() + 0 * self.weight.sum()


class RefusesOneSample(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("give two samples")
        return super().forward(x)


class FixedEps(CenteredNorm):
    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features)


class VarianceOfRows(CenteredNorm):
    """Its variance of 3d input is an average over one of the three position dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        dims = [0, 2, 3] if x.dim() == 5 else [0, *range(2, x.dim())]
        return super().forward(x) * x.var(dims, unbiased=False, keepdim=True).mean(-1, keepdim=True).rsqrt()


class RankDependent(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.dim() == 2 else 1)


class NaNHider(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num())


class FixedMoments(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class BatchInEvaluation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class SwappedMomentum(nn.BatchNorm2d):
    def __init__(self, num_features: int, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, momentum=None if momentum is None else 1 - momentum)


class KeepsOnReset(nn.BatchNorm2d):
    def reset_running_stats(self) -> None:
        if self.num_batches_tracked is None or not self.num_batches_tracked.item():
            super().reset_running_stats()


class IgnoresTracking(nn.BatchNorm2d):
    def __init__(self, num_features: int, affine: bool = True, track_running_stats: bool = True) -> None:
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


class HidesMoments(nn.BatchNorm2d):
    """Updates buffers of its own, which freezing does not know."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("other", torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.other.add_(x.detach().mean((0, 2, 3)))  # type: ignore[operator]
        return super().forward(x)


class ConstantMomentum(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        self.momentum = 0.1
        return super().forward(x)


class NaiveHalf(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = (x - x.sum(1, keepdim=True) / x.shape[1]) * 1.7
        return y * 3.1 * spread(self.weight, x).to(x.dtype) / 3.1 + spread(self.bias, x).to(x.dtype)


class Float32Only(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class AutocastCasts(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


class Cancelling(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        var = (x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
        return (x - x.mean(1, keepdim=True)) / (var.abs() + 1e-5).sqrt() * spread(self.weight, x)


class DetachedMean(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True).detach()) * spread(self.weight, x) + spread(self.bias, x)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy  # type: ignore[no-any-return]


class OnceDifferentiable(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Halved.apply(x))


class SharedCopy(CenteredNorm):
    def __deepcopy__(self, memo: Any) -> "SharedCopy":
        return self


class UnsavedState(CenteredNorm):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        return super().forward(x) * (1 + self.batches)


class ExtraBuffer(nn.BatchNorm2d):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("extra", torch.zeros(num_features))


class PlainTensor(CenteredNorm):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.offset = torch.ones(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + spread(self.offset, x)


class IgnoresDevice(CenteredNorm):
    def __init__(self, num_features: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(num_features)


class HiddenWeight(CenteredNorm):
    """Uses the parameter object of its construction, whatever is registered."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.__dict__["hidden"] = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * spread(self.hidden, x)


class ReadsValues(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.mean().item() > 0 else 1)


class Failing(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not written yet")


class SecretTags(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if current_tags(len(x)) is None else 2)


class UnsavedTask(CenteredNorm):
    task = 0

    def on_task_start(self, task: int) -> None:
        self.task = task

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.task)


class WrongLoss(CenteredNorm):
    def auxiliary_loss(self) -> float:
        return 0.5


class WrongRequest(CenteredNorm):
    replay_request = 20


class AcceptsAnything(CenteredNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


# For each check, a norm that fails it, and words of the reason.
DEFECTS: list[tuple[str, Any, str]] = [
    ("affine_parameters", Unweighted, "it has no weight"),
    ("output_like_input", Widening, "the dtype of its output is torch.float64"),
    ("evaluation_keeps_state", Counting, "it changes count in evaluation mode"),
    ("evaluation_of_each_sample", BatchInEvaluation, "single samples in evaluation"),
    ("input_unchanged", InPlace, "changes the input in place"),
    ("deterministic", Noisy, "different outputs for the same input"),
    ("non_contiguous", ByStorage, "non-contiguous input"),
    ("channels_last", ByStorage, "channels_last input"),
    ("output_layout", Packing, "not in the input's layout"),
    ("gradients_of_affine_alone", NeedsInputGradient, "whether a parameter has a gradient"),
    ("batch_of_one", RefusesOneSample, "give two samples"),
    ("one_position", RankDependent, "(N, C, 1, 1)"),
    ("eps", FixedEps, "the same for eps=1e-5 and eps=0.5"),
    ("shape_of_positions", VarianceOfRows, "for rank 5 in training mode, against those for rank 3"),
    ("empty_batch", ExtraBuffer, "for an empty batch"),
    ("nan_stays_visible", NaNHider, "a NaN in the input"),
    ("wrong_input", AcceptsAnything, "another number of channels raises no error"),
    ("moments_updated", FixedMoments, "does not change in training"),
    ("evaluation_uses_running_moments", BatchInEvaluation, "the same in training and evaluation"),
    ("momentum", SwappedMomentum, "with momentum="),
    ("reset_moments", KeepsOnReset, "reset_running_stats"),
    ("without_tracking", IgnoresTracking, "running moments with track_running_stats=False"),
    ("without_affine", IgnoresTracking, "a weight or a bias with affine=False"),
    ("tracking_disabled_later", IgnoresTracking, "track_running_stats = False"),
    ("frozen_moments", HidesMoments, "it changes other while its moments are frozen"),
    ("update_bn", SwappedMomentum, "after update_bn"),
    ("dtypes", NaiveHalf, "for bfloat16 input"),
    ("half_precision", Float32Only, "float16"),
    ("autocast", AutocastCasts, "under autocast"),
    ("autocast_other_dtype", AutocastCasts, "under autocast"),
    ("large_mean", Cancelling, "large mean"),
    ("gradients", DetachedMean, "gradients differ from numeric ones"),
    ("second_derivatives", OnceDifferentiable, "second derivatives differ from numeric ones"),
    ("gradient_checkpointing", Fading, "under a checkpoint with use_reentrant=False"),
    ("copies", SharedCopy, "shares weight with the layer"),
    ("state_dict_restores", UnsavedState, "a new layer with its state_dict() gives other outputs"),
    ("batch_norm_keys", ExtraBuffer, "unlike a batch norm's"),
    ("moves_all_tensors", PlainTensor, ""),
    ("device_and_dtype", IgnoresDevice, "not created on the device"),
    ("functional_call", HiddenWeight, "functional_call"),
    ("vmap", ReadsValues, "vmap"),
    ("conversion", Failing, "not written yet"),
    ("tags", SecretTags, "does not set needs_tags = True"),
    ("task_hooks", UnsavedTask, "not in its state_dict()"),
    ("auxiliary_loss", WrongLoss, "auxiliary_loss() returns 0.5"),
    ("replay_request", WrongRequest, "not a contnorm.ReplayRequest"),
]
