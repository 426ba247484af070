"""The GGUF format: its constants and limits, values and tensor entries. Nothing is read or written here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES, Dtype

QUANTIZATION_VERSION = 2  # version of the quantization blocks: ggml.h, GGML_QNT_VERSION
MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
NAME_NBYTES, MAX_AXES = 64, 4  # ggml's limits: names end within 64 bytes, at most four axes
ALIGNMENT_KEY, MAX_ALIGNMENT = "general.alignment", 1 << 20
DTYPE_BY_NUMBER = {t.number: t for t in DTYPES.values() if t.number is not None}
# kinds of metadata values by number: gguf.h, enum gguf_type
KINDS = (
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64",
)  # fmt: skip
NUMPY_CODES = {
    "u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4", "f32": "<f4",
    "bool": "?", "u64": "<u8", "i64": "<i8", "f64": "<f8",
}  # fmt: skip


class GGUFError(InputError):
    """An invalid GGUF file; names the file, the field and what is expected."""


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """A metadata value with its type in the file: `MetadataValue("u32", 8)`, `MetadataValue("string", ["a", "b"])`."""

    kind: str
    value: Any


def alignment_of(metadata: Mapping[str, MetadataValue]) -> int:
    """Return the alignment in bytes: offsets of tensors are multiples of it. Raises GGUFError."""
    alignment = metadata.get(ALIGNMENT_KEY, MetadataValue("u32", ALIGNMENT))
    value = alignment.value
    if alignment.kind != "u32" or not isinstance(value, int | np.integer):
        raise GGUFError(f"{ALIGNMENT_KEY} is of kind {alignment.kind}; it must be one u32")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise GGUFError(f"{ALIGNMENT_KEY} is {value}; it must be a power of two up to 2**20")
    return int(value)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: shape in NumPy order, offset and number of bytes, index of its part of a split file."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    offset: int
    nbytes: int
    part_index: int = 0


def tensor_nbytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    """Return the bytes of a tensor in a file; its rows must fill quantization blocks."""
    return math.prod(shape[:-1]) * dtype.row_nbytes(shape[-1] if shape else 1)
