"""Rounds matrices of a file block by block to quantization grids, with the least change of what they compute.

Takes a model (a base with unmerged adapters, or the one to quantize), batches of tokens, and a file with the new types,
whose matrices are changed in place.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.conversion.calibration.block_streams import Batch, Site, Streams
from packtrain.conversion.calibration.error_feedback import Feedback, feedback, product
from packtrain.conversion.calibration.grid_points import EIGHT, OnPoints
from packtrain.conversion.calibration.rounding_grid import OnGrid
from packtrain.dtypes import dtype_of
from packtrain.engine.backends import CPU, Target
from packtrain.gguf import GGUF
from packtrain.kernels.quantized_arrays import quantize
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import ModelFile
from packtrain.models.model_with_adapters import Scaled, adapted
from packtrain.models.rewrite_model import Rows

PART = 1 << 19  # values of a matrix rounded at a time
FEW_TOKENS = 32  # an expert reached by fewer tokens is rounded plainly

Done = Callable[[int, int], None]


def calibrate(
    path: Path,
    model: ModelFile,
    changes: Mapping[str, Rows],
    batches: Sequence[Batch],
    width: int | None = None,
    done: Done = lambda block, blocks: None,
    target: Target = CPU,
    searched: Collection[str] = (),
) -> dict[str, float]:
    """Round these matrices in the file; returns the relative error of each matrix's output.

    model  whose outputs are wanted
    width  most columns that compensate each other's errors: the sums over their inputs have width² numbers
    searched   names whose scales are searched under the sums over their inputs; the others keep those in the file
    """
    file = GGUF(path)
    written = np.memmap(path, np.uint8, "r+")
    arrays = {name: _mapped(written, file, name) for name in file.entries if name in changes}
    inside = {name: array for name, array in arrays.items() if name.startswith("blk.")}
    embedding = {name: arrays[name] for name in (EMBEDDING,) if name in searched}
    streams, sums = Streams(model, inside | embedding, batches, target), dict[str, np.ndarray]()
    changed = {int(name.split(".")[1]) for name in inside}
    first, last = 0 if embedding else min(changed), max(changed)
    streams.pass_by(first)
    for i in range(first, last + 1):
        block = streams.block(i)
        for site in block.sites:
            names = [name for name in site.names if dtype_of(arrays[name]).chosen]
            if names:
                rounded = replace(site, names=tuple(names))
                max_width = width or site.z.shape[-1]
                for name, sum in _site(streams, rounded, arrays, changes, max_width, searched):
                    sums[name] = sums.get(name, 0) + sum
        if i < last:
            streams.advance(block)
        done(i + 1 - first, last + 1 - first)
    written.flush()
    return {name: float((error / power) ** 0.5) for name, (error, power) in sums.items() if power}


def _mapped(written: np.ndarray, file: GGUF, name: str) -> np.ndarray:
    """The tensor mapped from the file for writing, (…, blocks)."""
    e = file.entries[name]
    return np.ndarray(e.dtype.array_shape(e.shape), e.dtype.numpy, written.data, e.offset)


def additions(base: ModelFile, adapters: Sequence[Scaled]) -> ModelFile:
    """The base with the adapters of its blocks; the others only work merged."""
    ours = []
    for adapter, by in adapters:
        pairs = {name: pair for name, pair in adapter.pairs.items() if name.startswith("blk.")}
        ours.append((replace(adapter, pairs=pairs), by))
    return adapted(base, ours)


def _site(
    streams: Streams,
    site: Site,
    arrays: Mapping[str, np.ndarray],
    changes: Mapping[str, Rows],
    width: int,
    searched: Collection[str],
) -> Iterator[tuple[str, np.ndarray]]:
    """Round the matrices of a site; an expert has its own sums if its inputs differ from the others'.

    Returns for each the squares of its error and of its output.
    """
    unit = EIGHT if any(dtype_of(arrays[name]).points for name in site.names) else 1
    columns, experts = site.z.shape[-1], [None] if site.expert is None else range(site.experts)
    for start in range(0, columns, width):
        part = slice(start, min(start + width, columns))
        for expert in experts:
            moments = streams.moments(site, part, expert)
            parts = {
                name: Slice.of(arrays[name], changes[name], part, expert, site.experts)
                for name in site.names
            }
            if expert is not None and moments.tokens < FEW_TOKENS:
                for columns_slice in parts.values():
                    columns_slice.round_plainly()
                continue
            powers = [columns_slice.power(moments.squares) for columns_slice in parts.values()]
            weights = moments.squares.diagonal() / moments.tokens
            back = feedback(moments.squares, moments.shift, unit)
            for (name, columns_slice), output_power in zip(parts.items(), powers, strict=True):
                error = columns_slice.round(back, weights if name in searched else None)
                yield name, np.array([error, output_power])


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows and columns of a matrix: the quantized ones to write, and the wanted values."""

    packed: np.ndarray
    changed: Rows
    rows: range
    columns: slice

    @classmethod
    def of(
        cls, array: np.ndarray, changed: Rows, columns: slice, expert: int | None, experts: int
    ) -> "Slice":
        """These columns of all rows, or of the rows of one expert."""
        packed, block = array.reshape(-1, array.shape[-1]), dtype_of(array).block
        count = len(packed) if expert is None else len(packed) // experts
        first = (expert or 0) * count
        blocks = slice(columns.start // block, columns.stop // block)
        return cls(packed[:, blocks], changed, range(first, first + count), columns)

    def _pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = max(1, PART // (self.columns.stop - self.columns.start))
        for at in self.rows[::step]:
            end = min(at + step, self.rows.stop)
            yield self.packed[at:end], self.changed(at, end)[:, self.columns]

    def power(self, squares: np.ndarray) -> float:
        """The sum of squares of the outputs for inputs with these sums."""
        return float(sum(np.vdot(product(rows, squares), rows) for _, rows in self._pieces()))

    def round(self, back: Feedback, weights: np.ndarray | None) -> float:
        """Write the rounded codes, with scales found by these weights of columns; returns the squared output error."""
        error = 0.0
        for packed, rows in self._pieces():
            aim = back.targets(rows)
            if weights is not None:
                packed[...] = quantize(back.rows(aim), dtype_of(packed), weights)
            grid = OnGrid(packed) if dtype_of(packed).layout else OnPoints(packed)
            error += back.round(aim, grid)
            grid.put(packed)
        return error

    def round_plainly(self) -> None:
        """Quantize them plainly, on their own grid."""
        equal_weights = np.ones(self.columns.stop - self.columns.start, np.float32)
        for packed, rows in self._pieces():
            dtype = dtype_of(packed)
            packed[...] = quantize(rows, dtype, equal_weights if dtype.demanding else None)
