"""Lightning: callbacks for moments, checkpoints with norms, and the plugin of synchronized norms."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
from lightning import pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

import contnorm as cn
from contnorm.integrations.lightning import SPEC_KEY, FreezeMoments, NormEffect, ReestimateMoments, SyncNorms
from contnorm.moments.freeze import stats_state
from tests.integrations.lightning_training import Net, Recorder, data, loader, quiet_trainer, train

AVERAGING: Any = getattr(pl.callbacks, "EMAWeightAveraging", None)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # advice about workers, loggers and numbers of steps
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def moments_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}


def frozen_layers(module: nn.Module) -> list[bool]:
    return [not stats_state(layer)[1] for layer in module.modules() if hasattr(layer, "running_mean")]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def exact_moments(module: nn.Module, batches: Any) -> dict[str, Tensor]:
    with cn.reestimate(module, batches, frozen="lift"):
        return moments_of(module)


@pytest.mark.parametrize("batches", [4, loader(), lambda: list(loader())], ids=["number", "loader", "function"])
def test_validation_and_checkpoint_have_exact_moments(batches: Any, tmp_path: Path) -> None:
    module, recorder = Net("cn"), Recorder()
    saved = ModelCheckpoint(tmp_path, filename="last")
    callbacks = [ReestimateMoments(batches), recorder, saved]
    trainer = quiet_trainer(callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=1)
    trainer.fit(module, loader(), loader(seed=1))
    assert len(recorder.moments) == 2  # the sanity check has the moments of the untrained module
    assert equal(recorder.moments[0], moments_of(Net("cn")))
    expected = exact_moments(module, list(loader()))
    assert equal(recorder.moments[1], expected)
    assert equal(moments_of(Net.load_from_checkpoint(tmp_path / "last.ckpt")), expected)


@pytest.mark.parametrize("own_generator", [False, True])
def test_measurements_do_not_change_training(own_generator: bool) -> None:
    states = []
    effect = NormEffect({"near": list(loader()), "far": list(loader(shift=4.0))})
    for callbacks in ([], [ReestimateMoments(2, restore=True), effect]):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        shuffled = DataLoader(data(), batch_size=8, shuffle=True, generator=generator)
        module = Net("cn")
        quiet_trainer(callbacks=callbacks, max_epochs=3, val_check_interval=2).fit(module, shuffled, loader(seed=1))
        states.append(dict(module.state_dict()))
    assert equal(*states)


def test_moments_are_measured_in_the_precision_of_the_trainer() -> None:
    dtypes = []

    def call(module: nn.Module, batch: Any) -> Any:
        dtypes.append(module(batch[0]).dtype)

    module = cn.freeze_stats(Net("cn"))
    callback = ReestimateMoments(4, when="validation", call=call, frozen="lift")
    quiet_trainer(callbacks=[callback], precision="bf16-mixed").fit(module, loader(), loader(seed=1))
    assert set(dtypes) == {torch.bfloat16} and frozen_layers(module) == [True, True]
    assert not equal(moments_of(module), moments_of(Net("cn")))


class DictNet(Net):
    """Takes batches of keyword arguments, and moves channels in the hook that prepares a batch for the device."""

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert labels is None and pixels.shape[1] == 3
        return self.net(pixels)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch["pixels"]), batch["labels"])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "pixels": batch["pixels"].movedim(3, 1)}


def test_dict_batches_pass_through_hooks_of_module() -> None:
    batches = [{"pixels": x.movedim(1, 3), "labels": y} for x, y in loader()]
    module, dicts = DictNet("cn"), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    quiet_trainer(callbacks=[ReestimateMoments(batches)]).fit(module, dicts, dicts)
    assert equal(moments_of(module), exact_moments(module, [{"pixels": x} for x, _ in loader()]))


@pytest.mark.skipif(AVERAGING is None, reason="it came with Lightning 2.6")
def test_moments_in_validation_are_those_of_averaged_weights() -> None:
    class Validated(Recorder):
        def on_validation_batch_start(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
            with torch.inference_mode(False):
                self.expected = exact_moments(pl_module, batches)
            self.validated = moments_of(pl_module)

    batches, recorder = list(loader()), Validated()
    callbacks = [AVERAGING(decay=0.9), ReestimateMoments(batches), recorder]
    module = Net("cn")
    quiet_trainer(callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader(seed=1))
    assert equal(recorder.validated, recorder.expected)
    assert equal(moments_of(module), recorder.expected)  # the averaged weights at the end, with validated moments


def test_moments_freeze_after_epoch_and_after_resuming(tmp_path: Path) -> None:
    def fit(resume: bool) -> Net:
        torch.manual_seed(0)
        module, saved = Net("cn"), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = quiet_trainer(callbacks=[FreezeMoments(2), saved], max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=tmp_path / "epoch=2.ckpt" if resume else None)
        return module

    whole = fit(resume=False)
    kept = [Net.load_from_checkpoint(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(3)]
    assert [frozen_layers(module) for module in kept] == [[False] * 2, [True] * 2, [True] * 2]
    assert equal(moments_of(kept[1]), moments_of(whole)) and not equal(moments_of(kept[0]), moments_of(whole))
    assert equal(dict(fit(resume=True).state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("norm", ["cn", "sn"])
def test_checkpoint_keeps_norms_and_resumed_training_has_them(norm: str, tmp_path: Path) -> None:
    def module() -> Net:
        torch.manual_seed(0)
        return Net("bn")

    whole = cn.convert_norm(module(), norm, **({"num_groups": 2} if norm == "cn" else {}))
    cn.freeze_stats(whole.net[4])
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    averaging = [AVERAGING(decay=0.9)] if norm == "sn" and AVERAGING else []
    quiet_trainer(max_epochs=2, callbacks=[saved, *averaging], enable_checkpointing=True).fit(whole, loader())
    if norm == "cn":
        assert cn.norm_spec(Net.load_from_checkpoint(tmp_path / "epoch=0.ckpt")) == cn.norm_spec(whole)
    resumed = module()
    trainer = quiet_trainer(max_epochs=2, callbacks=[AVERAGING(decay=0.9)] if averaging else [])
    options = {"weights_only": False} if AVERAGING else {}  # the default of older versions
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    assert cn.norm_spec(resumed) == cn.norm_spec(whole)
    assert equal(dict(resumed.state_dict()), dict(whole.state_dict()))  # with the momentum of the optimizer


def test_sync_norms_reverts_what_it_converted() -> None:
    module = Net("cn")
    cn.freeze_stats(module.net[4])
    local = cn.norm_spec(module)
    checkpoint: dict[str, Any] = {}
    plugin = SyncNorms()
    plugin.apply(module).on_save_checkpoint(checkpoint)
    assert [type(module.net[i]) for i in (1, 4)] == [cn.SyncContinualNorm] * 2
    assert cn.norm_spec(plugin.revert(module)) == local == checkpoint[SPEC_KEY]
    cn.convert_sync(module, only="net.1")
    plugin.revert(plugin.apply(module))
    assert isinstance(module.net[1], cn.SyncContinualNorm)  # the user's own
    assert type(plugin.revert(plugin.apply(Net("gn"))).net[1]) is cn.GroupNorm2d


def test_norm_effect_is_that_of_diagnose() -> None:
    module, tasks = Net("cn"), {"near": list(loader()), "far": list(loader(shift=4.0))}
    effect = NormEffect(lambda: tasks, every_n_epochs=2)
    trainer = quiet_trainer(max_epochs=2, callbacks=[FreezeMoments(1), effect])
    trainer.fit(module, loader(shift=4.0))
    assert frozen_layers(module) == [True, True]  # released for the measurement only
    expected = cn.diagnose(cn.freeze_stats(module, False), tasks)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["norm_effect/recovered"] == pytest.approx(expected.recovered, rel=1e-6)
    assert logged["norm_effect/accuracy_exact"] == pytest.approx(sum(expected.oracle) / 2, rel=1e-6)
    assert effect.diagnosis is not None and effect.diagnosis.tasks == ("near", "far")


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_train_as_one_with_pooled_moments(tmp_path: Path) -> None:
    """Both add up the same numbers in float64, in different orders."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integrations.lightning_training", str(tmp_path), "2"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one: Any = train(1)
    for process in (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)):
        assert process["classes"] == ["SyncContinualNorm"] * 2 and process["classes_after"] == ["ContinualNorm2d"] * 2
        for key in ("losses", "state", "val_loss", "moments"):
            torch.testing.assert_close(process[key], one[key], rtol=1e-9, atol=1e-9)
