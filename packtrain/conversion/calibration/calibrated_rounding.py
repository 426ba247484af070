"""Rounds matrices of a file block by block to quantization grids, with the least change of their outputs.

`calibrate` takes a model (a base with unmerged adapters, or the one to quantize), batches of tokens, and a file with
the new types, whose matrices it changes in place."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.common.mapped_file import MappedFile, more_pages, passing_pages
from packtrain.conversion.calibration.block_streams import MatrixInput, StreamPair, TokenBatch
from packtrain.conversion.calibration.error_feedback import ErrorFeedback, compute_feedback, product
from packtrain.conversion.calibration.grid_points import UNIT_COLUMNS, PointRounder
from packtrain.conversion.calibration.rounding_grid import GridRounder
from packtrain.dtypes import dtype_of
from packtrain.engine.backends import CPU, Target
from packtrain.gguf import GGUF
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import ModelFile
from packtrain.models.rewrite_model import ReadRows

PART = 1 << 19  # values of a matrix rounded at a time
ROUNDED_NBYTES = 2 * 4 * PART  # most pages of the rows that are read and of those that are written
# An expert that fewer tokens reach is rounded to the nearest: they say too little about its inputs. Experts share the
# sums of gate and up, which all tokens bring. down has sums per expert, whose rows differ between the streams, so
# errors of earlier blocks are not repaired there.
MIN_EXPERT_TOKENS = 32

BlockProgress = Callable[[int, int], None]


@more_pages(-ROUNDED_NBYTES)
def calibrate(
    path: Path, model: ModelFile, changes: Mapping[str, ReadRows], batches: Sequence[TokenBatch],
    max_columns: int | None = None, report_block: BlockProgress = lambda block, blocks: None, target: Target = CPU,
    searched: Collection[str] = (),
) -> dict[str, float]:  # fmt: skip
    """Round matrices in file `path`, in place, so that outputs on `batches` change least; return relative errors.

    model        the model whose outputs to keep; `changes`: functions that read exact rows, by matrix to round
    max_columns  most columns that compensate each other's errors, for which n² sums are held; None: all of a matrix
    searched     names whose scales are searched under the sums over their inputs; others keep the scales in the file
    """
    gguf = GGUF(path)
    file = MappedFile(path, writable=True)
    arrays = {name: _map_tensor(file, gguf, name) for name in gguf.entries if name in changes}
    inside = {name: array for name, array in arrays.items() if name.startswith("blk.")}
    embedding = {name: arrays[name] for name in (EMBEDDING,) if name in searched}
    streams, sums = StreamPair(model, inside | embedding, batches, target), dict[str, np.ndarray]()
    changed_blocks = {int(name.split(".")[1]) for name in inside}
    first_block, last_block = 0 if embedding else min(changed_blocks), max(changed_blocks)
    streams.skip_blocks(first_block)
    for i in range(first_block, last_block + 1):
        block = streams.block(i)
        for matrix_input in block.matrix_inputs:
            names = [name for name in matrix_input.matrix_names if dtype_of(arrays[name]).chosen]
            if names:
                rounded = replace(matrix_input, matrix_names=tuple(names))
                num_columns = max_columns or matrix_input.z.shape[-1]
                site_sums = _round_site(streams, rounded, arrays, changes, num_columns, searched)
                for name, sum in site_sums:
                    sums[name] = sums.get(name, 0) + sum
        if i < last_block:
            streams.advance_through(block)
        report_block(i + 1 - first_block, last_block + 1 - first_block)
    file.flush()
    return {name: float((error / power) ** 0.5) for name, (error, power) in sums.items() if power}


def _map_tensor(file: MappedFile, gguf: GGUF, name: str) -> np.ndarray:
    """Return the tensor mapped from the file for writing, (…, blocks)."""
    e = gguf.entries[name]
    return np.ndarray(e.dtype.array_shape(e.shape), e.dtype.numpy, file, e.offset)


def _round_site(
    streams: StreamPair, site: MatrixInput, arrays: Mapping[str, np.ndarray], changes: Mapping[str, ReadRows],
    max_columns: int, searched: Collection[str],
) -> Iterator[tuple[str, np.ndarray]]:  # fmt: skip
    """Round the matrices that share an input (a site); experts with different inputs are calibrated one by one. Yields
    (matrix's name, sums of squares (2,) of its output's error and of its output) for each part that was rounded."""
    unit = UNIT_COLUMNS if any(dtype_of(arrays[name]).points for name in site.matrix_names) else 1
    num_columns, experts = site.z.shape[-1], [None] if site.expert is None else range(site.experts)
    for column_start in range(0, num_columns, max_columns):
        part = slice(column_start, min(column_start + max_columns, num_columns))
        for expert in experts:
            moments = streams.moments(site, part, expert)
            parts = {
                name: MatrixSlice.of(arrays[name], changes[name], part, expert, site.experts)
                for name in site.matrix_names
            }
            if expert is not None and moments.tokens < MIN_EXPERT_TOKENS:
                for matrix_slice in parts.values():
                    matrix_slice.round_plainly()
                continue
            powers = [matrix_slice.output_power(moments.squares) for matrix_slice in parts.values()]
            weights = moments.squares.diagonal() / moments.tokens
            error_feedback = compute_feedback(moments.squares, moments.shift, unit)
            for (name, matrix_slice), output_power in zip(parts.items(), powers, strict=True):
                error = matrix_slice.round(error_feedback, weights if name in searched else None)
                yield name, np.array([error, output_power])


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """Some rows and columns of a matrix: `packed` has all its quantized rows; `changed` reads exact values."""

    packed: np.ndarray
    changed: ReadRows
    row_range: range
    columns: slice

    @classmethod
    def of(
        cls, array: np.ndarray, changed: ReadRows, columns: slice, expert: int | None, experts: int
    ) -> "MatrixSlice":
        """Return a slice with these columns of `array` (…, blocks), whose exact rows `changed` reads: all rows, or, if
        `array` is a stack of `experts` matrices, those of matrix number `expert`."""
        packed_rows = array.reshape(-1, array.shape[-1])
        num_rows = len(packed_rows) if expert is None else len(packed_rows) // experts
        first_row = (expert or 0) * num_rows
        return cls(packed_rows, changed, range(first_row, first_row + num_rows), columns)

    def _row_parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (quantized rows, to be written; their exact values), some rows of the slice at a time."""
        block_size = dtype_of(self.packed).block
        blocks = slice(self.columns.start // block_size, self.columns.stop // block_size)
        num_rows = max(1, PART // (self.packed.shape[-1] * block_size))
        for at in self.row_range[::num_rows]:
            row_stop = min(at + num_rows, self.row_range.stop)
            with passing_pages(rows := self.packed[at:row_stop]):
                yield rows[:, blocks], self.changed(at, row_stop)[:, self.columns]

    def output_power(self, squares: np.ndarray) -> float:
        """Return the sum over tokens of squared outputs W z, from the sums over inputs `squares` = ZᵀZ (n, n)."""
        return float(sum(np.vdot(product(rows, squares), rows) for _, rows in self._row_parts()))

    def round(self, back: ErrorFeedback, weights: np.ndarray | None) -> float:
        """Write rounded codes; return the squared output error. `weights` (n,): choose scales anew, None: keep them."""
        error = 0.0
        for packed, exact_rows in self._row_parts():
            targets = back.row_targets(exact_rows)
            if weights is not None:
                packed[...] = quantize(back.target_rows(targets), dtype_of(packed), weights)
            grid = GridRounder(packed) if dtype_of(packed).layout else PointRounder(packed)
            error += back.round_targets(targets, grid)
            grid.write_rows(packed)
        return error

    def round_plainly(self) -> None:
        """Round each value to the nearest of its type, without calibration."""
        equal_weights = np.ones(self.columns.stop - self.columns.start, np.float32)
        for packed_rows, rows in self._row_parts():
            dtype = dtype_of(packed_rows)
            weights = equal_weights if dtype.column_weights_need else None
            packed_rows[...] = quantize(rows, dtype, weights)
