"""Small data sets in the usual layouts, made here; and where the real ones are, if anywhere."""

import gzip
import json
import os
import pickle
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.data.dataset import GROUPS, MultiLabelSource
from contnorm.bench.data.formats import MINI_LISTS, MINI_WNIDS
from contnorm.bench.data.multilabel import Listing, Picture, build, published_stream

HERE = Path(__file__).resolve()


def real_data(*wanted: str) -> Path:
    """The folder of real data: ``CONTNORM_DATA``, or one beside the checkout; skips where a file is not there."""
    places = [Path(os.environ["CONTNORM_DATA"])] if "CONTNORM_DATA" in os.environ else []
    places += [parent / "shared" / "data" for parent in HERE.parents]
    for place in places:
        if all((place / name).exists() for name in wanted):
            return place
    pytest.skip(f"no real data with {', '.join(wanted)}: set CONTNORM_DATA to its folder")


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def small_mnist(root: Path, train: int = 300, test: int = 100, ending: str = "", folder: str = "mnist") -> Path:
    """Ten classes of blobs that a network can learn, as MNIST's four files."""
    chance = np.random.default_rng(0)
    centres = chance.integers(0, 200, size=(10, 28, 28))
    for stem, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.clip(centres[labels] + chance.integers(0, 56, size=(count, 28, 28)), 0, 255).astype(np.uint8)
        write_idx(root / folder / f"{stem}-images-idx3-ubyte{ending}", images)
        write_idx(root / folder / f"{stem}-labels-idx1-ubyte{ending}", labels)
    return root


def small_cifar100(
    root: Path, per_class: int = 6, binary: bool = True, test_labels: Sequence[int] = tuple(range(100)) * 2
) -> Path:
    """A hundred classes of noise, in one of CIFAR-100's two layouts."""
    chance = np.random.default_rng(0)
    for split, labels in (("train", list(range(100)) * per_class), ("test", list(test_labels))):
        fine = np.array(labels, dtype=np.uint8)
        images = chance.integers(0, 256, size=(len(fine), 3072), dtype=np.uint8)
        if binary:
            path = root / "cifar-100-binary" / f"{split}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.concatenate([(fine // 5)[:, None], fine[:, None], images], axis=1).tobytes())
        else:
            path = root / "cifar-100-python" / split
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps({b"data": images, b"fine_labels": fine.tolist()}, protocol=2))
    return root


def python2_batch(images: np.ndarray, labels: Sequence[int], key: str) -> bytes:
    """A CIFAR batch with the opcodes that Python 2 and numpy of its time wrote, as in the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    names = b"".join(text(b"name_%d.png" % i) + b"r" + struct.pack("<I", 256 + i) for i in range(len(labels)))
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
    dtype = b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(map(number, images.shape)) + b"\x86"
    raw = images.tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(" + text(b"filenames") + b"q\x02](" + names + b"e",
            text(b"batch_label") + text(b"training batch 1 of 5"),
            text(key.encode()) + b"q\x03]q\x04(" + b"".join(map(number, labels)) + b"e",
            text(b"data") + array + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb",
            b"u.",
        ]
    )


def small_cifar10(root: Path, per_class: int = 20, test_labels: Sequence[int] = range(10)) -> Path:
    """Ten classes of noise, in CIFAR-10's binary layout: five files to learn from, one to test."""
    chance = np.random.default_rng(0)
    labels = np.array(list(range(10)) * per_class, dtype=np.uint8)
    parts = {f"data_batch_{i + 1}": part for i, part in enumerate(np.array_split(labels, 5))}
    parts["test_batch"] = np.array(test_labels, dtype=np.uint8)
    for name, part in parts.items():
        images = chance.integers(0, 256, size=(len(part), 3072), dtype=np.uint8)
        path = root / "cifar-10-batches-bin" / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.concatenate([part[:, None], images], axis=1).tobytes())
    return root


def picture(path: Path, side: int, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (level, 0, 0)).save(path, format="JPEG")


def small_tiny_imagenet(root: Path, per_class: int = 2, test_labels: Sequence[int] = range(200)) -> Path:
    """Two hundred plain colours, in the official layout of Tiny-ImageNet."""
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{10000000 + i}" for i in range(200)]
    for i, wnid in enumerate(wnids):
        for j in range(per_class):
            picture(folder / "train" / wnid / "images" / f"{wnid}_{j}.JPEG", 64, i)
    for i in test_labels:
        picture(folder / "val" / "images" / f"val_{i}.JPEG", 64, i)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = [f"val_{i}.JPEG\t{wnids[i]}\t0\t0\t63\t63" for i in test_labels]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def small_mini_imagenet(root: Path, per_class: int = 3, test_labels: Sequence[int] = range(100)) -> Path:
    """A hundred plain colours, a folder a class, with lists that make one picture of some classes a test picture."""
    folder = root / "mini-imagenet"
    for i, wnid in enumerate(MINI_WNIDS):
        for j in range(per_class):
            picture(folder / wnid / f"{wnid}{j:08d}.jpg", 84, 2 * i)
    test = {(i, 0) for i in test_labels}
    write_mini_lists(folder, per_class, test)
    return root


def write_mini_lists(folder: Path, per_class: int, test: Collection[tuple[int, int]]) -> None:
    """The four split lists of mini-ImageNet; ``test`` has the class and the number of each test picture."""
    rows: dict[str, list[str]] = {name: [] for names in MINI_LISTS for name in names}
    for i, wnid in enumerate(MINI_WNIDS):
        for j in range(per_class):
            name = MINI_LISTS[(i, j) in test][i >= 15]
            rows[name].append(f"/a/b/{wnid}{j:08d}.jpg,{i}")
    for name, lines in rows.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def long_tailed_labels(samples: int, labels: int, tasks: int, seed: int) -> np.ndarray:
    """Rows of one to six labels, task after task; each task has labels of its own, by Zipf's law."""
    chance = np.random.default_rng(seed)
    rows = np.zeros((samples, labels), dtype=np.uint8)
    for task, own in enumerate(np.array_split(np.random.default_rng(0).permutation(labels), tasks)):
        weights = 1 / np.arange(1, len(own) + 1)
        for i in range(task * samples // tasks, (task + 1) * samples // tasks):
            some = min(int(chance.integers(1, 7)), len(own))
            rows[i, chance.choice(own, some, replace=False, p=weights / weights.sum())] = 1
    return rows


def small_multi_label(
    train: int = 180, test: int = 60, labels: int = 12, tasks: int = 3, side: int = 8
) -> MultiLabelSource:
    """Pictures that are the sum of a pattern for each of their labels, so that a network can learn them."""
    patterns = np.random.default_rng(1).integers(0, 60, size=(labels, 3 * side * side))
    parts = []
    for seed, samples in ((2, train), (3, test)):
        rows = long_tailed_labels(samples, labels, tasks, seed)
        images = np.clip(rows.astype(np.int64) @ patterns, 0, 255).astype(np.uint8).reshape(-1, 3, side, side)
        parts.append((images, rows, np.arange(samples) * tasks // samples))
    (train_images, train_rows, train_task), (test_images, test_rows, test_task) = parts
    names, groups = tuple(f"thing {i}" for i in range(labels)), tuple(np.tile(GROUPS, labels)[:labels].tolist())
    return MultiLabelSource(
        "cocoseq", train_images, train_rows, test_images, test_rows, labels, "0" * 16,
        train_task, test_task, tasks, names, groups,
    )  # fmt: skip


DROPPED = (
    "person", "knife", "cup", "wine glass", "keyboard", "mouse", "microwave", "toaster", "hair drier", "cell phone",
)  # fmt: skip


def coco_categories() -> list[dict[str, object]]:
    """COCO's 80, with gaps in their numbers as in COCO; not in the order of the stream's 70."""
    names = sorted([*published_stream("cocoseq").class_names, *DROPPED], reverse=True)
    return [{"id": 3 * i + 1, "name": name} for i, name in enumerate(names)]


def small_coco(root: Path, train: int = 3, test: int = 2, layout: str = "images", lists: str = "ids") -> Path:
    """COCO in small: noise of odd sizes, every fifth grey, each with some labels of the 80, the first with none kept.

    Pictures are numbered 1, 2, 3 and so on: those to learn of task 0, those to test of task 0, then task 1.
    """
    chance = np.random.default_rng(0)
    categories = coco_categories()
    number_of = {str(category["name"]): category["id"] for category in categories}
    annotated: dict[int, list[str]] = {}
    for task in range(4):
        for split, count in (("train", train), ("test", test)):
            numbers = list(range(len(annotated) + 1, len(annotated) + 1 + count))
            for number in numbers:
                annotated[number] = ["person"] if number == 1 else chance.choice(list(number_of), 4, False).tolist()
                _noise(root / _coco_file(layout, number), chance, grey=number % 5 == 0)
            write_json(root / lists / f"{split}_task{task}.json", numbers)
    halves = [[number for number in annotated if number % 2 == half] for half in range(2)]
    years = "2017" if layout == "2017" else "2014"
    for half, name in zip(halves, ("train", "val"), strict=True):
        entries = [(number, kind) for number in half for kind in annotated[number] for _ in range(2)]
        write_json(
            root / "annotations" / f"instances_{name}{years}.json",
            {
                "images": [{"id": number} for number in half],
                "annotations": [
                    {"id": i, "image_id": number, "category_id": number_of[kind], "segmentation": [[1.5, 2.5]]}
                    for i, (number, kind) in enumerate(entries)
                ],
                "categories": categories,
            },
        )
    return root


def _coco_file(layout: str, number: int) -> str:
    half = ("train", "val")[number % 2]
    names = {"images": "images/{:012d}.jpg", "2014": f"{half}2014/COCO_{half}2014_{{:012d}}.jpg"}
    return names.get(layout, f"{half}2017/{{:012d}}.jpg").format(number)


def _noise(path: Path, chance: np.random.Generator, grey: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = tuple(chance.integers(20, 60, size=2))
    pixels = chance.integers(0, 256, size=size if grey else (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="JPEG")


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def small_nus_wide(root: Path, images: int = 20) -> Path:
    """NUS-WIDE in small: official lists of so many images a split, labels of all classes and two more, pictures.

    The tasks have two images to learn and one to test each, the first places of the lists.
    """
    chance = np.random.default_rng(1)
    stream = published_stream("nus-wideseq")
    for split in ("Train", "Test"):
        names = [f"word{i % 3}\\{split}_{i:04d}.jpg" for i in range(images)]
        (root / "ImageList").mkdir(parents=True, exist_ok=True)
        (root / "ImageList" / f"{split}Imagelist.txt").write_text("\r\n".join(names) + "\r\n")
        for kind in (*stream.class_names, "airport", "zebra"):
            path = root / "TrainTestLabels" / f"Labels_{kind}_{split}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(map(str, chance.integers(0, 2, size=images))) + "\n")
        per_task = 2 if split == "Train" else 1
        for task in range(6):
            places = list(range(task * per_task, (task + 1) * per_task))
            write_json(root / "ids" / f"{split.lower()}_task{task}_id_nuswide.json", places)
            for place in places:
                _noise(root / "image" / names[place].replace("\\", "/"), chance, grey=False)
    return root


def small_long_tail(root: Path, name: str, per_task: int = 10, side: int = 16) -> Path:
    """One of the two published long-tailed streams, with a few plain pictures a task, built as they are built."""
    published = published_stream(name)
    classes, chance = len(published.class_names), np.random.default_rng(0)
    parts: dict[str, list[Picture]] = {"train": [], "test": []}
    for split, count in (("train", per_task), ("test", 6)):
        for number in range(count * len(published.task_order)):
            labels = sorted(chance.choice(classes, 3, replace=False).tolist())
            path = root / "pictures" / name / f"{split}{number}.jpg"
            picture(path, side, 3 * labels[0])
            parts[split].append(Picture(f"{split}{number}", path, number // count, tuple(labels)))
    listed = Listing(
        name, published.class_names, published.class_groups, tuple(map(str, published.task_order)),
        tuple(parts["train"]), tuple(parts["test"]), published.images,
    )  # fmt: skip
    build(listed, root / name, side)
    return root
