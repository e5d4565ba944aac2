"""The plugin that converts the norms of a strategy, and evaluates with moments of its replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from avalanche.core import SupervisedPlugin
from torch import nn

from contnorm.convert.conversion import Filter, convert_norm
from contnorm.convert.detect import detect_norm
from contnorm.integrations.avalanche.strategy_data import batches_of, check_layers, forward_on
from contnorm.moments.batches import Weights
from contnorm.moments.reestimate import Reestimated, keeps_moments, reestimate
from contnorm.registry import DIMS, LayerFactory, NormInfo, norm_class, resolve_norm

__all__ = ["NormPlugin"]


class NormPlugin(SupervisedPlugin):
    """Plugin that converts the norms of a strategy's model, and can evaluate with moments of the replay buffer.

    The model is converted in place before the first training or evaluation. Parameters stay the same objects, so the
    optimizer and its state stay valid. Norm layers that the model's adaptation adds later are converted too.

    With ``reestimate_from``, exact moments of the stored samples replace the running moments during each evaluation
    (`contnorm.reestimate`), and the running moments are restored afterwards. Training is not affected. An empty
    buffer, as before the first experience, leaves the running moments.

    Args:
        to: Name of the new norm, or a class or function, as in `contnorm.convert_norm`; None to keep the norms.
        reestimate_from: ``"buffer"`` for the replay buffer of the strategy (``Replay``, ``DER``, ``ER_ACE``, ...) or of
            its only plugin with a buffer; a plugin or a storage policy whose buffer is used; None for running moments.
        weights: Function of a batch of the buffer that returns one weight per sample, as in `contnorm.reestimate`.
        only, skip: The layers to convert, as in `contnorm.convert_norm`.
        **options: Arguments of the new norm, such as ``num_groups=8``.

    Raises:
        ValueError: For norms that Avalanche's loops can't train: those that need tags of the batch (``adab2n``,
            ``tbbn``, ``bnt``). When training or evaluation starts, if the model can't be converted, if there is no
            buffer, or for Avalanche's own ``BatchRenorm2D``, whose moments have another form.

    Example:
        >>> plugin = NormPlugin("cn", reestimate_from="buffer", num_groups=8)
        >>> batch_norm_with_buffer_moments = NormPlugin(None, reestimate_from="buffer")
    """

    def __init__(
        self,
        to: str | LayerFactory | NormInfo | None = "cn",
        reestimate_from: Any = None,
        *,
        weights: Weights | None = None,
        only: Filter | None = None,
        skip: Filter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_arguments(to, reestimate_from, weights, {**options, "only": only, "skip": skip})
        self.to, self.reestimate_from, self.weights = to, reestimate_from, weights
        self.only, self.skip, self.options = only, skip, options
        self._known: WeakSet[nn.Module] = WeakSet()  # norms after the last conversion
        self._is_converted = False
        self._evaluation_moments: Reestimated | None = None

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Restore moments that an interrupted evaluation left, and convert the model."""
        self._restore()
        self._prepare(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Convert norms that the model's adaptation added, and pass parameters of new norms to the optimizer."""
        before = {id(parameter) for parameter in strategy.model.parameters()}
        self._convert(strategy)
        if any(id(parameter) not in before for parameter in strategy.model.parameters()):
            strategy.make_optimizer()

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Convert the model if it was not trained yet, and set the moments of the buffer."""
        self._restore()
        self._prepare(strategy)
        if self.reestimate_from is None or not keeps_moments(strategy.model):
            return
        buffer = self._policy(strategy).buffer
        if len(buffer):
            batches = batches_of(strategy, buffer)
            self._evaluation_moments = reestimate(
                strategy.model, batches, weights=self.weights, call=forward_on(strategy.device), frozen="lift"
            )

    def after_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the running moments."""
        self._restore()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a checkpoint; weak references can't be pickled."""
        return {**self.__dict__, "_known": list(self._known)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._known = WeakSet(state["_known"])

    def _restore(self) -> None:
        if self._evaluation_moments is not None:
            self._evaluation_moments.restore()
            self._evaluation_moments = None

    def _prepare(self, strategy: Any) -> None:
        check_layers(strategy.model, "NormPlugin")
        self._convert(strategy)
        if self.reestimate_from is not None:
            self._policy(strategy)

    def _convert(self, strategy: Any) -> None:
        """Convert the norms that were not there after the last conversion."""
        norms = [module for module in strategy.model.modules() if detect_norm(module) is not None]
        if self.to is None or (self._is_converted and all(norm in self._known for norm in norms)):
            return
        skip: Any = _as_list(self.skip)
        if self._is_converted:
            skip.append(lambda name, module: module in self._known)
        strategy.model = convert_norm(strategy.model, self.to, only=self.only, skip=skip or None, **self.options)
        self._known.update(module for module in strategy.model.modules() if detect_norm(module) is not None)
        self._is_converted = True

    def _policy(self, strategy: Any) -> Any:
        """Return the storage policy whose buffer the moments are estimated from."""
        if self.reestimate_from == "buffer":
            return _find_policy(strategy)
        policy = getattr(self.reestimate_from, "storage_policy", self.reestimate_from)
        if not hasattr(policy, "buffer"):
            raise ValueError(
                f"NormPlugin: reestimate_from is a {type(self.reestimate_from).__name__}, which has no buffer. Use "
                f"'buffer', a plugin with a storage_policy, or a storage policy."
            )
        return policy


def _check_arguments(to: Any, reestimate_from: Any, weights: Any, options: Mapping[str, Any]) -> None:
    """Raise for arguments of `NormPlugin` that are wrong in any model."""
    if isinstance(reestimate_from, str) and reestimate_from != "buffer":
        raise ValueError(
            f"NormPlugin: reestimate_from={reestimate_from!r} is not allowed. Use 'buffer', a plugin or storage "
            f"policy of Avalanche, or None."
        )
    if weights is not None and not callable(weights):
        raise TypeError(
            f"NormPlugin: weights is a {type(weights).__name__}. Use a function of a batch, because the buffer changes."
        )
    if weights is not None and reestimate_from is None:
        raise ValueError("NormPlugin: weights need moments that are re-estimated. Give reestimate_from=, as 'buffer'.")
    given = [name for name, value in options.items() if value is not None]
    if to is None:
        if given:
            raise ValueError(f"NormPlugin: {', '.join(given)}: options of a norm need the norm. Give to=, as 'cn'.")
        return
    entry = resolve_norm(to, {})[0]
    if getattr(norm_class(entry, min(entry.layers or DIMS)), "needs_tags", False):
        raise ValueError(
            f"NormPlugin: {entry.name!r} needs tags of the samples of a batch, which Avalanche's training loops do not "
            f"give. Use another norm, or contnorm.convert_norm if your strategy opens contnorm.batch_tags."
        )


def _as_list(choices: Any) -> list[Any]:
    if choices is None:
        return []
    return list(choices) if isinstance(choices, list | tuple | set | frozenset) else [choices]


def _find_policy(strategy: Any) -> Any:
    """Return the only storage policy of a strategy and its plugins."""
    owners = [owner for owner in (strategy, *strategy.plugins) if hasattr(owner, "storage_policy")]
    policies = {id(owner.storage_policy): owner.storage_policy for owner in owners}
    if len(policies) == 1:
        return next(iter(policies.values()))
    name = type(strategy).__name__
    if not policies:
        raise ValueError(
            f"NormPlugin: reestimate_from='buffer', but {name} and its plugins have no replay buffer (storage_policy). "
            f"Add a ReplayPlugin, pass a storage policy, or use reestimate_from=None."
        )
    names = ", ".join(type(owner).__name__ for owner in owners)
    raise ValueError(
        f"NormPlugin: reestimate_from='buffer', but {name} has {len(policies)} replay buffers ({names}). Pass the "
        f"plugin or storage policy to use as reestimate_from."
    )
