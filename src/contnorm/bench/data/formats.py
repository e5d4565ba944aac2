"""Readers of the published file formats: MNIST's idx files, and CIFAR's pickles and binary files.

CIFAR's readers return uint8 images (samples, channels, height, width) and int64 labels. Errors name the file and the
check that failed.

CIFAR's official pickles are parsed without unpickling them. ``pickle.Unpickler`` calls the functions that a file names;
even if it is limited to numpy's functions, a file can build an array of object pointers and dereference them.
`parse_array_pickle` interprets the opcodes one by one: nothing is imported or called, and any opcode, name or type
beyond the layout of CIFAR's batches raises `PickleFormatError`. Memory use is proportional to the size of the file.
Accepted are protocols 2 to 5, as written by Python 2 (the official files) and by Python 3 with numpy 1 or 2.
"""

from __future__ import annotations

import gzip
import io
import math
import pickletools
import struct
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from contnorm.bench.data.dataset import Images, Labels
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.errors import UserError

__all__ = [
    "PickleFormatError",
    "parse_array_pickle",
    "read_cifar_binary",
    "read_cifar_pickle",
    "read_idx",
]

MAX_BYTES = 2**30  # limit for decompressed files; the largest official one has 160 million


def read_idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not.

    Args:
        path: File.
        rank: Required number of dimensions: 3 for images, 1 for labels.
    """
    content = _content(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise UserError(
            f"{path}: is not an idx file of bytes: it starts with {content[:4]!r} instead of b'\\x00\\x00\\x08'."
        )
    if content[3] != rank:
        raise UserError(f"{path}: has {content[3]} dimensions according to its header; {rank} are expected.")
    if len(content) < 4 + 4 * rank:
        raise UserError(f"{path}: the header is truncated: {len(content)} of {4 + 4 * rank} bytes.")
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    body = content[4 + 4 * rank :]
    if not all(sizes) or len(body) != math.prod(sizes):
        shape = " x ".join(f"{size:,}" for size in sizes)
        raise UserError(
            f"{path}: has {len(body):,} values after its header instead of {shape}. The file is damaged or truncated; "
            f"download it again."
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(sizes)


def _content(path: Path) -> bytes:
    """Read a file, decompressed, up to `MAX_BYTES`: a small gzip file can expand to any size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read, perhaps because it is truncated or damaged ({error}).") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: has more than {MAX_BYTES:,} bytes, so it is not the expected file.")
    return content


def read_cifar_binary(path: Path, coarse: bool) -> tuple[Images, Labels]:
    """Read records of one label (CIFAR-10), or a coarse and a fine label (CIFAR-100), and 3,072 bytes of pixels."""
    head = 2 if coarse else 1
    raw = np.frombuffer(_content(path), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % (head + 3072):
        raise UserError(
            f"{path}: its size of {len(raw):,} bytes is not a multiple of the record size of {head + 3072}."
        )
    records = raw.reshape(-1, head + 3072)
    return records[:, head:].reshape(-1, 3, 32, 32), records[:, head - 1].astype(np.int64)


def read_cifar_pickle(path: Path, labels: str) -> tuple[Images, Labels]:
    """Read an official pickled batch; ``labels`` is the key of its labels. Nothing in the file is executed."""
    try:
        batch = parse_array_pickle(_content(path))
    except PickleFormatError as error:
        raise UserError(f"{path}: is not a CIFAR batch: {error}.") from error
    missing = [key for key in ("data", labels) if key.encode() not in batch]
    if missing:
        raise UserError(f"{path}: is not a CIFAR batch: it has no {missing[0]!r}.")
    images, classes = batch[b"data"], batch[labels.encode()]
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
        raise UserError(f"{path}: is not a CIFAR batch: 'data' must be rows of 3,072 bytes.")
    numbers = _checked_labels(path, labels, classes)
    if len(numbers) != len(images):
        raise UserError(
            f"{path}: has {len(images):,} images and {len(numbers):,} {labels}; there must be one label per image."
        )
    return images.reshape(-1, 3, 32, 32), numbers


def _checked_labels(path: Path, key: str, labels: object) -> Labels:
    """Convert labels from a list of integers or an array of bytes."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        return labels.astype(np.int64)
    if not isinstance(labels, list):
        raise UserError(f"{path}: is not a CIFAR batch: {key!r} must be a list of integers.")
    for position, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < 256:
            kind = str(label)[:20] if type(label) is int and abs(label) < 2**63 else type(label).__name__
            raise UserError(f"{path}: label {position} of {key!r} must be an integer from 0 to 255, got {kind}.")
    return np.array(labels, dtype=np.int64)


MAX_RANK, MAX_LENGTH = 4, 2**31
_MARK = object()
_UINT8 = object()  # stands for numpy.dtype("u1"), the only supported data type


class PickleFormatError(ValueError):
    """A pickle that is damaged, or holds anything but plain data and uint8 arrays."""


class _Name(Enum):
    """Functions and types that a pickle can refer to; they are interpreted by `_Parser` and never called."""

    RECONSTRUCT = "_reconstruct"
    FROM_BUFFER = "_frombuffer"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    ENCODE = "encode"
    BYTES = "bytes"


_NAMES = {
    "numpy.core.multiarray._reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": _Name.RECONSTRUCT,
    "numpy.core.numeric._frombuffer": _Name.FROM_BUFFER,
    "numpy._core.numeric._frombuffer": _Name.FROM_BUFFER,
    "numpy.ndarray": _Name.NDARRAY,
    "numpy.dtype": _Name.DTYPE,
    "_codecs.encode": _Name.ENCODE,  # bytes in protocol 2 of Python 3
    "__builtin__.bytes": _Name.BYTES,  # empty bytes in protocol 2 of Python 3
}


class _PendingArray:
    """Result of ``_reconstruct``: an array whose shape and content follow in a BUILD opcode."""

    array: NDArray[np.uint8] | None = None


def parse_array_pickle(content: bytes) -> dict[bytes, Any]:
    """Return the dictionary in a pickle, with its keys as bytes.

    Example:
        >>> import pickle
        >>> parse_array_pickle(pickle.dumps({"labels": [3, 1]}))
        {b'labels': [3, 1]}
    """
    parser = _Parser(len(content))
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            parser.interpret(opcode.name, argument)
    except PickleFormatError:
        raise
    except ValueError as error:  # raised by genops for an unknown opcode or a truncated argument
        raise PickleFormatError(f"damaged or truncated: {str(error)[:100]}") from error
    return parser.result()


class _Parser:
    """A stack machine for the opcodes in `_OPCODES`.

    Args:
        size: Size of the file in bytes, which bounds the number of bytes decoded from it.
    """

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.encode_budget = size

    def interpret(self, opcode: str, argument: Any) -> None:
        """Apply one opcode."""
        action = _OPCODES.get(opcode)
        if action is None:
            raise PickleFormatError(f"opcode {opcode} is not allowed")
        action(self, argument)

    def result(self) -> dict[bytes, Any]:
        """Return the object on the stack after STOP, with pending arrays replaced by their content."""
        value = self.pop()
        if type(value) is not dict:
            raise PickleFormatError("it is not a dictionary")
        return {key: _finished(entry) for key, entry in value.items()}

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleFormatError("damaged: a value is missing")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise PickleFormatError(f"damaged: a {kind.__name__} is missing")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Remove and return all values above the last mark; the mark is removed too."""
        values = []
        while self.stack and self.stack[-1] is not _MARK:
            values.append(self.stack.pop())
        if not self.stack:
            raise PickleFormatError("damaged: a mark is missing")
        self.stack.pop()
        return values[::-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_tuple(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top(dict)
        if len(values) % 2:
            raise PickleFormatError("damaged: a key has no value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_as_bytes(key)] = value

    def memoize(self, index: int | None) -> None:
        """Store the top of the stack: under an index, or under the next one for MEMOIZE."""
        value = self.pop()
        self.memo[len(self.memo) if index is None else index] = value
        self.push(value)

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise PickleFormatError("damaged: it refers to a value that was not stored")
        self.push(self.memo[index])

    def push_name(self, module: Any, name: Any) -> None:
        known = _NAMES.get(f"{module}.{name}") if type(module) is type(name) is str else None
        if known is None:
            raise PickleFormatError(f"it refers to {f'{module}.{name}'[:80]!r}, which is not data")
        self.push(known)

    def push_stack_name(self) -> None:
        name = self.pop()
        self.push_name(self.pop(), name)

    def reduce(self) -> None:
        """Interpret the call of a known function."""
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple or type(function) is not _Name:
            raise PickleFormatError("damaged: a call of something that is not a function")
        match function, arguments:
            case _Name.RECONSTRUCT, (_Name.NDARRAY, tuple(), bytes()):
                self.push(_PendingArray())
            case _Name.FROM_BUFFER, (bytes() | bytearray() as raw, data_type, shape, ("C" | "F") as order):
                self.push(_array(raw, data_type, shape, order))
            case _Name.DTYPE, (code, bool() | int(), bool() | int()) if _is_uint8(code):
                self.push(_UINT8)
            case _Name.DTYPE, _:
                raise PickleFormatError("it has an array of another data type than uint8")
            case _Name.ENCODE, (str() as text, "latin1" | "latin-1"):
                self.push(self._encoded(text))
            case _Name.BYTES, ():
                self.push(b"")
            case _:
                raise PickleFormatError(f"a call of {function.value} has other arguments than numpy writes")

    def _encoded(self, text: str) -> bytes:
        """Encode text as bytes, within a budget.

        Without it, a text that is recalled and encoded many times could need far more memory than the file.
        """
        self.encode_budget -= len(text)
        if self.encode_budget < 0:
            raise PickleFormatError("it decodes to more bytes than it holds")
        return text.encode("latin-1")

    def build(self) -> None:
        """Set the state of the data type or array on the stack."""
        state = self.pop()
        target = self.pop()
        if type(target) is _PendingArray and type(state) is tuple and len(state) == 5 and type(state[3]) in (bool, int):
            target.array = _array(state[4], state[2], state[1], "F" if state[3] else "C")
        elif target is not _UINT8 or not _is_plain_state(state):
            raise PickleFormatError("an array or a data type has another state than numpy writes for uint8")
        self.push(target)


def _is_uint8(code: Any) -> bool:
    return type(code) in (str, bytes) and code in ("u1", "|u1", b"u1", b"|u1")


def _is_plain_state(state: Any) -> bool:
    """Whether the state of a data type is that of an integer: no subarray, names, fields, sizes, flags or metadata."""
    if type(state) is not tuple or not 5 <= len(state) <= 9:
        return False
    *version, order = state[:2] if type(state[0]) is int else state[:1]
    plain = all(value is None or (type(value) is int and value in (-1, 0)) for value in state[len(version) + 1 :])
    return plain and type(order) in (str, bytes) and order in ("|", "<", "=", b"|", b"<", b"=")


def _array(raw: Any, data_type: Any, shape: Any, order: str) -> NDArray[np.uint8]:
    if data_type is not _UINT8:
        raise PickleFormatError("it has an array of another data type than uint8")
    if type(raw) not in (bytes, bytearray):
        raise PickleFormatError("the content of an array is not bytes")
    if type(shape) is not tuple or len(shape) > MAX_RANK:
        raise PickleFormatError("the shape of an array is not a tuple of a few integers")
    if any(type(length) is not int or not 0 <= length < MAX_LENGTH for length in shape):
        raise PickleFormatError("the shape of an array is not a tuple of a few integers")
    if math.prod(shape) != len(raw):
        raise PickleFormatError(f"an array holds {len(raw):,} bytes, which do not fit its shape")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _as_bytes(key: Any) -> bytes:
    if type(key) is str:
        return key.encode("utf-8", "surrogatepass")
    if type(key) is not bytes:
        raise PickleFormatError("a key is not a string")
    return key


def _finished(value: Any) -> Any:
    if type(value) is not _PendingArray:
        return value
    if value.array is None:
        raise PickleFormatError("an array has no content")
    return value.array


_Action = Callable[[_Parser, Any], None]
_VALUES = (
    "BININT BININT1 BININT2 LONG1 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 BINUNICODE SHORT_BINUNICODE BINUNICODE8"
)
_OPCODES: dict[str, _Action] = {
    **dict.fromkeys(_VALUES.split(), _Parser.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda parser, argument: None),
    # Strings of Python 2 are bytes; genops decodes them as Latin-1.
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), lambda parser, text: parser.push(text.encode("latin-1"))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Parser.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Parser.recall),
    "NONE": lambda parser, _: parser.push(None),
    "NEWTRUE": lambda parser, _: parser.push(True),
    "NEWFALSE": lambda parser, _: parser.push(False),
    "MARK": lambda parser, _: parser.push(_MARK),
    "EMPTY_DICT": lambda parser, _: parser.push({}),
    "EMPTY_LIST": lambda parser, _: parser.push([]),
    "EMPTY_TUPLE": lambda parser, _: parser.push(()),
    "TUPLE1": lambda parser, _: parser.push_tuple(1),
    "TUPLE2": lambda parser, _: parser.push_tuple(2),
    "TUPLE3": lambda parser, _: parser.push_tuple(3),
    "TUPLE": lambda parser, _: parser.push(tuple(parser.pop_to_mark())),
    "APPEND": lambda parser, _: parser.append([parser.pop()]),
    "APPENDS": lambda parser, _: parser.append(parser.pop_to_mark()),
    "SETITEM": lambda parser, _: parser.set_items([parser.pop(), parser.pop()][::-1]),
    "SETITEMS": lambda parser, _: parser.set_items(parser.pop_to_mark()),
    "GLOBAL": lambda parser, names: parser.push_name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda parser, _: parser.push_stack_name(),
    "REDUCE": lambda parser, _: parser.reduce(),
    "BUILD": lambda parser, _: parser.build(),
}
