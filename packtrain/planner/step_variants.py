"""Variants of a training step: equal but for the order of additions, and what experts drop in other micro-batches."""

from collections.abc import Iterator
from dataclasses import replace

from packtrain.models.tiled_block import can_tile
from packtrain.planner.block_extrapolation import blocks_match, num_reached_blocks
from packtrain.planner.step_shape import DEFAULT_CHUNK, StepShape

CHUNK_SIZES = (DEFAULT_CHUNK, 64, 16)
# most micro-batches of a graph, and most blocks over all of them: building a graph takes time
PARTS, MAX_GRAPH_BLOCKS = 8, 256
TILE_ROWS = 256, 64  # rows of a tile
NUM_TWO_PASS_COUNTS = 16  # how many numbers of blocks that run backward twice are tried
NUM_UNEVEN_COUNTS = 2  # how many if blocks differ: each number then needs a graph of all blocks


def candidates(
    shape: StepShape, fixed: bool = False, may_tile: bool = False
) -> Iterator[StepShape]:
    """Yield variants of a step, to choose the fastest: with equal results but for rounding, or with `fixed`, equal
    bits; with `may_tile`, also with blocks that run in tiles of their rows."""
    for count in tile_counts(shape) if may_tile and not fixed else (shape.num_row_tiles,):
        yield from _with_micro_batches(replace(shape, num_row_tiles=count), fixed)


def tile_counts(shape: StepShape) -> list[int]:
    """Return the numbers of tiles in which blocks may run: 1, and those with TILE_ROWS rows a tile."""
    counts = [shape.seq_len // rows for rows in TILE_ROWS if shape.seq_len % rows == 0]
    return [1, *(count for count in counts if count > 1 and can_tile(shape.config))]


def _with_micro_batches(shape: StepShape, fixed: bool) -> Iterator[StepShape]:
    """Yield the shape in micro-batches, in either order through the blocks, and with blocks that run backward twice."""
    once, is_one_pass = shape.once, not shape.has_separate_update
    clips_norm = shape.max_norm is not None and is_one_pass
    for rows in [shape.micro_batch_size] if fixed else divisors(shape.micro_batch_size):
        count = shape.num_micro_batches * shape.micro_batch_size // rows
        for is_layered in (shape.layered,) if fixed else (False, True):
            is_small = 1 < count <= min(PARTS, MAX_GRAPH_BLOCKS // shape.config.block_count)
            if is_layered and not (is_small and is_one_pass):
                continue
            form = replace(once, micro_batch_size=rows, num_micro_batches=count, layered=is_layered)
            yield form
            if clips_norm and (is_layered or count == 1):
                num_counts = NUM_TWO_PASS_COUNTS if blocks_match(shape) else NUM_UNEVEN_COUNTS
                for n in spaced_counts(num_reached_blocks(shape), num_counts):
                    yield replace(form, num_two_pass_blocks=n)
                yield replace(form, two_passes=True)


def spaced_counts(max_count: int, num_counts: int) -> list[int]:
    """Return at most `num_counts` evenly spaced numbers from 1 to `max_count`, the last of which is `max_count`."""
    num_counts = min(max_count, num_counts)
    return [-(-max_count * n // num_counts) for n in range(1, num_counts + 1)]


def divisors(dividend: int) -> list[int]:
    """Return the divisors of `dividend`, the largest first."""
    return [n for n in range(dividend, 0, -1) if dividend % n == 0]


def extreme_shapes(
    shape: StepShape, fixed: bool = False, may_tile: bool = False
) -> list[StepShape]:
    """Return those `candidates` that may take the least memory: with the fewest or the most micro-batches."""
    least_chunk = shape if fixed else replace(shape, chunk=CHUNK_SIZES[-1])
    shapes = list(candidates(least_chunk, fixed, may_tile))
    extreme_rows = shapes[0].micro_batch_size, shapes[-1].micro_batch_size
    return [s for s in shapes if s.micro_batch_size in extreme_rows and not s.num_two_pass_blocks]
