"""Writing GGUF files atomically, tensor by tensor."""

import struct
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from packtrain.common.files import Check, atomic_file, write_ahead
from packtrain.dtypes import NUMPY, Dtype
from packtrain.gguf import gguf_format
from packtrain.gguf.gguf_format import AXES, KINDS, MAGIC, NAME_NBYTES, NUMERIC, VERSIONS, Value

KEPT = 32 << 20  # the largest block whose memory glibc keeps
AHEAD = 8 << 20  # bytes that are handed to the disk at a time
Given = SimpleQueue[memoryview | None]
Done = SimpleQueue[int | BaseException | None]
LENGTH = struct.Struct("<Q")
ITEMS = 4096  # list items encoded at a time: a vocabulary may have hundreds of thousands


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor to write whose values are produced part by part during writing, to save memory."""

    dtype: Dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def of(cls, read: Callable[[str], np.ndarray], name: str) -> "Deferred":
        """An array that is read again when its turn comes. Raises GGUFError for a type the format cannot hold."""
        array = read(name)
        dtype = NUMPY.get(array.dtype)
        if dtype is None or dtype.number is None:
            raise gguf_format.GGUFError(f"{name}: {array.dtype} values cannot be a GGUF tensor")
        return cls(dtype, dtype.tensor_shape(array.shape), lambda: [read(name)])

    @property
    def nbytes(self) -> int:
        return gguf_format.tensor_nbytes(self.shape, self.dtype)


def write(
    path: str | Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, np.ndarray | Deferred],
    waiting: int = 0,
    check: Check = bool,
) -> None:
    """Write a GGUF file atomically.

    tensors  arrays of f16, f32, f64, i8, i16, i32, i64, or of blocks (see dtypes); or Deferred
    waiting  bytes of finished parts that may wait to be written; 0: only one, while the next of its tensor is made
    check    is called with the whole file before it gets its name; where it raises, no file is left
    Raises GGUFError for names or values the format cannot hold, OSError if writing fails; an existing file then stays
    as it was.
    """
    with atomic_file(path, check) as file:
        deferred = {name: _deferred(name, tensor) for name, tensor in tensors.items()}
        _write(file, metadata, deferred, waiting)


def _deferred(name: str, tensor: np.ndarray | Deferred) -> Deferred:
    """dtype, logical shape and values of a tensor to write."""
    if len(name.encode()) >= NAME_NBYTES:
        raise gguf_format.GGUFError(f"tensor name {name!r} has more than {NAME_NBYTES - 1} bytes")
    if isinstance(tensor, Deferred):
        return tensor
    dtype = NUMPY.get(tensor.dtype)
    if dtype is None or dtype.number is None or tensor.ndim > AXES:
        raise gguf_format.GGUFError(
            f"{name}: a {tensor.dtype} array of {tensor.ndim} axes cannot be a GGUF tensor"
        )
    return Deferred(dtype, dtype.tensor_shape(tensor.shape), lambda: [tensor])


def _write(
    file: BinaryIO, metadata: Mapping[str, Value], tensors: Mapping[str, Deferred], waiting: int
) -> None:
    alignment = gguf_format.alignment_of(metadata)
    file.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key))
        file.writelines(_encoded(key, value))
    offset = 0
    for name, t in tensors.items():
        axes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        file.write(_text(name) + axes + struct.pack("<IQ", t.dtype.number, offset))
        offset += -(-t.nbytes // alignment) * alignment
    _write_behind(file, _pieces(tensors, alignment, file.tell()), waiting)


def _pieces(tensors: Mapping[str, Deferred], alignment: int, start: int) -> Iterator[memoryview]:
    """The bytes of all tensors part by part, each filled up to the alignment; the first follows `start` bytes."""
    yield memoryview(bytes(-start % alignment))
    for name, t in tensors.items():
        yield from _parts(name, t)
        yield memoryview(bytes(-t.nbytes % alignment))


def _parts(name: str, t: Deferred) -> Iterator[memoryview]:
    nbytes = 0
    for part in map(np.ascontiguousarray, t.make()):
        nbytes += part.nbytes
        yield part.reshape(-1).view(np.uint8).data
    if nbytes != t.nbytes:
        raise gguf_format.GGUFError(f"{name}: {nbytes} bytes were written, {t.nbytes} announced")


def _write_behind(file: BinaryIO, pieces: Iterable[memoryview], waiting: int) -> None:
    """Write pieces while the next ones are made; where nothing may wait, a tensor is written before the next begins.

    Ctrl-C can come at any moment: no lock here is taken in Python, which could be left locked.
    """
    queue, written = Given(), Done()
    if waiting > 0:
        # glibc keeps the memory of blocks smaller than the largest that was freed: parts are made there again
        np.empty(min(2 * waiting, KEPT), np.uint8)
    pending, has_started = 0, False
    try:
        start_new_thread(_write_given, (file, queue, written))
        has_started = True
        for piece in pieces:
            while pending and pending + piece.nbytes > waiting:
                pending -= _size(written.get())
            if piece.nbytes:
                queue.put(piece)
                pending += piece.nbytes
        while pending:
            pending -= _size(written.get())
    finally:
        with suppress(Empty):  # after an error no one needs what still waits
            while True:
                queue.get_nowait()
        queue.put(None)
        while has_started and written.get() is not None:
            pass


def _size(done: int | BaseException | None) -> int:
    """Bytes that were written; raises what writing raised."""
    if isinstance(done, BaseException):
        raise done
    return done or 0


def _write_given(file: BinaryIO, queue: Given, written: Done) -> None:
    """Write what is given, in that order, until None or an error; None then says that it ended."""
    try:
        while (data := queue.get()) is not None:
            _put(file, data)
            nbytes = data.nbytes
            del data  # its memory is free before the next part is made
            written.put(nbytes)
    except BaseException as error:  # `_size` raises it
        written.put(error)
    written.put(None)


def _put(file: BinaryIO, data: memoryview) -> None:
    start = file.tell() // AHEAD * AHEAD
    file.write(data)
    if (nbytes := file.tell() // AHEAD * AHEAD - start) > 0:
        write_ahead(file, start, nbytes)


def _text(*texts: str | bytes) -> bytes:
    """Strings as bytes: the length of each, and then its text."""
    raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
    pairs = [b""] * (2 * len(raw))
    pairs[::2], pairs[1::2] = map(LENGTH.pack, map(len, raw)), raw
    return b"".join(pairs)


def _encoded(key: str, value: Value) -> Iterator[bytes]:
    """Type and value as bytes, in parts; lists and arrays become arrays of their kind."""
    if value.kind != "string" and value.kind not in NUMERIC:
        raise gguf_format.GGUFError(
            f"{key}: kind {value.kind} is none of {', '.join(NUMERIC)}, string"
        )
    number, items = KINDS.index(value.kind), value.value
    if not isinstance(items, (list, tuple, np.ndarray)):
        yield struct.pack("<I", number) + _items(value.kind, [items])
        return
    yield struct.pack("<IIQ", KINDS.index("array"), number, len(items))
    for at in range(0, len(items), ITEMS):
        yield _items(value.kind, items[at : at + ITEMS])


def _items(kind: str, items: Sequence[Any] | np.ndarray) -> bytes:
    if kind == "string":
        return _text(*items)
    return np.asarray(items, NUMERIC[kind]).tobytes()
