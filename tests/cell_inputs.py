"""Inputs of a generation step for sequences in one table of cells, without a context."""

from collections.abc import Sequence

import numpy as np

from packtrain.inference.kv_cache.kv_cells import CellTable, pad_inputs, state_slot_inputs
from packtrain.models.cached_transformer import count_lines


def feed_inputs(
    table: CellTable, tokens: np.ndarray, seqs: np.ndarray, logit_rows: np.ndarray | Sequence[int], *, size: int = 0,
    max_sequences: int = 1, flash: bool = True, state_table: CellTable | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Take cells for the next tokens of sequences and return all inputs of a generation step.

    logit_rows     tokens whose logits are computed
    size           tokens of the step, the last of which are padding; 0: no padding
    max_sequences  those of the CacheLayout; `flash` is that of the config
    state_table    cells that hold the states of scans
    """
    new_cells, run_seqs = table.find_free_cells(seqs), [int(seq) for seq in np.unique(seqs)]
    pos = np.empty(len(seqs), np.int32)
    for seq in run_seqs:
        mask = seqs == seq
        pos[mask] = table.next(seq) + np.arange(mask.sum())
    since = [table.next(seq) for seq in run_seqs]
    table.append(new_cells, pos, [(int(seq),) for seq in seqs])
    lines, size = np.searchsorted(run_seqs, seqs), size or len(seqs)
    num_lines = count_lines(size, max_sequences)
    inputs = {"tokens": tokens, "pos": pos, "line": lines, "cell": new_cells}
    inputs = pad_inputs(inputs, size, num_lines) | {"rows": np.asarray(logit_rows, np.int32)}
    if state_table is not None:
        for seq, start_pos in zip(run_seqs, since, strict=True):
            state_table.drop_positions(seq, until=start_pos - 1)
        last = [table.next(seq) - 1 for seq in run_seqs]
        slots = state_table.advance_states(run_seqs, since, last, [(seq,) for seq in run_seqs])
        inputs |= state_slot_inputs(*slots, num_lines)
    if table.width:
        inputs["cell_before"] = table.before(run_seqs, inputs["cell"], inputs["line"])
    return inputs | table.line_inputs(run_seqs, num_lines, "cell_", flash=flash)
