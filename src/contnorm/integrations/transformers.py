"""transformers: models whose ``config.json`` says which norms they have, and a trainer that re-estimates moments.

The weights of a model with CN load into one with BN without an error, because their names are the same, and
``from_pretrained`` builds the norms of the architecture. So the description of the norms (`contnorm.norm_spec`) is
stored in the model's config as ``contnorm_norms``. `from_pretrained` of this module converts the model after it is
built and before its weights are loaded; all else is left to the ``from_pretrained`` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from contnorm.moments.reestimate import Call, call_on_batch, generators_restored, reestimate
from contnorm.norms.batch import BatchRenormBase
from contnorm.spec import apply_norm_spec, norm_spec

__all__ = ["CONFIG_KEY", "MomentsTrainer", "from_pretrained", "record_norms"]

CONFIG_KEY = "contnorm_norms"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def record_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Write the description of a model's norms into its config, so that ``save_pretrained`` stores it.

    Call it after the last change of the norms, including freezing.

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
        cls: The class of the saved model, or an auto class such as ``AutoModelForImageClassification``.
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
    config = kwargs.get("config")
    if not isinstance(config, PretrainedConfig):
        hub = {name: kwargs[name] for name in (*_HUB_ARGUMENTS, "trust_remote_code") if name in kwargs}
        config = AutoConfig.from_pretrained(path if config is None else config, **hub)
    spec = getattr(config, CONFIG_KEY, None)
    if spec is None:
        return cls.from_pretrained(path, *args, **kwargs)
    if not issubclass(cls, PreTrainedModel):  # an auto class
        with torch.device("meta"):
            cls = type(cls.from_config(config))

    def __init__(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        apply_norm_spec(self, spec)

    # transformers looks up names of classes and modules, so they are those of the model.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__init__": __init__}
    loaded = type(cls.__name__, (cls,), names).from_pretrained(path, *args, **kwargs)  # type: ignore[attr-defined]
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = cls
    for layer in model.modules():
        if isinstance(layer, BatchRenormBase):  # not in the weights, and from_pretrained leaves such buffers undefined
            nn.init.ones_(layer.r_limit)
            nn.init.zeros_(layer.d_limit)
    return loaded


class MomentsTrainer:
    """Mixin for a ``transformers.Trainer`` that re-estimates running moments before evaluation and prediction.

    The moments are set to the exact ones of batches of the train dataset, with `contnorm.reestimate`. With several
    processes, the data of all of them is pooled. Random generators are restored, so training is the same as with a
    plain ``Trainer``. Checkpoints contain the description of the norms, and training that is resumed from one converts
    the model accordingly.

    Args:
        *args: Arguments of the trainer.
        moments_batches: The data: a number of batches of the train dataset, in each process; or batches that can be
            iterated repeatedly; or a function without arguments that returns these, called each time.
        restore_moments: Whether to restore the running moments after the evaluation. By default the new moments stay,
            so that a checkpoint saved after an evaluation has the moments that were evaluated.
        moments_call: A function ``call(model, batch)`` that runs the model on a batch, if ``model(**batch)`` without
            labels does not apply.
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
        moments_batches: int | Iterable[Any] | Callable[[], Iterable[Any]] = 32,
        restore_moments: bool = False,
        moments_call: Call | None = None,
        **kwargs: Any,
    ) -> None:
        self.moments_batches, self.restore_moments, self.moments_call = moments_batches, restore_moments, moments_call
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
            record_norms(self.model)
        super()._save(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        config = Path(resume_from_checkpoint) / CONFIG_NAME
        spec = json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY) if config.is_file() else None
        if spec is not None:
            apply_norm_spec(self.model, spec)
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _reestimated(self: Any) -> Iterator[None]:
        if self._has_moments:
            yield
            return
        with generators_restored():
            data = self.moments_batches() if callable(self.moments_batches) else self.moments_batches
            if isinstance(data, int):
                data = list(islice(self._train_batches(), data))
            group = torch.distributed.group.WORLD  # None for a single process
            moments = reestimate(self.model, data, call=self._call_model, process_group=group)
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
        prepared = self.get_train_dataloader()
        # A loader that accelerate prepared stays its active one if only its first batches are read. So a plain loader
        # reads the same parts.
        if isinstance(prepared.dataset, IterableDataset):
            batching = {"batch_size": prepared.batch_size, "drop_last": prepared.drop_last}
        else:
            batching = {"batch_sampler": prepared.batch_sampler}
        return DataLoader(prepared.dataset, collate_fn=prepared.collate_fn, **batching)
