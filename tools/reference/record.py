"""Page of the schema of a record, with a committed record as its example."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contnorm.bench.records import SCHEMA
from tools.reference.markdown import code, table

__all__ = ["EXAMPLE", "FIELDS", "Field", "field_keys", "matches", "page"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "docs/records/runs/permuted-mnist-fresh-seeds.jsonl.gz"


class Field(NamedTuple):
    """A field of a record: type, where it occurs, and meaning."""

    type: str
    where: str
    meaning: str


_ALL, _FINISHED, _LABELS = "all", "finished", "finished, multi-label"
_COUNTS = "correct predictions on the test samples of each task, after each task"
FIELDS = {
    "schema": Field("int", _ALL, f"Version of this schema: {SCHEMA}."),
    "config": Field("object", _ALL, "All [settings](settings.md) of the run, by group and name."),
    "hash": Field("str", _ALL, "Hash of the settings that differ from their defaults, 12 hexadecimal digits."),
    "seed": Field("int", _ALL, "Seed of the run. Hash and seed identify a record."),
    "status": Field("str", _ALL, "`finished` or `diverged`."),
    "seal": Field("str", _ALL, "SHA-256 of the canonical JSON of all other fields."),
    "reason": Field("str", "diverged", "Message about the divergence: seed, step and task."),
    "matrix": Field("object", _FINISHED, f"The accuracy matrix: {_COUNTS}."),
    "matrix.correct": Field("list of lists of int or null", _FINISHED, "Row i after task i, one column per task; null "
                            "where nothing was measured."),
    "matrix.total": Field("list of int", _FINISHED, "Test samples of each task."),
    "matrix.before": Field("list of int or null", _FINISHED, "Correct predictions of the untrained network; null "
                           "unless `evaluate.ahead` is true."),
    "matrix_running": Field("object", _FINISHED, "The same with running moments, if `evaluate.moments` is another."),
    "matrix_memory": Field("object", _FINISHED, "The same with memory moments, of runs with `--memory-moments`."),
    "matrix_task": Field("object", _FINISHED, "Class-incremental streams: the same network evaluated with the task "
                         "known, so that only outputs of the sample's task compete."),
    "matrix_task_running": Field("object", _FINISHED, "`matrix_task` with running moments, if `evaluate.moments` is "
                                 "another."),
    "matrix_task_memory": Field("object", _FINISHED, "`matrix_task` with memory moments, of runs with "
                                "`--memory-moments`."),
    "labels": Field("object", _LABELS, "Label statistics after each task, in place of `matrix`."),
    "labels.own": Field("list of lists of object or null", _LABELS, "On the test images of each task: `samples` (int), "
                        "and as texts with a number per class `tp`, `predicted`, `positive` and `ap` (`-` for none)."),
    "labels.tally": Field("list of object", _LABELS, "The same on the test images of all tasks so far."),
    "labels_running": Field("object", _LABELS, "As `labels`, with running moments, if `evaluate.moments` is another."),
    "labels_memory": Field("object", _LABELS, "As `labels`, with memory moments, of runs with `--memory-moments`."),
    "classes": Field("object", _LABELS, "Names of the classes and the groups that scores are reported for."),
    "classes.names": Field("list of str", _LABELS, "Name of each class."),
    "classes.groups": Field("list of str", _LABELS, "Group of each class: `majority`, `moderate` or `minority`."),
    "census": Field("object", _LABELS, "Class counts of the memory and the stream, at the end of each task."),
    "census.capacity": Field("int", _LABELS, "Slots of the memory; 0 without one."),
    "census.held": Field("list of str", _LABELS, "Samples of each class in the memory, as numbers in one text."),
    "census.shown": Field("list of str", _LABELS, "Samples of each class in the stream so far."),
    "census.written": Field("list of int", _LABELS, "Samples written to the memory so far."),
    "census.evicted": Field("list of int", _LABELS, "Writes so far that replaced another sample."),
    "drift": Field("object", _FINISHED, "Distances between running and exact moments."),
    "drift.by_task": Field("list of object", _FINISHED, "After each task, by layer: `mean` and `var`, the L1 distances "
                           "over channels; empty if `evaluate.drift` is false."),
    "seconds": Field("object", _FINISHED, "Times; they are not results, and differ between repetitions."),
    "seconds.train": Field("number", _FINISHED, "Training, evaluation excluded; of parallel lanes, their share."),
    "seconds.evaluate": Field("number", _FINISHED, "Evaluation."),
    "seconds.train_by_task": Field("list of number", _FINISHED, "Training of each task."),
    "seconds.together": Field("number", _FINISHED, "All runs that were executed in the same lanes."),
    "seconds.lanes": Field("int", _FINISHED, "Number of these runs."),
    "seconds.all": Field("number", _FINISHED, "The whole run, in records of early versions."),
    "parameters": Field("int", _FINISHED, "Parameters of the network."),
    "task_ends": Field("list of int", _FINISHED, "Steps done at the end of each task."),
    "norms": Field("object", _FINISHED, "Number of norm layers by class."),
    "norm_groups": Field("object", _FINISHED, "Groups of each layer, if `norm.groups` is `auto`."),
    "renorm": Field("object", _FINISHED, "Batch renormalization: what its limits did."),
    "renorm.corrected_share": Field("number", _FINISHED, "Share of the batches in which r could differ from 1."),
    "reached": Field("object", _FINISHED, "With `train.max_steps`: how far the run got."),
    "reached.tasks": Field("int", _FINISHED, "Tasks that were begun."),
    "reached.of": Field("int", _FINISHED, "Tasks of the stream."),
    "versions": Field("object", _ALL, "Versions of contnorm, torch, Python, CUDA (null without) and used plugins."),
    "device": Field("object", _ALL, "Where the run was executed."),
    "device.kind": Field("str", _ALL, "`cpu` or `cuda`."),
    "device.name": Field("str", _ALL, "Name of the processor or GPU."),
    "device.threads": Field("int", _ALL, "CPU threads."),
    "device.instructions": Field("str", _ALL, "Vector instructions that torch uses, on a CPU."),
    "device.cn_kernel": Field("str", _ALL, "Kernel of CN on a CPU: `cpp`, `torch` without a compiler, or a named one."),
    "precision": Field("str", _ALL, "Precision of training, as `train.precision`."),
    "deterministic": Field("bool", _ALL, "Whether only deterministic algorithms were used."),
    "convolutions": Field("str", _ALL, "Hash of the table of convolution kernels, if Triton computed some of them."),
    "source": Field("object", _ALL, "The data set."),
    "source.name": Field("str", _ALL, "Its name."),
    "source.fingerprint": Field("str", _ALL, "Hash of its images and labels; equal data have equal fingerprints."),
    "source.images": Field("int", _ALL, "Images that were there."),
    "source.published_images": Field("int or null", _ALL, "Images of the published data set."),
    "source.missing_images": Field("int", _ALL, "Images that were missing, with `--allow-missing`."),
    "source.extra_images": Field("int", _ALL, "Images that the published data set does not have."),
    "source.missing_by_split": Field("object", _ALL, "The same by split."),
    "source.missing_by_split.train": Field("int", _ALL, "Missing training images."),
    "source.missing_by_split.test": Field("int", _ALL, "Missing test images."),
    "source.deviating_classes": Field("int", _ALL, "Classes with missing or further images."),
    "source.split": Field("str", _ALL, "How images were divided into training and test images, if not officially."),
    "source.decoder": Field("str", _ALL, "Library that decoded the images, with its version."),
    "initial_weights": Field("str", _ALL, "Note that all seeds started from the weights of a given module."),
    "commit": Field("str or null", _ALL, "Commit of contnorm; with `-dirty` if its checkout had changes."),
}  # fmt: skip

_OPEN = ("config", "norms", "norm_groups", "versions")  # objects whose keys are not fields
_ANY_MATRIX = (
    "matrix_running", "matrix_memory", "matrix_task", "matrix_task_running", "matrix_task_memory", "labels_running",
    "labels_memory",
)  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "number": (int, float), "str": (str,), "bool": (bool,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


def field_keys(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of the fields of a record with their values, without those of open objects and further matrices."""
    for key, value in record.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict) and key not in (*_OPEN, *_ANY_MATRIX):
            yield from field_keys(value, f"{prefix}{key}.")


def matches(value: object, kind: str) -> bool:
    """Whether a value has a type of the table.

    Example:
        >>> matches([[1, None], [2, 3]], "list of lists of int or null"), matches([1, "a"], "list of int")
        (True, False)
    """
    if kind.startswith("list of "):
        if value is None:
            return kind.endswith(" or null")
        inner = kind.removeprefix("list of ").replace("lists of", "list of")
        return isinstance(value, list) and all(matches(one, inner) for one in value)
    return any(
        isinstance(value, _TYPES[name]) and (name == "bool" or not isinstance(value, bool))
        for name in kind.split(" or ")
    )


def page() -> str:
    """Every field of a record, an example and the rules of compatibility."""
    lines = [_INTRODUCTION, ""]
    lines += table(("field", "type", "in", "meaning"), [(code(key), *field) for key, field in FIELDS.items()])
    return "\n".join(
        [*lines, "", _EXAMPLE.format(path=f"../../{EXAMPLE}".replace("../../docs", ".."), json=_example())]
    )


def _example() -> str:
    """The first record of the example's archive, with one line per field and per group of settings."""
    with gzip.open(ROOT / EXAMPLE, "rt", encoding="utf-8") as file:
        record = json.loads(file.readline())
    groups = [f'  "{group}": {json.dumps(values)}' for group, values in record["config"].items()]
    parts = [
        f' "{key}": ' + ("{\n" + ",\n".join(groups) + "\n }" if key == "config" else json.dumps(value))
        for key, value in record.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}"


_INTRODUCTION = """\
# Records

A run that finished or diverged has one record: the JSON file `RUNS/HASH/SEED.json`. It holds the settings, the counts
that all [scores](metrics.md) are computed from, and what the results depend on. A run that was stopped has a
checkpoint instead. Fields that do not apply are absent. A dot stands for a field inside an object.

A test compares this table with the records of the documentation and with new ones."""

_EXAMPLE = f"""\
## Example

The first record of `{EXAMPLE}`:

```json
{{json}}
```

```python
import gzip
import hashlib
import json

from contnorm import bench

archive = "{EXAMPLE}"
with gzip.open(archive, "rt") as file:
    raw = json.loads(file.readline())

# The seal is the checksum of the other fields, and the hash that of the settings.
content = {{{{key: value for key, value in raw.items() if key != "seal"}}}}
canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
assert hashlib.sha256(canonical.encode()).hexdigest() == raw["seal"]

record = bench.load_runs(archive).records[0]
assert (record.hash, record.seed) == (raw["hash"], raw["seed"])
final = raw["matrix"]["correct"][-1]
acc = sum(100 * right / total for right, total in zip(final, raw["matrix"]["total"])) / len(final)
assert abs(record.score("acc") - acc) < 1e-9
```

## Compatibility

- Records have schema 3. Those of the schemas 1 and 2, which no release wrote, are not read.
- Settings are never renamed, and their defaults never change. The hash counts only settings that differ from their
  defaults, so a new setting does not change the hash of older records.
- A record that does not match its seal or the hash of its settings is reported and left out.
- Fields may be added. A program that reads records should ignore those it does not know.
- Reading a record executes nothing: it is parsed and checked, not unpickled.

## Archives

`contnorm show --runs RUNS --to FILE.jsonl.gz` writes all records to one file: one record per line, sorted by hash
and seed. Every command and `bench.load_runs` read an archive, or a folder of archives, like a runs folder. Equal
records give equal bytes. A damaged line is reported by its number, and the others are read. `FILE.jsonl` is the same
without compression.
"""
