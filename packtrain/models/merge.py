"""A model file written again with some of its matrices changed: all else stays as it is, byte for byte.

In go the base, its changed rows in f32, and where to write; a changed matrix is stored in its own type again, or in
another that was asked for. Few rows are in memory at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.dtypes import READABLE, WRITABLE, Dtype
from packtrain.errors import InputError
from packtrain.gguf import GGUF, Deferred, Entry, Value, write
from packtrain.models.adapter import Adapter
from packtrain.quant import dequantize, quantize

PART = 1 << 15  # elements that are changed at a time: a run that ends still holds all of its memory
DROPPED = (
    "split.",
    "general.base_model.",
)  # beginnings of keys that do not hold for what is written

Rows = Callable[[int, int], np.ndarray]
Done = Callable[[Entry, Dtype, float], None]


def merged(base: GGUF, adapters: Sequence[tuple[Adapter, float]]) -> dict[str, Rows]:
    """Rows of every matrix that these adapters, each times its scale, add to. Raises InputError for unreadable ones."""
    touched = dict.fromkeys(name for adapter, _ in adapters for name in adapter.pairs)

    def rows(name: str) -> Rows:
        if base.entries[name].dtype not in READABLE:
            known = ", ".join(map(str, READABLE))
            raise InputError(
                f"{base.path}: {name} is {base.entries[name].dtype}, to which nothing can be added; it must be one"
                f" of {known}"
            )
        array = base.array(name)
        flat = array.reshape(-1, array.shape[-1])
        ours = [(adapter, by) for adapter, by in adapters if name in adapter.pairs]

        def changed(start: int, stop: int) -> np.ndarray:
            values = dequantize(flat[start:stop])
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # what is not finite is found in `packed`
                for adapter, by in ours:
                    values = values + np.float32(by) * adapter.rows(name, start, stop)
            return values

        return changed

    return {name: rows(name) for name in touched}


def stored_type(entry: Entry, dtype: Dtype | None) -> Dtype:
    """The type that a changed tensor of the base gets: `dtype` for a matrix whose rows it can hold, else its own."""
    if dtype is not None and len(entry.shape) > 1 and entry.shape[-1] % dtype.block == 0:
        return dtype
    return entry.dtype.instead or entry.dtype


def write_changed(
    path: str | Path,
    base: GGUF,
    changes: Mapping[str, Rows],
    *,
    name: str,
    dtype: Dtype | None = None,
    types: Mapping[str, Dtype] = MappingProxyType({}),
    more: Mapping[str, Value] = MappingProxyType({}),
    done: Done = lambda entry, stored, error: None,
) -> None:
    """Write the base with these rows, f32 (stop - start, width) for each (start, stop), in the place of its own.

    dtype, types  what changed tensors are stored in: see stored_type; but for those that are named
    more  metadata beside that of the base
    done  is told of each changed tensor: what it was, its type now, and what that type loses, relative
    Raises InputError for values that the type cannot hold, or a name that the base has not.
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
    base: GGUF, entry: Entry, rows: Rows | None, dtype: Dtype | None, done: Done
) -> Deferred:
    if rows is None:
        return Deferred(entry.dtype, entry.shape, lambda: [base.array(entry.name)])
    stored = stored_type(entry, dtype)
    if stored not in WRITABLE:
        known = ", ".join(map(str, WRITABLE))
        raise InputError(
            f"{base.path}: {entry.name} would be {stored}; types that can be written: {known}"
        )
    *outer, width = entry.shape
    count, step = math.prod(outer), max(1, PART // max(width, 1))

    def parts() -> Iterator[np.ndarray]:
        values = (rows(at, min(at + step, count)) for at in range(0, count, step))
        where = f"{base.path}: {entry.name}"
        yield from packed(where, values, stored, lambda error: done(entry, stored, error))

    return Deferred(stored, entry.shape, parts)


def packed(
    where: str, parts: Iterable[np.ndarray], dtype: Dtype, done: Callable[[float], None]
) -> Iterator[np.ndarray]:
    """Parts of a tensor, f32, as this type; `done` is told what is lost. Raises InputError for its values."""
    wrong = total = 0.0
    for values in parts:
        total += squares(values)
        if not math.isfinite(total):
            raise InputError(f"{where} has values that are not finite; they must be")
        with np.errstate(over="ignore"):  # what is beyond the type is found below
            part = quantize(values, dtype)
        wrong += squares(dequantize(part) - values)
        if not math.isfinite(wrong):
            raise InputError(f"{where} has values too large for {dtype}; take another type")
        yield part
    done(math.sqrt(wrong / total) if total else 0.0)


def squares(x: np.ndarray) -> float:
    """Their sum, in f64, without a copy in f64."""
    flat = x.reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
