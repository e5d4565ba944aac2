"""transformers: models whose ``config.json`` says which norms they have, and a trainer that re-estimates moments.

The weights of a model with CN load into one with BN without an error, because their names are the same, and
``from_pretrained`` builds the norms of the architecture. So the description of the norms (`contnorm.norm_spec`) is
stored in the model's config as ``contnorm_norms``. The model is converted after it is built and before its weights are
loaded: a subclass does so in its constructor, and the loaded model then gets its own class. Everything else, such as
devices, dtypes and missing weights, is left to ``from_pretrained``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from contnorm.convert.spec_format import check_spec
from contnorm.integrations.extras import missing_extra
from contnorm.integrations.generators import generators_restored
from contnorm.integrations.moment_data import Batches, all_processes, check_batches, select_batches
from contnorm.model_norms import apply_norm_spec, norm_spec
from contnorm.moments.batches import Call, call_on_batch
from contnorm.moments.buffers import Frozen
from contnorm.moments.reestimate import reestimate
from contnorm.norms.renorm import BatchRenormBase

try:
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
    from transformers.utils import CONFIG_NAME
except ModuleNotFoundError as error:
    raise missing_extra("transformers", error) from error

__all__ = ["CONFIG_KEY", "MomentsTrainer", "from_pretrained", "record_norms", "register", "unregister"]

CONFIG_KEY = "contnorm_norms"


def record_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Write the description of a model's norms into its config, so that ``save_pretrained`` stores it.

    Call it after the last change of the norms, including freezing. After `register`, ``save_pretrained`` does it.

    Returns:
        The model.

    Example:
        >>> from contnorm import convert_norm
        >>> from transformers import ResNetConfig, ResNetModel
        >>> model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
        >>> record_norms(convert_norm(model, "cn", num_groups=2)).config.contnorm_norms == norm_spec(model)
        True
    """
    setattr(model.config, CONFIG_KEY, norm_spec(model))
    return model


def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a model as ``cls.from_pretrained`` does, with the norms that its config describes.

    Args:
        cls: A class of models, or an auto class such as ``AutoModelForImageClassification``.
        path: A folder, or a name on the Hub.
        *args: Arguments of ``cls.from_pretrained``.
        **kwargs: Arguments of ``cls.from_pretrained``.

    Returns:
        The model, or what else ``cls.from_pretrained`` returns.

    Raises:
        ValueError: If the model does not have the layers that the config describes.

    Example:
        >>> import tempfile
        >>> from contnorm import convert_norm
        >>> from transformers import AutoModel, ResNetConfig, ResNetModel
        >>> model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record_norms(convert_norm(model, "cn", num_groups=2)).save_pretrained(folder)
        ...     loaded = from_pretrained(AutoModel, folder)
        >>> loaded.embedder.embedder.normalization
        ContinualNorm2d(8, num_groups=2, eps=1e-05, momentum=0.1)
    """
    if not issubclass(cls, PreTrainedModel):
        cls = _class_of(cls, path, kwargs)
    if not _describes_norms(cls, path, kwargs):
        return cls.from_pretrained(path, *args, **kwargs)
    converting = _converting_class(cls)
    return _of_class(cls, converting.from_pretrained(path, *args, **kwargs))


def register() -> None:
    """Let ``save_pretrained`` store the norms of a model in its config, and ``from_pretrained`` build them.

    It replaces the two methods of ``transformers.PreTrainedModel`` in this process; `unregister` restores them. A
    ``Trainer`` that resumes from a checkpoint converts its model too. Models without norms of this package are saved
    and loaded as before. Calling it again does nothing.

    Example:
        >>> register()
        >>> PreTrainedModel.save_pretrained.__module__
        'contnorm.integrations.transformers'
        >>> unregister()
    """
    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
    PreTrainedModel.save_pretrained = _save_pretrained
    _replace_resume()


def unregister() -> None:
    """Undo `register`."""
    PreTrainedModel.from_pretrained = _ORIGINAL_FROM
    PreTrainedModel.save_pretrained = _ORIGINAL_SAVE
    _restore_resume()


_ORIGINAL_FROM = vars(PreTrainedModel)["from_pretrained"]
_ORIGINAL_SAVE = PreTrainedModel.save_pretrained


@wraps(_ORIGINAL_FROM.__func__)
def _from_pretrained(cls: type[PreTrainedModel], path: Any, *args: Any, **kwargs: Any) -> Any:
    if issubclass(cls, _ConvertsNorms) or not _describes_norms(cls, path, kwargs):
        return _ORIGINAL_FROM.__func__(cls, path, *args, **kwargs)
    return _of_class(cls, _ORIGINAL_FROM.__func__(_converting_class(cls), path, *args, **kwargs))


def _save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    _update_config(self)
    return _ORIGINAL_SAVE(self, *args, **kwargs)


def _replace_resume() -> None:
    """Let a plain ``Trainer`` that resumes from a checkpoint convert its model first."""
    try:
        trainer = import_module("transformers.trainer").Trainer
    except (ImportError, RuntimeError):  # transformers is installed without what its trainer needs
        return
    original = trainer._load_from_checkpoint
    if hasattr(original, "_contnorm_original"):
        return

    @wraps(original)
    def resume(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        _apply_saved_norms(self.model, resume_from_checkpoint)
        original(self, resume_from_checkpoint, *args, **kwargs)

    vars(resume)["_contnorm_original"] = original
    trainer._load_from_checkpoint = resume


def _restore_resume() -> None:
    if (module := sys.modules.get("transformers.trainer")) is not None:
        current = module.Trainer._load_from_checkpoint
        module.Trainer._load_from_checkpoint = getattr(current, "_contnorm_original", current)


def _apply_saved_norms(model: Any, folder: str) -> None:
    """Convert the norms of a model to those of a trainer's checkpoint, whose weights are loaded afterwards."""
    config = Path(folder) / CONFIG_NAME
    spec = json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY) if config.is_file() else None
    if spec is not None:
        apply_norm_spec(model, spec)


def _update_config(model: PreTrainedModel) -> None:
    """Write the description of a model's norms into its config if they are not those of the architecture."""
    if _has_built_norms(model):
        vars(model.config).pop(CONFIG_KEY, None)
    else:
        record_norms(model)


def _has_built_norms(model: PreTrainedModel) -> bool:
    """Whether a model has the norms that its class builds, so that a description of them is not needed."""
    spec = norm_spec(model)
    try:
        with torch.device("meta"):
            built = type(model)(copy.deepcopy(model.config))
    except Exception:  # its constructor needs more than a config
        return False
    return norm_spec(built) == spec


class _ConvertsNorms:
    """Base of classes that convert the norms of a model after it is built, as its config describes."""


def _converting_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        apply_norm_spec(self, _fitted_spec(self, getattr(config, CONFIG_KEY)))

    # transformers looks up names of classes and modules, so they are those of the model.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__init__": __init__}
    return type(cls.__name__, (cls, _ConvertsNorms), names)


def _fitted_spec(model: PreTrainedModel, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec of a model for the class that is loaded from it, such as the base model without its head.

    As transformers does with weights, paths are taken with and without the prefix of the base model. Layers that only
    one of the two classes has stay as they are built.
    """
    if type(model).__name__ in (model.config.architectures or [type(model).__name__]):
        return spec  # everything must fit
    spec = check_spec(spec)
    names, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."

    def renamed(path: str) -> str | None:
        return next((name for name in (path, path.removeprefix(prefix), prefix + path) if name in names), None)

    def fitted(value: Any) -> Any:
        return [name for path in value if (name := renamed(path)) is not None] if isinstance(value, list) else value

    result = norm_spec(model)
    for table in ("norms", "activations", "convolutions"):
        for path, entry in spec[table].items():
            if (name := renamed(path)) is not None:
                paths = {key: fitted(entry[key]) for key in ("also_at", "absorbed", "standardized") if key in entry}
                result[table][name] = {**entry, **paths}
    return result


def _of_class(cls: type[PreTrainedModel], loaded: Any) -> Any:
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = cls
    for layer in model.modules():
        if isinstance(layer, BatchRenormBase):  # not in the weights, and from_pretrained leaves such buffers undefined
            nn.init.ones_(layer.r_limit)
            nn.init.zeros_(layer.d_limit)
    return loaded


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def _describes_norms(cls: type[PreTrainedModel], path: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the config with which a model is to be built describes norms."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return getattr(config, CONFIG_KEY, None) is not None
    where = path if config is None else config
    if where is None:
        return False
    try:
        read, _ = PreTrainedConfig.get_config_dict(where, **_hub_arguments(kwargs))
    except OSError:  # there is none; from_pretrained says so, or finds another file
        return False
    return read.get(CONFIG_KEY) is not None


def _class_of(auto: Any, path: Any, kwargs: dict[str, Any]) -> type[PreTrainedModel]:
    """Return the class of the model that an auto class builds for a config."""
    config = kwargs.get("config")
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    if not isinstance(config, PreTrainedConfig):
        config = AutoConfig.from_pretrained(path if config is None else config, **_hub_arguments(kwargs), **trust)
    with torch.device("meta"):
        return type(auto.from_config(config, **trust))


def _hub_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}


class MomentsTrainer:
    """Mixin for a ``transformers.Trainer`` that re-estimates running moments before evaluation and prediction.

    The moments are set to the exact ones of batches of the train dataset, with `contnorm.reestimate`. With several
    processes, the data of all of them is pooled. Random generators are restored, so training is the same as with a
    plain ``Trainer``. Checkpoints contain the description of the norms, and training that is resumed from one converts
    the model accordingly, also without `register`.

    Args:
        *args: Arguments of the trainer.
        moments_batches: The data: a number of batches of the train dataset, in each process; or batches that can be
            iterated repeatedly; or a function without arguments that returns these, called each time.
        restore_moments: Whether to restore the running moments after the evaluation. By default the new moments stay,
            so that a checkpoint saved after an evaluation has the moments that were evaluated.
        moments_call: A function ``call(model, batch)`` that runs the model on a batch, if ``model(**batch)`` without
            labels does not apply.
        moments_frozen: What to do with frozen layers, as in `reestimate`: ``"raise"``, ``"lift"`` or ``"keep"``.
        **kwargs: Arguments of the trainer.

    Example:
        >>> from transformers import Trainer
        >>> class MyTrainer(MomentsTrainer, Trainer):
        ...     pass
        >>> # MyTrainer(model, training_args, train_dataset=..., eval_dataset=..., moments_batches=64).train()
    """

    def __init__(
        self,
        *args: Any,
        moments_batches: int | Batches = 32,
        restore_moments: bool = False,
        moments_call: Call | None = None,
        moments_frozen: Frozen = "raise",
        **kwargs: Any,
    ) -> None:
        check_batches(moments_batches, "MomentsTrainer: moments_batches")
        self.moments_batches, self.restore_moments = moments_batches, restore_moments
        self.moments_call, self.moments_frozen = moments_call, moments_frozen
        self._has_moments = False  # an evaluation on several data sets calls itself for each
        super().__init__(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Re-estimate the moments, then evaluate."""
        with self._reestimated():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Re-estimate the moments, then predict."""
        with self._reestimated():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def _save(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.model, PreTrainedModel):
            _update_config(self.model)
        super()._save(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        _apply_saved_norms(self.model, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _reestimated(self: Any) -> Iterator[None]:
        if self._has_moments:
            yield
            return
        with generators_restored():
            moments = reestimate(
                self.model,
                select_batches(self.moments_batches, self._train_batches),
                call=self._call_model,
                frozen=self.moments_frozen,
                process_group=all_processes(),
            )
        self._has_moments = True
        try:
            yield
        finally:
            self._has_moments = False
            if self.restore_moments:
                moments.restore()

    def _call_model(self: Any, model: nn.Module, batch: Any) -> object:
        with self.compute_loss_context_manager():
            return (self.moments_call or call_on_batch)(model, self._prepare_inputs(batch))

    def _train_batches(self: Any) -> Iterable[Any]:
        if self.train_dataset is None:
            raise ValueError(
                "MomentsTrainer: there is no train_dataset to draw batches from. Give it, or moments_batches= batches."
            )
        prepared = self.get_train_dataloader()
        # A loader that accelerate prepared stays its active one if only its first batches are read. So a plain loader
        # reads the same parts.
        if isinstance(prepared.dataset, IterableDataset):
            batching = {"batch_size": prepared.batch_size, "drop_last": prepared.drop_last}
        else:
            batching = {"batch_sampler": prepared.batch_sampler}
        return DataLoader(
            prepared.dataset,
            collate_fn=prepared.collate_fn,
            num_workers=prepared.num_workers,
            worker_init_fn=prepared.worker_init_fn,
            **batching,
        )
