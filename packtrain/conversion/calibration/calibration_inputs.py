"""How many tokens a calibrated merge reads within a memory limit: decided before training starts.

Returns a Reading for a model, names of matrices and a number of bytes, or None if not even the minimum fits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from packtrain.conversion.calibration.block_streams import Batch, Graphs, padding
from packtrain.conversion.calibration.calibrated_rounding import PART
from packtrain.dtypes import Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import make_plan
from packtrain.engine.placement import place
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile
from packtrain.models.tensor_shapes import block_shapes

TOKENS, LEAST = 6144, 1024  # tokens read at most, and at least
AT_ONCE = 1024  # tokens that go through a block at a time
NARROW = 512  # least number of columns
OTHER_NBYTES = 12 << 20  # graphs, NumPy and the file writer, measured
BUFFERS = 8  # of PART values, while rows are rounded


class Batched(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How a merge fits into a number of bytes.

    rows    at a time, in `batches` batches
    width   most columns that compensate each other's errors
    target  where the streams run
    """

    rows: int
    time: int
    batches: int
    width: int
    nbytes: int
    target: Target = CPU

    def __str__(self) -> str:
        return f"reads {self.tokens:,} tokens of the data"

    @property
    def tokens(self) -> int:
        return self.batches * self.rows * self.time

    def all(self, data: Batched, tokens: int | None = None) -> list[Batch]:
        """All rows of the data in batches, the last one filled with padding; or the first rows with so many tokens."""
        max_rows = None if tokens is None else max(1, tokens // self.time)
        rows = list(islice(_rows(data), max_rows))
        nothing = {name: np.zeros_like(values) for name, values in rows[0].items()}
        return self._batches(rows + [nothing] * (-len(rows) % self.rows))

    def read(self, data: Batched) -> list[Batch]:
        """The first rows of the data, in batches."""
        rows, num_rows = [], self.rows * self.batches
        for row in _rows(data):
            rows.append(row)
            if len(rows) == num_rows:
                break
        del rows[len(rows) // self.rows * self.rows or len(rows) :]
        return self._batches(rows)

    def _batches(self, rows: list[Batch]) -> list[Batch]:
        groups = [rows[at : at + self.rows] for at in range(0, len(rows), self.rows)]
        return [{name: np.stack([r[name] for r in g]) for name in g[0]} for g in groups]


def _rows(data: Batched) -> Iterator[Batch]:
    """The non-empty rows of an epoch."""
    for index in range(len(data)):
        batch = data[index]
        for at in np.flatnonzero((~padding(batch)).any(-1)):
            yield {name: values[at] for name, values in batch.items()}


def reading(
    adapted: ModelFile,
    types: Mapping[str, Dtype],
    time: int,
    rows: int,
    limit: int | None = None,
    target: Target = CPU,
) -> Reading | None:
    """The most tokens, and columns at a time, that fit; None if not even the minimum fits."""
    candidates = readings(adapted, types, time, rows, target)
    return next(
        (candidate for candidate in candidates if limit is None or candidate.nbytes <= limit), None
    )


def readings(
    adapted: ModelFile,
    types: Mapping[str, Dtype],
    time: int,
    rows: int,
    target: Target = CPU,
    tokens: int | None = None,
) -> Iterator[Reading]:
    """All ways to read, those of the most memory first; none if the target's memory is too small.

    types   of the calibrated matrices
    rows    number of available rows of `time` tokens
    tokens  most to read, else TOKENS
    """
    at_once = min(max(1, AT_ONCE // time), rows)
    blocks = _kinds(adapted, types)
    graphs = Graphs.of(adapted, types, (at_once, time))
    arena, widest, max_device_nbytes = 0, 1, 0
    for i in blocks:
        block = graphs.block(i)
        sites = [{"x": site.x or site.z, "z": site.z} for site in block.sites]
        for outputs in (*sites, {"x": block.x, "z": block.z, **block.shared}):
            plan = make_plan(place(Graph(outputs), target))
            outputs_nbytes = 3 * sum(t.spec.nbytes for t in outputs.values()) // 2
            arena = max(arena, plan.arena().nbytes + outputs_nbytes)
            max_device_nbytes = max(max_device_nbytes, plan.arena(target.space).nbytes)
        widest = max([widest, *(site.z.shape[-1] for site in block.sites)])
    leaves = {t for weights in (graphs.x, graphs.z) for t in weights.values()}
    if (
        target.limit is not None
        and max_device_nbytes + sum(t.spec.nbytes for t in leaves) > target.limit
    ):
        return
    fixed = arena + sum(array.nbytes for array in adapted.added.values()) + OTHER_NBYTES
    max_batches = min(tokens or TOKENS, rows * time) // (at_once * time) or 1
    for batches, width in _ladder(max_batches, LEAST // (at_once * time) or 1, widest):
        streams = 2 * 4 * batches * at_once * time * kept_width(adapted.config)
        matrix = 4 * width * width
        nbytes = fixed + streams + max(4 * matrix, 2 * matrix + BUFFERS * 4 * PART)
        yield Reading(at_once, time, batches, width, nbytes, target)


def _ladder(max_batches: int, min_batches: int, widest: int) -> Iterator[tuple[int, int]]:
    """Numbers of batches and widths to try, best first: fewer tokens, then fewer columns."""
    batches, width = max_batches, widest
    yield batches, width
    while batches > min_batches or width > NARROW:
        if batches > min_batches:
            batches = max(batches // 2, min(min_batches, batches))
        else:
            width = -(-width // 2 // NARROW) * NARROW
        yield batches, width


def kept_width(config: Config) -> int:
    """Values of a token between blocks: the stream, and keys and values that later blocks have, too."""
    sources = {config.source_of(i) for i in range(config.block_count) if config.source_of(i) != i}
    shared = sum(2 * config.kv_heads_of(i) * config.width_of(i) for i in sources)
    return math.prod(config.stream_shape) + shared


def _kinds(adapted: ModelFile, names: Iterable[str]) -> list[int]:
    """One block of each kind: kinds differ in their weights, sliding windows or rope."""
    config = adapted.config
    block_by_kind = {
        (*block_shapes(config, i).items(), config.window_of(i), config.rope_of(i)): i
        for i in {int(name.split(".")[1]) for name in names}
    }
    return sorted(block_by_kind.values())
