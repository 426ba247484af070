"""Batches of tokenized samples as a pure function of an index, like training.text_batches for running text.

Turns samples into inputs of `transformer.loss`; `weights` is 1 for a target in the loss. Samples that share a row
are separated by `seq` and `pos`: none attends to another.
"""

from typing import Literal

import numpy as np

from packtrain.data.conversations import Samples
from packtrain.training.epoch_order import Keys, item_at, keys_of

SHORTEST = 256  # the shortest row, even if all samples are shorter
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


class SampleBatches:
    """Rows of `time` tokens, `rows` to a batch; the index runs on through the epochs.

    pack     best-fit packing: each sample, longest first, goes into the fullest row that has room for it;
             otherwise a row is one sample and padding
    shuffle  each epoch has its rows in a new random order, and fills them with other samples of the same lengths
    texts    of the base in which rows end, see training.replay_texts
    """

    texts: int | None = None

    def __init__(
        self,
        samples: Samples,
        rows: int,
        time: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pack: bool = True,
    ) -> None:
        self.samples, self.rows, self.time = samples, rows, time
        self.seed, self.shuffle, self.pack = seed, shuffle, pack
        self.key = 0
        lengths = self.lengths_of(samples)
        longest, self.longest = int(lengths.max()), int(samples.lengths.max()) - 1
        if longest > time:
            raise ValueError(f"a sample of {longest} targets does not fit a row of {time}")
        # packed by length alone, so that every epoch has the same number of rows
        self._order = np.arange(len(lengths))
        row_of = self._order
        if pack:
            self._order = np.argsort(-lengths, kind="stable")
            row_of = best_fit(lengths[self._order], time)
        self._shortness = -lengths[self._order]
        self._places = np.argsort(row_of, kind="stable")
        self._first = np.append(0, np.cumsum(np.bincount(row_of)))

    @staticmethod
    def lengths_of(samples: Samples) -> np.ndarray:
        """Targets of each item that a row holds as a whole."""
        return samples.lengths - 1

    @property
    def windows(self) -> int:
        """Rows in one epoch."""
        return len(self._first) - 1

    def __len__(self) -> int:
        """Batches in one epoch; the last one is padded."""
        return -(-self.windows // self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `pos`, `seq` i32 and `weights` f32, all (rows, time)."""
        rows = [self._row(chosen) for chosen in self.chosen(index)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def chosen(self, index: int) -> list[list[int]]:
        """The items of each row of a batch."""
        epoch, batch = divmod(index, len(self))
        keys = keys_of(self.seed, epoch, self.key)
        places = range(batch * self.rows, (batch + 1) * self.rows)
        return [self._chosen_at(place, keys) for place in places]

    def answers(self, index: int) -> list[list[int]]:
        """The samples of each row of a batch, in the order of `seq`."""
        return self.chosen(index)

    def _chosen_at(self, place: int, keys: Keys) -> list[int]:
        """The samples of the row at a place in the epoch."""
        if place >= self.windows:
            return []
        row = item_at(place, self.windows, keys) if self.shuffle else place
        ranks = self._places[self._first[row] : self._first[row + 1]].tolist()
        return [int(self._order[self._swapped(rank, keys)]) for rank in ranks]

    def _swapped(self, rank: int, keys: Keys) -> int:
        """The rank of the sample that takes this place in this epoch: one of the same length."""
        if not (self.pack and self.shuffle):
            return rank
        shortness = self._shortness[rank]
        first, end = (int(np.searchsorted(self._shortness, shortness, side)) for side in SIDES)
        return first + item_at(rank - first, end - first, keys, -int(shortness))

    def _row(self, chosen: list[int]) -> dict[str, np.ndarray]:
        """The samples one after the other; the rest of the row is padding, as samples no longer than the longest: a
        model may have learned so many positions only."""
        names = ("tokens", "targets", "pos", "seq")
        row = {name: np.zeros(self.time, np.int32) for name in names}
        row["weights"] = np.zeros(self.time, np.float32)
        at = 0
        for number, i in enumerate(chosen):
            ids, weights = self.samples[i]
            span = slice(at, at + len(ids) - 1)
            row["tokens"][span], row["targets"][span] = ids[:-1], ids[1:]
            row["weights"][span] = weights[1:]
            row["pos"][span] = np.arange(len(ids) - 1)
            row["seq"][span] = number
            at = span.stop
        padding = np.arange(self.time - at)
        row["pos"][at:], row["seq"][at:] = (
            padding % self.longest,
            len(chosen) + padding // self.longest,
        )
        return row


def row_length(max_length: int, *lengths: np.ndarray) -> int:
    """Row length that holds the longest item, in targets, and at least SHORTEST."""
    longest = max(int(part.max()) for part in lengths)
    return min(max_length, max(longest, SHORTEST))


def best_fit(lengths: np.ndarray, time: int) -> np.ndarray:
    """The row of each sample, by best fit: the fullest row with room for it, else a new one."""
    rows = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(time + 1)]
    room_bits, count = 0, 0  # bit r of `there`: some row has room for r more
    for i, length in enumerate(lengths.tolist()):
        fitting = room_bits >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            room_bits ^= 0 if with_room[room] else 1 << room
        else:
            room, row, count = time, count, count + 1
        with_room[room - length].append(row)
        room_bits |= 1 << (room - length)
        rows[i] = row
    return rows
