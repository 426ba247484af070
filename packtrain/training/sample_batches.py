"""Batches of tokenized samples, like training.text_batches for running text.

Turns samples into inputs of `transformer.loss`; `weights` is 1 for a target in the loss. Samples that share a row
are separated by `seq` and `pos`: none attends to another."""

from typing import Literal

import numpy as np

from packtrain.data.conversations import TokenizedSamples
from packtrain.training.epoch_order import RoundKeys, item_at, items_at
from packtrain.training.indexed_batches import Batch, IndexedBatches

MIN_ROW_LENGTH = 256  # the shortest row, even if all samples are shorter
PACKING_NBYTES = 64  # per sample, while the rows of an epoch are packed; 52 measured
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


class SampleBatches(IndexedBatches):
    """Rows of samples.

    pack       best-fit packing: each sample, longest first, goes into the fullest row that has room for it;
               otherwise a row is one sample and padding
    shuffle    each epoch also fills its rows with other samples of the same lengths
    shuffle_samples  with shuffle and pack: each epoch packs its samples anew, in a random order, so that other samples
               share a row; the plan holds for every epoch: each has the rows of longest first, and no row has more
               samples than the fullest of those. Where a random order needs more, see `_pack_shuffled`
    num_texts  number of replayed texts, see training.replay_texts; None: no texts. Every row ends in a text: each step
               sees data and base, and the texts' weight means the same at any batch size
    """

    num_texts: int | None = None

    def __init__(
        self, samples: TokenizedSamples, rows: int, time: int, *, seed: int = 0, shuffle: bool = True,
        pack: bool = True, shuffle_samples: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, time, seed, shuffle, shuffle_samples and pack)
        self.samples, self.pack = samples, pack
        lengths = self.item_lengths(samples)
        longest_item, self.max_sample_length = int(lengths.max()), int(samples.lengths.max()) - 1
        if longest_item > time:
            raise ValueError(f"a sample of {longest_item} targets does not fit a row of {time}")
        self._sample_time = time  # of a row, for samples; replayed texts add to `time`
        # packed by length alone, so that every epoch has the same number of rows
        self._order = np.arange(len(lengths), dtype=np.int32)
        row_of = self._order
        if pack:
            self._order = np.argsort(-lengths, kind="stable").astype(np.int32)
            row_of = best_fit(lengths[self._order], time)
        self._shortness = -lengths[self._order].astype(np.int32)
        self._sorted_by_row, self._row_starts = _group_by_row(row_of)
        self.max_items = int(np.diff(self._row_starts).max())  # most items of a row, in any epoch
        self._packed_keys: RoundKeys = ()  # of the epoch whose rows are these items
        self._packed_items = self._packed_starts = self._order
        self.epoch_nbytes = PACKING_NBYTES * len(self._order) * self.shuffle_samples

    @staticmethod
    def item_lengths(samples: TokenizedSamples) -> np.ndarray:
        """Return the targets of each item that a row must hold whole: a sample, or a pair in PairBatches."""
        return samples.lengths - 1

    @property
    def windows(self) -> int:
        """Rows of an epoch."""
        return len(self._row_starts) - 1

    def row_at(self, position: int, keys: RoundKeys) -> Batch:
        return self._make_row(self._items_at(position, keys))

    def row_items(self, index: int) -> list[list[int]]:
        """Return, for each row of batch `index`, the numbers of its items: of samples, or of pairs in PairBatches."""
        keys, positions = self.epoch_positions(index)
        return [self._items_at(position, keys) for position in positions]

    def row_samples(self, index: int) -> list[list[int]]:
        """Return, for each row of batch `index`, the numbers of its samples, in the order of the input `seq`."""
        return self.row_items(index)

    def _items_at(self, position: int, keys: RoundKeys) -> list[int]:
        """Return the items (numbers of samples or pairs) of the row at a position of the epoch; [] after the last."""
        if position >= self.windows:
            return []
        row = item_at(position, self.windows, keys) if self.shuffle else position
        if self.shuffle_samples:
            if keys != self._packed_keys:
                self._packed_items, self._packed_starts = self._pack_shuffled(keys)
                self._packed_keys = keys
            start, stop = self._packed_starts[row : row + 2]
            return [int(item) for item in self._packed_items[start:stop]]
        item_ranks = self._sorted_by_row[self._row_starts[row] : self._row_starts[row + 1]].tolist()
        return [int(self._order[self._swapped_rank(rank, keys)]) for rank in item_ranks]

    def _swapped_rank(self, rank: int, keys: RoundKeys) -> int:
        """Return the place in `_order` of the item that this epoch reads in place of item `rank`, of equal length."""
        if not (self.pack and self.shuffle):
            return rank
        shortness = self._shortness[rank]
        start_rank, end = (int(np.searchsorted(self._shortness, shortness, side)) for side in SIDES)
        return start_rank + item_at(rank - start_rank, end - start_rank, keys, -int(shortness))

    def _pack_shuffled(self, keys: RoundKeys) -> tuple[np.ndarray, np.ndarray]:
        """Pack an epoch's items in random order; returns their numbers, row after row, and where each row begins.

        Best fit of a random order may need more rows than longest first. Then longer items go first, by classes of
        length, in random order within a class; classes become narrower with each try, down to single lengths, which is
        longest first with the items of a length shuffled.

          rows of 12 targets, items in random order         4 3 9 8    4 3 | 9 | 8    3 rows
          classes 9 to 16 and 1 to 8, random within a class 9 4 3 8    9 3 | 4 8      2 rows, as longest first
        """
        num_items = len(self._order)
        ranks = items_at(np.arange(num_items, dtype=np.int32), num_items, keys)
        for class_bits in range(self._sample_time.bit_length(), -1, -1):
            classes = self._shortness[ranks] // (1 << class_bits)
            tried_ranks = ranks[np.argsort(classes, kind="stable")]
            row_of = best_fit(-self._shortness[tried_ranks], self._sample_time)
            ranks_by_row, row_starts = _group_by_row(row_of)
            if len(row_starts) - 1 == self.windows and np.diff(row_starts).max() <= self.max_items:
                break
        return self._order[tried_ranks[ranks_by_row]], row_starts

    def _make_row(self, items: list[int]) -> Batch:
        """Build a row: samples, then padding, cut into pretend samples: no position exceeds the data's longest."""
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
        row["pos"][offset:] = padding % self.max_sample_length
        row["seq"][offset:] = len(items) + padding // self.max_sample_length
        return row


def row_length(max_length: int, *lengths: np.ndarray) -> int:
    """Return a row's targets: the largest of all `lengths` of items, but from MIN_ROW_LENGTH to `max_length`."""
    longest = max(int(item_lengths.max()) for item_lengths in lengths)
    return min(max_length, max(longest, MIN_ROW_LENGTH))


def _group_by_row(row_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort items by their rows, `row_of`; returns the items' numbers, row after row, and where each row begins."""
    by_row = np.argsort(row_of, kind="stable").astype(np.int32)
    return by_row, np.append(0, np.cumsum(np.bincount(row_of))).astype(np.int32)


def best_fit(lengths: np.ndarray, time: int) -> np.ndarray:
    """Return each item's row, by its number of targets: the fullest row of `time` targets with room, else a new row."""
    rows = np.empty(len(lengths), np.int32)
    rows_by_room: list[list[int]] = [[] for _ in range(time + 1)]
    room_bits, num_rows = 0, 0  # bit r of `room_bits`: some row has room for r more
    for i, length in enumerate(map(int, lengths)):
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
