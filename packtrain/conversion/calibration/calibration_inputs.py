"""Decides how many tokens a calibrated merge reads within a memory limit, before training starts.

`best_reading` returns a ReadingPlan for a model, types of matrices and a number of bytes; None if none fits."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from packtrain.conversion.calibration.block_streams import StreamGraphs, TokenBatch, padding_mask
from packtrain.conversion.calibration.calibrated_rounding import PART, ROUNDED_NBYTES
from packtrain.dtypes import Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import make_plan
from packtrain.engine.page_window import in_pages, smallest_window, weight_reads
from packtrain.engine.placement import place
from packtrain.engine.tensor import Tensor
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile
from packtrain.models.tensor_shapes import block_shapes

MAX_TOKENS, MIN_TOKENS = 6144, 1024  # most and fewest tokens read
TOKENS_AT_ONCE = 1024  # tokens that go through a block at a time
MIN_COLUMNS = 512  # fewest columns that compensate each other's errors
OTHER_NBYTES = 12 << 20  # graphs, NumPy and the file writer, measured
NUM_BUFFERS = 8  # buffers of PART values, while rows are rounded
BLOCK_NUMBER = re.compile(r"\.\d+\.")


class BatchSequence(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """How a calibrated merge fits into a number of bytes."""

    rows: int  # rows of `seq_len` tokens at a time, in `batches` batches
    seq_len: int
    batches: int
    max_columns: int  # most columns that compensate each other's errors
    nbytes: int
    window_nbytes: int = 0  # least pages of the read and written models, where pages are limited
    target: Target = CPU  # backends on which the streams run

    def __str__(self) -> str:
        return f"reads {self.tokens:,} tokens of the data"

    @property
    def tokens(self) -> int:
        return self.batches * self.rows * self.seq_len

    def all_batches(self, data: BatchSequence, max_tokens: int | None = None) -> list[TokenBatch]:
        """Return the data's rows, or those of its first `max_tokens` tokens, in batches; the last batch is padded."""
        max_rows = None if max_tokens is None else max(1, max_tokens // self.seq_len)
        token_rows = list(islice(_unpadded_rows(data), max_rows))
        padding_row = {name: np.zeros_like(values) for name, values in token_rows[0].items()}
        return self._group_batches(token_rows + [padding_row] * (-len(token_rows) % self.rows))

    def read(self, data: BatchSequence) -> list[TokenBatch]:
        """Return the first rows of the data, in at most `batches` batches of `rows` rows; short data is one batch."""
        token_rows, max_rows = [], self.rows * self.batches
        for token_row in _unpadded_rows(data):
            token_rows.append(token_row)
            if len(token_rows) == max_rows:
                break
        del token_rows[len(token_rows) // self.rows * self.rows or len(token_rows) :]
        return self._group_batches(token_rows)

    def _group_batches(self, rows: list[TokenBatch]) -> list[TokenBatch]:
        row_groups = [rows[at : at + self.rows] for at in range(0, len(rows), self.rows)]
        return [{name: np.stack([row[name] for row in g]) for name in g[0]} for g in row_groups]


def _unpadded_rows(data: BatchSequence) -> Iterator[TokenBatch]:
    """Yield the rows of an epoch that are not only padding."""
    for index in range(len(data)):
        batch = data[index]
        for row_index in np.flatnonzero((~padding_mask(batch)).any(-1)):
            yield {name: values[row_index] for name, values in batch.items()}


def best_reading(
    adapted: ModelFile, types: Mapping[str, Dtype], seq_len: int, num_rows: int, limit: int | None = None,
    target: Target = CPU, page_nbytes: int = 0,
) -> ReadingPlan | None:  # fmt: skip
    """Return the plan that fits `limit` bytes with the most calibration tokens, then the most columns that compensate
    each other's rounding errors; None if none fits. If `limit` is None, any plan fits; with `page_nbytes`, a limit on
    mapped pages, memory and pages together fit the sum of both limits. Other arguments: see reading_plans."""
    candidates = reading_plans(adapted, types, seq_len, num_rows, target)
    if limit is None:
        return next(candidates, None)
    sizes = ((c, c.nbytes + (c.window_nbytes if page_nbytes else 0)) for c in candidates)
    return next((c for c, nbytes in sizes if nbytes <= limit + page_nbytes), None)


def reading_plans(
    adapted: ModelFile, types: Mapping[str, Dtype], seq_len: int, num_rows: int, target: Target = CPU,
    max_tokens: int | None = None,
) -> Iterator[ReadingPlan]:  # fmt: skip
    """Yield plans to run a model over calibration rows, most memory first; none if the target's memory is too small.

    types       types of the calibrated matrices, by name
    num_rows    number of available rows of `seq_len` tokens
    max_tokens  most tokens to read, by default MAX_TOKENS
    """
    at_once = min(max(1, TOKENS_AT_ONCE // seq_len), num_rows)
    blocks = _blocks_by_kind(adapted, types)
    graphs = StreamGraphs.for_types(adapted, types, (at_once, seq_len))
    arena_nbytes, max_width, max_device_nbytes = 0, 1, 0
    sizes = _largest_sizes((*graphs.x.values(), *graphs.z.values()))
    window_nbytes = smallest_window(weight_reads(place(graphs.embedding()), sizes))
    for i in blocks:
        block = graphs.build_block(i)
        input_pairs = [{"x": site.x or site.z, "z": site.z} for site in block.matrix_inputs]
        for outputs in (*input_pairs, {"x": block.x, "z": block.z, **block.shared}):
            plan = make_plan(placed := place(Graph(outputs), target))
            window_nbytes = max(window_nbytes, smallest_window(weight_reads(placed, sizes)))
            outputs_nbytes = 3 * sum(leaf.spec.nbytes for leaf in outputs.values()) // 2
            arena_nbytes = max(arena_nbytes, plan.arena().nbytes + outputs_nbytes)
            max_device_nbytes = max(max_device_nbytes, plan.arena(target.space).nbytes)
        max_width = max([max_width, *(site.z.shape[-1] for site in block.matrix_inputs)])
    weight_leaves = {leaf for weights in (graphs.x, graphs.z) for leaf in weights.values()}
    if (
        target.limit is not None
        and max_device_nbytes + sum(leaf.spec.nbytes for leaf in weight_leaves) > target.limit
    ):
        return
    fixed = arena_nbytes + sum(a.nbytes for a in adapted.adapter_values.values()) + OTHER_NBYTES
    max_batches = min(max_tokens or MAX_TOKENS, num_rows * seq_len) // (at_once * seq_len) or 1
    for batches, width in _ladder(max_batches, MIN_TOKENS // (at_once * seq_len) or 1, max_width):
        stream_nbytes = 2 * 4 * batches * at_once * seq_len * values_per_token(adapted.config)
        matrix = 4 * width * width
        nbytes = fixed + stream_nbytes + max(4 * matrix, 2 * matrix + NUM_BUFFERS * 4 * PART)
        pages = window_nbytes + ROUNDED_NBYTES
        yield ReadingPlan(at_once, seq_len, batches, width, nbytes, pages, target)


def _largest_sizes(leaves: Collection[Tensor]) -> dict[str, int]:
    """Return for each leaf's name the bytes, in whole pages, of the largest leaf of the same name in any block."""
    places = {leaf.label: BLOCK_NUMBER.sub(".", leaf.label) for leaf in leaves}
    sizes = dict.fromkeys(places.values(), 0)
    for leaf in leaves:
        sizes[places[leaf.label]] = max(sizes[places[leaf.label]], in_pages(leaf.spec.nbytes))
    return {label: sizes[place_in_block] for label, place_in_block in places.items()}


def _ladder(max_batches: int, min_batches: int, max_width: int) -> Iterator[tuple[int, int]]:
    """Yield (batches, columns) to try, best first: batches are halved down to `min_batches`, then columns."""
    num_batches, num_columns = max_batches, max_width
    yield num_batches, num_columns
    while num_batches > min_batches or num_columns > MIN_COLUMNS:
        if num_batches > min_batches:
            num_batches = max(num_batches // 2, min(min_batches, num_batches))
        else:
            num_columns = -(-num_columns // 2 // MIN_COLUMNS) * MIN_COLUMNS
        yield num_batches, num_columns


def values_per_token(config: Config) -> int:
    """Return how many values of a token pass from block to block: the residual stream, and shared keys and values."""
    sources = {config.source_of(i) for i in range(config.block_count) if config.source_of(i) != i}
    kv_values = sum(2 * config.kv_heads_of(i) * config.width_of(i) for i in sources)
    return math.prod(config.stream_shape) + kv_values


def _blocks_by_kind(adapted: ModelFile, names: Iterable[str]) -> list[int]:
    """Return one block for each combination of shapes, window and rope, so that not every block is planned."""
    config = adapted.config
    block_by_kind = {
        (*block_shapes(config, i).items(), config.window_of(i), config.rope_of(i)): i
        for i in {int(name.split(".")[1]) for name in names}
    }
    return sorted(block_by_kind.values())
