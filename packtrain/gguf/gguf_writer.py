"""Writes GGUF files atomically, tensor by tensor."""

import struct
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from packtrain.common.files import Check, atomic_file, write_ahead
from packtrain.common.mapped_file import passing_pages
from packtrain.dtypes import DTYPES_BY_NUMPY, Dtype
from packtrain.gguf import gguf_format
from packtrain.gguf.gguf_format import KINDS, MAGIC, NAME_NBYTES, NUMPY_CODES, MetadataValue

MAX_REUSED_NBYTES = 32 << 20  # the largest block whose memory glibc keeps
WRITE_AHEAD_NBYTES = 4 << 20  # bytes that are handed to the disk at a time
PASSING_NBYTES = 5 * WRITE_AHEAD_NBYTES  # where pages are limited: those read and written
PieceQueue = SimpleQueue[memoryview | None]
WrittenQueue = SimpleQueue[int | BaseException | None]
LENGTH_STRUCT = struct.Struct("<Q")
ITEMS_PER_CHUNK = 4096  # list items encoded at a time: a vocabulary may have hundreds of thousands


@dataclass(frozen=True, slots=True)
class DeferredTensor:
    """A tensor to write whose values are produced part by part during writing, to save memory."""

    dtype: Dtype
    shape: tuple[int, ...]
    make_parts: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def from_reader(cls, read_array: Callable[[str], np.ndarray], name: str) -> "DeferredTensor":
        """Return a tensor, read now for type and shape, and again when written. Raises GGUFError for another type."""
        return replace(_as_deferred(name, read_array(name)), make_parts=lambda: [read_array(name)])

    @property
    def nbytes(self) -> int:
        return gguf_format.tensor_nbytes(self.shape, self.dtype)


def write_gguf(
    path: str | Path, metadata: Mapping[str, MetadataValue], tensors: Mapping[str, np.ndarray | DeferredTensor],
    max_pending_nbytes: int = 0, check: Check = bool,
) -> None:  # fmt: skip
    """Write a GGUF file atomically.

    tensors             arrays of f16, f32, f64, i8, i16, i32, i64 or blocks (see dtypes); or DeferredTensors
    max_pending_nbytes  bytes of finished parts that may wait to be written; 0: one part, while the next one is made
    check               called with the complete file's temporary path; if it raises, that file is removed
    Raises GGUFError for names or values the format cannot store, OSError if writing fails; an existing file then stays.
    """
    with atomic_file(path, check) as file:
        deferred_tensors = {name: _as_deferred(name, tensor) for name, tensor in tensors.items()}
        _write_file(file, metadata, deferred_tensors, max_pending_nbytes)


def _as_deferred(name: str, tensor: np.ndarray | DeferredTensor) -> DeferredTensor:
    """Return a tensor to write, an array or not, as a DeferredTensor, checked. Raises GGUFError."""
    if len(name.encode()) >= NAME_NBYTES:
        raise gguf_format.GGUFError(f"tensor name {name!r} has more than {NAME_NBYTES - 1} bytes")
    if isinstance(tensor, DeferredTensor):
        return tensor
    dtype = DTYPES_BY_NUMPY.get(tensor.dtype)
    if dtype is None or dtype.number is None or tensor.ndim > gguf_format.MAX_AXES:
        fact = f"{name}: a {tensor.dtype} array of {tensor.ndim} axes cannot be a GGUF tensor"
        raise gguf_format.GGUFError(fact)
    return DeferredTensor(dtype, dtype.tensor_shape(tensor.shape), lambda: [tensor])


def _write_file(
    file: BinaryIO, metadata: Mapping[str, MetadataValue], tensors: Mapping[str, DeferredTensor],
    max_pending_nbytes: int,
) -> None:  # fmt: skip
    alignment = gguf_format.alignment_of(metadata)
    file.write(MAGIC + struct.pack("<IQQ", gguf_format.VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_encode_texts(key))
        file.writelines(_encode_value(key, value))
    data_offset = 0
    for name, t in tensors.items():
        axes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        file.write(_encode_texts(name) + axes + struct.pack("<IQ", t.dtype.number, data_offset))
        data_offset += -(-t.nbytes // alignment) * alignment
    _write_pieces(file, _byte_pieces(tensors, alignment, file.tell()), max_pending_nbytes)


def _byte_pieces(
    tensors: Mapping[str, DeferredTensor], alignment: int, data_start: int
) -> Iterator[memoryview]:
    """Yield the bytes of all tensors part by part, each padded to the alignment; `data_start` bytes precede them."""
    yield memoryview(bytes(-data_start % alignment))
    for name, tensor in tensors.items():
        yield from _tensor_bytes(name, tensor)
        yield memoryview(bytes(-tensor.nbytes % alignment))


def _tensor_bytes(name: str, t: DeferredTensor) -> Iterator[memoryview]:
    nbytes = 0
    for part in map(np.ascontiguousarray, t.make_parts()):
        nbytes += part.nbytes
        yield part.reshape(-1).view(np.uint8).data
    if nbytes != t.nbytes:
        raise gguf_format.GGUFError(f"{name}: {nbytes} bytes were written, {t.nbytes} announced")


def _write_pieces(file: BinaryIO, pieces: Iterable[memoryview], max_pending_nbytes: int) -> None:
    """Write pieces while the next ones are made; if nothing may wait, a tensor is written before the next begins.
    Ctrl-C can come at any moment: no lock here is taken in Python, which could be left locked."""
    piece_queue, written_queue = PieceQueue(), WrittenQueue()
    if max_pending_nbytes > 0:
        # glibc keeps freed memory for blocks smaller than the largest one freed: parts then reuse it
        np.empty(min(2 * max_pending_nbytes, MAX_REUSED_NBYTES), np.uint8)
    pending_nbytes, has_started = 0, False
    try:
        arguments = _write_queued, file, piece_queue, written_queue
        start_new_thread(copy_context().run, arguments)  # the thread knows the limit of pages
        has_started = True
        for piece in pieces:
            while pending_nbytes and pending_nbytes + piece.nbytes > max_pending_nbytes:
                pending_nbytes -= _written_nbytes(written_queue.get())
            if piece.nbytes:
                piece_queue.put(piece)
                pending_nbytes += piece.nbytes
        while pending_nbytes:
            pending_nbytes -= _written_nbytes(written_queue.get())
    finally:
        with suppress(Empty):  # after an error, nobody needs the pieces that still wait
            while True:
                piece_queue.get_nowait()
        piece_queue.put(None)
        while has_started and written_queue.get() is not None:
            pass


def _written_nbytes(written: int | BaseException | None) -> int:
    """Return the bytes of a piece that the writing thread reports as written, 0 for None; raise a reported error."""
    if isinstance(written, BaseException):
        raise written
    return written or 0


def _write_queued(file: BinaryIO, piece_queue: PieceQueue, written_queue: WrittenQueue) -> None:
    """Write queued pieces, in a thread, until None or an error; report each piece's bytes, or the error, then None."""
    try:
        while (piece := piece_queue.get()) is not None:
            for at in range(0, piece.nbytes, WRITE_AHEAD_NBYTES):
                _write_passing(file, piece[at : at + WRITE_AHEAD_NBYTES])
            nbytes = piece.nbytes
            del piece  # its memory is free before the next part is made
            written_queue.put(nbytes)
    except BaseException as error:  # `_written_nbytes` raises it
        written_queue.put(error)
    written_queue.put(None)


def _write_passing(file: BinaryIO, part: memoryview) -> None:
    ahead_start = file.tell() // WRITE_AHEAD_NBYTES * WRITE_AHEAD_NBYTES
    with passing_pages(np.asarray(part)):
        file.write(part)
    ahead_end = file.tell() // WRITE_AHEAD_NBYTES * WRITE_AHEAD_NBYTES
    if ahead_end > ahead_start:
        write_ahead(file, ahead_start, ahead_end - ahead_start)


def _encode_texts(*texts: str | bytes) -> bytes:
    """Return strings as bytes: the length of each, then its text."""
    encoded_texts = [text if isinstance(text, bytes) else text.encode() for text in texts]
    pairs = [b""] * (2 * len(encoded_texts))
    pairs[::2], pairs[1::2] = map(LENGTH_STRUCT.pack, map(len, encoded_texts)), encoded_texts
    return b"".join(pairs)


def _encode_value(key: str, value: MetadataValue) -> Iterator[bytes]:
    """Yield type and value as bytes, in parts; lists and arrays become arrays of their kind."""
    if value.kind != "string" and value.kind not in NUMPY_CODES:
        fact = f"{key}: kind {value.kind} is none of {', '.join(NUMPY_CODES)}, string"
        raise gguf_format.GGUFError(fact)
    type_number, items = KINDS.index(value.kind), value.value
    if not isinstance(items, (list, tuple, np.ndarray)):
        yield struct.pack("<I", type_number) + _encode_items(value.kind, [items])
        return
    yield struct.pack("<IIQ", KINDS.index("array"), type_number, len(items))
    for chunk_start in range(0, len(items), ITEMS_PER_CHUNK):
        yield _encode_items(value.kind, items[chunk_start : chunk_start + ITEMS_PER_CHUNK])


def _encode_items(kind: str, items: Sequence[Any] | np.ndarray) -> bytes:
    if kind == "string":
        return _encode_texts(*items)
    return np.asarray(items, NUMPY_CODES[kind]).tobytes()
