"""The table of norms of a model."""

import pytest
import torch
from torch import nn

import contnorm as cn
from tests.models import ResNet, ScaledBatchNorm2d


def test_summary_lists_every_layer_once() -> None:
    shared = nn.BatchNorm2d(8)
    model = nn.Sequential(shared, nn.Sequential(shared), cn.CN(64, num_groups=8, momentum=None), cn.LayerNorm2d(4))
    summary = cn.summarize(model)
    assert [(row.layer, row.norm, row.channels, row.groups) for row in summary] == [
        ("0", "bn", "8", "-"),
        ("2", "cn", "64", "8"),
        ("3", "ln", "4", "-"),
    ]
    assert summary.rows[1].momentum == "None" and summary.rows[2].momentum == "-"
    *table, counts, note = str(summary).splitlines()[2:]
    assert counts == "Sequential: 1 bn, 1 cn, 1 ln"
    assert len({len(line) for line in table}) == 1, "columns are aligned"
    assert "skip cn:" in note and "reestimate" in note  # not our batch norm, which derives from torch's


def test_summary_lists_unsupported_norms() -> None:
    assert cn.summarize(nn.Sequential(ScaledBatchNorm2d(8))).rows[0].norm == "?"


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning")
def test_summary_lists_traced_norms() -> None:
    layers = nn.Sequential(cn.create_norm("cn2", 4))
    traced = torch.jit.trace(layers, torch.randn(2, 4, 3, 3), check_trace=False)
    assert [row.norm for row in cn.summarize(traced)] == ["?"]


def test_summary_lists_lazy_and_scripted_norms() -> None:
    (lazy,) = cn.summarize(nn.Sequential(nn.LazyBatchNorm2d()))
    assert (lazy.norm, lazy.channels) == ("?", "?")
    (scripted,) = cn.summarize(torch.jit.script(nn.Sequential(nn.BatchNorm2d(4))))
    assert (scripted.layer, scripted.norm) == ("0", "?")


def test_summary_of_a_model_without_norms() -> None:
    assert str(cn.summarize(nn.Linear(2, 2))) == "Linear: no norm layers"


def test_summary_counts_layers() -> None:
    assert "\nResNet: 20 cn\n" in str(cn.summarize(cn.convert_norm(ResNet(), "cn", num_groups=4)))
    assert str(cn.summarize(cn.convert_norm(ResNet(), "bn"))).endswith("ResNet: 20 bn")
