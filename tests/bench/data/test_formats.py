"""Readers of idx files and CIFAR batches: what they accept, and that damaged or hostile files raise one UserError."""

from __future__ import annotations

import gzip
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from contnorm.bench.data import formats
from contnorm.bench.data.formats import read_cifar_binary, read_cifar_pickle, read_idx
from contnorm.errors import UserError
from tests.datasets import python2_batch

IMAGES = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)


def read(tmp_path: Path, content: bytes, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    (tmp_path / "batch").write_bytes(content)
    return read_cifar_pickle(tmp_path / "batch", labels)


def one_line(error: pytest.ExceptionInfo[UserError]) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("text_keys", [False, True])
def test_cifar_pickle_of_every_protocol(tmp_path: Path, protocol: int, order: str, text_keys: bool) -> None:
    images = np.asarray(IMAGES, order=order)  # type: ignore[call-overload]
    batch = {b"batch_label": b"", b"labels": [3, 7], b"data": images, b"filenames": [b"a.png", b"b.png"]}
    content = pickle.dumps({k.decode(): v for k, v in batch.items()} if text_keys else batch, protocol=protocol)
    for written_by in (content, content.replace(b"numpy._core", b"numpy.core")):
        if len(written_by) != len(content) and protocol > 3:
            continue  # the lengths of names are written before them
        data, labels = read(tmp_path, written_by)
        np.testing.assert_array_equal(data, IMAGES.reshape(2, 3, 32, 32))
        assert labels.tolist() == [3, 7] and labels.dtype == np.int64


def test_cifar_pickle_of_python_2(tmp_path: Path) -> None:
    data, labels = read(tmp_path, python2_batch(IMAGES, [3, 200], "fine_labels"), "fine_labels")
    np.testing.assert_array_equal(data, IMAGES.reshape(2, 3, 32, 32))
    assert labels.tolist() == [3, 200]


def test_cifar_pickle_of_many_references_to_one_array(tmp_path: Path) -> None:
    data, _ = read(tmp_path, pickle.dumps({"labels": [1, 2], "data": IMAGES, "again": IMAGES}, protocol=4))
    np.testing.assert_array_equal(data, IMAGES.reshape(2, 3, 32, 32))


def array_opcodes(code: bytes, state: bytes, raw: bytes, shape: bytes) -> bytes:
    dtype = b"cnumpy\ndtype\n" + b"U" + bytes([len(code)]) + code + b"K\x00K\x01\x87R" + state
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return array + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"


def forged_labels(code: bytes, state: bytes, raw: bytes, shape: bytes = b"K\x01\x85") -> bytes:
    """One proper image, and labels as an array: the code of its data type, the state set on that, and its content."""
    images = array_opcodes(b"u1", NO_OBJECTS, bytes(3072), b"K\x01M\x00\x0c\x86")
    return b"\x80\x02}(U\x06labels" + array_opcodes(code, state, raw, shape) + b"U\x04data" + images + b"u."


POINTERS = struct.pack("<Q", 0x4141414141414141)
NO_OBJECTS = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
OBJECT_FIELD = (
    b"(K\x03U\x01|N(U\x01at}U\x01acnumpy\ndtype\nU\x01OK\x00K\x01\x87RK\x00\x86sK\x08K\x08K\x00tb"  # at offset 0
)


@pytest.mark.parametrize(
    "content",
    [
        forged_labels(b"O", NO_OBJECTS, POINTERS),
        forged_labels(b"O8", NO_OBJECTS, POINTERS),
        forged_labels(b"V8", OBJECT_FIELD, POINTERS),
        forged_labels(b"u1", OBJECT_FIELD, POINTERS, b"K\x08\x85"),
        forged_labels(b"u1", b"(K\x03U\x01|NNNK\x08J\xff\xff\xff\xffK\x3ftb", POINTERS),
        forged_labels(b"i8", b"", POINTERS),
        forged_labels(b"u1", NO_OBJECTS, POINTERS, b"J\xff\xff\xff\xff\x85"),
        forged_labels(b"u1", NO_OBJECTS, POINTERS, b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01\x85"),
        forged_labels(b"u1", NO_OBJECTS, b"", b"K\x00\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x86"),
        forged_labels(b"u1", NO_OBJECTS, POINTERS, b"K\x09\x85"),
    ],
    ids=[
        "object",
        "object of 8",
        "void with an object field",
        "uint8 with an object field",
        "uint8 with size and flags",
        "int64",
        "negative length",
        "length over 64 bits",
        "empty, of great length",
        "content too short",
    ],
)
def test_forged_array_is_refused(tmp_path: Path, content: bytes) -> None:
    """In a process of its own: an array of object pointers ends the process as soon as one is followed."""
    (tmp_path / "batch").write_bytes(content)
    code = """
        import sys
        from pathlib import Path
        from contnorm.errors import UserError
        from contnorm.bench.data.formats import read_cifar_pickle
        try:
            read_cifar_pickle(Path(sys.argv[1]), "labels")
        except UserError as error:
            print("refused:", error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "batch")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-300:]}"
    assert done.stdout.startswith("refused:") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({b"data": print}), "print"),
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x80\x02cnumpy\nload\n.", "numpy.load"),
        (b"\x80\x02(ios\nsystem\n.", "INST"),
        (b"\x80\x02c__builtin__\nbytes\nM\xff\xff\x85R.", "arguments"),
        (pickle.dumps(IMAGES), "dictionary"),
        (pickle.dumps({"data": IMAGES}), "'labels'"),
        (pickle.dumps({"labels": [1, 2]}), "'data'"),
        (pickle.dumps({"labels": [1, 2], "data": IMAGES.tolist()}), "3,072"),
        (pickle.dumps({"labels": [1, 2], "data": IMAGES[:, :9]}), "3,072"),
        (pickle.dumps({"labels": [1, 2, 3], "data": IMAGES}), "2 images and 3 labels"),
        (pickle.dumps({"labels": [1, 2], "data": IMAGES}, protocol=0), "opcode"),
        (pickle.dumps({"labels": [1, 2], "data": IMAGES.astype(np.float32)}), "uint8"),
        (b"", "truncated"),
        (b"\x80\x02]q\x00h\x00a.", "dictionary"),
        (b"\x80\x02}K\x01K\x02s.", "key"),
        (b"\x80\x02}(U\x06labels" + b"(" * 5 + b"u.", "damaged"),
        (b"\x80\x02h\x07.", "stored"),
    ],
)
def test_pickle_of_other_data_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, content)
    assert one_line(caught) and "batch" in str(caught.value)


@pytest.mark.parametrize(
    "labels",
    [None, [None, 1], [1, 2**63], [1, 2**2000], [-1, 1], [256, 0], [1.0, 2.0], [True, 1], ["1", "2"], [[1], [2]]],
)
def test_invalid_cifar_labels_are_refused(tmp_path: Path, labels: object) -> None:
    for protocol in (2, 5):
        with pytest.raises(UserError) as caught:
            read(tmp_path, pickle.dumps({"labels": labels, "data": IMAGES}, protocol=protocol))
        assert one_line(caught)


def test_repeatedly_encoded_string_is_refused(tmp_path: Path) -> None:
    """Each call of ``_codecs.encode`` would make another copy: a megabyte of opcodes, hundreds of gigabytes."""
    text = b"X" + struct.pack("<I", 10**6) + b"x" * 10**6 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    with pytest.raises(UserError, match="more bytes than it holds"):
        read(tmp_path, b"\x80\x02](" + text + again * 1000 + b"e.")


def idx(*sizes: int, body: int | None = None, head: bytes = b"\x00\x00\x08") -> bytes:
    count = int(np.prod(sizes)) if body is None else body
    return head + bytes([len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + b"\x01" * count


@pytest.mark.parametrize(
    "content",
    [
        *(idx(2, 3, 3)[:n] for n in range(17)),
        idx(2, 3, 3) + b"\x00",
        idx(2, 3, 3, head=b"\x00\x00\x0d"),
        idx(2, 3, 3, head=b"\x00\x01\x08"),
        idx(18),
        idx(1, 2, 3, 3),
        b"\x00\x00\x08\xff",
        idx(0, 28, 28),
        idx(0, 2**32 - 1, 2**32 - 1),
        idx(2**32 - 1, 2**32 - 1, 2**32 - 1, body=4),
        idx(2**31, 2**31, 4, body=0),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_damaged_idx_file_is_refused(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"images{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(UserError, match="images") as caught:
        read_idx(path, 3)
    assert one_line(caught)


def test_idx_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx(2, 3, 3))
    assert read_idx(tmp_path / "a", 3).shape == (2, 3, 3)


def test_too_large_gzip_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(1, 31, 31)))
    assert read_idx(tmp_path / "a.gz", 3).size == 961
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(1, 32, 32)))
    with pytest.raises(UserError, match="more than 1,000 bytes"):
        read_idx(tmp_path / "a.gz", 3)


FUZZ = """
    import random, sys
    from pathlib import Path
    from contnorm.errors import UserError
    from contnorm.bench.data.formats import read_cifar_binary, read_cifar_pickle, read_idx
    readers = {
        "idx": lambda path: read_idx(path, 3),
        "gz": lambda path: read_idx(path, 3),
        "bin": lambda path: read_cifar_binary(path, coarse=True),
    }
    path, kind, seed, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    read = readers.get(kind, lambda path: read_cifar_pickle(path, "labels"))
    valid, chance = path.read_bytes(), random.Random(seed)
    ends = [*range(min(len(valid), 400)), *range(max(0, len(valid) - 400), len(valid))]
    for number in range(rounds):
        content = bytearray(valid)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = min(chance.choice(ends), len(content) - 1)
            action = chance.randrange(5)
            if action == 0:
                content[at] = chance.randrange(256)
            elif action == 1:
                del content[at : at + chance.randrange(1, 9)]
            elif action == 2:
                content[at:at] = chance.randbytes(chance.randrange(1, 9))
            elif action == 3:
                source = chance.choice(ends)
                content[at : at + 4] = content[source : source + 4]
            else:
                del content[max(1, at) :]
            if not content:
                content = bytearray(b"x")
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            assert "\\n" not in str(error) and len(str(error)) < 500, (number, str(error))
        except Exception as error:
            raise SystemExit(f"round {number}: {error!r}") from error
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python2", "protocol 2", "protocol 4", "protocol 5", "idx", "gz", "bin"])
def test_mutated_files_raise_only_user_errors(tmp_path: Path, kind: str) -> None:
    """In a process of its own, so that a crash of the interpreter fails this test and not the whole suite."""
    path = tmp_path / (f"file.{kind}" if kind in ("gz", "bin") else "file")
    batch = {b"labels": [3, 7], b"data": IMAGES, b"filenames": [b"a.png", b"b.png"]}
    contents = {
        "python2": lambda: python2_batch(IMAGES, [3, 7], "labels"),
        "idx": lambda: idx(2, 5, 5),
        "gz": lambda: gzip.compress(idx(2, 5, 5), mtime=0),
        "bin": lambda: bytes(3074 * 2),
    }
    path.write_bytes(contents.get(kind, lambda: pickle.dumps(batch, protocol=int(kind[-1])))())
    command = [sys.executable, "-c", textwrap.dedent(FUZZ), str(path), kind, "0", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-1500:]}"


def test_truncated_or_empty_cifar_binary_is_refused(tmp_path: Path) -> None:
    for size in (0, 1, 3073, 3075):
        (tmp_path / "train.bin").write_bytes(bytes(size))
        with pytest.raises(UserError, match=r"train\.bin"):
            read_cifar_binary(tmp_path / "train.bin", coarse=True)
