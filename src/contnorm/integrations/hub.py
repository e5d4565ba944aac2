"""Models on the Hugging Face Hub: a mixin that stores the norm spec in ``config.json`` and applies it on loading.

``huggingface_hub.PyTorchModelHubMixin`` stores the arguments of a model's constructor and its state dict. A model whose
norms were converted after its construction would be built with the old ones, and load the weights without an error.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import PyTorchModelHubMixin
from huggingface_hub.constants import CONFIG_NAME
from torch import nn

from contnorm.spec import apply_norm_spec, norm_spec

__all__ = ["NORM_SPEC_KEY", "NormHubMixin"]

NORM_SPEC_KEY = "norm_spec"  # in config.json


class NormHubMixin(PyTorchModelHubMixin):
    """``PyTorchModelHubMixin`` whose models keep their norms: use it in its place.

    ``save_pretrained`` and ``push_to_hub`` add the norm spec of the model to ``config.json``, under ``norm_spec``.
    ``from_pretrained`` builds the model, applies the spec (`contnorm.apply_norm_spec`) and loads the weights. Without a
    spec, as in a repository of ``PyTorchModelHubMixin``, it warns and keeps the norms that the constructor builds.

    Example:
        >>> import tempfile, contnorm as cn
        >>> class Net(nn.Module, NormHubMixin):
        ...     def __init__(self, width: int = 8) -> None:
        ...         super().__init__()
        ...         self.conv, self.bn = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
        >>> folder = tempfile.mkdtemp()
        >>> _ = cn.convert_norm(Net(width=16), "cn", num_groups=4).save_pretrained(folder)
        >>> Net.from_pretrained(folder).bn
        Loading weights from local directory
        ContinualNorm2d(16, num_groups=4, eps=1e-05, momentum=0.1)
    """

    def __init_subclass__(cls, *args: Any, tags: list[str] | None = None, **options: Any) -> None:
        """Add a tag to the model card."""
        super().__init_subclass__(*args, tags=[*(tags or []), "contnorm"], **options)

    def save_pretrained(self, save_directory: str | Path, *, config: Any = None, **options: Any) -> str | None:
        """Save weights and configuration, with the norm spec; the arguments are those of ``PyTorchModelHubMixin``."""
        config = self._hub_mixin_config if config is None else config
        fields = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config or {})
        fields[NORM_SPEC_KEY] = norm_spec(cast(nn.Module, self))
        saved: str | None = super().save_pretrained(save_directory, config=fields, **options)
        return saved

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Any:
        """Build the model without the spec, which a constructor with ``**options`` or ``config`` would be given."""
        arguments.pop(NORM_SPEC_KEY, None)
        if isinstance(config := arguments.get("config"), dict):
            arguments["config"] = {key: value for key, value in config.items() if key != NORM_SPEC_KEY}
        return super()._from_pretrained(**arguments)

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        config = Path(model_file).with_name(CONFIG_NAME)
        fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        if NORM_SPEC_KEY in fields:
            apply_norm_spec(model, fields[NORM_SPEC_KEY])
        else:
            warnings.warn(
                f"{config} has no {NORM_SPEC_KEY!r}: the norms are those that the model is built with.", stacklevel=5
            )
        return super()._load_as_safetensor(model, model_file, map_location, strict)
