"""Lightning in one process: callbacks for moments, checkpoints with norms, and the plugin of synchronized norms."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
import pytorch_lightning
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy

import contnorm as cn
from contnorm.integrations.lightning import (
    SPEC_KEY,
    FreezeMoments,
    NormEffect,
    ReestimateMoments,
    SavesNorms,
    SyncNorms,
)
from contnorm.integrations.lightning.classes import installed_packages
from contnorm.moments.freeze import is_frozen
from tests.integrations.lightning_training import Net, Recorder, data, loader, quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # advice about workers, loggers and numbers of steps
]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def moments_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}


def frozen_layers(module: nn.Module) -> list[bool]:
    return [is_frozen(layer) for layer in module.modules() if hasattr(layer, "running_mean")]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def exact_moments(module: nn.Module, batches: Any) -> dict[str, Tensor]:
    with cn.reestimate(module, batches):
        return moments_of(module)


# --- ReestimateMoments ---------------------------------------------------------------------------------------------


@pytest.mark.feature("lightning", "moments re-estimated before evaluation (`ReestimateMoments`)")
@pytest.mark.parametrize(
    "batches",
    [4, loader(), lambda: list(loader())],
    ids=["number", "loader", "function"],
)
def test_validation_and_checkpoint_have_exact_moments(batches: Any, tmp_path: Path) -> None:
    module, recorder = Net("cn"), Recorder()
    saved = ModelCheckpoint(tmp_path, filename="last")
    trainer = quiet_trainer(
        callbacks=[ReestimateMoments(batches), recorder, saved], enable_checkpointing=True, num_sanity_val_steps=1
    )
    trainer.fit(module, loader(), loader(seed=1))
    assert len(recorder.moments) == 2  # the sanity check has the moments of the untrained module
    assert equal(recorder.moments[0], moments_of(Net("cn")))
    expected = exact_moments(module, list(loader()))
    assert equal(recorder.moments[1], expected)
    assert equal(moments_of(Net.load_from_checkpoint(tmp_path / "last.ckpt")), expected)
    assert not any(tensor.is_inference() for tensor in module.buffers())


def test_restored_moments_are_those_of_training(tmp_path: Path) -> None:
    plain, restored = Net("cn"), Net("cn")
    restored.load_state_dict(plain.state_dict())
    for module, callbacks in ((plain, []), (restored, [ReestimateMoments(2, restore=True)])):
        torch.manual_seed(1)
        train = DataLoader(data(), batch_size=8, shuffle=True)
        quiet_trainer(callbacks=callbacks, max_epochs=3, val_check_interval=2).fit(module, train, loader(seed=1))
    assert equal(dict(plain.state_dict()), dict(restored.state_dict()))  # also the shuffling is the same


def test_generator_of_train_loader_is_not_advanced() -> None:
    weights = []
    for callbacks in ([], [ReestimateMoments(2, restore=True)]):
        torch.manual_seed(1)
        train = DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))
        module = Net("cn")
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(module, train, loader(seed=1))
        weights.append(dict(module.state_dict()))
    assert equal(*weights)


@pytest.mark.slow
def test_persistent_workers_of_training_are_not_disturbed() -> None:
    """A validation in the middle of an epoch must not restart the epoch of workers that are shared by iterations."""
    seen = []
    for callbacks in ([], [ReestimateMoments(1, restore=True)]):
        torch.manual_seed(1)
        module = Net("cn")
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        train = DataLoader(data(), batch_size=8, **options)
        quiet_trainer(callbacks=callbacks, val_check_interval=1).fit(module, train, loader(seed=1))
        seen.append(module.losses)
    assert len(seen[0]) == 4 and seen[0] == seen[1]


def test_moments_before_test_use_train_data_of_module_or_datamodule() -> None:
    class WithData(Net):
        def train_dataloader(self) -> DataLoader:
            return loader()

    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader()

        def test_dataloader(self) -> DataLoader:
            return loader(seed=1)

    callback = ReestimateMoments(4)
    for module, options in ((WithData("cn"), {"dataloaders": loader(seed=1)}), (Net("cn"), {"datamodule": Data()})):
        quiet_trainer(callbacks=[callback]).test(module, verbose=False, **options)
        assert equal(moments_of(module), exact_moments(module, list(loader())))
    with pytest.raises(RuntimeError, match=r"no train dataloader to draw batches from. Give .* a DataLoader or a list"):
        quiet_trainer(callbacks=[callback]).test(Net("cn"), loader(seed=1), verbose=False)


def test_moments_at_fit_end_and_not_before_validation() -> None:
    module, recorder = Net("cn"), Recorder()
    trainer = quiet_trainer(callbacks=[ReestimateMoments(4, when="fit_end"), recorder], num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader(seed=1))
    expected = exact_moments(module, list(loader()))
    assert equal(moments_of(module), expected) and not equal(recorder.moments[0], expected)


class DictNet(Net):
    """Takes batches of keyword arguments, and moves channels in the hook that prepares a batch for the device."""

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert labels is None and pixels.shape[1] == 3
        return self.net(pixels)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch["pixels"]), batch["labels"])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "pixels": batch["pixels"].movedim(3, 1)}


def dict_loader(last: bool = True) -> list[dict[str, Tensor]]:
    return [{"pixels": x.movedim(1, 3) if last else x, "labels": y} for x, y in loader()]


def test_dict_batches_pass_through_hooks_of_module() -> None:
    module = DictNet("cn")
    trainer = quiet_trainer(callbacks=[ReestimateMoments(dict_loader())])
    trainer.fit(module, DataLoader(dict_loader(), batch_size=None), DataLoader(dict_loader(), batch_size=None))
    assert equal(moments_of(module), exact_moments(module, dict_loader(last=False)))


def test_batches_of_several_train_loaders_are_combined() -> None:
    class Combined(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["near"]) + self.loss(batch["far"][0])

    def call(module: nn.Module, batch: Any) -> Any:
        return module(torch.cat([batch["near"][0], batch["far"][0][0]]))

    module = Combined("cn")
    train = {"near": loader(), "far": [loader(4, samples=8, shift=2.0)]}  # the shorter one begins again
    quiet_trainer(callbacks=[ReestimateMoments(4, call=call)]).fit(module, train, loader(seed=1))
    near, far = list(loader()), list(loader(4, samples=8, shift=2.0)) * 2
    joint = [torch.cat([a, b]) for (a, _), (b, _) in zip(near, far, strict=True)]
    assert equal(moments_of(module), exact_moments(module, joint))


def test_call_runs_in_precision_of_trainer() -> None:
    dtypes = []

    def call(module: nn.Module, batch: Any) -> Any:
        output = module(batch[0])
        dtypes.append(output.dtype)
        return output

    module = Net("cn")
    trainer = quiet_trainer(callbacks=[ReestimateMoments(2, call=call)], precision="bf16-mixed")
    trainer.fit(module, loader(), loader(seed=1))
    assert set(dtypes) == {torch.bfloat16}


def test_frozen_layers_are_lifted_only_if_asked() -> None:
    module = cn.freeze_stats(Net("cn"))
    with pytest.raises(ValueError, match="frozen"):
        quiet_trainer(callbacks=[ReestimateMoments(list(loader()))]).validate(module, loader(), verbose=False)
    callback = ReestimateMoments(list(loader()), frozen="lift")
    quiet_trainer(callbacks=[callback]).validate(module, loader(), verbose=False)
    assert equal(moments_of(module), moments_of(cn.reestimate(module, list(loader()), frozen="lift") and module))
    assert frozen_layers(module) == [True, True]


def test_moments_are_restored_after_an_error_in_validation() -> None:
    class Failing(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("stop")

    module = Failing("cn")
    before = moments_of(module)
    trainer = quiet_trainer(callbacks=[ReestimateMoments(list(loader()), restore=True)])
    with pytest.raises(RuntimeError, match="stop"):
        trainer.validate(module, loader(), verbose=False)
    assert equal(moments_of(module), before)


@pytest.mark.feature("lightning", "moments of averaged weights (`WeightAveraging`)")
def test_moments_in_validation_are_those_of_averaged_weights(tmp_path: Path) -> None:
    class Validated(Recorder):
        def on_validation_batch_start(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
            with torch.inference_mode(False):
                self.expected = exact_moments(pl_module, batches)
            self.validated = moments_of(pl_module)

    batches, recorder = list(loader()), Validated()
    callbacks = [EMAWeightAveraging(decay=0.9), ReestimateMoments(batches), recorder]
    trainer = quiet_trainer(callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0)
    module = Net("cn")
    trainer.fit(module, loader(), loader(seed=1))
    assert equal(recorder.validated, recorder.expected)
    assert equal(moments_of(module), recorder.expected)  # the averaged weights at the end, with validated moments


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([ReestimateMoments(2), EMAWeightAveraging()], "must come after EMAWeightAveraging"),
        ([EMAWeightAveraging(), ReestimateMoments(2, restore=True)], "restore=True is not possible with EMAWeight"),
        ([StochasticWeightAveraging(0.01), FreezeMoments(1)], "FreezeMoments: StochasticWeightAveraging resets"),
    ],
)
def test_callbacks_that_undo_each_other_are_refused(callbacks: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        quiet_trainer(callbacks=callbacks, num_sanity_val_steps=0).fit(Net("cn"), loader(), loader())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReestimateMoments(0), "batches=0 must be at least 1"),
        (lambda: ReestimateMoments(2, when="valid"), "when='valid': allowed are 'validation', 'test'"),  # type: ignore
        (lambda: ReestimateMoments(2, when=()), "when=()"),
        (lambda: FreezeMoments(-1), "after_epoch=-1 must be a whole number"),
        (lambda: NormEffect([], every_n_epochs=0), "every_n_epochs=0 must be a whole number"),
    ],
)
def test_wrong_arguments_of_callbacks_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


# --- FreezeMoments and checkpoints ---------------------------------------------------------------------------------


class FrozenByEpoch(Recorder):
    """Records at the start of each epoch which layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen: list[list[bool]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        if trainer.is_last_batch:
            self.frozen.append(frozen_layers(pl_module))


@pytest.mark.feature("lightning", "moments frozen after an epoch (`FreezeMoments`), also after resuming")
def test_moments_freeze_after_epoch_and_after_resuming(tmp_path: Path) -> None:
    def fit(epochs: int, resume: bool) -> tuple[Net, list[list[bool]]]:
        torch.manual_seed(0)
        module, recorder = Net("cn"), FrozenByEpoch()
        callbacks = [
            FreezeMoments(after_epoch=2),
            recorder,
            ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1),
        ]
        trainer = quiet_trainer(callbacks=callbacks, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=tmp_path / "epoch=2.ckpt" if resume else None)
        return module, recorder.frozen

    whole, frozen = fit(4, resume=False)
    assert frozen == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]
    assert frozen_layers(whole) == [True, True]
    assert [frozen_layers(Net.load_from_checkpoint(tmp_path / f"epoch={e}.ckpt")) for e in range(3)] == [
        [False] * 2,
        [True] * 2,
        [True] * 2,
    ]
    resumed, frozen_again = fit(4, resume=True)
    assert frozen_again == [[True] * 2]
    assert equal(dict(resumed.state_dict()), dict(whole.state_dict()))


@pytest.mark.feature("lightning", "checkpoints keep norms and freezes (`SavesNorms`)")
@pytest.mark.parametrize("norm", ["cn", "gn", "sn"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoint_keeps_norm_freeze_and_outputs(norm: str, weights_only: bool, tmp_path: Path) -> None:
    module = Net("bn")
    cn.convert_norm(module, norm, **({} if norm == "sn" else {"num_groups": 2}))  # unknown to Net's constructor
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, loader())
    if norm != "gn":
        cn.freeze_stats(module.net[4])
    trainer.save_checkpoint(tmp_path / "net.ckpt", weights_only=weights_only)
    loaded = Net.load_from_checkpoint(tmp_path / "net.ckpt")
    assert cn.norm_spec(loaded) == cn.norm_spec(module) == torch.load(tmp_path / "net.ckpt")[SPEC_KEY]
    x = data().tensors[0]
    assert torch.equal(loaded.eval()(x), module.eval()(x))


def test_training_resumed_from_checkpoint_converts_before_optimizer(tmp_path: Path) -> None:
    def module() -> Net:
        torch.manual_seed(0)
        return Net("bn")

    whole = cn.convert_norm(module(), "cn", num_groups=2)
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    quiet_trainer(max_epochs=2, callbacks=[saved], enable_checkpointing=True).fit(whole, loader())
    resumed = module()
    quiet_trainer(max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert cn.norm_spec(resumed) == cn.norm_spec(whole)
    # Momentum of the optimizer included, since the second epoch continues with it.
    assert equal(dict(resumed.state_dict()), dict(whole.state_dict()))


def test_resumed_training_converts_averaged_weights_too(tmp_path: Path) -> None:
    """Switch norm has tensors that batch norm does not have."""

    def make_trainer(epochs: int) -> Any:
        return quiet_trainer(callbacks=[EMAWeightAveraging(decay=0.9)], max_epochs=epochs)

    trainer = make_trainer(1)
    trainer.fit(cn.convert_norm(Net("bn"), "sn"), loader())
    trainer.save_checkpoint(tmp_path / "average.ckpt")
    expected, resumed = cn.convert_norm(Net("bn"), "sn"), Net("bn")
    for module in (expected, resumed):
        make_trainer(2).fit(module, loader(), ckpt_path=tmp_path / "average.ckpt", weights_only=False)
    assert equal(dict(resumed.state_dict()), dict(expected.state_dict()))


def test_strategy_that_restores_after_setup_needs_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer()
    trainer.fit(Net("cn"), loader())
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", True)
    with pytest.raises(RuntimeError, match=r"other norms than Net, and SingleDeviceStrategy restores .* __init__"):
        quiet_trainer(max_epochs=2).fit(Net("bn"), loader(), ckpt_path=tmp_path / "net.ckpt")
    quiet_trainer(max_epochs=2).fit(Net("cn"), loader(), ckpt_path=tmp_path / "net.ckpt")


def test_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    class Wider(Net):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__("bn", lr)
            self.net[1] = nn.BatchNorm2d(16)

    trainer = quiet_trainer()
    trainer.strategy.connect(Net("cn"))
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    with pytest.raises(ValueError, match=r"does not fit Wider: 'net\.1': 8 channels in the spec, and 16 in the model"):
        Wider.load_from_checkpoint(tmp_path / "net.ckpt")


def test_mixin_after_lightning_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Write class Late\(SavesNorms, LightningModule\)"):

        class Late(LightningModule, SavesNorms):
            pass


# --- SyncNorms -----------------------------------------------------------------------------------------------------


def test_sync_norms_reverts_what_it_converted() -> None:
    module = Net("cn")
    cn.freeze_stats(module.net[4])
    cn.convert_sync(module, only="net.1")
    before = cn.norm_spec(module)
    plugin = SyncNorms()
    plugin.apply(module)
    assert [type(module.net[i]) for i in (1, 4)] == [cn.SyncContinualNorm] * 2
    assert cn.norm_spec(plugin.revert(module)) == before
    assert isinstance(module.net[1], cn.SyncContinualNorm)  # the user's own


def test_sync_norms_leaves_model_without_moments() -> None:
    plugin, module = SyncNorms(), Net("gn")
    assert plugin.revert(plugin.apply(module)) is module and type(module.net[1]) is cn.GroupNorm2d


def test_checkpoint_in_synchronized_training_has_local_norms() -> None:
    module = Net("cn")
    local = cn.norm_spec(module)
    checkpoint: dict[str, Any] = {}
    SyncNorms().apply(module).on_save_checkpoint(checkpoint)  # type: ignore[operator]
    assert checkpoint[SPEC_KEY] == local


def test_sync_norms_excludes_sync_batchnorm_of_trainer() -> None:
    with pytest.raises(Exception, match="Choose one or the other"):
        quiet_trainer(plugins=[SyncNorms()], sync_batchnorm=True)
    plugin = quiet_trainer(sync_batchnorm=True)._accelerator_connector._layer_sync
    with pytest.raises(TypeError, match=r"Use contnorm\.convert_sync"):  # raised when such a trainer begins to fit
        plugin.apply(Net("cn"))


def test_classes_work_with_pytorch_lightning() -> None:
    class Other(SavesNorms, pytorch_lightning.LightningModule):
        forward, loss, training_step = Net.forward, Net.loss, Net.training_step
        validation_step, configure_optimizers = Net.validation_step, Net.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": 0.1})
            self.net, self.losses = Net("cn").net, []

    callbacks = [ReestimateMoments(4), FreezeMoments(1), NormEffect([list(loader())])]
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[SyncNorms()],
        callbacks=callbacks,
    )
    module = Other()
    trainer.fit(module, loader(), loader(seed=1))
    assert frozen_layers(module) == [True, True]
    assert equal(moments_of(module), moments_of(cn.reestimate(module, list(loader()), frozen="lift") and module))
    assert "norm_effect/recovered" in trainer.callback_metrics


def test_one_installed_package_of_lightning_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_packages() == ["lightning.pytorch", "pytorch_lightning"]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    assert installed_packages() == ["pytorch_lightning"]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ModuleNotFoundError, match=r'Install it with: pip install "contnorm\[lightning\]"'):
        installed_packages()


# --- NormEffect ----------------------------------------------------------------------------------------------------


class Metrics(Logger):
    """Stores logged metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    name = version = "metrics"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def tasks() -> dict[str, list[tuple[Tensor, Tensor]]]:
    return {"near": list(loader()), "far": list(loader(shift=4.0))}


@pytest.mark.feature("lightning", "cross-task normalization effect logged (`NormEffect`)")
@pytest.mark.parametrize("every_n_epochs", [2, None])
@pytest.mark.parametrize("form", [lambda t: t, lambda t: list(t.values()), lambda t: lambda: t])
def test_norm_effect_is_that_of_diagnose(every_n_epochs: int | None, form: Callable[[Any], Any]) -> None:
    module, logger = Net("cn"), Metrics()
    effect = NormEffect(form(tasks()), every_n_epochs=every_n_epochs, by_task=True, by_layer=True)
    trainer = quiet_trainer(max_epochs=2, callbacks=[FreezeMoments(1), effect], logger=logger, log_every_n_steps=1)
    trainer.fit(module, loader(shift=4.0))
    assert frozen_layers(module) == [True, True]  # released for the measurement only
    expected = cn.diagnose(cn.freeze_stats(module, False), tasks())
    logged = [metrics for metrics in logger.logged if "norm_effect/recovered" in metrics]
    assert len(logged) == 1
    values = {name.removeprefix("norm_effect/"): value for name, value in logged[0].items() if "norm_effect" in name}
    near, far = effect.diagnosis.tasks  # type: ignore[union-attr]
    distances = [layer.running_oracle for layer in expected.layers]
    assert values == pytest.approx(
        {
            "accuracy_running": sum(expected.running) / 2,
            "accuracy_exact": sum(expected.oracle) / 2,
            "recovered": expected.recovered,
            "last_task": expected.last_task_change,
            "drift_mean": sum(distance.mean_scaled for distance in distances) / 2,
            "drift_var": sum(distance.var_scaled for distance in distances) / 2,
            f"accuracy_running/{near}": expected.running[0],
            f"accuracy_running/{far}": expected.running[1],
            f"accuracy_exact/{near}": expected.oracle[0],
            f"accuracy_exact/{far}": expected.oracle[1],
            "drift_mean/net.1": distances[0].mean_scaled,
            "drift_mean/net.4": distances[1].mean_scaled,
            "drift_var/net.1": distances[0].var_scaled,
            "drift_var/net.4": distances[1].var_scaled,
        },
        rel=1e-6,  # the logger of Lightning stores float32
    )
    assert values["drift_mean"] > 0.1


def test_norm_effect_does_not_change_training() -> None:
    weights = []
    for callbacks in ([], [NormEffect(tasks())]):
        torch.manual_seed(1)
        module = Net("cn")
        train = DataLoader(data(), batch_size=8, shuffle=True)
        quiet_trainer(max_epochs=2, callbacks=callbacks).fit(module, train)
        weights.append(dict(module.state_dict()))
    assert equal(*weights)
