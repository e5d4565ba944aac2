"""Load pretrained weights into a network, from a file or from published weights.

Every tensor must match by name and shape, with two exceptions. The classifier keeps its initialization if the file has
a different number of outputs or no classifier. A norm loads only the tensors it has itself: continual norm uses the
parameters and moments of batch norm, group norm ignores the moments, and tensors that the file lacks keep their initial
values.

Weights files are located by path or published name, identified by a hash of their content, and read without running
code: safetensors, or torch files with ``weights_only=True``.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from contnorm.bench.config.schema import ModelConfig
from contnorm.detect import detect_norm
from contnorm.errors import UserError, unknown, usable
from contnorm.spec import architecture_difference

PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")  # put in front by wrappers and by training code
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


def load_pretrained(network: nn.Module, config: ModelConfig) -> None:
    """Load the weights of a run's settings into a network, which is modified only if all weights match.

    Raises:
        UserError: If the file can't be used, or if it is not the file that the run started with.
    """
    assert config.weights is not None
    now = weights_hash(config.weights, config.name)
    if config.weights_hash not in (None, now):
        raise UserError(
            f"weights {config.weights!r} have changed since the run started (model.weights_hash was "
            f"{config.weights_hash}, and is {now} now). Restore the file to resume the run."
        )
    path = locate_weights(config.weights, config.name)
    weights, state = read_weights(path), network.state_dict()
    if _is_safetensors(path) and (difference := architecture_difference(network, path)):
        raise UserError(f"{path}: {difference}. Set model.name and model.stem to those of the weights.")
    loaded: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key
        while name not in state and (prefix := next((p for p in PREFIXES if name.startswith(p)), None)):
            name = name.removeprefix(prefix)
        loaded[name] = tensor
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    classifier = {name for name in state if linear and name.startswith(f"{linear[-1]}.")}
    resized = [name for name in classifier & loaded.keys() if loaded[name].shape != state[name].shape]
    only_outputs = all(loaded[name].shape[1:] == state[name].shape[1:] for name in resized)
    new = classifier if not classifier & loaded.keys() or (resized and only_outputs) else set()
    norms = {name for name, module in network.named_modules() if detect_norm(module) is not None}
    of_norms = {name for name in (*state, *loaded) if name.rpartition(".")[0] in norms}
    optional = {name for name in of_norms if not name.endswith((".weight", ".bias"))} | new
    differences = {
        "missing": state.keys() - loaded.keys() - optional,
        "unexpected": loaded.keys() - state.keys() - of_norms,
        "with another shape": {n for n in state.keys() & loaded.keys() - new if loaded[n].shape != state[n].shape},
    }
    if any(differences.values()):
        wrong = ", ".join(f"{len(n)} {what} ({', '.join(sorted(n)[:2])})" for what, n in differences.items() if n)
        raise UserError(
            f"{path}: the weights do not fit model {config.name!r} of width {config.width}: {wrong}. Set model.name "
            f"and model.width to those of the weights; published weights have width 64."
        )
    network.load_state_dict({name: loaded[name] for name in state if name in loaded and name not in new}, strict=False)
    if new:
        outputs = f"has {len(loaded[resized[0]])} outputs" if resized else "has no classifier"
        _warn_once(
            f"{path}: its classifier is not loaded, and {linear[-1]} is newly initialized, because the file {outputs} "
            f"and the run has {len(state[min(new)])}."
        )


@cache  # warn once, even if many seeds load the same weights
def _warn_once(text: str) -> None:
    logging.getLogger("contnorm").warning(text)


def weights_hash(weights: str, model: str) -> str:
    """First digits of the SHA-256 of a weights file; known without the file for published weights.

    Example:
        >>> weights_hash("torchvision:IMAGENET1K_V2", "resnet101")
        'cd907fc2'
    """
    named = _published(weights, model)
    return _digits_in(named) if named else _hash_of(locate_weights(weights, model))


def locate_weights(weights: str, model: str) -> Path:
    """Path of a weights file; published weights are downloaded to torch's cache if they are not there yet."""
    named = _published(weights, model)
    if not named:
        path = Path(weights).expanduser()
        if not path.is_file():
            raise UserError(
                f"weights {weights!r}: there is no such file. Use a safetensors or torch file of weights, or a name: "
                f"{', '.join(PUBLISHED)}."
            )
        return path
    path = Path(torch.hub.get_dir()) / "checkpoints" / named
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        advice = "Download it in another way, and use --weights FILE."
        with usable(BASE + named, "download failed", advice, RuntimeError):  # another file, which torch deletes
            torch.hub.download_url_to_file(BASE + named, str(path), _digits_in(named), sys.stderr.isatty())
    if _hash_of(path) != _digits_in(named):
        raise UserError(f"{path}: is damaged: its SHA-256 does not begin with {_digits_in(named)}. Delete it.")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a file; a file that contains code is rejected."""
    problem = "is not a safetensors or torch file of weights alone"
    advice = "Save weights with safetensors.torch.save_file(model.state_dict(), path)."
    with usable(path, problem, advice, SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError):
        content: Any = (
            load_file(path)
            if _is_safetensors(path)
            else torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        )
    for key in ("state_dict", "model_state_dict", "model"):  # a training checkpoint holds weights and other state
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    return {name: t for name, t in named if isinstance(name, str) and isinstance(t, Tensor)}


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"  # 8 bytes of length, then a JSON header


def _published(weights: str, model: str) -> str | None:
    """File name of published weights; None if ``weights`` is a path."""
    if not weights.startswith("torchvision:"):
        return None
    known = [name for name, files in PUBLISHED.items() if model in files]
    if weights not in known:
        raise unknown(f"weights of {model}", weights, [*known, "path/to/file"])
    return PUBLISHED[weights][model]


def _digits_in(name: str) -> str:
    return Path(name).stem.rpartition("-")[2]


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
