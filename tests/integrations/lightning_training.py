"""A small Lightning module and data, shared by the tests in one process and those in several.

As a script, it trains with several processes and stores what each of them has in the end:
``python -m tests.integrations.lightning_training FOLDER DEVICES``.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # before Lightning, which imports torchvision
    from tests import torchvision_operators

    torchvision_operators.declare()

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contnorm as cn
from contnorm.integrations.lightning import ReestimateMoments, SavesNorms, SyncNorms
from tests.norms.processes import leave


class Net(SavesNorms, LightningModule):
    """A network with two batch norms, in float64 so that two ways of summation agree."""

    def __init__(self, norm: str = "bn", lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 2 * 2, 2),
        )
        if norm != "bn":
            cn.convert_norm(self.net, norm, num_groups=4)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.losses.append(float(mean))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)


def data(samples: int = 32, shift: float = 0.0, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % 2
    x = torch.randn(samples, 3, 6, 6, generator=generator) + y.view(-1, 1, 1, 1) + shift
    return TensorDataset(x, y)


def loader(batch_size: int = 8, **options: object) -> DataLoader:
    return DataLoader(data(**options), batch_size=batch_size)  # type: ignore[arg-type]


def quiet_trainer(**options: object) -> Trainer:
    defaults: dict[str, object] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **options})


class Recorder(Callback):
    """Records the classes of norms in training, and the moments with which a model is validated."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.moments: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.classes = [type(module).__name__ for module in pl_module.modules() if hasattr(module, "running_mean")]

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.moments.append({name: b.clone() for name, b in pl_module.named_buffers() if "running" in name})


class SplitData(LightningDataModule):
    """Batches of 8 samples in total: process r of n has every n-th sample of them, from the r-th on."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes = processes

    def _loader(self, dataset: TensorDataset) -> DataLoader:
        rank = 0 if self.trainer is None else self.trainer.global_rank
        sampler = DistributedSampler(dataset, self.processes, rank, shuffle=False)
        return DataLoader(dataset, batch_size=8 // self.processes, sampler=sampler)

    def train_dataloader(self) -> DataLoader:
        return self._loader(data())

    def val_dataloader(self) -> DataLoader:
        return self._loader(data(seed=1))


def train(devices: int) -> dict[str, object]:
    """Train with a total batch size of 8 on some processes; return losses, weights, moments and classes of norms."""
    torch.manual_seed(0)
    module, recorder = Net("cn").double(), Recorder()
    trainer = quiet_trainer(
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        precision="64-true",
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        plugins=[SyncNorms()] if devices > 1 else [],
        callbacks=[ReestimateMoments(2, restore=True), recorder],
    )
    trainer.fit(module, datamodule=SplitData(devices))
    return {
        "rank": trainer.global_rank,
        "losses": module.losses,
        "state": module.state_dict(),
        "moments": recorder.moments,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "classes": recorder.classes,
        "classes_after": [type(module.net[i]).__name__ for i in (1, 4)],
    }


def main() -> None:
    folder, devices = Path(sys.argv[1]), int(sys.argv[2])
    result = train(devices)
    leave(result, folder, int(str(result["rank"])), devices)


if __name__ == "__main__":
    main()
