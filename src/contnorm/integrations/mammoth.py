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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from contnorm.convert.conversion import convert_norm
from contnorm.moments.freeze import frozen_stats
from contnorm.registry import DIMS, NORMS, norm_class, resolve_norm

__all__ = ["MammothNotFoundError", "bn_track_stats", "main", "register_backbones"]

USAGE = """usage: python -m contnorm.integrations.mammoth SCRIPT [ARGUMENTS]

Run a script of mammoth with the backbones <backbone>-<norm>, such as resnet18-cn. In mammoth's folder:

  python -m contnorm.integrations.mammoth main.py --model derpp --dataset seq-cifar10 --backbone resnet18-cn ...

ARGUMENTS are those of the script; "main.py --help" lists them, with the names of the backbones.
"""


class MammothNotFoundError(ImportError):
    """mammoth's folder is not the first one on ``sys.path`` that has its modules."""


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

    Raises:
        MammothNotFoundError: An `ImportError`, if mammoth's folder is not on ``sys.path``.
        ValueError: For an unknown backbone or norm, or a norm that can't be used in mammoth.
    """
    registry = _import_mammoth("backbone", "register_backbone")
    batch_norm = _import_mammoth("utils.batch_norm", "bn_track_stats")
    _replace_tracking(batch_norm)
    registered: dict[str, Any] = registry.REGISTERED_BACKBONES
    chosen = [_checked_norm(norm) for norm in norms] if norms is not None else _usable_norms()
    bases = _checked_backbones(backbones, registered) if backbones is not None else _batch_norm_backbones(registered)
    names = []
    for base in bases:
        for norm in chosen:
            name = f"{base}-{norm}".replace("_", "-")
            if name not in registered:
                registry.register_backbone(name)(_converting(registered[base]["class"], norm, name))
            names.append(name)
    return tuple(names)


class bn_track_stats:  # noqa: N801 (mammoth's name)
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

    def __init__(self, module: nn.Module, condition: bool = True) -> None:
        self.module, self.enable = module, condition
        self._frozen = ExitStack()

    def __enter__(self) -> None:
        if not self.enable:
            self._frozen.enter_context(frozen_stats(self.module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._frozen.close()


def main(arguments: Sequence[str]) -> None:
    """Register the backbones, and run a script of mammoth with its arguments.

    Args:
        arguments: The script, such as ``main.py`` or ``utils/main.py``, and its arguments; ``--help`` prints the usage.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    script = Path(arguments[0]) if arguments else Path("main.py")
    if not arguments or not script.is_file():
        where = f"there is no {script}" if arguments else "the script is missing"
        sys.exit(
            f"contnorm.integrations.mammoth: {where}. In mammoth's folder, use: python -m "
            f"contnorm.integrations.mammoth main.py --model ..."
        )
    folder = next((f for f in (script.resolve().parent, *script.resolve().parents) if (f / "backbone").is_dir()), None)
    if folder is None:
        sys.exit(f"contnorm.integrations.mammoth: {script} is not in a folder of mammoth, which has a folder backbone.")
    sys.path.insert(0, str(folder))
    try:
        register_backbones()
    except MammothNotFoundError as error:
        sys.exit(f"contnorm.integrations.mammoth: {error}")
    sys.argv = list(arguments)
    runpy.run_path(str(script), run_name="__main__")


def _import_mammoth(name: str, attribute: str) -> ModuleType:
    """Import a module of mammoth, whose names (backbone, utils) other programs use too."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise  # a requirement of mammoth
        raise MammothNotFoundError(
            f"register_backbones: there is no module {name!r}. Run it in mammoth's folder, or add that to sys.path."
        ) from error
    if not hasattr(module, attribute):
        raise MammothNotFoundError(
            f"register_backbones: {module.__name__} at {module.__file__} is not mammoth's: it has no {attribute}. Put "
            f"mammoth's folder first on sys.path."
        )
    return module


def _replace_tracking(batch_norm: ModuleType) -> None:
    """Replace ``bn_track_stats`` in mammoth's module, and in models that have imported it already."""
    original = batch_norm.bn_track_stats
    if original is bn_track_stats:
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("models", "utils") and getattr(module, "bn_track_stats", None) is original:
            module.bn_track_stats = bn_track_stats  # type: ignore[attr-defined]


def _usable_norms() -> list[str]:
    return [name for name in NORMS if name != "bn" and _obstacle(name) is None]


def _obstacle(norm: str) -> str | None:
    """Return why a norm can't be used in mammoth; None if it can."""
    entry = NORMS[norm]
    if getattr(norm_class(entry, min(entry.layers or DIMS)), "needs_tags", False):
        return "it needs tags of the samples of a batch, which mammoth's training loop does not give"
    if entry.absorbs_activation:
        return "it contains the activation, and mammoth's networks call activations as functions"
    return None


def _checked_norm(norm: str) -> str:
    name = resolve_norm(norm, {})[0].name
    obstacle = _obstacle(name)
    if obstacle is not None:
        raise ValueError(f"register_backbones: norm {norm!r}: {obstacle}. Use one of {', '.join(_usable_norms())}.")
    return name


def _checked_backbones(names: Iterable[str], registered: dict[str, Any]) -> list[str]:
    bases = [name.replace("_", "-").lower() for name in names]
    for base in bases:
        if base not in registered:
            raise ValueError(f"register_backbones: no backbone {base!r}. Registered are {', '.join(registered)}.")
    return bases


def _batch_norm_backbones(registered: dict[str, Any]) -> list[str]:
    """Return the backbones whose source file uses batch norm; building them to look may start a download."""
    bases = []
    for name, entry in registered.items():
        module = sys.modules[entry["class"].__module__]
        if module.__name__ != __name__ and "BatchNorm" in inspect.getsource(module):
            bases.append(name)
    return bases


def _converting(build: Callable[..., nn.Module], norm: str, name: str) -> Callable[..., nn.Module]:
    """Return a function that builds a backbone and converts it; mammoth reads its arguments from the signature."""
    entry = NORMS[norm]

    def build_converted(*args: Any, num_groups: int | str = "auto", **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        options: dict[str, Any] = {"num_groups": num_groups} if entry.grouped else {}
        return convert_norm(model, norm, **options)

    target = build.__init__ if inspect.isclass(build) else build
    parameters = [parameter for key, parameter in inspect.signature(target).parameters.items() if key != "self"]
    if entry.grouped:
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
    # The module by its name: what it registers must not belong to a second copy of it, named __main__.
    importlib.import_module("contnorm.integrations.mammoth").main(sys.argv[1:])
