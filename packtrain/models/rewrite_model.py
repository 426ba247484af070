"""Rewriting a model file with some matrices changed; all other tensors are copied byte for byte.

Takes the base, its changed rows in f32, and the output path; a changed matrix is stored in its own type, or in
another requested one. Only a few rows are in memory at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import READABLE, RECODABLE, WRITABLE, Dtype
from packtrain.engine.ops.stored_values import stored_rows
from packtrain.gguf import GGUF, Deferred, Entry, Value, write
from packtrain.kernels.quantized_arrays import Stored, dequantize, packed
from packtrain.models.adapter_file import Adapter
from packtrain.models.arch.architecture import is_matrix

PART = 1 << 15  # elements changed at a time: a run that ends still holds all its memory
# prefixes of keys that are not valid for the new file
DROPPED = ("split.", "general.base_model.")

Rows = Callable[[int, int], np.ndarray]
Done = Callable[[Entry, Dtype, float], None]


@dataclass(frozen=True, slots=True)
class InBlocks:
    """Merged rows in the blocks of the base, with their scales: bit for bit what aware training saw.

    exact  the same rows before rounding
    """

    array: np.ndarray
    adapter: Adapter
    name: str
    exact: Callable[[int, int], np.ndarray]

    def __call__(self, start: int, stop: int) -> Stored:
        a, b = self.adapter.pairs[self.name]
        by, rows = self.adapter.scale(self.name), self.array[start:stop]
        return Stored(stored_rows(rows, a, b[start:stop], by, start), self.exact(start, stop))


def recodable(base: GGUF, name: str) -> bool:
    """Whether aware training keeps this matrix in its blocks."""
    entry = base.entries[name]
    return name.startswith("blk.") and entry.dtype in RECODABLE and len(entry.shape) == 2


def stored_with(base: GGUF, adapter: Adapter) -> dict[str, Rows | InBlocks]:
    """The same for an adapter of aware training, whose matrices stay in their blocks."""
    return {
        name: InBlocks(base.array(name), adapter, name, rows) if recodable(base, name) else rows
        for name, rows in merged(base, [(adapter, 1.0)]).items()
    }


def merged(base: GGUF, adapters: Sequence[tuple[Adapter, float]]) -> dict[str, Rows]:
    """Merged rows of every matrix that the adapters change. Raises InputError for types that cannot be read."""
    touched = dict.fromkeys(name for adapter, _ in adapters for name in adapter.pairs)

    def changed(name: str) -> Rows:
        if base.entries[name].dtype not in READABLE:
            readable_types = ", ".join(map(str, READABLE))
            raise InputError(
                f"{base.path}: {name} is {base.entries[name].dtype}, which cannot be merged into; it must be one"
                f" of {readable_types}"
            )
        before = unpacked(base, name)
        tensor_adapters = [(adapter, by) for adapter, by in adapters if name in adapter.pairs]

        def rows(start: int, stop: int) -> np.ndarray:
            values = before(start, stop)
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # `packed` finds values that are not finite
                for adapter, by in tensor_adapters:
                    values = values + np.float32(by) * adapter.rows(name, start, stop)
            return values

        return rows

    return {name: changed(name) for name in touched}


def unpacked(base: GGUF, name: str) -> Rows:
    """The rows of a matrix, or of all matrices of a stack, as f32."""
    array = base.array(name)
    flat = array.reshape(-1, array.shape[-1])
    return lambda start, stop: dequantize(flat[start:stop])


def stored_type(entry: Entry, dtype: Dtype | None) -> Dtype:
    """The stored type of a changed tensor: `dtype` if its blocks divide the rows of the matrix, else its own."""
    matrix = is_matrix(entry.name, entry.shape)
    if dtype is not None and matrix and entry.shape[-1] % dtype.block == 0:
        return dtype
    return entry.dtype.instead or entry.dtype


def write_changed(
    path: str | Path,
    base: GGUF,
    changes: Mapping[str, Rows | InBlocks],
    *,
    name: str,
    dtype: Dtype | None = None,
    types: Mapping[str, Dtype] = MappingProxyType({}),
    more: Mapping[str, Value] = MappingProxyType({}),
    done: Done = lambda entry, stored, error: None,
) -> None:
    """Write the base with changed tensors; rows(start, stop) returns f32 (stop - start, width).

    dtype, types  stored type of changed tensors (see stored_type), and exceptions by name
    more  additional metadata
    done  called for each changed tensor: its entry in the base, its new type, and the relative rounding error
    Raises InputError for values that the type cannot hold, or a name that the base does not have.
    """
    unknown = [tensor for tensor in changes if tensor not in base.entries]
    if unknown:
        raise InputError(f"{base.path}: there is no tensor {unknown[0]} to change")
    tensors = {
        tensor: _deferred(base, entry, changes.get(tensor), types.get(tensor, dtype), done)
        for tensor, entry in base.entries.items()
    }
    values = {key: value for key, value in base.values.items() if not key.startswith(DROPPED)}
    before = values.get("general.name", Value("string", base.path.stem))
    values |= {
        "general.name": Value("string", name),
        "general.base_model.count": Value("u32", 1),
        "general.base_model.0.name": before,
        **more,
    }
    write(path, values, tensors)


def _deferred(
    base: GGUF, entry: Entry, rows: Rows | InBlocks | None, dtype: Dtype | None, done: Done
) -> Deferred:
    if rows is None:
        return Deferred(entry.dtype, entry.shape, lambda: [base.array(entry.name)])
    stored = entry.dtype if isinstance(rows, InBlocks) else stored_type(entry, dtype)
    if stored not in WRITABLE and not isinstance(rows, InBlocks):
        writable_types = ", ".join(map(str, WRITABLE))
        raise InputError(
            f"{base.path}: {entry.name} would be {stored}; types that can be written: {writable_types}"
        )
    *outer, width = entry.shape
    count, step = math.prod(outer), max(1, PART // max(width, 1))

    def parts() -> Iterator[np.ndarray]:
        values = (rows(at, min(at + step, count)) for at in range(0, count, step))
        location = f"{base.path}: {entry.name}"
        yield from packed(location, values, stored, lambda error: done(entry, stored, error))

    return Deferred(stored, entry.shape, parts)
