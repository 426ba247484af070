"""Writing GGUF: the whole file beside its place, tensor by tensor, then renamed over what was there."""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packtrain.dtypes import NUMPY, Dtype
from packtrain.files import replacing
from packtrain.gguf.format import (
    ALIGNMENT,
    ALIGNMENT_KEY,
    AXES,
    KINDS,
    MAGIC,
    NAME_NBYTES,
    NUMERIC,
    VERSIONS,
    GGUFError,
    Value,
    tensor_nbytes,
)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor to write whose values are made when their turn comes, part by part, so that few are in memory."""

    dtype: Dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.dtype)


def write(
    path: str | Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, np.ndarray | Deferred],
) -> None:
    """Write a GGUF file: beside its place first, synced, then renamed over it.

    tensors  arrays of f16, f32, f64, i8, i16, i32, i64, or of blocks (see dtypes); or Deferred, made when written
    Raises GGUFError for names or values the format cannot hold, OSError if the disk does not take the file;
    a file that was there before is then still there, whole.
    """
    with replacing(path) as file:
        _write(file, metadata, {name: _deferred(name, given) for name, given in tensors.items()})


def _deferred(name: str, given: np.ndarray | Deferred) -> Deferred:
    """dtype, logical shape and values of a tensor to write."""
    if len(name.encode()) >= NAME_NBYTES:
        raise GGUFError(f"tensor name {name!r} has more than {NAME_NBYTES - 1} bytes")
    if isinstance(given, Deferred):
        return given
    dtype = NUMPY.get(given.dtype)
    if dtype is None or dtype.number is None or given.ndim > AXES:
        raise GGUFError(
            f"{name}: a {given.dtype} array of {given.ndim} axes cannot be a GGUF tensor"
        )
    return Deferred(dtype, dtype.tensor_shape(given.shape), lambda: [given])


def _write(file: BinaryIO, metadata: Mapping[str, Value], tensors: Mapping[str, Deferred]) -> None:
    alignment = int(metadata.get(ALIGNMENT_KEY, Value("u32", ALIGNMENT)).value)
    file.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key) + _encoded(key, value))
    offset = 0
    for name, t in tensors.items():
        axes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        file.write(_text(name) + axes + struct.pack("<IQ", t.dtype.number, offset))
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
