"""Datasets: datapoints by the names of a model's inputs, in shards that stay together."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from packtrain.errors import InputError
from packtrain.words import plural

Values = dict[str, np.ndarray]


class Dataset:
    """Arrays by input name; their first axis counts datapoints. Arrays are used as they are, also mapped ones.

    columns  inputs and labels of any type; quantized ones are arrays of blocks
    shard    datapoints per shard: neighbours that stay together, in order, when the data is shuffled
    Raises InputError: no columns, no datapoints, different lengths, or a shard that does not divide them.
    """

    def __init__(self, columns: Mapping[str, Any], *, shard: int = 1) -> None:
        self.columns: Values = {name: np.asarray(values) for name, values in columns.items()}
        self.shard = shard
        scalars = [name for name, values in self.columns.items() if not values.ndim]
        if scalars or not self.columns:
            raise InputError(
                f"the dataset has {'a single number as ' + scalars[0] if scalars else 'no columns'};"
                " give arrays by the names of the model's inputs"
            )
        counts = {name: len(values) for name, values in self.columns.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} has {count:,}" for name, count in counts.items())
            raise InputError(f"columns of a dataset must be equally long: {listed}")
        if not len(self):
            raise InputError("the dataset is empty")
        if shard < 1 or len(self) % shard:
            raise InputError(
                f"shard={shard} must be 1 or more and divide {plural(len(self), 'datapoint')}"
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def shuffled(self, order: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The positions of `order` with its shards in another order, drawn by (seed, epoch)."""
        shards = order.reshape(-1, self.shard)
        return shards[np.random.default_rng([seed, epoch]).permutation(len(shards))].reshape(-1)

    def space(self, size: int) -> Values:
        """Arrays for `size` datapoints."""
        return {name: np.empty((size, *v.shape[1:]), v.dtype) for name, v in self.columns.items()}

    def batches(
        self, size: int, order: np.ndarray | None = None, into: Values | None = None
    ) -> Iterator[Values]:
        """`size` datapoints each, in the order of positions; an incomplete last batch is left out.

        into  arrays of at least `size` datapoints that every batch overwrites; None: each has its own
        """
        places = np.arange(len(self)) if order is None else order
        for at in range(0, len(places) - size + 1, size):
            batch = {n: a[:size] for n, a in (into or self.space(size)).items()}
            for name, values in self.columns.items():
                np.take(values, places[at : at + size], 0, batch[name], "clip")
            yield batch
