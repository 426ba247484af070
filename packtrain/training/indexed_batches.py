"""Batches as a pure function of an index: a resumed run needs only the index. They know no model and no optimizer."""

import numpy as np

from packtrain.training.epoch_order import RoundKeys, round_keys

Batch = dict[str, np.ndarray]


class IndexedBatches:
    """`rows` rows of `time` tokens to a batch; the index runs on through the epochs, and len() is one epoch.

    shuffle          each epoch visits the rows in a new random order
    shuffle_key      another number gives another random order
    shuffle_samples  each epoch shuffles samples before short ones share a row; the number of rows stays
    epoch_nbytes     bytes that are taken for a moment when an epoch begins
    """

    shuffle_key = epoch_nbytes = 0

    def __init__(
        self, rows: int, time: int, seed: int, shuffle: bool, shuffle_samples: bool
    ) -> None:
        self.rows, self.time, self.seed, self.shuffle = rows, time, seed, shuffle
        self.shuffle_samples = shuffle_samples and shuffle

    @property
    def windows(self) -> int:
        """Rows in one epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches in one epoch; the last one is padded."""
        return -(-self.windows // self.rows)

    def __getitem__(self, index: int) -> Batch:
        """`tokens`, `targets`, `pos`, `seq` i32 and `weights` f32, all (rows, time)."""
        keys, positions = self.epoch_positions(index)
        rows = [self.row_at(position, keys) for position in positions]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def epoch_positions(self, index: int) -> tuple[RoundKeys, range]:
        """Return the keys of the epoch's order and places in it of batch `index`'s rows; `index` never restarts."""
        epoch, batch = divmod(index, len(self))
        keys = round_keys(self.seed, epoch, self.shuffle_key)
        return keys, range(batch * self.rows, (batch + 1) * self.rows)

    def row_at(self, position: int, keys: RoundKeys) -> Batch:
        """Build the row (tokens, targets …) at a position of the epoch's order; past the last row, padding."""
        raise NotImplementedError
