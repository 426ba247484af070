"""Rewrites a model file with some matrices changed; all other tensors are copied byte for byte.

Takes the base, its changed rows in f32, and the output path; a changed matrix is stored in its own type, or in
another requested type. Only a few rows are in memory at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.mapped_file import passing_pages
from packtrain.dtypes import READABLE, RECODABLE, WRITABLE, Dtype
from packtrain.engine.ops.stored_values import stored_rows
from packtrain.gguf import GGUF, DeferredTensor, MetadataValue, TensorInfo, write_gguf
from packtrain.kernels.quant.quantized_arrays import QuantizedBlocks, dequantize, packed
from packtrain.models.adapter_file import Adapter
from packtrain.models.arch.architecture import is_matrix

CHUNK_ELEMENTS = 1 << 15  # elements changed at a time: a run that ends still holds all its memory
# prefixes of keys that are not valid for the new file
DROPPED = ("split.", "general.base_model.")

ReadRows = Callable[[int, int], np.ndarray]
TensorDone = Callable[[TensorInfo, Dtype, float], None]


@dataclass(frozen=True, slots=True)
class AwareMergedRows:
    """Reads merged rows stored in the base's quantization blocks and scales: bit for bit what aware training saw."""

    array: np.ndarray
    adapter: Adapter
    tensor_name: str
    exact_rows: Callable[[int, int], np.ndarray]  # function that reads merged rows before rounding

    def __call__(self, row_start: int, row_stop: int) -> QuantizedBlocks:
        a, b = self.adapter.lora_pairs[self.tensor_name]
        scale, stored = self.adapter.scale_of(self.tensor_name), self.array[row_start:row_stop]
        with passing_pages(stored):
            rows = stored_rows(stored, a, b[row_start:row_stop], scale, row_start)
        return QuantizedBlocks(rows, self.exact_rows(row_start, row_stop))


def is_recodable(base: GGUF, name: str) -> bool:
    """Whether the merge of an --aware adapter keeps this matrix's quantization blocks and scales."""
    entry = base.entries[name]
    return name.startswith("blk.") and entry.dtype in RECODABLE and len(entry.shape) == 2


def aware_merged_rows(base: GGUF, adapter: Adapter) -> dict[str, ReadRows | AwareMergedRows]:
    """Return {tensor: function (row_start, row_stop) -> rows} of an --aware merge, in base's blocks if is_recodable."""
    return {
        name: AwareMergedRows(base.array(name), adapter, name, r) if is_recodable(base, name) else r
        for name, r in merged_rows(base, [(adapter, 1.0)]).items()
    }


def merged_rows(base: GGUF, adapters: Sequence[tuple[Adapter, float]]) -> dict[str, ReadRows]:
    """Return {tensor: function (row_start, row_stop) -> merged rows, f32} for all matrices that `adapters`, pairs of an
    adapter and a factor of its scale, change. Raises InputError for unreadable types."""
    adapted_names = dict.fromkeys(name for adapter, _ in adapters for name in adapter.lora_pairs)

    def read_merged(name: str) -> ReadRows:
        if base.entries[name].dtype not in READABLE:
            readable_types = ", ".join(map(str, READABLE))
            raise InputError(
                f"{base.path}: {name} is {base.entries[name].dtype}, which cannot be merged into; it must be one"
                f" of {readable_types}"
            )
        read_base = unpacked(base, name)
        tensor_adapters = [(adapter, by) for adapter, by in adapters if name in adapter.lora_pairs]

        def read_rows(row_start: int, row_stop: int) -> np.ndarray:
            values = read_base(row_start, row_stop)
            # `packed` finds values that are not finite
            with np.errstate(over="ignore", invalid="ignore"):
                for adapter, by in tensor_adapters:
                    values = values + np.float32(by) * adapter.delta_rows(name, row_start, row_stop)
            return values

        return read_rows

    return {name: read_merged(name) for name in adapted_names}


def unpacked(base: GGUF, name: str) -> ReadRows:
    """Return a function (row_start, row_stop) -> f32 rows of a matrix, or of a stack's matrices in sequence."""
    array = base.array(name)
    matrix_rows = array.reshape(-1, array.shape[-1])

    def read_rows(row_start: int, row_stop: int) -> np.ndarray:
        with passing_pages(rows := matrix_rows[row_start:row_stop]):
            return dequantize(rows)

    return read_rows


def stored_dtype(entry: TensorInfo, dtype: Dtype | None) -> Dtype:
    """Return a changed tensor's stored type: `dtype` if its blocks divide the matrix's rows, else its own."""
    has_matrix = is_matrix(entry.name, entry.shape)
    if dtype is not None and has_matrix and entry.shape[-1] % dtype.block == 0:
        return dtype
    return entry.dtype.merge_dtype or entry.dtype


def write_changed(
    path: str | Path, base: GGUF, changes: Mapping[str, ReadRows | AwareMergedRows], *, name: str,
    dtype: Dtype | None = None, types: Mapping[str, Dtype] = MappingProxyType({}),
    extra_metadata: Mapping[str, MetadataValue] = MappingProxyType({}),
    on_tensor: TensorDone = lambda entry, stored, error: None,
) -> None:  # fmt: skip
    """Write the base with changed tensors, whose rows `changes` reads as f32 (row_stop - row_start, width).

    dtype, types  stored type of changed tensors (see stored_dtype), and exceptions by name
    on_tensor     called for each changed tensor: its entry in the base, its new type, and the relative rounding error
    Raises InputError for values that the type cannot hold, or a name that the base does not have.
    """
    unknown_names = [tensor for tensor in changes if tensor not in base.entries]
    if unknown_names:
        raise InputError(f"{base.path}: there is no tensor {unknown_names[0]} to change")
    tensors = {
        tensor: _deferred(base, entry, changes.get(tensor), types.get(tensor, dtype), on_tensor)
        for tensor, entry in base.entries.items()
    }
    metadata = {key: value for key, value in base.values.items() if not key.startswith(DROPPED)}
    base_name = metadata.get("general.name", MetadataValue("string", base.path.stem))
    metadata |= {
        "general.name": MetadataValue("string", name), "general.base_model.count": MetadataValue("u32", 1),
        "general.base_model.0.name": base_name, **extra_metadata,
    }  # fmt: skip
    write_gguf(path, metadata, tensors)


def _deferred(
    base: GGUF, entry: TensorInfo, read_rows: ReadRows | AwareMergedRows | None, dtype: Dtype | None,
    on_tensor: TensorDone,
) -> DeferredTensor:  # fmt: skip
    """Return tensor `entry` to write: the base's bytes, or the rows that read_rows gives, as `dtype`."""
    if read_rows is None:
        return DeferredTensor(entry.dtype, entry.shape, lambda: [base.array(entry.name)])
    stored = entry.dtype if isinstance(read_rows, AwareMergedRows) else stored_dtype(entry, dtype)
    if stored not in WRITABLE and not isinstance(read_rows, AwareMergedRows):
        writable_types = ", ".join(map(str, WRITABLE))
        fact = f"{base.path}: {entry.name} would be {stored}"
        raise InputError(f"{fact}; types that can be written: {writable_types}")
    *outer_shape, width = entry.shape
    num_rows, step = math.prod(outer_shape), max(1, CHUNK_ELEMENTS // max(width, 1))

    def packed_chunks() -> Iterator[np.ndarray]:
        chunks = (read_rows(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
        location = f"{base.path}: {entry.name}"
        yield from packed(location, chunks, stored, lambda error: on_tensor(entry, stored, error))

    return DeferredTensor(stored, entry.shape, packed_chunks)
