"""transformers: norms in config.json, models loaded with them, and a trainer that re-estimates moments."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from transformers import (
    AutoBackbone,
    AutoModel,
    AutoModelForImageClassification,
    ConvNextBackbone,
    ConvNextConfig,
    ConvNextForImageClassification,
    ConvNextModel,
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    PreTrainedModel,
    RegNetConfig,
    RegNetForImageClassification,
    ResNetBackbone,
    ResNetConfig,
    ResNetForImageClassification,
    ResNetModel,
)

import contnorm as cn
from contnorm.integrations.transformers import CONFIG_KEY, from_pretrained, record_norms, register, unregister

RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "patch_size": 2}
STAGES = {"out_features": ["stage1", "stage2"]}


def resnet() -> ResNetForImageClassification:
    return ResNetForImageClassification(ResNetConfig(**RESNET))


def convnext() -> ConvNextForImageClassification:
    return ConvNextForImageClassification(ConvNextConfig(**CONVNEXT))


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


@pytest.fixture
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


MODELS = [
    pytest.param(resnet, id="resnet"),
    pytest.param(convnext, id="convnext"),
    pytest.param(lambda: ResNetModel(ResNetConfig(**RESNET)), id="resnet-base"),
    pytest.param(lambda: ResNetBackbone(ResNetConfig(**RESNET, **STAGES)), id="resnet-backbone"),
    pytest.param(lambda: ConvNextBackbone(ConvNextConfig(**CONVNEXT, **STAGES)), id="convnext-backbone"),
    pytest.param(lambda: ConvNextV2ForImageClassification(ConvNextV2Config(**CONVNEXT)), id="convnextv2"),
    pytest.param(
        lambda: RegNetForImageClassification(
            RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=3)
        ),
        id="regnet",
    ),
]


@pytest.mark.feature("transformers", "norms in `config.json`: `from_pretrained` after `save_pretrained` is bit-equal")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("norm", ["cn", "gn", "brn", "sn"])
def test_loaded_model_has_norms_and_outputs(make: Any, norm: str, tmp_path: Path, registered: None) -> None:
    options = {"num_groups": 2} if norm in ("cn", "gn") else {}
    model = trained(cn.convert_norm(make(), norm, **options))
    if norm == "cn":
        cn.freeze_stats(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert cn.norm_spec(loaded) == cn.norm_spec(model)
    assert same_outputs(loaded, model)
    ours, theirs = dict(model.named_buffers()), dict(loaded.named_buffers())
    assert ours.keys() == theirs.keys()
    if norm != "brn":  # whose limits follow from the batch counter at the next batch
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded.train()(images())  # all tensors are on the device, and it can be trained
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())[CONFIG_KEY] == cn.norm_spec(model)


@pytest.mark.feature("transformers", "auto classes, base models and backbones load the norms")
@pytest.mark.parametrize("use_register", [False, True])
@pytest.mark.parametrize(
    ("make", "cls"),
    [
        (resnet, AutoModelForImageClassification),
        (resnet, AutoModel),
        (resnet, ResNetModel),
        (lambda: ResNetModel(ResNetConfig(**RESNET)), AutoModelForImageClassification),
        (lambda: ResNetForImageClassification(ResNetConfig(**RESNET, **STAGES)), ResNetBackbone),
        (convnext, AutoModelForImageClassification),
        (convnext, ConvNextModel),
        (lambda: ConvNextForImageClassification(ConvNextConfig(**CONVNEXT, **STAGES)), ConvNextBackbone),
    ],
)
def test_other_class_loads_norms_of_shared_layers(make: Any, cls: Any, use_register: bool, tmp_path: Path) -> None:
    model = trained(cn.convert_norm(make(), "cn", num_groups=2))
    record_norms(model).save_pretrained(tmp_path)
    if use_register:
        register()
        try:
            loaded = cls.from_pretrained(str(tmp_path))
        finally:
            unregister()
    else:
        loaded = from_pretrained(cls, str(tmp_path))
    own = {path: entry for path, entry in cn.norm_spec(loaded)["norms"].items() if entry["norm"] == "cn"}
    saved = {path: entry for path, entry in cn.norm_spec(model)["norms"].items() if entry["norm"] == "cn"}

    def shortened(entries: dict[str, Any]) -> dict[str, Any]:
        return {path.removeprefix("resnet.").removeprefix("convnext."): entry for path, entry in entries.items()}

    assert shortened(own) == shortened(saved) and own
    base, expected = getattr(loaded, loaded.base_model_prefix, loaded), getattr(model, model.base_model_prefix, model)
    stages = lambda m: m.eval()(images(), output_hidden_states=True).hidden_states  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(stages(base), stages(expected), strict=True))


def test_auto_backbone_loads_norms_of_folder(tmp_path: Path) -> None:
    model = trained(cn.convert_norm(ResNetBackbone(ResNetConfig(**RESNET, **STAGES)), "cn", num_groups=2))
    record_norms(model).save_pretrained(tmp_path)
    loaded = from_pretrained(AutoBackbone, tmp_path)
    assert type(loaded) is ResNetBackbone and same_outputs(loaded, model)


def test_plain_loading_without_registration_differs(tmp_path: Path) -> None:
    """What the integration is for: torch's batch norm takes the weights of CN without an error."""
    model = trained(cn.convert_norm(resnet(), "cn", num_groups=2))
    record_norms(model).save_pretrained(tmp_path)
    assert not same_outputs(ResNetForImageClassification.from_pretrained(tmp_path), model)
    assert same_outputs(from_pretrained(ResNetForImageClassification, tmp_path), model)


@pytest.mark.parametrize("make", [resnet, convnext])
def test_config_of_unchanged_model_stays_the_same(make: Any, tmp_path: Path, registered: None) -> None:
    model = trained(make())
    model.save_pretrained(tmp_path)
    assert CONFIG_KEY not in json.loads((tmp_path / "config.json").read_text())
    assert same_outputs(type(model).from_pretrained(tmp_path), model)


def test_description_is_removed_with_the_norms(tmp_path: Path, registered: None) -> None:
    loaded = resnet()
    cn.convert_norm(loaded, "cn", num_groups=2).save_pretrained(tmp_path)
    assert CONFIG_KEY in json.loads((tmp_path / "config.json").read_text())
    cn.convert_norm(loaded, "bn").save_pretrained(tmp_path)  # undone, and so is the description
    assert CONFIG_KEY not in json.loads((tmp_path / "config.json").read_text())


def test_batch_norm_in_place_of_layer_norm_is_recorded(tmp_path: Path, registered: None) -> None:
    model = trained(cn.convert_norm(convnext(), "bn"))
    model.save_pretrained(tmp_path)
    loaded = ConvNextForImageClassification.from_pretrained(tmp_path)
    assert isinstance(loaded.convnext.embeddings.layernorm, nn.BatchNorm2d) and same_outputs(loaded, model)


def test_arguments_of_loading_are_passed_on(tmp_path: Path, registered: None) -> None:
    model = cn.convert_norm(resnet(), "cn", num_groups=2)
    model.save_pretrained(tmp_path / "sub")
    loaded, info = ResNetForImageClassification.from_pretrained(
        tmp_path,
        subfolder="sub",
        num_labels=5,
        ignore_mismatched_sizes=True,
        dtype="bfloat16",
        output_loading_info=True,
    )
    assert loaded.classifier[1].out_features == 5 and loaded.dtype == torch.bfloat16
    assert isinstance(loaded.resnet.embedder.embedder.normalization, cn.ContinualNorm2d)
    assert len(info["mismatched_keys"]) == 2 and not info["missing_keys"]


def test_spec_of_another_model_is_refused(tmp_path: Path) -> None:
    model = record_norms(cn.convert_norm(resnet(), "cn", num_groups=2))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["hidden_sizes"] = [8, 24]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the spec does not fit ResNetForImageClassification: .*16 channels"):
        from_pretrained(ResNetForImageClassification, tmp_path)


@pytest.mark.parametrize("cls", [ResNetForImageClassification, AutoModel])
@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"format": "contnorm.norm_spec", "version": 2, "norms": {}}, ValueError, "has version 2"),
        ({"norms": {}}, ValueError, "not a spec of contnorm"),
        ("cn", TypeError, "expected a spec"),
    ],
)
def test_damaged_spec_is_refused_by_all_classes(
    cls: Any, spec: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    resnet().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, CONFIG_KEY: spec}))
    with pytest.raises(error, match=words):
        from_pretrained(cls, tmp_path)


def test_registration_is_undone() -> None:
    before = vars(PreTrainedModel)["from_pretrained"], PreTrainedModel.save_pretrained
    register()
    register()
    assert PreTrainedModel.save_pretrained is not before[1]
    unregister()
    assert (vars(PreTrainedModel)["from_pretrained"], PreTrainedModel.save_pretrained) == before
