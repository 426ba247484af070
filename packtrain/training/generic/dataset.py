"""Datasets: datapoints by the names of a model's inputs, in shards that stay together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural

Values = dict[str, np.ndarray]
COPY_NBYTES = 1 << 17  # bytes copied at a time from a column whose type or layout differs


class Dataset:
    """Arrays by input name; their first axis counts datapoints. Arrays are used as they are, also mapped ones.

    columns  inputs and labels of any type; quantized ones are arrays of blocks
    shard    datapoints per shard: neighbours that stay together, in order, when the data is shuffled
    Raises InputError: no columns, no datapoints, different lengths, or a shard that does not divide them.
    """

    def __init__(self, columns: Mapping[str, Any], *, shard: int = 1) -> None:
        if not isinstance(columns, Mapping):
            fact = "a dataset is a dict of arrays by the names of the model's inputs"
            raise InputError(f"{fact}, not a {type(columns).__name__}")
        self.columns: Values = {name: _as_array(name, column) for name, column in columns.items()}
        self.shard = shard
        scalar_names = [name for name, column in self.columns.items() if not column.ndim]
        if scalar_names or not self.columns:
            raise InputError(
                f"the dataset has {'a single number as ' + scalar_names[0] if scalar_names else 'no columns'};"
                " give arrays by the names of the model's inputs"
            )
        counts = {name: len(column) for name, column in self.columns.items()}
        if len(set(counts.values())) > 1:
            lengths_text = ", ".join(f"{name} has {length:,}" for name, length in counts.items())
            raise InputError(f"columns of a dataset must be equally long: {lengths_text}")
        if not len(self):
            raise InputError("the dataset is empty")
        if not isinstance(shard, int | np.integer) or shard < 1 or len(self) % shard:
            fact = f"shard={shard} must be 1 or more and divide {plural(len(self), 'datapoint')}"
            raise InputError(fact)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def shuffled(self, order: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return `order`, positions of datapoints, with runs of `shard` neighbours shuffled by (seed, epoch)."""
        shards = order.reshape(-1, self.shard)
        return shards[np.random.default_rng([seed, epoch]).permutation(len(shards))].reshape(-1)

    def batches(
        self, size: int, order: np.ndarray | None = None, into: Values | None = None
    ) -> Iterator[Values]:
        """Yield batches of `size` datapoints in the order of the positions; an incomplete last batch is left out.

        into  arrays of at least `size` datapoints that every batch overwrites, in types of their own; None: each
              batch has its own arrays
        Raises InputError for positions outside the dataset, and whole numbers that do not fit their type.
        """
        positions = np.arange(len(self)) if order is None else self._valid_order(order)
        for batch_start in range(0, len(positions) - size + 1, size):
            batch = {n: a[:size] for n, a in (into or self._batch_buffers(size)).items()}
            for name, column in self.columns.items():
                _copy_rows(name, column, positions[batch_start : batch_start + size], batch[name])
            yield batch

    def _batch_buffers(self, size: int) -> Values:
        return {name: np.empty((size, *v.shape[1:]), v.dtype) for name, v in self.columns.items()}

    def _valid_order(self, order: np.ndarray | Sequence[int]) -> np.ndarray:
        places = np.asarray(order)
        is_invalid = places.dtype.kind not in "iu" or places.ndim != 1
        if is_invalid or (places.size and not 0 <= places.min() <= places.max() < len(self)):
            fact = "an order lists positions of datapoints"
            raise InputError(f"{fact}, whole numbers from 0 to {len(self) - 1}")
        return places


def _as_array(name: str, column: Any) -> np.ndarray:
    if np.ma.is_masked(column):
        raise InputError(f"{name} has masked values; fill them, as with .filled(0)")
    try:
        return np.asarray(column)
    except ValueError as error:
        raise InputError(f"{name} is no array: {error}") from None


def _copy_rows(name: str, column: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    """Copy rows `places` of a column, `name` in errors, to `out`, without a large temporary copy. Raises InputError."""
    if column.dtype == out.dtype and column.flags.c_contiguous:
        np.take(column, places, 0, out, "clip")  # any other mode copies the rows once more
        return
    row_nbytes = column.nbytes // len(column)
    step = max(COPY_NBYTES // max(row_nbytes, 1), 1)
    for at in range(0, len(places), step):
        chunk = column[places[at : at + step] if step > 1 else slice(places[at], places[at] + 1)]
        if chunk.size and out.dtype.kind in "iu" and not np.can_cast(chunk.dtype, out.dtype):
            low, high, int_range = chunk.min(), chunk.max(), np.iinfo(out.dtype)
            if low < int_range.min or high > int_range.max:
                raise InputError(f"{name} has values from {low} to {high}; {out.dtype} ends before")
        with np.errstate(over="ignore"):  # such values become infinite, which the loss shows
            out[at : at + step] = chunk
