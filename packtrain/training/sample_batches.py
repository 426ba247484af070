"""Batches of tokenized samples as a pure function of an index, like training.text_batches for running text.

Turns samples into inputs of `transformer.loss`; `weights` is 1 for a target in the loss. Samples that share a row
are separated by `seq` and `pos`: none attends to another.
"""

from typing import Literal

import numpy as np

from packtrain.data.conversations import TokenizedSamples
from packtrain.training.epoch_order import RoundKeys, item_at, round_keys

MIN_ROW_LENGTH = 256  # the shortest row, even if all samples are shorter
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


class SampleBatches:
    """Rows of `time` tokens, `rows` to a batch; the index runs on through the epochs.

    pack       best-fit packing: each sample, longest first, goes into the fullest row that has room for it;
               otherwise a row is one sample and padding
    shuffle    each epoch has its rows in a new random order, and fills them with other samples of the same lengths
    num_texts  number of replayed texts, see training.replay_texts; None: no texts. Every row ends in a text: each step
               sees data and base, and the texts' weight means the same at any batch size
    """

    num_texts: int | None = None

    def __init__(
        self,
        samples: TokenizedSamples,
        rows: int,
        time: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pack: bool = True,
    ) -> None:
        self.samples, self.rows, self.time = samples, rows, time
        self.seed, self.shuffle, self.pack = seed, shuffle, pack
        self.shuffle_key = 0
        lengths = self.item_lengths(samples)
        longest_item, self.max_sample_length = int(lengths.max()), int(samples.lengths.max()) - 1
        if longest_item > time:
            raise ValueError(f"a sample of {longest_item} targets does not fit a row of {time}")
        # packed by length alone, so that every epoch has the same number of rows
        self._order = np.arange(len(lengths))
        row_of = self._order
        if pack:
            self._order = np.argsort(-lengths, kind="stable")
            row_of = best_fit(lengths[self._order], time)
        self._shortness = -lengths[self._order]
        self._sorted_by_row = np.argsort(row_of, kind="stable")
        self._row_starts = np.append(0, np.cumsum(np.bincount(row_of)))

    @staticmethod
    def item_lengths(samples: TokenizedSamples) -> np.ndarray:
        """Return the number of target tokens of each sample; a row never splits a sample."""
        return samples.lengths - 1

    @property
    def windows(self) -> int:
        """Rows in one epoch."""
        return len(self._row_starts) - 1

    def __len__(self) -> int:
        """Batches in one epoch; the last one is padded."""
        return -(-self.windows // self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `pos`, `seq` i32 and `weights` f32, all (rows, time)."""
        rows = [self._make_row(items) for items in self.row_items(index)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def row_items(self, index: int) -> list[list[int]]:
        """Return the items of each row of batch `index`."""
        epoch, batch = divmod(index, len(self))
        keys = round_keys(self.seed, epoch, self.shuffle_key)
        row_positions = range(batch * self.rows, (batch + 1) * self.rows)
        return [self._items_at(row_position, keys) for row_position in row_positions]

    def row_samples(self, index: int) -> list[list[int]]:
        """Return the samples of each row of batch `index`, in the order of `seq`."""
        return self.row_items(index)

    def _items_at(self, row_position: int, keys: RoundKeys) -> list[int]:
        """Return the items of the row at a position of the epoch; none after the last row."""
        if row_position >= self.windows:
            return []
        row = item_at(row_position, self.windows, keys) if self.shuffle else row_position
        item_ranks = self._sorted_by_row[self._row_starts[row] : self._row_starts[row + 1]].tolist()
        return [int(self._order[self._swapped_rank(rank, keys)]) for rank in item_ranks]

    def _swapped_rank(self, rank: int, keys: RoundKeys) -> int:
        """Return the rank of the item that takes the place of `rank` in this epoch, an item of equal length."""
        if not (self.pack and self.shuffle):
            return rank
        shortness = self._shortness[rank]
        start_rank, end = (int(np.searchsorted(self._shortness, shortness, side)) for side in SIDES)
        return start_rank + item_at(rank - start_rank, end - start_rank, keys, -int(shortness))

    def _make_row(self, items: list[int]) -> dict[str, np.ndarray]:
        """Build a row of samples, one after the other; the rest is padding, as samples no longer than the longest: a
        model may have learned only so many positions."""
        names = ("tokens", "targets", "pos", "seq")
        row = {name: np.zeros(self.time, np.int32) for name in names}
        row["weights"] = np.zeros(self.time, np.float32)
        offset = 0
        for sample_number, i in enumerate(items):
            ids, weights = self.samples[i]
            span = slice(offset, offset + len(ids) - 1)
            row["tokens"][span], row["targets"][span] = ids[:-1], ids[1:]
            row["weights"][span] = weights[1:]
            row["pos"][span] = np.arange(len(ids) - 1)
            row["seq"][span] = sample_number
            offset = span.stop
        padding = np.arange(self.time - offset)
        row["pos"][offset:], row["seq"][offset:] = (
            padding % self.max_sample_length,
            len(items) + padding // self.max_sample_length,
        )
        return row


def row_length(max_length: int, *lengths: np.ndarray) -> int:
    """Return the row length that holds the longest item, from MIN_ROW_LENGTH to `max_length` targets."""
    longest = max(int(item_lengths.max()) for item_lengths in lengths)
    return min(max_length, max(longest, MIN_ROW_LENGTH))


def best_fit(lengths: np.ndarray, time: int) -> np.ndarray:
    """Assign each sample to a row by best fit: the fullest row with room for it, else a new row."""
    rows = np.empty(len(lengths), np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(time + 1)]
    room_bits, num_rows = 0, 0  # bit r of `room_bits`: some row has room for r more
    for i, length in enumerate(lengths.tolist()):
        fitting_rooms = room_bits >> length
        if fitting_rooms:
            room = length + (fitting_rooms & -fitting_rooms).bit_length() - 1
            row = rows_by_room[room].pop()
            room_bits ^= 0 if rows_by_room[room] else 1 << room
        else:
            room, row, num_rows = time, num_rows, num_rows + 1
        rows_by_room[room - length].append(row)
        room_bits |= 1 << (room - length)
        rows[i] = row
    return rows
