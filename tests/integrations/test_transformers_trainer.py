"""The trainer of transformers with moments re-estimated before evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback, TrainingArguments

import contnorm as cn
from contnorm.integrations.transformers import MomentsTrainer, from_pretrained, register, unregister

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class MyTrainer(MomentsTrainer, Trainer):
    pass


class Images(Dataset):
    def __init__(self, samples: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.arange(samples) % 2
        self.x = torch.randn(samples, 3, 16, 16, generator=generator) + self.y.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.x[index], "labels": int(self.y[index])}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        images = Images()
        return (images[i] for i in range(len(images)))


def network(norm: str = "cn") -> nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2)
    model = ResNetForImageClassification(config)
    return cn.convert_norm(model, norm, num_groups=2) if norm == "cn" else model


def make_trainer(folder: Path, cls: type = MyTrainer, **options: Any) -> Any:
    arguments = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **options.pop("arguments", {}),
    }
    given = {"model": network(), "train_dataset": Images(), "eval_dataset": Images(seed=1), **options}
    return cls(args=TrainingArguments(str(folder), **arguments), **given)


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """All samples in another order: equal up to rounding in float32."""
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def exact_moments(model: nn.Module) -> dict[str, Tensor]:
    with cn.reestimate(model, [{"pixel_values": Images().x}]):
        return moments_of(model)


@pytest.mark.feature("transformers", "moments re-estimated before evaluation (`MomentsTrainer`)")
def test_evaluation_and_checkpoint_have_exact_moments(tmp_path: Path) -> None:
    register()
    try:
        trainer = make_trainer(tmp_path, moments_batches=100)
        trainer.train()
        trainer.evaluate()
    finally:
        unregister()
    close(moments_of(trainer.model), exact_moments(trainer.model))
    saved = from_pretrained(ResNetForImageClassification, tmp_path / "checkpoint-6")
    close(moments_of(saved), exact_moments(saved))
    images = Images(seed=1)
    loss = nn.functional.cross_entropy(saved(images.x).logits, images.y)
    logged = next(e["eval_loss"] for e in trainer.state.log_history if e["step"] == 6 and "eval_loss" in e)
    assert float(loss) == pytest.approx(logged, rel=1e-4)  # as it was evaluated before it was saved


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_is_the_same_as_without(accumulation: int, tmp_path: Path) -> None:
    weights = []
    for cls, options in ((Trainer, {}), (MyTrainer, {"moments_batches": 2, "restore_moments": True})):
        arguments = {"gradient_accumulation_steps": accumulation, "eval_steps": 1}
        trainer = make_trainer(tmp_path / cls.__name__, cls, arguments=arguments, **options)
        trainer.train()
        weights.append(dict(trainer.model.state_dict()))
    assert equal(*weights)


def test_moments_are_estimated_once_for_several_data_sets(tmp_path: Path) -> None:
    calls = []

    def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        calls.append(len(batch["labels"]))
        return model(batch["pixel_values"])

    trainer = make_trainer(
        tmp_path,
        eval_dataset={"a": Images(seed=1), "b": Images(seed=2)},
        moments_batches=lambda: [{"pixel_values": Images().x, "labels": Images().y}],
        moments_call=call,
    )
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= metrics.keys()
    assert len(calls) == 1  # one sweep over one batch, for both data sets
    close(moments_of(trainer.model), exact_moments(trainer.model))


def test_predictions_have_exact_moments_and_running_ones_return(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(moments_of(trainer.model))

    trainer = make_trainer(tmp_path, moments_batches=4, restore_moments=True, callbacks=[Look()])
    before = moments_of(trainer.model)
    trainer.predict(Images(seed=1))
    close(seen[0], exact_moments(trainer.model))
    assert equal(moments_of(trainer.model), before)
    assert trainer.accelerator.gradient_state.active_dataloader is None  # of accelerate, as after a plain prediction


def test_iterable_train_dataset_gives_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=Stream(), arguments={"max_steps": 2}, moments_batches=4)
    trainer.evaluate()
    close(moments_of(trainer.model), exact_moments(trainer.model))


def test_missing_data_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no train_dataset to draw batches from"):
        make_trainer(tmp_path, train_dataset=None).evaluate()
    with pytest.raises(ValueError, match="moments_batches=0 must be at least 1"):
        make_trainer(tmp_path, moments_batches=0)


@pytest.mark.feature("transformers", "training resumed with the norms of the checkpoint")
@pytest.mark.parametrize("cls", [MyTrainer, Trainer])
def test_resumed_training_has_norms_of_checkpoint(cls: type, tmp_path: Path) -> None:
    """`MomentsTrainer` stores and restores norms by itself, and a plain trainer after `register`."""
    if cls is Trainer:
        register()
    try:
        make_trainer(tmp_path, cls).train()
        results = []
        for norm in ("cn", "bn"):
            trainer = make_trainer(tmp_path / norm, cls, model=network(norm))
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
            results.append(trainer.model)
    finally:
        unregister()
    assert not hasattr(Trainer._load_from_checkpoint, "_contnorm_original")
    expected, resumed = results
    assert cn.norm_spec(resumed) == cn.norm_spec(expected) == cn.norm_spec(network())
    assert equal(resumed.state_dict(), expected.state_dict())
