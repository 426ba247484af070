"""Bookkeeping of the KV cache on the host: one pool of cells, each holding one position of one sequence.

It builds the index inputs of `transformer.generation`; the session holds the keys and values.
"""

import numpy as np

FREE = -1


class CacheFull(RuntimeError):
    """More cells are needed than are free."""


class Cells:
    """Which sequence and position each cell holds; cells of dropped sequences are reused."""

    def __init__(self, count: int) -> None:
        self.pos = np.zeros(count, np.int32)
        self.seq = np.full(count, FREE, np.int32)

    @property
    def length(self) -> int:
        """Cells up to the last one in use."""
        used = np.flatnonzero(self.seq != FREE)
        return int(used[-1]) + 1 if used.size else 0

    def take(self, seq: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cells and positions for the next `count` tokens of a sequence, i32 (count,) each."""
        free = self._free(count)
        mine = self.pos[self.seq == seq]
        first = int(mine.max()) + 1 if mine.size else 0
        self.seq[free] = seq
        self.pos[free] = np.arange(first, first + count)
        return free.astype(np.int32), self.pos[free]

    def _free(self, count: int) -> np.ndarray:
        free = np.flatnonzero(self.seq == FREE)
        if len(free) < count:
            raise CacheFull(f"{count} cells wanted, {len(free)} of {len(self.seq)} are free")
        return free[:count]

    def drop(self, seq: int, since: int = 0) -> None:
        """Drop a sequence from position `since` on."""
        self.seq[(self.seq == seq) & (self.pos >= since)] = FREE

    def feed(self, tokens: np.ndarray, seqs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """All inputs of a generation step for tokens (T,) of sequences (T,), in order; with logits at `rows`."""
        self._free(len(seqs))
        cell, pos = np.empty_like(seqs), np.empty_like(seqs)
        for seq in np.unique(seqs):
            cell[seqs == seq], pos[seqs == seq] = self.take(int(seq), int((seqs == seq).sum()))
        return {
            "tokens": tokens, "pos": pos, "seq": seqs, "cell": cell, "rows": rows,
            "cell_pos": self.pos, "cell_seq": self.seq, "length": np.array([self.length], np.int32),
        }  # fmt: skip
