"""Bookkeeping of a KV cache on the host: which position of which sequences each cell holds.

A CellTable builds the index inputs of `cached_transformer.generation`; the session holds the keys and values."""

from collections.abc import Mapping, Sequence

import numpy as np

BEYOND = 1 << 31  # beyond every position
SEQUENCES = 63  # most sequences: bits of a set


class CacheFull(RuntimeError):
    """A run needs more cells than are free."""


def bit(seq: int) -> int:
    """Return the bit mask of one sequence; sets of sequences are such masks."""
    return 1 << seq


class CellTable:
    """A position and a set of sequences for each cell; a cell without a sequence is free.

    pos        (cells,)  i32
    sets       (cells,)  i64  bit s: sequence s has this position here; several sequences may share a cell
    num_parts  equal parts of the cells, one for each sequence; with 1, all sequences share all cells
    width      width of the model's convolutions; 0: there are none
    """

    def __init__(self, num_cells: int, num_parts: int = 1, width: int = 0) -> None:
        self.pos, self.sets = np.zeros(num_cells, np.int32), np.zeros(num_cells, np.int64)
        self.num_parts, self.width, self._ordered_cells = num_parts, width, dict[int, np.ndarray]()

    def __len__(self) -> int:
        return len(self.pos)

    def ordered_cells(self, seq: int) -> np.ndarray:
        """Return the cells of a sequence, by position."""
        if seq not in self._ordered_cells:
            cells = np.flatnonzero(self.sets & bit(seq)).astype(np.int32)
            self._ordered_cells[seq] = cells[np.argsort(self.pos[cells], kind="stable")]
        return self._ordered_cells[seq]

    def of(self, seq: int, since: int = 0, until: int | None = None) -> np.ndarray:
        """Return the cells of a sequence that have positions from `since` on, below `until`, ordered by position."""
        cells = self.ordered_cells(seq)
        pos = self.pos[cells]
        selected: np.ndarray = cells[(pos >= since) & (pos < (BEYOND if until is None else until))]
        return selected

    def next(self, seq: int) -> int:
        """Return the position after the last one of a sequence; 0 if the sequence is empty."""
        cells = self.ordered_cells(seq)
        return int(self.pos[cells[-1]]) + 1 if cells.size else 0

    def free_cells(self, seq: int, freed: int = 0) -> np.ndarray:
        """Return the cells free for `seq`: those of no sequence, or only of sequences in the bit mask `freed`."""
        if self.num_parts == 1:
            return np.flatnonzero(self.sets & ~freed == 0)
        size = len(self) // self.num_parts
        return seq * size + np.flatnonzero(self.sets[seq * size : (seq + 1) * size] & ~freed == 0)

    def find_free_cells(self, seqs: np.ndarray, freed: int = 0) -> np.ndarray:
        """Return a cell, i32, for each of `seqs`: free, or only of sequences in bit mask `freed`. Raises CacheFull."""
        if self.num_parts == 1:
            return self._first_free_cells(len(seqs), 0, freed)
        cells = np.empty(len(seqs), np.int32)
        for seq in np.unique(seqs):
            mask = seqs == seq
            cells[mask] = self._first_free_cells(int(mask.sum()), int(seq), freed)
        return cells

    def _first_free_cells(self, num_wanted: int, seq: int, freed: int) -> np.ndarray:
        """Return num_wanted cells that are free for `seq`, see free_cells. Raises CacheFull."""
        free = self.free_cells(seq, freed)
        if len(free) < num_wanted:
            cells_per_part = len(self) // self.num_parts
            raise CacheFull(f"{num_wanted} cells wanted, {len(free)} of {cells_per_part} are free")
        return free[:num_wanted].astype(np.int32)

    def assign_cells(self, cells: np.ndarray, pos: np.ndarray, sets: np.ndarray | int) -> None:
        """Set positions of cells, and the sequences that have them: bit masks `sets`, one for all or for each."""
        self.pos[cells], self.sets[cells] = pos, sets
        self._ordered_cells.clear()

    def append(self, cells: np.ndarray, pos: np.ndarray, owners: Sequence[Sequence[int]]) -> None:
        """Give free cells the next positions, `pos`, of the sequences that own them: `owners` of each cell."""
        new_cells = dict[int, list[int]]()
        for new_cell, cell_seqs in zip(cells.tolist(), owners, strict=True):
            for seq in cell_seqs:
                new_cells.setdefault(seq, []).append(new_cell)
        new_orders = {
            s: np.append(self.ordered_cells(s), np.array(c, np.int32)) for s, c in new_cells.items()
        }
        self.pos[cells] = pos
        for seq, added_cells in new_cells.items():
            self.sets[added_cells] |= bit(seq)
        self._ordered_cells |= new_orders

    def release_cells(self, cells: np.ndarray) -> None:
        """Free cells of all sequences."""
        self.sets[cells] = 0
        self._ordered_cells.clear()

    def drop_positions(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Drop positions of a sequence from `since` on, below `until`."""
        dropped_cells = self.of(seq, since, until)
        if dropped_cells.size:
            self.sets[dropped_cells] &= ~bit(seq)
            del self._ordered_cells[seq]

    def share_cells(self, seq: int, to: int, since: int = 0, until: int | None = None) -> None:
        """Add sequence `to` to the cells of `seq` with positions from `since` on, below `until`."""
        self.sets[self.of(seq, since, until)] |= bit(to)
        self._ordered_cells.pop(to, None)

    def line_inputs(
        self, seqs: Sequence[int], lines: int, prefix: str, *, flash: bool = True
    ) -> dict[str, np.ndarray]:
        """Return inputs of a run, by names that begin with `prefix`: `pos`, positions of all cells; `order` (lines,
        cells) and `counts` (lines,), the indices of each sequence's cells and how many there are; or without `flash`
        (fused attention) `seen` (lines, cells), 1 for its cells, else 0."""
        if not flash:
            visible_cells = np.zeros((lines, len(self)), np.float32)
            for line, seq in enumerate(seqs):
                visible_cells[line, self.ordered_cells(seq)] = 1
            return {f"{prefix}pos": self.pos, f"{prefix}seen": visible_cells}
        cell_order, counts = np.zeros((lines, len(self)), np.int32), np.zeros(lines, np.int32)
        for line, seq in enumerate(seqs):
            seq_cells = self.ordered_cells(seq)
            cell_order[line, : len(seq_cells)], counts[line] = seq_cells, len(seq_cells)
        return {f"{prefix}pos": self.pos, f"{prefix}order": cell_order, f"{prefix}counts": counts}

    def before(self, seqs: Sequence[int], new_cells: np.ndarray, lines: np.ndarray) -> np.ndarray:
        """Return for each new cell the cells (T, width) of its sequence's last tokens, oldest first; -1: none.

        lines  index into `seqs` for each new cell; other values, as of padding, see no cells
        """
        last_cells = np.full((len(new_cells), self.width), -1, np.int32)
        index_of_cell = np.empty(len(self), np.int64)
        for line_index, seq in enumerate(seqs):
            seq_cells, mask = self.ordered_cells(seq), lines == line_index
            index_of_cell[seq_cells] = np.arange(len(seq_cells))
            indices = index_of_cell[new_cells[mask]][:, None] - np.arange(self.width)[::-1]
            last_cells[mask] = np.where(indices < 0, -1, seq_cells[np.maximum(indices, 0)])
        return last_cells

    def advance_states(
        self, seqs: Sequence[int], start_positions: Sequence[int], last: Sequence[int],
        state_owners: Sequence[tuple[int, ...]],
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Take a cell for each sequence's scan state after position `last`; returns cells to read, and cells to write.

        start_positions  first position of each sequence without a state; 0: there is no state to read
        state_owners     sequences that will have each new state
        """
        source_cells = np.full(len(seqs), -1, np.int32)
        for i, (seq, start_pos) in enumerate(zip(seqs, start_positions, strict=True)):
            if start_pos:
                source_cells[i] = self.of(seq, start_pos - 1)[-1]
        target_cells = self.find_free_cells(np.asarray(seqs, np.int32))
        self.append(target_cells, np.asarray(last, np.int32), state_owners)
        return source_cells, target_cells


def state_slot_inputs(source: np.ndarray, target: np.ndarray, lines: int) -> dict[str, np.ndarray]:
    """Return inputs of a run: for each of `lines` lines, one for a sequence, the cell of the scan state that it reads
    (source) and the one that it writes (target); -1: padding."""
    padding = (0, lines - len(source))
    return {
        f"state_{name}": np.pad(cells, padding, constant_values=-1).astype(np.int32)
        for name, cells in (("from", source), ("to", target))
    }


def pad_inputs(inputs: Mapping[str, np.ndarray], size: int, lines: int) -> dict[str, np.ndarray]:
    """Return inputs, i32, padded to `size` tokens; padding is of the last of `lines` lines, sees and writes nothing."""
    padding_values = {"tokens": 0, "pos": 0, "line": lines - 1, "cell": -1, "ring": -1}
    every = dict[str, np.ndarray]()
    for name, value in inputs.items():
        padding = [padding_values[name]] * (size - len(value))
        every[name] = (np.append(value, padding) if padding else value).astype(np.int32, copy=False)
    return every
