"""transformers: norms in config.json, models loaded with them, and a trainer that re-estimates moments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    AutoModelForImageClassification,
    PreTrainedModel,
    ResNetBackbone,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    __version__,
)

import contnorm as cn
from contnorm.integrations.transformers import CONFIG_KEY, MomentsTrainer, from_pretrained, record_norms

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
DTYPE = "dtype" if __version__ >= "4.56" else "torch_dtype"
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 2}


def resnet(cls: Any = ResNetForImageClassification, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(ResNetConfig(**RESNET, **options))


def images(samples: int = 6) -> Tensor:
    return torch.randn(samples, 3, 32, 32, generator=torch.Generator().manual_seed(3)) * 2 + 1


def trained(model: PreTrainedModel) -> PreTrainedModel:
    """Give the moments and affine parameters of a model values other than the initial ones."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.train()
    for _ in range(3):
        model(images())
    return model.eval()


def outputs(model: nn.Module) -> list[Tensor]:
    result = model.eval()(images())
    tensors = result.feature_maps if hasattr(result, "feature_maps") else list(result.to_tuple())
    return [t for t in tensors if isinstance(t, Tensor)]


def same_outputs(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(outputs(a), outputs(b), strict=True))


@pytest.mark.parametrize("norm", ["cn", "gn", "brn", "sn"])
@pytest.mark.parametrize("make", [resnet, lambda: resnet(ResNetBackbone, out_features=["stage1", "stage2"])])
def test_loaded_model_has_norms_and_outputs(make: Any, norm: str, tmp_path: Path) -> None:
    model = trained(cn.convert_norm(make(), norm, **({"num_groups": 2} if norm in ("cn", "gn") else {})))
    cn.freeze_stats(model)
    record_norms(model).save_pretrained(tmp_path)
    for cls in (type(model), *([AutoModelForImageClassification] if make is resnet else [])):
        loaded = from_pretrained(cls, tmp_path)
        assert type(loaded) is type(model) and cn.norm_spec(loaded) == cn.norm_spec(model)
        assert same_outputs(loaded, model)
        loaded.train()(images())  # all tensors are there, and it can be trained
    if norm == "cn":  # what the integration is for: batch norm takes the weights without an error
        assert not same_outputs(type(model).from_pretrained(tmp_path), model)


def test_arguments_of_loading_are_passed_on(tmp_path: Path) -> None:
    record_norms(cn.convert_norm(resnet(), "cn", num_groups=2)).save_pretrained(tmp_path / "sub")
    options = {"subfolder": "sub", "num_labels": 5, "ignore_mismatched_sizes": True, DTYPE: "bfloat16"}
    loaded, info = from_pretrained(ResNetForImageClassification, tmp_path, output_loading_info=True, **options)
    assert loaded.classifier[1].out_features == 5 and loaded.dtype == torch.bfloat16
    assert isinstance(loaded.resnet.embedder.embedder.normalization, cn.ContinualNorm2d)
    assert len(info["mismatched_keys"]) == 2 and not info["missing_keys"]


# --- the trainer ----------------------------------------------------------------------------------------------------


class MyTrainer(MomentsTrainer, Trainer):
    pass


class Images(Dataset):
    def __init__(self, samples: int = 16, seed: int = 0) -> None:
        self.y = torch.arange(samples) % 2
        noise = torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        self.x = noise + self.y.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.x[index], "labels": int(self.y[index])}


def make_trainer(folder: Path, cls: type = MyTrainer, norm: str = "cn", **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "seed": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options.pop("arguments", {}),
    }
    model = resnet() if norm == "bn" else cn.convert_norm(resnet(), norm, num_groups=2)
    given = {"model": model, "train_dataset": Images(), "eval_dataset": Images(seed=1), **options}
    return cls(args=TrainingArguments(str(folder), **arguments), **given)


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def assert_exact(model: nn.Module, moments: dict[str, Tensor] | None = None) -> None:
    """All samples in another order: equal up to rounding in float32."""
    moments = moments_of(model) if moments is None else moments
    with cn.reestimate(model, [{"pixel_values": Images().x}]):
        torch.testing.assert_close(moments, moments_of(model), rtol=1e-5, atol=1e-6)


def test_evaluation_checkpoint_and_resumed_training_have_norms_and_moments(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, moments_batches=100)
    trainer.train()
    assert CONFIG_KEY in json.loads((tmp_path / "checkpoint-6/config.json").read_text())
    saved = from_pretrained(ResNetForImageClassification, tmp_path / "checkpoint-6")
    assert_exact(saved)
    data = Images(seed=1)
    loss = nn.functional.cross_entropy(saved(data.x).logits, data.y)
    logged = next(e["eval_loss"] for e in trainer.state.log_history if e["step"] == 6 and "eval_loss" in e)
    assert float(loss) == pytest.approx(logged, rel=1e-4)  # as it was evaluated before it was saved
    states = []
    for norm in ("cn", "bn"):
        resumed = make_trainer(tmp_path / norm, norm=norm)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert cn.norm_spec(resumed.model) == cn.norm_spec(trainer.model)
        states.append(resumed.model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_training_is_the_same_as_without(tmp_path: Path) -> None:
    states = []
    options: dict[str, Any]
    for cls, options in ((Trainer, {}), (MyTrainer, {"moments_batches": 2, "restore_moments": True})):
        arguments = {"gradient_accumulation_steps": 2, "eval_steps": 1}
        trainer = make_trainer(tmp_path / cls.__name__, cls, arguments=arguments, **options)
        trainer.train()
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_moments_are_estimated_once_and_running_ones_return(tmp_path: Path) -> None:
    calls, seen = [], []

    def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        calls.append(len(batch["labels"]))
        return model(batch["pixel_values"])

    class Look(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(moments_of(trainer.model))

    trainer = make_trainer(
        tmp_path,
        eval_dataset={"a": Images(seed=1), "b": Images(seed=2)},
        moments_batches=lambda: [{"pixel_values": Images().x, "labels": Images().y}],
        moments_call=call,
        restore_moments=True,
        callbacks=[Look()],
    )
    before = moments_of(trainer.model)
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate().keys() and len(calls) == 1
    trainer.predict(Images(seed=1))
    for moments in seen:
        assert_exact(trainer.model, moments)
    assert all(torch.equal(before[name], value) for name, value in moments_of(trainer.model).items())
