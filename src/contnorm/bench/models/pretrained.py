"""Load pretrained weights into a network, from a file or from published weights.

Every tensor must match by name and shape, with two exceptions. The classifier keeps its initialization if the file has
a different number of outputs or no classifier. A norm loads only the tensors it has itself: continual norm uses the
parameters and moments of batch norm, group norm ignores the moments, and tensors that the file lacks keep their initial
values.

Weights files are located by path or published name, identified by a hash of their content, and read without running
code. A safetensors file contains only tensors. A torch file is a pickle, which could run code; it is read with
``torch.load(weights_only=True)`` and rejected if it contains more than tensors and plain values.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from contnorm.bench.config.schema import ModelConfig
from contnorm.bench.files import file_sha256, file_signature
from contnorm.bench.models.resnet import identify_resnet
from contnorm.convert.detect import detect_norm
from contnorm.errors import UserError, unknown, usable

__all__ = ["PUBLISHED", "load_pretrained", "locate_weights", "read_weights", "weights_change", "weights_hash"]

PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")  # put in front by wrappers and by training code
SHOWN = 2  # names of each kind in a message


def load_pretrained(network: nn.Module, config: ModelConfig) -> None:
    """Load the weights of a run's settings into a network.

    Args:
        network: Newly built network; modified only if all weights match.
        config: Settings of the network.

    Raises:
        UserError: If the file can't be used, or if it is not the file that the run started with.
    """
    assert config.weights is not None
    reason = weights_change(config)
    if reason:
        raise UserError(reason)
    path = locate_weights(config.weights, config.name)
    state = network.state_dict()
    loaded = _without_prefixes(read_weights(path), state, path)
    parts = _Parts.of(network)
    reinitialized = _reinitialized_names(state, loaded, parts.classifier)
    matching = _matching_tensors(
        state, {name: t for name, t in loaded.items() if name not in reinitialized}, reinitialized, parts, path, config
    )
    network.load_state_dict(matching, strict=False)
    if reinitialized:
        _warn_once(
            f"{path}: its classifier is not loaded, and {parts.classifier} is newly initialized, "
            f"{_outputs(state, loaded, reinitialized)}."
        )


@dataclass(frozen=True)
class _Parts:
    """Module names of a network's norms and of its classifier."""

    norms: frozenset[str]
    classifier: str

    @classmethod
    def of(cls, network: nn.Module) -> _Parts:
        modules = dict(network.named_modules())
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        return cls(
            frozenset(name for name, module in modules.items() if detect_norm(module) is not None),
            linear[-1] if linear else "",
        )

    def in_norm(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.norms

    def needed(self, name: str) -> bool:
        """Whether the file must contain the tensor: of a norm only weight and bias."""
        return not self.in_norm(name) or name.endswith((".weight", ".bias"))


def _without_prefixes(loaded: Mapping[str, Tensor], names: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Tensors by the names of the network, with prefixes of wrappers removed."""
    known = set(names)
    renamed: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        short = name
        while short not in known and (prefix := next((p for p in PREFIXES if short.startswith(p)), None)):
            short = short.removeprefix(prefix)
        if short in renamed:
            raise UserError(f"{path}: holds {short} twice, with and without a prefix. Save a single network.")
        renamed[short] = tensor
    return renamed


def _reinitialized_names(state: Mapping[str, Tensor], loaded: Mapping[str, Tensor], classifier: str) -> set[str]:
    """Tensor names of the classifier if the file has none, or one with a different number of outputs; else empty."""
    names = {name for name in state if classifier and name.startswith(f"{classifier}.")}
    present = [name for name in names if name in loaded]
    resized = present and all(loaded[n].shape[1:] == state[n].shape[1:] and loaded[n].dim() for n in present)
    differs = any(loaded[name].shape != state[name].shape for name in present)
    return names if not present or (resized and differs) else set()


def _outputs(state: Mapping[str, Tensor], loaded: Mapping[str, Tensor], reinitialized: set[str]) -> str:
    example = min(reinitialized)
    outputs = f"has {len(loaded[example])} outputs" if example in loaded else "has no classifier"
    return f"because the file {outputs} and the run has {len(state[example])}"


def _matching_tensors(
    state: Mapping[str, Tensor],
    loaded: Mapping[str, Tensor],
    reinitialized: set[str],
    parts: _Parts,
    path: Path,
    config: ModelConfig,
) -> dict[str, Tensor]:
    """Tensors to load.

    Raises:
        UserError: If the file is of another network (the message lists the differences) or has invalid values.
    """
    missing = [name for name in state if name not in loaded and name not in reinitialized and parts.needed(name)]
    unexpected = [name for name in loaded if name not in state and not parts.in_norm(name)]
    common = [name for name in state if name in loaded]
    shapes = [
        f"{n} {tuple(loaded[n].shape)} for {tuple(state[n].shape)}" for n in common if loaded[n].shape != state[n].shape
    ]
    kinds = [
        f"{n} {loaded[n].dtype} for {state[n].dtype}"
        for n in common
        if _number_kind(loaded[n]) != _number_kind(state[n])
    ]
    if missing or unexpected or shapes or kinds:
        differences = {
            "missing": missing,
            "unexpected": unexpected,
            "with another shape": shapes,
            "with another data type": kinds,
        }
        wrong = ", ".join(f"{len(names)} {what} ({_some(names)})" for what, names in differences.items() if names)
        like = identify_resnet(loaded)
        hint = f" They look like weights of {like}." if like and like != config.name else ""
        raise UserError(
            f"{path}: the weights do not fit model {config.name!r} of width {config.width}: {wrong}.{hint} Set "
            f"model.name and model.width to those of the weights; published weights have width 64."
        )
    broken = [n for n in common if loaded[n].is_floating_point() and not torch.isfinite(loaded[n]).all()]
    if broken:
        raise UserError(f"{path}: contains values that are not finite ({_some(broken)}). Use other weights.")
    negative = [n for n in common if n.endswith("running_var") and (loaded[n] < 0).any()]
    if negative:
        raise UserError(f"{path}: contains negative variances ({_some(negative)}). Use other weights.")
    return {name: loaded[name] for name in common}


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


@cache  # warn once, even if many seeds load the same weights
def _warn_once(text: str) -> None:
    logging.getLogger("contnorm").warning(text)


BASE = "https://download.pytorch.org/models/"
DIGITS = 8  # hex digits of the SHA-256 of a file; torchvision puts as many into file names

# Published weights by name and network. A file's name ends with the first digits of its SHA-256.
PUBLISHED: dict[str, dict[str, str]] = {
    "torchvision:IMAGENET1K_V1": {
        "resnet34": "resnet34-b627a593.pth",
        "resnet50": "resnet50-0676ba61.pth",
        "resnet101": "resnet101-63fe2227.pth",
    },
    "torchvision:IMAGENET1K_V2": {
        "resnet50": "resnet50-11ad3fa6.pth",
        "resnet101": "resnet101-cd907fc2.pth",
    },
}


def weights_hash(weights: str, model: str) -> str:
    """First digits of the SHA-256 of a weights file; known without the file for published weights.

    Example:
        >>> weights_hash("torchvision:IMAGENET1K_V2", "resnet101")
        'cd907fc2'
    """
    named = _published(weights, model)
    return _digits_in(named) if named else _hash_of(_existing_file(weights))


def weights_change(config: ModelConfig) -> str:
    """Error message if a run's weights changed since it started; empty if they are the same or the run has none.

    Example:
        >>> weights_change(ModelConfig("resnet34", weights="torchvision:IMAGENET1K_V1", weights_hash="01234567"))
        "weights 'torchvision:IMAGENET1K_V1' have changed since the run started (model.weights_hash was 01234567, ..."
    """
    if config.weights is None or config.weights_hash is None:
        return ""
    try:
        now = weights_hash(config.weights, config.name)
    except UserError as error:
        return str(error)
    if now == config.weights_hash:
        return ""
    return (
        f"weights {config.weights!r} have changed since the run started (model.weights_hash was "
        f"{config.weights_hash}, and is {now} now). Restore the file to resume the run."
    )


def locate_weights(weights: str, model: str) -> Path:
    """Path of a weights file; published weights are downloaded to torch's cache if they are not there yet."""
    named = _published(weights, model)
    if not named:
        return _existing_file(weights)
    path = Path(torch.hub.get_dir()) / "checkpoints" / named
    if not path.is_file():
        _fetch(named, path)
    if _hash_of(path) != _digits_in(named):
        raise UserError(f"{path}: is damaged: its SHA-256 does not begin with {_digits_in(named)}. Delete it.")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a file; a file that contains code is rejected."""
    with usable(path, "cannot be read", "Check the permissions."), path.open("rb") as file:
        header = file.read(9)[8:]  # safetensors: 8 bytes of length, then a JSON header
    content = _safetensors(path) if header == b"{" else _torch_file(path)
    for key in ("state_dict", "model_state_dict", "model"):  # a training checkpoint holds weights and other state
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {name: t for name, t in named if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise UserError(f"{path}: contains no named tensors. {SAVE}")
    odd = next((name for name, tensor in tensors.items() if not _is_plain(tensor)), None)
    if odd is not None:
        raise UserError(
            f"{path}: {odd} is not a plain tensor, but {_storage(tensors[odd])}. Weights must be dense, with 16 "
            f"bits or more per value. {SAVE}"
        )
    return tensors


SAVE = "Save weights with safetensors.torch.save_file(model.state_dict(), path)."


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and not (tensor.is_floating_point() and tensor.element_size() < 2)


def _storage(tensor: Tensor) -> str:
    layout, kind = (str(attribute).removeprefix("torch.") for attribute in (tensor.layout, tensor.dtype))
    return f"{layout}, {kind}, on {tensor.device.type}"


def _published(weights: str, model: str) -> str | None:
    """File name of published weights; None if ``weights`` is a path."""
    if not weights.startswith("torchvision:"):
        return None
    known = [name for name, files in PUBLISHED.items() if model in files]
    if not known:
        available = ", ".join(sorted({model for files in PUBLISHED.values() for model in files}))
        raise UserError(f"weights {weights!r}: not available for model {model!r}, only for {available}. Use a file.")
    if weights not in known:
        raise unknown(f"weights of {model}", weights, [*known, "path/to/file"])
    return PUBLISHED[weights][model]


def _existing_file(weights: str) -> Path:
    try:
        path = Path(weights).expanduser()
    except RuntimeError as error:  # "~name" of an unknown user
        raise UserError(f"weights {weights!r}: {error} Use an absolute path.") from error
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        named = ", ".join(PUBLISHED)
        raise UserError(
            f"weights {weights!r}: {problem}. Use a safetensors or torch file of weights, or a name: {named}."
        )
    return path


def _digits_in(name: str) -> str:
    return Path(name).stem.rpartition("-")[2]


def _hash_of(path: Path) -> str:
    with usable(path, "cannot be read", "Check the permissions."):
        return _hash_at(path.resolve(), *file_signature(path))


@cache  # the signature of the file is part of the key; every seed needs the hash
def _hash_at(path: Path, *signature: int) -> str:
    return file_sha256(path)[:DIGITS]


def _fetch(name: str, path: Path) -> None:
    url = BASE + name
    hint = f"Download {name} in another way, and use --weights FILE or --set model.weights=FILE."
    with usable(path.parent, "weights cannot be written there", "Set TORCH_HOME to another folder."):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path), _digits_in(name), progress=sys.stderr.isatty())
    except OSError as error:  # no network, no such file, or no space on disk
        raise UserError(f"{url}: download failed ({error}). {hint}") from error
    except RuntimeError as error:
        raise UserError(f"{url}: the downloaded file is not {name} ({error}) and was deleted. {hint}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is not a valid safetensors file ({error}).") from error


def _torch_file(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.load raises an error for the same cause afterwards
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        named = re.search(r"GLOBAL:? ([\w.]+)", str(error))
        if named is None:
            raise _no_weights(path) from error
        raise UserError(f"{path}: contains {named[1]}, which could run code, so it is not loaded. {SAVE}") from error
    except Exception as error:  # an invalid or damaged pickle can raise any exception
        raise _no_weights(path) from error


def _no_weights(path: Path) -> UserError:
    return UserError(f"{path}: is not a valid safetensors or torch file of weights. {SAVE}")
