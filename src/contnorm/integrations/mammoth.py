"""mammoth: its backbones with the norms of this package, and a `bn_track_stats` that knows their layers.

mammoth (https://github.com/aimagelab/mammoth) is a repository and not a package: it runs in its own folder, by
``python main.py``. To use the backbones there without changing a file of it, start the same command as a module::

    python -m contnorm.integrations.mammoth main.py --model derpp --dataset seq-cifar10 --backbone resnet18-cn ...

Programs and notebooks that import mammoth call `register_backbones` after they import it.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from contnorm.convert import convert_norm
from contnorm.moments.freeze import frozen_stats
from contnorm.registry import NORMS, norm_class

__all__ = ["bn_track_stats", "register_backbones"]


def register_backbones(norms: Iterable[str] | None = None, backbones: Iterable[str] | None = None) -> tuple[str, ...]:
    """Register mammoth's backbones with other norms, as ``<backbone>-<norm>``, and replace its ``bn_track_stats``.

    ``--backbone resnet18-cn`` is mammoth's ``resnet18``, converted after it is built (with its weights, if it is
    pretrained). It takes the arguments of ``resnet18``, and for norms with groups also ``--num_groups``, a number or
    ``auto`` (default): the largest divisor of the channels up to 32 that leaves at least 2 channels in a group.

    Call it after mammoth's folder is on ``sys.path``, and before arguments are parsed. Further calls only add names.

    Args:
        norms: Names of norms; None for all but ``bn`` that work in mammoth's training loop. Norms that need tags of the
            batch (``adab2n``, ``tbbn``, ``bnt``) and norms that contain the activation (``evonorm_s0``, ``frn``) don't.
        backbones: Names of registered backbones; None for all that are built with batch norm.

    Returns:
        The names that were registered, by this call or before.
    """
    registry: Any = importlib.import_module("backbone")
    batch_norm: Any = importlib.import_module("utils.batch_norm")
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in ("models", "utils")]:
        if getattr(module, "bn_track_stats", None) is batch_norm.bn_track_stats and module is not batch_norm:
            vars(module)["bn_track_stats"] = bn_track_stats
    batch_norm.bn_track_stats = bn_track_stats
    registered: dict[str, Any] = registry.REGISTERED_BACKBONES
    if norms is None:
        entries = [e for e in NORMS.values() if not (e.name == "bn" or e.layers or e.absorbs_activation)]
        norms = [entry.name for entry in entries if not getattr(norm_class(entry, 2), "needs_tags", False)]
    if backbones is None:  # by their source: building them to look may start a download
        modules = {name: sys.modules[entry["class"].__module__] for name, entry in registered.items()}
        backbones = [n for n, m in modules.items() if m.__name__ != __name__ and "BatchNorm" in inspect.getsource(m)]
    names = []
    for base, norm in [(base.replace("_", "-"), norm) for base in backbones for norm in norms]:
        names.append(f"{base}-{norm}".replace("_", "-"))
        if names[-1] not in registered:
            registry.register_backbone(names[-1])(_converting(registered[base]["class"], norm, names[-1]))
    return tuple(names)


@contextmanager
def bn_track_stats(module: nn.Module, condition: bool = True) -> Iterator[None]:
    """Context manager that keeps running moments unchanged if the condition is False, as mammoth's of the same name.

    In training mode, layers normalize with the batch inside it. mammoth's knows torch's ``BatchNorm1d`` and
    ``BatchNorm2d`` alone, and turns tracking on at its end for layers that had it turned off before, such as layers
    that `contnorm.freeze_stats` froze. This one holds for all norms with running moments, and restores what was.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> with bn_track_stats(model, False):
        ...     _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean
        tensor([0., 0.])
    """
    if condition:
        yield
        return
    with frozen_stats(module):
        yield


def _converting(build: Callable[..., nn.Module], norm: str, name: str) -> Callable[..., nn.Module]:
    """Return a function that builds a backbone and converts it; mammoth reads its arguments from the signature."""
    grouped = NORMS[norm].grouped

    def build_converted(*args: Any, num_groups: int | str = "auto", **kwargs: Any) -> nn.Module:
        options: dict[str, Any] = {"num_groups": num_groups} if grouped else {}
        return convert_norm(build(*args, **kwargs), norm, **options)

    target = build.__init__ if inspect.isclass(build) else build
    parameters = [parameter for key, parameter in inspect.signature(target).parameters.items() if key != "self"]
    if grouped:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("num_groups", kind, default="auto", annotation=_parse_groups))
    build_converted.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    build_converted.__name__ = build_converted.__qualname__ = name.replace("-", "_")
    build_converted.__doc__ = f"Build mammoth's {build.__name__} with the norm {norm!r}."
    return build_converted


def _parse_groups(text: str) -> int | str:
    """Return the argument --num_groups as a number, or "auto"."""
    return "auto" if text == "auto" else int(text)


if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(next(folder for folder in script.parents if (folder / "backbone").is_dir())))
    # The module by its name: what it registers must not belong to a second copy of it, named __main__.
    importlib.import_module("contnorm.integrations.mammoth").register_backbones()
    sys.argv = sys.argv[1:]
    runpy.run_path(str(script), run_name="__main__")
