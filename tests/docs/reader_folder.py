"""The folder of a reader who follows a page: small data sets, images, code of the reader, files that the page shows."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from tests.datasets import (
    small_cifar10,
    small_cifar100,
    small_coco,
    small_mini_imagenet,
    small_mnist,
    small_nus_wide,
    small_tiny_imagenet,
)
from tests.docs.mine import make
from tests.docs.pages import ROOT, Block, blocks, commands

__all__ = ["installed_package", "prepare_folder"]

# A word in the commands of a page, and what it names in the reader's folder, which is also the home folder.
_DATA: dict[str, Callable[[Path], object]] = {
    "mnist": lambda home: small_mnist(home / "data", train=300, test=40),
    "--norm": lambda home: small_mnist(home / "data", train=300, test=40),  # of the default stream
    "paper": lambda home: small_mnist(home / "data", train=300, test=40),
    "cifar10": lambda home: small_cifar10(home / "data", per_class=5, test_labels=range(10)),
    "cifar100": lambda home: small_cifar100(home / "data", per_class=2, test_labels=range(100)),
    "table2": lambda home: small_cifar100(home / "data", per_class=2, test_labels=range(100)),
    "tiny-imagenet": lambda home: small_tiny_imagenet(home / "data", per_class=1),
    "mini-imagenet": lambda home: small_mini_imagenet(home / "data", per_class=2),
    "~/coco": lambda home: small_coco(home / "coco"),
    "~/nus-wide": lambda home: small_nus_wide(home / "nus-wide"),
    "blobs.npz": lambda home: _blobs(home / "blobs.npz"),
    "net.safetensors": lambda home: _weights(home),
    "my-images": lambda home: _image_folder(home / "my-images", classes=10),
    "pictures/flowers": lambda home: _image_folder(home / "pictures" / "flowers", classes=10),
}
_CSV_PAGE = ROOT / "docs" / "howto" / "long-tail.md"
_READER_CODE = ROOT / "tests" / "docs" / "mine.py"


def prepare_folder(page: Path, home: Path) -> None:
    """Write what the commands of a page need into a folder that starts empty."""
    text = "\n".join(commands(page))
    (home / "data").mkdir()
    (home / "docs").mkdir()
    (home / "docs" / "records").symlink_to(ROOT / "docs" / "records")
    (home / "examples").symlink_to(ROOT / "examples")
    for word, write in _DATA.items():
        if word in text:
            write(home)
    _write_named_files(page, home)
    _write_table(page, home, text)
    _write_photos(home, text)
    _write_user_code(page, home, text)


def installed_package(page: Path, home: Path) -> bool:
    """Install the package that a page shows, if it does: its entry points, beside the files of its modules."""
    for block in blocks(page, "toml"):
        project = tomllib.loads(block.text).get("project", {})
        if "name" in project and "entry-points" in project:
            folder = home / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
            groups = project["entry-points"].items()
            sections = [
                f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups
            ]
            (folder / "entry_points.txt").write_text("\n".join(sections))
            return True
    return False


def _write_named_files(page: Path, home: Path) -> None:
    """Write the blocks whose first line is a comment with the name of a file, such as ``# newest_samples/parts.py``."""
    for block in blocks(page, "python", "toml", "json", "yaml", "text"):
        if match := re.match(r"# ([\w./-]+\.\w+)\n", block.text):
            path = home / match[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def _write_table(page: Path, home: Path, text: str) -> None:
    """Write the first table of settings of a page as the `.toml` file that its commands name."""
    settings = [block for block in blocks(page, "toml") if "project" not in tomllib.loads(block.text)]
    for file in set(re.findall(r"(?<![\w/])[\w-]+\.toml\b", text)):
        (home / file).write_text(settings[0].text)


def _write_photos(home: Path, text: str) -> None:
    """Write the CSV table of the documentation as the file that commands name, and the pictures that it lists."""
    for file, folder in re.findall(r"--csv (\S+) --images ~/(\S+)", text):
        rows = next(block.text for block in blocks(_CSV_PAGE, "text") if block.text.startswith("image,"))
        header, *lines = rows.splitlines()
        rows = "\n".join([header, *(line.replace(".jpg", f"_{i}.jpg") for i in range(10) for line in lines)])
        (home / file).write_text(rows + "\n")
        for picture in re.findall(r"^\S+\.jpg", rows, re.MULTILINE):
            (home / folder / picture).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 10)).save(home / folder / picture)


def _write_user_code(page: Path, home: Path, text: str) -> None:
    """Write ``file.py`` of each ``file.py:Name`` with the blocks of the page that define or import what it needs."""
    for file, name in re.findall(r"([\w-]+\.py):(\w+)", text):
        if (home / file).exists():
            continue
        if file == _READER_CODE.name:
            (home / file).write_text(_READER_CODE.read_text())
            continue
        python = blocks(page, "python")
        defining = next(
            (i for i, block in enumerate(python) if re.search(rf"^(?:class|def) {name}\b", block.text, re.MULTILINE)),
            None,
        )
        assert defining is not None, f"no block of the page defines {name} of {file}"
        (home / file).write_text(_definitions(python[: defining + 1]))


def _definitions(python: list[Block]) -> str:
    """The last block, with the imports of those before it."""
    imports = [line for block in python[:-1] for line in block.text.splitlines() if re.match(r"(?:import|from) ", line)]
    return "\n".join([*imports, python[-1].text])


def _blobs(path: Path) -> None:
    labels = np.arange(80) % 4
    x = np.random.default_rng(0).normal(size=(80, 16)) + labels[:, None]
    np.savez(path, x_train=x[:60], y_train=labels[:60], x_test=x[60:], y_test=labels[60:])


def _weights(home: Path) -> None:
    """A network of the reader, trained elsewhere."""
    (home / "net.py").write_text(_READER_CODE.read_text())
    save_file(make((1, 28, 28), 10).state_dict(), home / "net.safetensors")


def _image_folder(folder: Path, classes: int, per_class: int = 5) -> None:
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(per_class):
            pixels = rng.integers(0, 256, size=(40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{i}.png")
