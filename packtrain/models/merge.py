"""A model file written again with some of its matrices changed: all else stays as it is, byte for byte.

In go the base, its changed rows in f32, and where to write; a changed matrix is stored in its own type again, or in
another that was asked for. Few rows are in memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.dtypes import BLOCK_TYPES, Dtype
from packtrain.errors import InputError
from packtrain.gguf import GGUF, Deferred, Entry, Value, write
from packtrain.models.adapter import Adapter
from packtrain.quant import WRITABLE, dequantize, quantize

PART = 1 << 20  # elements that are changed at a time
# what stands for a type that can be read only: the next larger one of the same block
INSTEAD = MappingProxyType(
    {
        BLOCK_TYPES[read]: BLOCK_TYPES[written]
        for read, written in (
            ("q2_K", "q4_K"), ("q3_K", "q4_K"), ("iq4_xs", "q4_K"), ("iq4_nl", "q5_0"), ("mxfp4", "q5_0"),
        )
    }
)  # fmt: skip

Rows = Callable[[int, int], np.ndarray]


def merged(base: GGUF, adapters: Sequence[tuple[Adapter, float]]) -> dict[str, Rows]:
    """Rows of every matrix that these adapters, each times its scale, add to."""
    touched = dict.fromkeys(name for adapter, _ in adapters for name in adapter.pairs)

    def rows(name: str) -> Rows:
        array = base.array(name)
        flat = array.reshape(-1, array.shape[-1])
        ours = [(adapter, by) for adapter, by in adapters if name in adapter.pairs]

        def changed(start: int, stop: int) -> np.ndarray:
            values = dequantize(flat[start:stop])
            for adapter, by in ours:
                values = values + np.float32(by) * adapter.rows(name, start, stop)
            return values

        return changed

    return {name: rows(name) for name in touched}


def stored_type(entry: Entry, dtype: Dtype | None) -> Dtype:
    """The type that a changed tensor of the base gets: `dtype` for a matrix whose rows it can hold, else its own."""
    if dtype is not None and len(entry.shape) > 1 and entry.shape[-1] % dtype.block == 0:
        return dtype
    return INSTEAD.get(entry.dtype, entry.dtype)


def write_changed(
    path: str | Path,
    base: GGUF,
    changes: Mapping[str, Rows],
    *,
    name: str,
    dtype: Dtype | None = None,
) -> None:
    """Write the base with these rows, f32 (stop - start, width) for each (start, stop), in the place of its own.

    Raises InputError for values that the type cannot hold, or a name that the base has not.
    """
    unknown = [tensor for tensor in changes if tensor not in base.entries]
    if unknown:
        raise InputError(f"{base.path}: there is no tensor {unknown[0]} to change")
    tensors = {
        tensor: _deferred(base, entry, changes.get(tensor), dtype)
        for tensor, entry in base.entries.items()
    }
    values = {key: value for key, value in base.values.items() if not key.startswith("split.")}
    before = values.get("general.name", Value("string", base.path.stem))
    values |= {
        "general.name": Value("string", name),
        "general.base_model.count": Value("u32", 1),
        "general.base_model.0.name": before,
    }
    write(path, values, tensors)


def _deferred(base: GGUF, entry: Entry, rows: Rows | None, dtype: Dtype | None) -> Deferred:
    if rows is None:
        return Deferred(entry.dtype, entry.shape, lambda: [base.array(entry.name)])
    stored = stored_type(entry, dtype)
    if stored not in WRITABLE:
        known = ", ".join(map(str, WRITABLE))
        raise InputError(
            f"{base.path}: {entry.name} would be {stored}; types that can be written: {known}"
        )

    def parts() -> Iterator[np.ndarray]:
        *outer, width = entry.shape
        count, step = int(np.prod(outer)), max(1, PART // max(width, 1))
        for start in range(0, count, step):
            yield quantize(rows(start, min(start + step, count)), stored)

    return Deferred(stored, entry.shape, parts)
