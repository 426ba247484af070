"""Parses one GGUF file: metadata and tensors, with every count, length, shape and offset checked before it is used.

Nothing is allocated by a count that the file has no room for: a hostile file costs time and memory in proportion to
its own size.
"""

import math
import struct
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.gguf import gguf_format
from packtrain.gguf.gguf_format import (
    AXES,
    KINDS,
    NUMERIC,
    TYPES,
    VERSIONS,
    Entry,
    GGUFError,
    Value,
)

LEAST = 24  # bytes of an empty file
# keys, and tensors: real files have hundreds, and each costs more here than there
MOST_THINGS = 1 << 14
# in arrays, all together: the largest vocabularies have 0.8 million texts and merges
MOST_STRINGS = 1 << 21
MOST_NBYTES = 2**63 - 1  # of an array, if no axis were 0: what NumPy and ggml can count
SHOWN = 80  # characters of a text of the file in an error
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
SCALARS = {
    kind: struct.Struct(f"<{code}") for kind, code in zip(NUMERIC, "BbHhIif?Qqd", strict=True)
}


def shortened(text: str) -> str:
    """A text of the file, shortened for an error message."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class Part:
    """A GGUF file: `values` by key, `entries` by tensor name, in the order of the file. Raises GGUFError."""

    def __init__(self, path: Path, data: bytes | mmap) -> None:
        self.path, self.data, self.nbytes, self.at = path, data, len(data), 4
        self.strings = 0
        self.values: dict[str, Value] = {}
        self.entries: dict[str, Entry] = {}
        if self.nbytes < LEAST:
            raise self._wrong(
                f"this is not a GGUF file: it has {self.nbytes} bytes, fewer than {LEAST}"
            )
        if data[:4] != gguf_format.MAGIC:
            raise self._wrong(
                f"this is not a GGUF file: it begins with {data[:4].decode('latin-1')!r},"
                f" not with {gguf_format.MAGIC.decode()!r}"
            )
        version = self._number(U32, "version")
        if version not in VERSIONS:
            raise self._wrong(
                f"version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} can be read"
            )
        tensors, pairs = self._things("tensor count", 24), self._things("metadata count", 13)
        for _ in range(pairs):
            self._pair()
        try:
            alignment = gguf_format.alignment_of(self.values)
        except GGUFError as error:
            raise self._wrong(str(error)) from None
        for _ in range(tensors):
            self._entry()
        self._place(-(-self.at // alignment) * alignment, alignment)

    def _wrong(self, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: {problem}")

    # ---- numbers and texts

    def _number(self, format: struct.Struct, title: str) -> Any:
        self._need(format.size, title)
        self.at += format.size
        return format.unpack_from(self.data, self.at - format.size)[0]

    def _need(self, nbytes: int, title: str) -> None:
        left = self.nbytes - self.at
        if nbytes > left:
            raise self._wrong(
                f"{title} needs {nbytes} bytes at {self.at}, the file has {left} left"
            )

    def _count(self, title: str, min_nbytes: int) -> int:
        """A count of things of at least `min_nbytes` bytes each, which must fit into the rest of the file."""
        count: int = self._number(U64, title)
        self._need(count * min_nbytes, f"{title} {count}")
        return count

    def _things(self, title: str, min_nbytes: int) -> int:
        count = self._count(title, min_nbytes)
        if count > MOST_THINGS:
            raise self._wrong(f"{title} {count}; at most {MOST_THINGS} are read")
        return count

    def _string(self, title: str) -> str:
        size = self._count(f"length of {title}", 1)
        self.at += size
        try:
            return self.data[self.at - size : self.at].decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{title} at {self.at - size} is not UTF-8") from None

    # ---- metadata

    def _pair(self) -> None:
        key = self._string("a metadata key")
        if key in self.values:
            raise self._wrong(f"metadata key {shortened(key)} occurs twice")
        self.values[key] = self._value(shortened(key))

    def _value(self, key: str) -> Value:
        kind = self._kind(key)
        if kind == "string":
            return Value(kind, self._string(key))
        if kind != "array":
            return Value(kind, self._number(SCALARS[kind], key))
        kind = self._kind(key)
        if kind == "array":
            raise self._wrong(f"{key} is an array of arrays, which no model file has")
        if kind == "string":
            count = self._count(f"length of {key}", 8)
            self.strings += count
            if self.strings > MOST_STRINGS:
                raise self._wrong(f"{key} has {count} strings; at most {MOST_STRINGS} are read")
            return Value(kind, self._strings(key, count))
        dtype = np.dtype(NUMERIC[kind])
        count = self._count(f"length of {key}", dtype.itemsize)
        self.at += count * dtype.itemsize
        return Value(kind, np.frombuffer(self.data, dtype, count, self.at - count * dtype.itemsize))

    def _kind(self, key: str) -> str:
        number = self._number(U32, f"type of {key}")
        if number >= len(KINDS):
            raise self._wrong(f"{key} has type {number}; types go from 0 to {len(KINDS) - 1}")
        return KINDS[number]

    def _strings(self, key: str, count: int) -> list[bytes]:
        """Strings of an array as bytes: token texts of real vocabularies are not always UTF-8."""
        data, at, last, strings = self.data, self.at, self.nbytes - 8, []
        length_of = U64.unpack_from
        for i in range(count):
            if at > last or (size := length_of(data, at)[0]) > last - at:
                raise self._wrong(f"string {i} of {key} at {at} does not end within the file")
            at += 8
            strings.append(data[at : at + size])
            at += size
        self.at = at
        return strings

    # ---- tensors

    def _entry(self) -> None:
        name = self._string("a tensor name")
        shown = shortened(name)
        if len(name.encode()) >= gguf_format.NAME_NBYTES or name in self.entries:
            raise self._wrong(f"tensor name '{shown}' is longer than 63 bytes or occurs twice")
        axes = self._number(U32, f"axes of {shown}")
        if axes > AXES:
            raise self._wrong(f"{shown} has {axes} axes; at most {AXES} are allowed")
        shape = tuple(self._number(U64, f"shape of {shown}") for _ in range(axes))[::-1]
        number = self._number(U32, f"type of {shown}")
        offset = self._number(U64, f"offset of {shown}")
        if number not in TYPES:
            raise self._wrong(f"{shown} has unknown tensor type {number}")
        dtype, width = TYPES[number], shape[-1] if shape else 1
        if width % dtype.block:
            raise self._wrong(
                f"rows of {shown} have {width} elements; {dtype} packs {dtype.block} each"
            )
        if math.prod(max(axis, 1) for axis in shape) * 8 > MOST_NBYTES:
            raise self._wrong(f"{shown} has shape {[*shape]}; nothing of that size can be counted")
        nbytes = gguf_format.tensor_nbytes(shape, dtype)
        self.entries[name] = Entry(name, shape, dtype, offset, nbytes)

    def _place(self, start: int, alignment: int) -> None:
        """Check the offsets of the tensors; no two may share bytes."""
        for e in self.entries.values():
            shown, left = shortened(e.name), self.nbytes - start - e.offset
            if e.offset % alignment:
                raise self._wrong(
                    f"{shown} is at offset {e.offset}, no multiple of the alignment {alignment}"
                )
            if e.nbytes > left:
                raise self._wrong(
                    f"{shown} needs {e.nbytes} bytes at offset {e.offset}, the file has {max(left, 0)}"
                )
        end, previous_name = 0, ""
        for e in sorted(self.entries.values(), key=lambda e: (e.offset, e.nbytes)):
            if e.nbytes and e.offset < end:
                raise self._wrong(
                    f"{shortened(e.name)} at offset {e.offset} shares bytes with {shortened(previous_name)};"
                    f" it must begin at {end} or later"
                )
            end, previous_name = max(end, e.offset + e.nbytes), e.name
        self.entries = {
            name: replace(e, offset=start + e.offset) for name, e in self.entries.items()
        }
