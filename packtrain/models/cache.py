"""Bookkeeping of a KV cache on the host: which position of which sequences each cell holds.

It builds the index inputs of `transformer.generation`; the session holds the keys and values.
"""

from collections.abc import Sequence

import numpy as np

SEQUENCES = 63  # at most: bits of a set; the last bit belongs to padding, which sees nothing
PADDING = {"tokens": 0, "pos": 0, "seq": SEQUENCES, "cell": -1, "rows": -1}


class CacheFull(RuntimeError):
    """More cells are needed than are free."""


def bit(seq: int) -> int:
    """The set of one sequence."""
    return 1 << seq


class Cells:
    """A position and a set of sequences for each cell; a cell without a sequence is free.

    pos    (cells,)  i32
    sets   (cells,)  i64  bit s: sequence s has that position here; several may share a cell
    parts  equal parts of the cells, one for each sequence; with 1, all sequences share all cells
    """

    def __init__(self, count: int, parts: int = 1) -> None:
        self.pos, self.sets = np.zeros(count, np.int32), np.zeros(count, np.int64)
        self.parts = parts

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def length(self) -> int:
        """Cells up to the last one in use."""
        used = np.flatnonzero(self.sets)
        return int(used[-1]) + 1 if used.size else 0

    def of(self, seq: int, since: int = 0, until: int | None = None) -> np.ndarray:
        """The cells of a sequence from position `since` on, below `until`, by position."""
        there = (self.sets & bit(seq) != 0) & (self.pos >= since)
        if until is not None:
            there &= self.pos < until
        found = np.flatnonzero(there)
        return found[np.argsort(self.pos[found], kind="stable")]

    def next(self, seq: int) -> int:
        """The position after the last one of a sequence."""
        mine = self.pos[self.sets & bit(seq) != 0]
        return int(mine.max()) + 1 if mine.size else 0

    def free(self, seq: int) -> np.ndarray:
        """Free cells that the sequence may take."""
        if self.parts == 1:
            return np.flatnonzero(self.sets == 0)
        size = len(self) // self.parts
        return seq * size + np.flatnonzero(self.sets[seq * size : (seq + 1) * size] == 0)

    def find(self, seqs: np.ndarray) -> np.ndarray:
        """A free cell for each of these sequences, i32; takes none. Raises CacheFull."""
        found = np.empty(len(seqs), np.int32)
        for seq in [0] if self.parts == 1 else np.unique(seqs):
            mine = np.full(len(seqs), True) if self.parts == 1 else seqs == seq
            free, count = self.free(int(seq)), int(mine.sum())
            if len(free) < count:
                most = len(self) // self.parts
                raise CacheFull(f"{count} cells wanted, {len(free)} of {most} are free")
            found[mine] = free[:count]
        return found

    def put(self, cells: np.ndarray, pos: np.ndarray, sets: np.ndarray | int) -> None:
        self.pos[cells], self.sets[cells] = pos, sets

    def take(self, seq: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cells and positions for the next `count` tokens of a sequence, i32 (count,) each."""
        cells = self.find(np.full(count, seq))
        first = self.next(seq)
        self.put(cells, np.arange(first, first + count), bit(seq))
        return cells, self.pos[cells]

    def drop(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Drop positions of a sequence from `since` on, below `until`."""
        self.sets[self.of(seq, since, until)] &= ~bit(seq)

    def share(self, seq: int, to: int, since: int = 0, until: int | None = None) -> None:
        """Let another sequence have those positions, too, in the same cells."""
        self.sets[self.of(seq, since, until)] |= bit(to)

    def inputs(self, prefix: str = "") -> dict[str, np.ndarray]:
        length = np.array([self.length], np.int32)
        return {f"{prefix}pos": self.pos, f"{prefix}sets": self.sets, f"{prefix}length": length}

    def feed(
        self, tokens: np.ndarray, seqs: np.ndarray, rows: np.ndarray | Sequence[int]
    ) -> dict[str, np.ndarray]:
        """All inputs of a generation step for the next tokens (T,) of sequences (T,); with logits at `rows`."""
        cell = self.find(seqs)
        pos = np.empty(len(seqs), np.int32)
        for seq in np.unique(seqs):
            mine = seqs == seq
            pos[mine] = self.next(int(seq)) + np.arange(mine.sum())
        self.put(cell, pos, np.left_shift(np.int64(1), seqs.astype(np.int64)))
        given = {"tokens": tokens, "pos": pos, "seq": seqs, "rows": np.asarray(rows)}
        ids = {name: np.asarray(value, np.int32) for name, value in given.items()}
        return ids | {"cell": cell} | self.inputs("cell_")
