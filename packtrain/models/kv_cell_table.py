"""Bookkeeping of a KV cache on the host: which position of which sequences each cell holds.

It builds the index inputs of `transformer.generation`; the session holds the keys and values.
"""

from collections.abc import Mapping, Sequence

import numpy as np

BEYOND = 1 << 31  # every position
SEQUENCES = 63  # at most: bits of a set
PADDING = {
    "tokens": 0,
    "pos": 0,
    "line": -1,
    "cell": -1,
    "ring": -1,
    "rows": -1,
}  # line -1 is the last one, empty


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
    width  of the model's convolutions; 0: there are none
    """

    def __init__(self, count: int, parts: int = 1, width: int = 0) -> None:
        self.pos, self.sets = np.zeros(count, np.int32), np.zeros(count, np.int64)
        self.parts, self.width, self._orders = parts, width, dict[int, np.ndarray]()

    def __len__(self) -> int:
        return len(self.pos)

    def order(self, seq: int) -> np.ndarray:
        """The cells of a sequence, by position."""
        if seq not in self._orders:
            cells = np.flatnonzero(self.sets & bit(seq)).astype(np.int32)
            self._orders[seq] = cells[np.argsort(self.pos[cells], kind="stable")]
        return self._orders[seq]

    def of(self, seq: int, since: int = 0, until: int | None = None) -> np.ndarray:
        """The same from position `since` on, below `until`."""
        cells = self.order(seq)
        pos = self.pos[cells]
        selected: np.ndarray = cells[(pos >= since) & (pos < (BEYOND if until is None else until))]
        return selected

    def next(self, seq: int) -> int:
        """The position after the last one of a sequence."""
        cells = self.order(seq)
        return int(self.pos[cells[-1]]) + 1 if cells.size else 0

    def free(self, seq: int, gone: int = 0) -> np.ndarray:
        """Cells that the sequence may take: those that are free once the set `gone` of sequences is."""
        if self.parts == 1:
            return np.flatnonzero(self.sets & ~gone == 0)
        size = len(self) // self.parts
        return seq * size + np.flatnonzero(self.sets[seq * size : (seq + 1) * size] & ~gone == 0)

    def find(self, seqs: np.ndarray, gone: int = 0) -> np.ndarray:
        """A cell for each of these sequences, i32, free once the set `gone` is; takes none. Raises CacheFull."""
        if self.parts == 1:
            return self._first(len(seqs), 0, gone)
        cells = np.empty(len(seqs), np.int32)
        for seq in np.unique(seqs):
            mask = seqs == seq
            cells[mask] = self._first(int(mask.sum()), int(seq), gone)
        return cells

    def _first(self, count: int, seq: int, gone: int) -> np.ndarray:
        free = self.free(seq, gone)
        if len(free) < count:
            cells_per_part = len(self) // self.parts
            raise CacheFull(f"{count} cells wanted, {len(free)} of {cells_per_part} are free")
        return free[:count].astype(np.int32)

    def put(self, cells: np.ndarray, pos: np.ndarray, sets: np.ndarray | int) -> None:
        """Give cells positions and sets."""
        self.pos[cells], self.sets[cells] = pos, sets
        self._orders.clear()

    def append(self, cells: np.ndarray, pos: np.ndarray, owners: Sequence[Sequence[int]]) -> None:
        """Give free cells the next positions of sequences, which own them."""
        new_cells = dict[int, list[int]]()
        for cell, cell_seqs in zip(cells.tolist(), owners, strict=True):
            for seq in cell_seqs:
                new_cells.setdefault(seq, []).append(cell)
        orders = {
            seq: np.append(self.order(seq), np.array(new, np.int32))
            for seq, new in new_cells.items()
        }
        self.pos[cells] = pos
        for seq, new in new_cells.items():
            self.sets[new] |= bit(seq)
        self._orders |= orders

    def take(self, seq: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cells and positions for the next `count` tokens of a sequence, i32 (count,) each."""
        cells = self.find(np.full(count, seq))
        self.append(cells, self.next(seq) + np.arange(count), [(seq,)] * count)
        return cells, self.pos[cells]

    def free_up(self, cells: np.ndarray) -> None:
        """No sequence has these any more."""
        self.sets[cells] = 0
        self._orders.clear()

    def drop(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Drop positions of a sequence from `since` on, below `until`."""
        gone = self.of(seq, since, until)
        if gone.size:
            self.sets[gone] &= ~bit(seq)
            del self._orders[seq]

    def share(self, seq: int, to: int, since: int = 0, until: int | None = None) -> None:
        """Let another sequence have those positions, too, in the same cells."""
        self.sets[self.of(seq, since, until)] |= bit(to)
        self._orders.pop(to, None)

    def inputs(
        self, seqs: Sequence[int], lines: int, prefix: str, *, flash: bool = True
    ) -> dict[str, np.ndarray]:
        """What a run of tokens of these sequences reads: positions of cells, and a line of cells for each sequence."""
        if not flash:
            seen = np.zeros((lines, len(self)), np.float32)
            for line, seq in enumerate(seqs):
                seen[line, self.order(seq)] = 1
            return {f"{prefix}pos": self.pos, f"{prefix}seen": seen}
        order, counts = np.zeros((lines, len(self)), np.int32), np.zeros(lines, np.int32)
        for line, seq in enumerate(seqs):
            seq_cells = self.order(seq)
            order[line, : len(seq_cells)], counts[line] = seq_cells, len(seq_cells)
        return {f"{prefix}pos": self.pos, f"{prefix}order": order, f"{prefix}counts": counts}

    def before(self, seqs: Sequence[int], new: np.ndarray, line: np.ndarray) -> np.ndarray:
        """The cells (T, width) of the last tokens up to each of `new`, its own last; -1 where there are no more.

        new, line  cells of a run's tokens, and which of `seqs` each is of; others, as padding, see none
        """
        last_cells = np.full((len(new), self.width), -1, np.int32)
        place = np.empty(len(self), np.int64)
        for number, seq in enumerate(seqs):
            seq_cells, mask = self.order(seq), line == number
            place[seq_cells] = np.arange(len(seq_cells))
            at = place[new[mask]][:, None] - np.arange(self.width)[::-1]
            last_cells[mask] = np.where(at < 0, -1, seq_cells[np.maximum(at, 0)])
        return last_cells

    def advance(
        self, seqs: Sequence[int], since: Sequence[int], last: Sequence[int],
        owners: Sequence[tuple[int, ...]],
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Of cells with states: that of each of these sequences, and one for what it is after position `last`.

        since  the first positions without a state; what is older than that is freed
        owners the sequences that will have each of the new states
        """
        source = np.full(len(seqs), -1, np.int32)
        for i, (seq, first) in enumerate(zip(seqs, since, strict=True)):
            if first:
                source[i] = self.of(seq, first - 1)[-1]
        target = self.find(np.asarray(seqs, np.int32))
        self.append(target, np.asarray(last, np.int32), owners)
        return source, target

    def feed(
        self, tokens: np.ndarray, seqs: np.ndarray, rows: np.ndarray | Sequence[int], *, size: int = 0,
        sequences: int = 1, flash: bool = True, states: "Cells | None" = None,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """All inputs of a generation step for the next tokens of sequences, with results for some of them.

        size       tokens of the step, the last of which are padding; 0: no padding
        sequences  those of the Cache
        flash      as in the config
        states     of scans
        """
        cell, every = self.find(seqs), [int(seq) for seq in np.unique(seqs)]
        pos = np.empty(len(seqs), np.int32)
        for seq in every:
            mask = seqs == seq
            pos[mask] = self.next(seq) + np.arange(mask.sum())
        since = [self.next(seq) for seq in every]
        self.append(cell, pos, [(int(seq),) for seq in seqs])
        line, size = np.searchsorted(every, seqs), size or len(seqs)
        count = lines(size, sequences)
        inputs = {"tokens": tokens, "pos": pos, "line": line, "cell": cell}
        inputs = padded(inputs, size, count) | {"rows": np.asarray(rows, np.int32)}
        if states is not None:
            for seq, first in zip(every, since, strict=True):
                states.drop(seq, until=first - 1)
            last = [self.next(seq) - 1 for seq in every]
            inputs |= ends(*states.advance(every, since, last, [(seq,) for seq in every]), count)
        if self.width:
            inputs["cell_before"] = self.before(every, inputs["cell"], inputs["line"])
        return inputs | self.inputs(every, count, "cell_", flash=flash)


def ends(source: np.ndarray, target: np.ndarray, lines: int) -> dict[str, np.ndarray]:
    """Inputs of a run: the states that lines begin with, and leave; the last line is padding."""
    padding = (0, lines - len(source))
    return {
        f"state_{name}": np.pad(at, padding, constant_values=-1).astype(np.int32)
        for name, at in (("from", source), ("to", target))
    }


def lines(time: int, sequences: int) -> int:
    """Lines of cells that a run of `time` tokens reads: one for each of its sequences, and an empty one for padding."""
    return min(time, sequences) + 1


def padded(inputs: Mapping[str, np.ndarray], size: int, lines: int) -> dict[str, np.ndarray]:
    """Inputs of a run of `size` tokens, i32: the last ones see nothing and write nothing."""
    filler = {"tokens": 0, "pos": 0, "line": lines - 1, "cell": -1, "ring": -1}
    every = dict[str, np.ndarray]()
    for name, value in inputs.items():
        padding = [filler[name]] * (size - len(value))
        every[name] = (np.append(value, padding) if padding else value).astype(np.int32, copy=False)
    return every
