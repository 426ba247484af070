"""GGUF files: read by mapping, with every count and bound checked; written beside, synced and renamed.

Metadata and tensors go in and out by name; shapes are in NumPy order, GGUF's reversed order exists only here.
It knows no models. The format: ggml/docs/gguf.md, version 3 (version 2 is read too).
"""

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from packtrain.dtypes import BLOCK_TYPES, Dtype, bf16, f16, f32, f64, i8, i16, i32, i64
from packtrain.errors import InputError
from packtrain.files import replacing

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
NAME_NBYTES, AXES = 64, 4  # ggml's limits: names end within 64 bytes, at most four axes
# ggml's type numbers: ggml.h, enum ggml_type
SCALARS = {0: f32, 1: f16, 24: i8, 25: i16, 26: i32, 27: i64, 28: f64, 30: bf16}
TYPES: dict[int, Dtype] = SCALARS | {
    number: BLOCK_TYPES[name]
    for number, name in (
        (2, "q4_0"), (3, "q4_1"), (6, "q5_0"), (7, "q5_1"), (8, "q8_0"), (10, "q2_K"), (11, "q3_K"), (12, "q4_K"),
        (13, "q5_K"), (14, "q6_K"), (16, "iq2_xxs"), (17, "iq2_xs"), (18, "iq3_xxs"), (19, "iq1_s"), (20, "iq4_nl"),
        (21, "iq3_s"), (22, "iq2_s"), (23, "iq4_xs"), (29, "iq1_m"), (34, "tq1_0"), (35, "tq2_0"), (39, "mxfp4"),
        (40, "nvfp4"), (41, "q1_0"), (42, "q2_0"),
    )
}  # fmt: skip
NUMBERS = {dtype: number for number, dtype in TYPES.items()}
# gguf.h, enum gguf_type, by number
KINDS = (
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "f32",
    "bool",
    "string",
    "array",
    "u64",
    "i64",
    "f64",
)
NUMERIC = {"u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4", "f32": "<f4",
           "bool": "?", "u64": "<u8", "i64": "<i8", "f64": "<f8"}  # fmt: skip


class GGUFError(InputError):
    """A file that is no sound GGUF: names the file, the field and what would be right."""


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value with the kind it has in the file: `Value("u32", 8)`, `Value("string", ["a", "b"])`."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: shape in NumPy order, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor to write whose values are made when their turn comes, part by part, so that few are in memory."""

    dtype: Dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.dtype)


def tensor_nbytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    """Bytes of a tensor in a file; its rows must be whole blocks."""
    return math.prod(shape[:-1]) * dtype.row_nbytes(shape[-1] if shape else 1)


class GGUF:
    """An open file: `metadata` by key, `entries` by tensor name; `array(name)` maps a tensor without a copy.

    Raises GGUFError for whatever is not as the format says; nothing is allocated by a count that the file could
    not hold.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.values: dict[str, Value] = {}
        self.entries: dict[str, Entry] = {}
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise GGUFError(f"{path}: is no regular file; a GGUF file must be one")
        try:
            with open(self.path, "rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                if self.nbytes < 24:
                    raise GGUFError(f"{path}: {self.nbytes} bytes; a GGUF file has at least 24")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise GGUFError(f"{path}: cannot be read: {reason}") from None
        self.at = 0
        self._read()

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: value.value for key, value in self.values.items()}

    def array(self, name: str) -> np.ndarray:
        """The tensor's values, read-only; types without a NumPy type come as their bytes, u8 (..., row bytes)."""
        e = self.entries[name]
        if e.dtype.numpy is not None:
            return np.ndarray(e.shape, e.dtype.numpy, self.map, e.offset)
        row = e.dtype.row_nbytes(e.shape[-1] if e.shape else 1)
        return np.ndarray((*e.shape[:-1], row), np.uint8, self.map, e.offset)

    # ---- reading

    def _read(self) -> None:
        if self.map[:4] != MAGIC:
            raise GGUFError(
                f"{self.path}: begins with {self.map[:4]!r}; a GGUF file begins with {MAGIC!r}"
            )
        self.at = 4
        version = self._number("<u4", "version")
        if version not in VERSIONS:
            raise GGUFError(
                f"{self.path}: version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} can be read"
            )
        tensors, pairs = self._count("tensor count", 24), self._count("metadata count", 13)
        for _ in range(pairs):
            key = self._string("a metadata key")
            if key in self.values:
                raise GGUFError(f"{self.path}: metadata key {key} is there twice")
            self.values[key] = self._value(key)
        alignment = self.values.get("general.alignment", Value("u32", ALIGNMENT)).value
        if (
            not isinstance(alignment, int)
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 1 << 20
        ):
            raise GGUFError(
                f"{self.path}: general.alignment is {alignment}; it must be a power of two"
            )
        listed = [self._entry() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        for e in listed:
            self._place(e, start, alignment)

    def _number(self, format: str, what: str) -> Any:
        size = np.dtype(format).itemsize
        self._need(size, what)
        self.at += size
        return np.frombuffer(self.map, format, 1, self.at - size)[0].item()

    def _need(self, nbytes: int, what: str) -> None:
        if nbytes > self.nbytes - self.at:
            left = self.nbytes - self.at
            raise GGUFError(
                f"{self.path}: {what} needs {nbytes} bytes at {self.at}, the file has {left} left"
            )

    def _count(self, what: str, least: int) -> int:
        """A count of things of at least `least` bytes each, which must fit into what is left of the file."""
        count = int(self._number("<u8", what))
        self._need(count * least, f"{what} {count}")
        return count

    def _string(self, what: str) -> str:
        size = self._count(f"length of {what}", 1)
        self.at += size
        try:
            return self.map[self.at - size : self.at].decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self.path}: {what} at {self.at - size} is not UTF-8") from None

    def _value(self, key: str) -> Value:
        kind = self._kind(key)
        if kind == "string":
            return Value(kind, self._string(key))
        if kind != "array":
            return Value(kind, self._number(NUMERIC[kind], key))
        kind = self._kind(key)
        if kind == "array":
            raise GGUFError(f"{self.path}: {key} is an array of arrays, which no model file has")
        if kind == "string":
            return Value(kind, self._strings(key, self._count(f"length of {key}", 8)))
        dtype = np.dtype(NUMERIC[kind])
        count = self._count(f"length of {key}", dtype.itemsize)
        self.at += count * dtype.itemsize
        return Value(kind, np.frombuffer(self.map, dtype, count, self.at - count * dtype.itemsize))

    def _kind(self, key: str) -> str:
        number = self._number("<u4", f"type of {key}")
        if number >= len(KINDS):
            raise GGUFError(
                f"{self.path}: {key} has type {number}; types go from 0 to {len(KINDS) - 1}"
            )
        return KINDS[number]

    def _strings(self, key: str, count: int) -> list[bytes]:
        """Strings of an array as bytes: token texts of real vocabularies are not always UTF-8."""
        data, at, end, found = self.map, self.at, self.nbytes, []
        length_of = struct.Struct("<Q").unpack_from
        for i in range(count):
            if at + 8 > end or length_of(data, at)[0] > end - at - 8:
                raise GGUFError(
                    f"{self.path}: string {i} of {key} at {at} does not end within the file"
                )
            size = length_of(data, at)[0]
            found.append(data[at + 8 : at + 8 + size])
            at += 8 + size
        self.at = at
        return found

    def _entry(self) -> Entry:
        name = self._string("a tensor name")
        if len(name.encode()) >= NAME_NBYTES or name in self.entries:
            raise GGUFError(
                f"{self.path}: tensor name {name[:80]!r} is longer than 63 bytes or there twice"
            )
        axes = self._number("<u4", f"axes of {name}")
        if axes > AXES:
            raise GGUFError(f"{self.path}: {name} has {axes} axes; at most {AXES} are allowed")
        shape = tuple(int(self._number("<u8", f"shape of {name}")) for _ in range(axes))[::-1]
        number, offset = (
            self._number("<u4", f"type of {name}"),
            self._number("<u8", f"offset of {name}"),
        )
        if number not in TYPES:
            raise GGUFError(
                f"{self.path}: {name} has tensor type {number}, which is not known here"
            )
        dtype = TYPES[number]
        if (shape[-1] if shape else 1) % dtype.block:
            raise GGUFError(
                f"{self.path}: rows of {name} have {shape[-1]} elements; {dtype} packs {dtype.block} each"
            )
        self.entries[name] = Entry(name, shape, dtype, offset, tensor_nbytes(shape, dtype))
        return self.entries[name]

    def _place(self, e: Entry, start: int, alignment: int) -> None:
        if e.offset % alignment:
            raise GGUFError(
                f"{self.path}: {e.name} is at offset {e.offset}, no multiple of the alignment {alignment}"
            )
        if e.nbytes > self.nbytes - start - e.offset:
            left = max(self.nbytes - start - e.offset, 0)
            raise GGUFError(
                f"{self.path}: {e.name} needs {e.nbytes} bytes at offset {e.offset}, the file has {left}"
            )
        self.entries[e.name] = Entry(e.name, e.shape, e.dtype, start + e.offset, e.nbytes)


# ---- writing ---------------------------------------------------------------------------------------------------


def write(
    path: str | Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, np.ndarray | tuple[Dtype, np.ndarray] | Deferred],
) -> None:
    """Write a GGUF file: beside its place first, synced, then renamed over it.

    tensors  arrays of f16, f32, f64, i8, i16, i32 or i64; (dtype, u8 (..., row bytes)) for types NumPy does not have;
             or Deferred, made when it is written
    Raises GGUFError for names or values the format cannot hold, OSError if the disk does not take the file;
    a file that was there before is then still there, whole.
    """
    with replacing(path) as file:
        _write(file, metadata, {name: _deferred(name, given) for name, given in tensors.items()})


def _deferred(name: str, given: np.ndarray | tuple[Dtype, np.ndarray] | Deferred) -> Deferred:
    """dtype, logical shape and values of a tensor to write."""
    if len(name.encode()) >= NAME_NBYTES:
        raise GGUFError(f"tensor name {name!r} has more than {NAME_NBYTES - 1} bytes")
    if isinstance(given, Deferred):
        return given
    if isinstance(given, tuple):
        dtype, array = given
        width = array.shape[-1] // dtype.block_nbytes * dtype.block
        return Deferred(dtype, (*array.shape[:-1], width), lambda: [array])
    dtype = next((d for d in NUMBERS if d.numpy == given.dtype), f32)
    if dtype.numpy != given.dtype or given.ndim > AXES:
        raise GGUFError(
            f"{name}: a {given.dtype} array of {given.ndim} axes cannot be a GGUF tensor"
        )
    return Deferred(dtype, given.shape, lambda: [given])


def _write(file: BinaryIO, metadata: Mapping[str, Value], tensors: Mapping[str, Deferred]) -> None:
    alignment = (
        int(metadata["general.alignment"].value) if "general.alignment" in metadata else ALIGNMENT
    )
    file.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key) + _encoded(key, value))
    offset = 0
    for name, t in tensors.items():
        axes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        file.write(_text(name) + axes + struct.pack("<IQ", NUMBERS[t.dtype], offset))
        offset += -(-t.nbytes // alignment) * alignment
    for name, t in tensors.items():
        file.write(bytes(-file.tell() % alignment))
        nbytes = 0
        for part in map(np.ascontiguousarray, t.make()):
            nbytes += part.nbytes
            file.write(part.reshape(-1).view(np.uint8).data if part.size else b"")
        if nbytes != t.nbytes:
            raise GGUFError(f"{name}: {nbytes} bytes were made, {t.nbytes} announced")
    file.write(bytes(-file.tell() % alignment))


def _text(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encoded(key: str, value: Value) -> bytes:
    """Type and value as in the file; lists and arrays become arrays of their kind."""
    many = isinstance(value.value, (list, tuple, np.ndarray))
    if value.kind == "string":
        body = b"".join(map(_text, value.value)) if many else _text(value.value)
    elif value.kind in NUMERIC:
        body = np.asarray(value.value, NUMERIC[value.kind]).tobytes()
    else:
        raise GGUFError(f"{key}: kind {value.kind} is none of {', '.join(NUMERIC)}, string")
    number = KINDS.index(value.kind)
    if not many:
        return struct.pack("<I", number) + body
    return struct.pack("<IIQ", KINDS.index("array"), number, len(value.value)) + body
