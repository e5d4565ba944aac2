"""Evaluation of a run after each task, and its results as they are recorded.

An evaluation counts the correct predictions on the test samples of each task: one row of the accuracy matrix. It uses
the running moments, and others if the settings say so. Oracle moments are the exact ones of all training data so far.
Memory moments are the exact, possibly weighted ones of the samples in the replay memory. In both, images are as in
evaluation, without augmentation. Task moments are the running moments at the end of each task. The running moments are
restored afterwards, so that training is not affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.label_metrics import LabelStats, label_scores
from contnorm.bench.metrics import TaskScores, accuracy_scores
from contnorm.bench.models.norm_layers import count_norms
from contnorm.bench.plan import sample_weights, stored_items, take_census
from contnorm.moments.pooling import keeps_moments
from contnorm.moments.reestimate import Reestimated, reestimate
from contnorm.norms.batch import BatchRenormBase

TEST_BATCH = 1000
LARGE_TEST_BATCH = 4096  # if GPU memory allows: many small passes are limited by the host
MAPS_IN_MEMORY = 32  # feature maps of 64 channels, of a whole batch, that must fit into GPU memory
TEST_VALUES = 1000 * 3 * 84 * 84  # most values in a batch: batches of larger images are smaller

Row = Any  # counts of correct predictions by task, or statistics of labels


@dataclass
class Measurements:
    """The measurements of a run so far; saved in every checkpoint.

    Attributes:
        rows: Rows after each task, by the name of their matrix in the record: ``"matrix"``, for class-incremental
            streams ``"matrix_task"`` (the task is known), or for multi-label streams ``"labels"``. Names of other
            moments than those of the settings end in ``"_running"`` or ``"_memory"``.
        before: Rows before the first task.
        drift: Distance between running and oracle moments after each task, by layer.
        seconds: Seconds of training and of evaluation.
        train_by_task: Seconds of training of each task.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    before: dict[str, Row] = field(default_factory=dict)
    drift: list[dict[str, dict[str, float]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    train_by_task: list[float] = field(default_factory=list)

    @property
    def tasks(self) -> int:
        """Number of tasks that were learned and evaluated."""
        return len(self.rows.get("matrix", self.rows.get("labels", ())))


def evaluate_task(trainer: Trainer, measured: Measurements, task: int) -> None:
    """Evaluate after a task. Rows are added when all is measured, so that an interruption leaves no partial ones.

    Raises:
        NonFiniteMomentsError: If moments of the data are not finite.
    """
    settings = trainer.config.evaluate
    tasks = len(trainer.plan.ends) if settings.ahead and not trainer.data.sequence.multi_label else task + 1
    running = count_predictions(trainer, tasks)
    chosen, beside, drift = running, dict[str, Row](), None
    if keeps_moments(trainer.model):
        if settings.moments == "oracle" or settings.drift:
            items = torch.nonzero(trainer.data.train.task <= task).squeeze(1)  # all training data so far
            batches = ItemBatches(trainer, items)
            with reestimate(trainer.model, batches, call=nn.Module.__call__, frozen="lift") as done:
                drift = {
                    name: {
                        "mean": float((m.old_mean - m.new_mean).abs().sum()),
                        "var": float((m.old_var - m.new_var).abs().sum()),
                    }
                    for name, m in done.moments.items()
                }
                chosen = count_predictions(trainer, tasks) if settings.moments == "oracle" else running
        if settings.moments == "memory":
            with memory_moments(trainer, task):
                chosen = count_predictions(trainer, tasks)
        elif trainer.memory_moments and trainer.plan.slots:
            try:
                with memory_moments(trainer, task):
                    beside = count_predictions(trainer, tasks)
            except ValueError:  # such as a memory of one sample, or moments that are not finite
                beside = {}
        if settings.moments == "task":
            trainer.save_moments_of(task)
            chosen = _count_with_task_moments(trainer, running, task)
    found = {f"{name}_running": row for name, row in running.items() if chosen[name] is not row}
    for name, row in (chosen | found | {f"{name}_memory": row for name, row in beside.items()}).items():
        measured.rows.setdefault(name, []).append(row)
    if drift is not None:
        measured.drift.append(drift)


def count_predictions(trainer: Trainer, tasks: int) -> dict[str, Row]:
    """Evaluate the network as it is on the test samples of the first tasks. Test items are ordered by task."""
    test, sizes = trainer.data.sequence.test, trainer.test_samples[:tasks]
    logits = _logits(trainer, torch.arange(sum(sizes), device=trainer.device))
    padding = [None] * (len(trainer.plan.ends) - tasks)
    if trainer.data.sequence.multi_label:
        task, label = test.task[: len(logits)], test.label[: len(logits)]
        scores = np.nan_to_num(logits.cpu().numpy(), nan=float(np.finfo(np.float32).min))  # NaN: a negative prediction
        own = [LabelStats.of(scores[task == t], label[task == t]).to_json() for t in range(tasks)]
        return {"labels": {"own": [*own, *padding], "tally": LabelStats.of(scores, label).to_json()}}
    table = trainer.data.test
    heads = {"matrix": trainer.head} | ({} if trainer.task_mask is None else {"matrix_task": trainer.task_mask})
    right = {
        name: head(logits, table.task[: len(logits)]).argmax(1) == table.label[: len(logits)]
        for name, head in heads.items()
    }
    return {
        name: [*torch.stack([part.sum() for part in torch.split(of_head, sizes)]).tolist(), *padding]
        for name, of_head in right.items()
    }


def _count_with_task_moments(trainer: Trainer, running: dict[str, Row], task: int) -> dict[str, Row]:
    """Count the correct predictions on earlier tasks again, each with the running moments saved at its end.

    These moments assume that the task is known. In class-incremental streams it is known for ``matrix_task`` alone.
    """
    name = "matrix_task" if "matrix_task" in running else "matrix"
    head, table, counts = trainer.task_mask or trainer.head, trainer.data.test, list(running[name])
    for earlier in range(task):
        items = torch.nonzero(table.task == earlier).squeeze(1)
        with trainer.using_moments_of(earlier):
            logits = _logits(trainer, items)
        counts[earlier] = int((head(logits, table.task[items]).argmax(1) == table.label[items]).sum())
    return {**running, name: counts}


@torch.no_grad()
def _logits(trainer: Trainer, items: Tensor) -> Tensor:
    """Return the logits of test items."""
    trainer.model.eval()
    size, may_pad, parts = evaluation_batch(trainer), _may_pad(trainer), []
    for part in torch.split(items, size):
        # The number of test items is another one after each task. For every new batch size, the libraries of a GPU
        # choose and set up the kernels of all layers again, which takes longer than the evaluation.
        padded = min(size, 1 << (len(part) - 1).bit_length()) if may_pad else len(part)
        batch = torch.cat([part, part[-1:].expand(padded - len(part))]) if padded > len(part) else part
        with trainer.autocast():
            parts.append(trainer.model(trainer.data.test_x(batch))[: len(part)].float())
    return torch.cat(parts)


def _may_pad(trainer: Trainer) -> bool:
    """Whether batches are padded: on a GPU, if the output of a sample does not depend on the others."""
    return (
        trainer.device.type != "cpu"
        and trainer.has_package_network
        and all(getattr(module, "running_mean", module) is not None for module in trainer.model.modules())
    )


def evaluation_batch(trainer: Trainer) -> int:
    """Return the batch size for evaluation."""
    image = trainer.data.images.test.pixels[0]
    most = TEST_BATCH
    if trainer.device.type == "cuda":
        memory = torch.cuda.get_device_properties(trainer.device).total_memory
        most = min(LARGE_TEST_BATCH, max(TEST_BATCH, memory // (MAPS_IN_MEMORY * 64 * image[0].numel() * 4)))
    return max(1, min(most, TEST_VALUES // image.numel()))


class ItemBatches:
    """Batches of images of items, without augmentation; can be iterated repeatedly.

    Args:
        trainer: The run.
        items: The items.
        values: One value of each item, such as labels or weights; batches are then pairs of images and values.
        test: Whether they are items of the test samples.
    """

    def __init__(self, trainer: Trainer, items: Tensor, values: Tensor | None = None, test: bool = False) -> None:
        self.images = trainer.data.test_x if test else trainer.data.train_x
        self.items, self.values, self.size = items, values, evaluation_batch(trainer)

    def __len__(self) -> int:
        return max(1, -(-len(self.items) // self.size))  # torch.split of no items has one empty part

    def __iter__(self) -> Iterator[Any]:
        images = map(self.images, torch.split(self.items, self.size))
        return images if self.values is None else zip(images, torch.split(self.values, self.size), strict=True)


def task_batches(trainer: Trainer, task: int, *, test: bool = False) -> ItemBatches:
    """Return the batches of images and labels of one task."""
    table = trainer.data.test if test else trainer.data.train
    items = torch.nonzero(table.task == task).squeeze(1)
    return ItemBatches(trainer, items, table.label[items], test)


def memory_moments(trainer: Trainer, task: int) -> Reestimated:
    """Replace running moments by the exact moments of the samples in the memory at the end of a task.

    Leaving the context of the returned object restores the running moments.
    """
    items = stored_items(trainer.plan, trainer.plan.ends[task])
    weights = sample_weights(trainer.config, trainer.plan, trainer.data.sequence.train.task[items], task)
    plain = trainer.config.evaluate.weights == "plain"
    values = None if plain else torch.from_numpy(weights)
    batches = ItemBatches(trainer, torch.from_numpy(items).to(trainer.device), values)
    if plain:
        return reestimate(trainer.model, batches, call=nn.Module.__call__, frozen="lift")
    return reestimate(trainer.model, batches, weights=itemgetter(1), frozen="lift")


def classes_of(trainer: Trainer, x: Tensor, task: int) -> Tensor:
    """Return the predicted classes of images of one task, among the outputs that the scenario allows."""
    with trainer.autocast():
        logits = trainer.model(x)
    return trainer.head(logits.float(), torch.full((len(x),), task, device=trainer.device)).argmax(1)


def task_scores(trainer: Trainer, measured: Measurements, task: int) -> TaskScores:
    """Return the scores after a task, from its rows."""
    if "labels" in measured.rows:
        row = measured.rows["labels"][task]
        own = [None if stats is None else LabelStats.from_json(stats) for stats in row["own"]]
        return label_scores(own, LabelStats.from_json(row["tally"]))
    return accuracy_scores(measured.rows["matrix"][task], trainer.test_samples, task)


def run_results(trainer: Trainer, measured: Measurements) -> dict[str, Any]:
    """Return the measured part of a run's record."""
    results: dict[str, Any] = {}
    for name, rows in measured.rows.items():
        if len(rows) < measured.tasks:  # moments could not be estimated, or the run started without them
            continue
        if name.startswith("labels"):
            results[name] = {key: [row[key] for row in rows] for key in ("own", "tally")}
        else:
            before = measured.before.get("matrix_task" if name.startswith("matrix_task") else "matrix")
            results[name] = {"correct": rows, "total": trainer.test_samples, "before": before}
    stream, model = trainer.data.sequence, trainer.model
    if isinstance(stream.source, MultiLabelSource):
        results["classes"] = {"names": list(stream.source.class_names), "groups": list(stream.source.class_groups)}
        results["census"] = take_census(trainer.plan, stream)
    results |= {
        "drift": {"by_task": measured.drift},
        "seconds": {**measured.seconds, "train_by_task": measured.train_by_task},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "task_ends": list(trainer.plan.ends),  # steps, for logs that are made of records
        "norms": count_norms(model),
    }
    if shares := [module.corrected_share() for module in model.modules() if isinstance(module, BatchRenormBase)]:
        results["renorm"] = {"corrected_share": fmean(shares)}
    if len(trainer.plan.ends) < stream.tasks:
        results["reached"] = {"tasks": len(trainer.plan.ends), "of": stream.tasks}
    if trainer.config.norm.groups == "auto":
        groups = {name: getattr(module, "num_groups", None) for name, module in model.named_modules()}
        results["norm_groups"] = {name: number for name, number in groups.items() if isinstance(number, int)}
    return results
