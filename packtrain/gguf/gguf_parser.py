"""Parses one GGUF file: metadata and tensors, with every count, length, shape and offset checked before it is used.

Nothing is allocated by a count that the file has no room for: a hostile file costs time and memory by its size.
"""

import math
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from packtrain.gguf import gguf_format
from packtrain.gguf.gguf_format import KINDS, MAX_AXES, NUMPY_CODES, GGUFError, MetadataValue

MIN_FILE_NBYTES = 24  # bytes of an empty file
# keys, and tensors: real files have hundreds, and each costs more memory here than in the file
MAX_COUNT = 1 << 14
# strings in all arrays together: the largest vocabularies have 0.8 million texts and merges
MAX_STRINGS = 1 << 21
MAX_ARRAY_NBYTES = 2**63 - 1  # bytes of an array without axes of 0 that NumPy and ggml can count
MAX_TEXT_LENGTH = 80  # characters of the file's texts in an error
U32, U64 = Struct("<I"), Struct("<Q")
SCALAR_STRUCTS = {kind: Struct(f"<{c}") for kind, c in zip(NUMPY_CODES, "BbHhIif?Qqd", strict=True)}


def shorten_text(text: str) -> str:
    """Return a text of the file, shortened for an error message."""
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}…"


class GGUFPart:
    """A parsed GGUF file: `values` by key, `entries` by tensor name, in the order of the file. Raises GGUFError."""

    def __init__(self, path: Path, data: bytes | mmap) -> None:
        self.path, self.data, self.nbytes, self.at = path, data, len(data), 4
        self.num_strings = 0
        self.values: dict[str, MetadataValue] = {}
        self.entries: dict[str, gguf_format.TensorInfo] = {}
        if self.nbytes < MIN_FILE_NBYTES:
            raise self._error(
                f"this is not a GGUF file: it has {self.nbytes} bytes, fewer than {MIN_FILE_NBYTES}"
            )
        if data[:4] != gguf_format.MAGIC:
            raise self._error(
                f"this is not a GGUF file: it begins with {data[:4].decode('latin-1')!r},"
                f" not with {gguf_format.MAGIC.decode()!r}"
            )
        version = self._read_number(U32, "version")
        if version not in gguf_format.VERSIONS:
            raise self._error(
                f"version {version}; versions {gguf_format.VERSIONS[0]} and {gguf_format.VERSIONS[1]} can be read"
            )
        num_tensors, pairs = self._things("tensor count", 24), self._things("metadata count", 13)
        for _ in range(pairs):
            self._read_metadata_pair()
        try:
            alignment = gguf_format.alignment_of(self.values)
        except GGUFError as error:
            raise self._error(str(error)) from None
        for _ in range(num_tensors):
            self._read_tensor_info()
        self._check_offsets(-(-self.at // alignment) * alignment, alignment)

    def _error(self, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: {problem}")

    # ---- numbers and texts

    def _read_number(self, number_format: Struct, title: str) -> Any:
        size, at = number_format.size, self.at
        if size > self.nbytes - at:
            self._require_nbytes(size, title)
        self.at += size
        return number_format.unpack_from(self.data, at)[0]

    def _require_nbytes(self, size: int, title: str) -> None:
        left = self.nbytes - self.at
        if size > left:
            fact = f"{title} needs {size} bytes at {self.at}, the file has {left} left"
            raise self._error(f"{fact}; download it again")

    def _read_count(self, title: str, min_nbytes: int) -> int:
        """Read how many things of at least `min_nbytes` bytes each follow, which must fit into the rest of the file."""
        num_things: int = self._read_number(U64, title)
        self._require_nbytes(num_things * min_nbytes, f"{title} {num_things}")
        return num_things

    def _things(self, title: str, min_nbytes: int) -> int:
        """Read how many keys or tensors (`title`) follow, of at least `min_nbytes` bytes each, at most MAX_COUNT."""
        num_things = self._read_count(title, min_nbytes)
        if num_things > MAX_COUNT:
            raise self._error(f"{title} {num_things}; at most {MAX_COUNT} are read")
        return num_things

    def _read_string(self, title: str) -> str:
        text_nbytes = self._read_count(f"length of {title}", 1)
        self.at += text_nbytes
        try:
            return self.data[self.at - text_nbytes : self.at].decode()
        except UnicodeDecodeError:
            raise self._error(f"{title} at {self.at - text_nbytes} is not UTF-8") from None

    # ---- metadata

    def _read_metadata_pair(self) -> None:
        key = self._read_string("a metadata key")
        if key in self.values:
            raise self._error(f"metadata key {shorten_text(key)} occurs twice")
        self.values[key] = self._read_value(shorten_text(key))

    def _read_value(self, key: str) -> MetadataValue:
        value_type = self._read_value_type(key)
        if value_type == "string":
            return MetadataValue(value_type, self._read_string(key))
        if value_type != "array":
            return MetadataValue(value_type, self._read_number(SCALAR_STRUCTS[value_type], key))
        value_type = self._read_value_type(key)
        if value_type == "array":
            raise self._error(f"{key} is an array of arrays, which no model file has")
        if value_type == "string":
            num_items = self._read_count(f"length of {key}", 8)
            self.num_strings += num_items
            if self.num_strings > MAX_STRINGS:
                raise self._error(f"{key} has {num_items} strings; at most {MAX_STRINGS} are read")
            return MetadataValue(value_type, self._read_strings(key, num_items))
        dtype = np.dtype(NUMPY_CODES[value_type])
        num_items = self._read_count(f"length of {key}", dtype.itemsize)
        values = np.frombuffer(self.data, dtype, num_items, self.at)
        self.at += values.nbytes
        return MetadataValue(value_type, values)

    def _read_value_type(self, key: str) -> str:
        type_number = self._read_number(U32, f"type of {key}")
        if type_number >= len(KINDS):
            raise self._error(f"{key} has type {type_number}; types go from 0 to {len(KINDS) - 1}")
        return KINDS[type_number]

    def _read_strings(self, key: str, num_strings: int) -> list[bytes]:
        """Read the strings of an array as bytes: token texts of real vocabularies are not always UTF-8."""
        data, at, last, strings = self.data, self.at, self.nbytes - 8, []
        unpack_length = U64.unpack_from
        for i in range(num_strings):
            if at > last or (text_nbytes := unpack_length(data, at)[0]) > last - at:
                raise self._error(f"string {i} of {key} at {at} does not end within the file")
            at += 8
            strings.append(data[at : at + text_nbytes])
            at += text_nbytes
        self.at = at
        return strings

    # ---- tensors

    def _read_tensor_info(self) -> None:
        name = self._read_string("a tensor name")
        shown = shorten_text(name)
        if len(name.encode()) >= gguf_format.NAME_NBYTES or name in self.entries:
            raise self._error(f"tensor name '{shown}' is longer than 63 bytes or occurs twice")
        num_axes = self._read_number(U32, f"axes of {shown}")
        if num_axes > MAX_AXES:
            raise self._error(f"{shown} has {num_axes} axes; at most {MAX_AXES} are allowed")
        shape = tuple([self._read_number(U64, f"shape of {shown}") for _ in range(num_axes)])[::-1]
        type_number = self._read_number(U32, f"type of {shown}")
        offset = self._read_number(U64, f"offset of {shown}")
        if type_number not in gguf_format.DTYPE_BY_NUMBER:
            raise self._error(f"{shown} has unknown tensor type {type_number}")
        dtype, row_width = gguf_format.DTYPE_BY_NUMBER[type_number], shape[-1] if shape else 1
        if row_width % dtype.block:
            fact = f"rows of {shown} have {row_width} elements; {dtype} packs {dtype.block} each"
            raise self._error(fact)
        if math.prod(filter(None, shape)) * 8 > MAX_ARRAY_NBYTES:
            raise self._error(f"{shown} has shape {[*shape]}; nothing of that size can be counted")
        nbytes = gguf_format.tensor_nbytes(shape, dtype)
        self.entries[name] = gguf_format.TensorInfo(name, shape, dtype, offset, nbytes)

    def _check_offsets(self, start: int, alignment: int) -> None:
        """Check that tensors are in the file, apart, at multiples of `alignment`; add `start` to their offsets."""
        for e in self.entries.values():
            shown, left_nbytes = shorten_text(e.name), self.nbytes - start - e.offset
            if e.offset % alignment:
                fact = f"{shown} is at offset {e.offset}, no multiple of the alignment {alignment}"
                raise self._error(fact)
            if e.nbytes > left_nbytes:
                fact = f"{shown} needs {e.nbytes} bytes at offset {e.offset}"
                raise self._error(f"{fact}, the file has {max(left_nbytes, 0)}; download it again")
        data_end, previous_name = 0, ""
        for e in sorted(self.entries.values(), key=lambda info: (info.offset, info.nbytes)):
            if e.nbytes and e.offset < data_end:
                raise self._error(
                    f"{shorten_text(e.name)} at offset {e.offset} shares bytes with {shorten_text(previous_name)};"
                    f" it must begin at {data_end} or later"
                )
            data_end, previous_name = max(data_end, e.offset + e.nbytes), e.name
        self.entries = {n: replace(e, offset=start + e.offset) for n, e in self.entries.items()}
