"""Which modules and functions a model applies directly before and after its norm layers.

In ``nn.Sequential`` the order of modules shows it. Elsewhere the model is run once on an example input: hooks and a
function mode follow the very tensors that convolutions and norms return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from contnorm.convert.norm_comparison import random_state_restored
from contnorm.moments.freeze import evaluation_mode
from contnorm.norm_entry import Dim
from contnorm.norms.activation import AbsorbedActivation, observe_normed_relu

__all__ = ["ACTIVATIONS", "CONVOLUTIONS", "NeighbourMap", "Neighbours", "find_neighbours", "input_dims", "run_example"]

# Activations without parameters that a norm can replace. Not sigmoid and softmax, which are gates and outputs.
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.RReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Softplus,
)
_FUNCTIONS = frozenset(cls.__name__.lower() for cls in ACTIVATIONS) | {"leaky_relu", "threshold"}
_IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"))
# Reading these of a tensor does not use its values.
_READS = frozenset(("__get__", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "__len__"))
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Neighbours:
    """What a model applies before and after one norm layer.

    Attributes:
        knows_before: Whether it is known what is applied before it.
        knows_after: Whether it is known what is applied after it.
        convolutions: The convolutions whose output it normalizes.
        activations: The activation modules that are applied to its output.
        functions: The names of activations that are applied to its output as functions, such as ``F.relu``.
        has_other_use: Whether its output is also used otherwise.
        fused: For a norm that is called by `normed_relu`: whether the ReLU directly follows. None for other norms.
    """

    knows_before: bool = False
    knows_after: bool = False
    convolutions: list[nn.Module] = field(default_factory=list)
    activations: list[nn.Module] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    has_other_use: bool = False
    fused: bool | None = None


@dataclass(frozen=True)
class NeighbourMap:
    """The neighbours of norms, and the activations that are also applied to other tensors than outputs of norms."""

    of: dict[nn.Module, Neighbours]
    shared: frozenset[nn.Module]


def find_neighbours(model: nn.Module, norms: Sequence[nn.Module], example_input: object) -> NeighbourMap:
    """Find the neighbours of norms; nothing is known about a norm that the run does not call.

    Args:
        model: The model; its state is not changed.
        norms: Norm layers of it.
        example_input: An input to run the model on; None to look only at ``nn.Sequential``.
    """
    if example_input is None:
        return _neighbours_in_sequences(model, norms)
    recorder = _Recorder(norms)
    with ExitStack() as stack:
        for handle in recorder.hooks(model):
            stack.callback(handle.remove)
        stack.enter_context(observe_normed_relu(recorder.called_with_relu))
        stack.enter_context(recorder)
        run_example(model, example_input)
    return recorder.result()


def input_dims(
    model: nn.Module, norms: Sequence[nn.Module], example_input: object, caller: str
) -> dict[nn.Module, Dim]:
    """Return the number of spatial dimensions (at least 1) of the input of each norm that a run of the model calls."""
    dims: dict[nn.Module, Dim] = {}
    if example_input is None:
        return dims

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(_tensors((args, kwargs)), None)
        if x is not None and 2 <= x.dim() <= 5:
            dims[module] = cast(Dim, max(1, x.dim() - 2))

    with ExitStack() as stack:
        for norm in norms:
            stack.callback(norm.register_forward_pre_hook(measure, with_kwargs=True).remove)
        run_example(model, example_input, caller)
    return dims


def run_example(model: nn.Module, example_input: object, caller: str = "convert_norm") -> None:
    """Run a model on an input in evaluation mode, without changing its state."""
    try:
        with torch.no_grad(), random_state_restored(), evaluation_mode(model):
            if isinstance(example_input, tuple | list):
                model(*example_input)
            elif isinstance(example_input, dict):
                model(**example_input)
            else:
                model(example_input)
    except Exception as error:
        raise ValueError(
            f"{caller}: the model can't be run on example_input: {type(error).__name__}: {error}. The model is "
            f"unchanged."
        ) from error


# --- by the order of modules ----------------------------------------------------------------------------------------


def _neighbours_in_sequences(model: nn.Module, norms: Sequence[nn.Module]) -> NeighbourMap:
    uses = Counter(child for parent in model.modules() for child in parent._modules.values() if child is not None)
    of = {norm: Neighbours() for norm in norms}
    shared: set[nn.Module] = set()
    for chain, is_whole in _chains(model):
        for i, norm in enumerate(chain):
            if norm not in of or uses[norm] > 1:
                continue
            neighbours = of[norm]
            neighbours.knows_before, neighbours.knows_after = i > 0 or is_whole, i + 1 < len(chain) or is_whole
            if i and isinstance(chain[i - 1], CONVOLUTIONS):
                neighbours.convolutions.append(chain[i - 1])
            following = chain[i + 1] if i + 1 < len(chain) else None
            if not _is_activation(following):
                neighbours.has_other_use = True
                continue
            neighbours.activations.append(cast(nn.Module, following))
            if uses[cast(nn.Module, following)] > 1:  # it may be applied anywhere else
                shared.add(cast(nn.Module, following))
    return NeighbourMap(of, frozenset(shared))


def _chains(model: nn.Module) -> Iterator[tuple[list[nn.Module], bool]]:
    """Iterate over the longest chains of modules that are called in order, and whether a chain is the whole model."""
    nested = {child for parent in model.modules() if _is_sequence(parent) for child in parent.children()}
    for module in model.modules():
        if (_is_sequence(module) and module not in nested) or module is model:
            yield list(_flat(module)), module is model


def _is_activation(module: nn.Module | None) -> bool:
    return isinstance(module, (*ACTIVATIONS, AbsorbedActivation))


def _is_sequence(module: nn.Module) -> bool:
    """Whether a module calls its children in order: a subclass of ``nn.Sequential`` may have another forward."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if not _is_sequence(module):
        yield module
        return
    for child in module._modules.values():  # children() has a module only once that is called several times
        if child is not None:
            yield from _flat(child)


# --- by a run -------------------------------------------------------------------------------------------------------


class _Recorder(TorchFunctionMode):
    """Follows the tensors that convolutions and norms return."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norms = set(norms)
        self.of = {norm: Neighbours() for norm in norms}
        self.outputs: dict[int, tuple[Tensor, nn.Module]] = {}  # of norms; held, so that no id is reused
        self.convolved: dict[int, tuple[Tensor, nn.Module]] = {}
        self.current: list[Tensor] = []  # input of the activation that is running
        self.otherwise: set[nn.Module] = set()  # activations that are applied to other tensors

    def result(self) -> NeighbourMap:
        used = {activation for neighbours in self.of.values() for activation in neighbours.activations}
        partial = {a for neighbours in self.of.values() if neighbours.has_other_use for a in neighbours.activations}
        return NeighbourMap(self.of, frozenset((self.otherwise | partial) & used))

    def called_with_relu(self, norm: nn.Module, directly: bool) -> None:
        if norm in self.norms:
            neighbours = self.of[norm]
            neighbours.fused = directly and neighbours.fused is not False

    def hooks(self, model: nn.Module) -> Iterable[Any]:
        inner = {module.act for module in model.modules() if isinstance(module, AbsorbedActivation)}
        for module in model.modules():
            if module in self.norms:
                yield module.register_forward_pre_hook(self._before_norm, with_kwargs=True)
                yield module.register_forward_hook(self._after_norm)
            elif isinstance(module, CONVOLUTIONS):
                yield module.register_forward_hook(self._after_convolution)
            elif _is_activation(module) and module not in inner:
                yield module.register_forward_pre_hook(self._before_activation, with_kwargs=True)
                yield module.register_forward_hook(self._after_activation)

    def _before_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        neighbours = self.of[norm]
        neighbours.knows_before = neighbours.knows_after = True
        x = next(_tensors((args, kwargs)), None)  # not the residual, which a norm may also take
        if id(x) in self.convolved and (source := self.convolved[id(x)][1]) not in neighbours.convolutions:
            neighbours.convolutions.append(source)

    def _after_norm(self, norm: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            self.outputs[id(output)] = (output, norm)

    def _after_convolution(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            self.convolved[id(output)] = (output, module)

    def _before_activation(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in _tensors((args, kwargs)):
            self.current.append(x)
            if id(x) not in self.outputs:
                self.otherwise.add(module)
                continue
            neighbours = self.of[self.outputs[id(x)][1]]
            if module not in neighbours.activations:
                neighbours.activations.append(module)

    def _after_activation(self, module: nn.Module, args: object, output: object) -> None:
        self.current.clear()
        self.outputs.pop(id(output), None)  # an in-place activation: what follows uses its result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(getattr(func, "__name__", ""))
        if name not in _READS:
            for x in _tensors((args, kwargs)):
                if id(x) in self.outputs and not any(x is running for running in self.current):
                    in_place = name in _IN_PLACE or (name.endswith("_") and not name.startswith("__"))
                    in_place |= (kwargs or {}).get("inplace") is True or any(value is True for value in args[1:])
                    self._use(x, name, in_place)
        return func(*args, **(kwargs or {}))

    def _use(self, x: Tensor, name: str, in_place: bool) -> None:
        neighbours = self.of[self.outputs[id(x)][1]]
        if name.rstrip("_") in _FUNCTIONS:
            neighbours.functions.append(name.rstrip("_"))
        else:
            neighbours.has_other_use = True
        if in_place:
            self.outputs.pop(id(x))  # what follows uses the result


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
