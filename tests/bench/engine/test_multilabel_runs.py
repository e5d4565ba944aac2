"""Runs of images with several labels: they learn, they are recorded, and stopping loses no bit of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.data.multilabel import build, list_csv
from contnorm.bench.engine import evaluate
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.label_metrics import LabelStats
from contnorm.bench.records import Store, read_record
from contnorm.bench.streams.tasks import STREAMS
from contnorm.errors import UserError
from tests.bench.engine.stopped_runs import results, train
from tests.datasets import picture, small_multi_label

CPU = torch.device("cpu")
SOURCE = small_multi_label()


def settings(**groups: dict[str, Any]) -> RunConfig:
    own: dict[str, Any] = {
        "stream": {"name": "cocoseq", "source": "cocoseq"},
        "strategy": {"name": "prs"},
        "memory": {"kind": "prs", "size": 25},
        "model": {"name": "mlp", "width": 16},
        "norm": {"name": "cn", "groups": 4},
        "train": {"lr": 0.003},
    }
    return from_dict(merge_settings(merge_settings(STREAMS["cocoseq"].defaults, own), groups))


def finished(lane: Trainer, folder: Path | None = None) -> dict[str, Any]:
    (found,) = results([lane], None if folder is None else [folder])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prs", "reservoir"])
@pytest.mark.parametrize("norm", ["bn", "cn"])
def test_multilabel_run_learns_and_records_every_score(tmp_path: Path, norm: str, kind: str) -> None:
    config = settings(norm={"name": norm}, memory={"kind": kind}, train={"passes": 8})
    lane = Trainer(config, 0, SOURCE, CPU)
    untrained = LabelStats.from_json(evaluate.count_predictions(lane, 3)["labels"]["tally"])
    record = read_record(Store(tmp_path).save(config, 0, finished(lane)))
    assert record.multi_label
    assert record.score("map") > 100 * np.mean([ap for ap in untrained.ap if ap is not None]) + 10
    for score in ("c_f1", "o_f1", "map", "fm_c_f1", "fm_o_f1", "fm_map"):
        for group in ("overall", "majority", "moderate", "minority"):
            assert record.score(score, group) <= 100 and (score.startswith("fm") or record.score(score, group) >= 0)
    census = record.raw["census"]
    assert census["capacity"] == 25 and census["evicted"][-1] == census["written"][-1] - 25 > 10
    assert census["shown"][-1] == " ".join(map(str, SOURCE.train_labels.sum(0)))
    assert record.raw["classes"]["names"] == list(SOURCE.class_names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("er-ace", "strategy 'er-ace': does not support multi-label streams"),
        ("lwf", "no task boundaries, at which strategy 'lwf' has hooks"),
        ("ewc", "no task boundaries, at which strategy 'ewc' has hooks"),
    ],
)
def test_strategy_that_needs_tasks_or_single_labels_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(settings(strategy={"name": name}), 0, SOURCE, CPU)


def test_recorded_counts_equal_those_of_the_outputs() -> None:
    """Own and tally once more, by hand from the network's outputs on normalized pictures."""
    lane = Trainer(settings(train={"max_steps": 13}), 0, SOURCE, CPU)
    found = finished(lane)
    assert len(found["labels"]["tally"]) == lane.data.sequence.tasks, "the last step is the last task's first"
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    lane.model.eval()
    with torch.no_grad():
        logits = lane.model((torch.from_numpy(SOURCE.test_images) / 255 - mean) / std).numpy()
    assert found["labels"]["tally"][-1] == LabelStats.of(logits, SOURCE.test_labels).to_json()
    for task in range(3):
        own = SOURCE.test_task == task
        assert found["labels"]["own"][-1][task] == LabelStats.of(logits[own], SOURCE.test_labels[own]).to_json()
    assert found["labels"]["own"][0][1:] == [None, None]


def test_step_equals_joint_pass_with_clipping_and_adam() -> None:
    """The engine's first steps, and the same made by hand from the plan with torch's own loss and optimizer."""
    config = settings(train={"clip_value": 1e-3})
    lane, plain = (Trainer(config, 0, SOURCE, CPU) for _ in range(2))
    model = plain.model
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    items, clipped = lane.data.sequence.train, 0
    for step in plain.plan.steps[:4]:
        seen = np.concatenate([step.stream, *step.replay])
        x = (torch.from_numpy(SOURCE.train_images[items.image[seen]]) / 255 - mean) / std
        y = torch.from_numpy(SOURCE.train_labels[items.image[seen]]).float()
        adam.zero_grad()
        loss = nn.MultiLabelSoftMarginLoss()(model.train()(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            clipped += int((parameter.grad.abs() > 1e-3).sum())
            parameter.grad.clamp_(-1e-3, 1e-3)
        adam.step()
        assert float(lane.step()) == pytest.approx(loss.item(), rel=1e-5)
    assert clipped > 100 and [len(step.replay[0]) for step in plain.plan.steps[:3]] == [0, 10, 10]
    for ours, theirs in zip(lane.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # two formulas of one loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prs", "reservoir"])
def test_stop_at_any_step_and_resume_is_bitwise_equal(tmp_path: Path, kind: str) -> None:
    config = settings(memory={"kind": kind}, evaluate={"moments": "oracle"})
    whole = Trainer(config, 0, SOURCE, CPU)
    expected = finished(whole)
    assert any(name.startswith("optimizer.") for name in whole.state())
    for at in (1, 7, 13):
        lane = Trainer(config, 0, SOURCE, CPU)
        train([lane], [tmp_path / str(at)], log_every=1, stop=lambda lane=lane, at=at: lane.done == at)
        assert lane.done == at
        resumed = Trainer(config, 0, SOURCE, CPU)
        found = finished(resumed, tmp_path / str(at))
        for key in ("labels", "labels_running", "drift", "census"):
            assert found[key] == expected[key], key
        for name, tensor in whole.state().items():
            assert torch.equal(resumed.state()[name], tensor), name


def test_norms_share_samples_of_a_seed_and_memories_do_not() -> None:
    lanes = [Trainer(settings(norm={"name": norm}), 0, SOURCE, CPU) for norm in ("bn", "cn")]
    lanes.append(Trainer(settings(memory={"kind": "reservoir"}), 0, SOURCE, CPU))
    bn, cn, reservoir = (lane.plan.steps for lane in lanes)
    for a, b, c in zip(bn, cn, reservoir, strict=True):
        np.testing.assert_array_equal(np.concatenate([a.stream, *a.replay]), np.concatenate([b.stream, *b.replay]))
        np.testing.assert_array_equal(a.stream, c.stream)
    assert any((a.write != c.write).any() for a, c in zip(bn, reservoir, strict=True))


def birds(tmp_path: Path, *gone: int) -> None:
    """A set of one's own in two tasks, built without some of its pictures."""
    rows = ["image,split,task,labels"]
    for number in range(36):
        if number not in gone:
            picture(tmp_path / "pictures" / f"{number}.jpg", 16, 7 * number)
        split, task = ("test" if number % 3 == 2 else "train"), ("spring" if number < 18 else "autumn")
        rows.append(f"{number}.jpg,{split},{task},{'robin;wren' if number % 2 else 'owl'}")
    (tmp_path / "birds.csv").write_text("\n".join(rows) + "\n")
    listed = list_csv("birds", tmp_path / "birds.csv", tmp_path / "pictures")
    build(listed, tmp_path / "birds", 16, allow_missing=True)


def of_birds(tmp_path: Path, source: str = "birds") -> RunConfig:
    common: dict[str, Any] = {
        "strategy": {"name": "prs"},
        "model": {"name": "mlp", "width": 16},
        "memory": {"size": 10},
    }
    return resolve({**common, "stream": {"name": "multi-label", "source": source}}, tmp_path)


def test_user_data_set_is_a_stream(tmp_path: Path) -> None:
    """Built from a table under a name, and run by that name or by its folder."""
    birds(tmp_path)
    found = []
    for source in ("birds", str(tmp_path / "birds")):
        config = of_birds(tmp_path, source)
        list(execute([Run(config, 0)], RunOptions(runs=tmp_path / "runs", data_root=tmp_path)))
        found += Store(tmp_path / "runs").find(config.hash).records
    assert found[0].raw["labels"] == found[1].raw["labels"] and found[0].counted.tasks == 2
    assert found[0].raw["classes"]["names"] == ["owl", "robin", "wren"] and found[0].raw["source"]["name"] == "birds"
    with pytest.raises(UserError, match=r"stream\.source for multi-label: 'brids'\. Did you mean 'birds'"):
        resolve({"stream": {"name": "multi-label", "source": "brids"}}, tmp_path)
