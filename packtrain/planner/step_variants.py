"""Forms of a training step: shapes that compute the same as the requested one, except for the order of additions."""

from collections.abc import Iterator
from dataclasses import replace

from packtrain.planner.block_extrapolation import even, reached
from packtrain.planner.step_shape import CHUNK, StepShape

CHUNKS = (CHUNK, 64, 16)
# most micro-batches of a graph, and blocks counted for each: building it takes time
PARTS, BLOCKS = 8, 256
TWICE = 16  # numbers of blocks that go back twice
FEW = 2  # the same where blocks are uneven: then all are built for each


def candidates(shape: StepShape, fixed: bool = False) -> Iterator[StepShape]:
    """Shapes that compute the same as this one, whatever its chunk; bit for bit the same if `fixed`."""
    one_pass, blocks = not shape.apart, shape.config.block_count
    clips = shape.max_norm is not None and one_pass
    for rows in [shape.rows] if fixed else divisors(shape.rows):
        micros = shape.micros * shape.rows // rows
        for layered in (shape.layered,) if fixed else (False, True):
            is_small = 1 < micros <= min(PARTS, BLOCKS // blocks)
            if layered and not (is_small and one_pass):
                continue
            candidate = replace(shape.once, rows=rows, micros=micros, layered=layered)
            yield candidate
            if clips and (layered or micros == 1):
                for count in numbers(reached(shape), TWICE if even(shape) else FEW):
                    yield replace(candidate, twice=count)
                yield replace(candidate, two_passes=True)


def numbers(count: int, max_numbers: int) -> list[int]:
    """Numbers up to `count`, at most so many, evenly spaced."""
    max_numbers = min(count, max_numbers)
    return [-(-count * n // max_numbers) for n in range(1, max_numbers + 1)]


def divisors(count: int) -> list[int]:
    """Divisors of count, the largest first."""
    return [n for n in range(count, 0, -1) if count % n == 0]


def extremes(shape: StepShape, fixed: bool = False) -> list[StepShape]:
    """Candidates for the least memory: all rows at once, or as few as possible."""
    all_shapes = list(candidates(shape if fixed else replace(shape, chunk=CHUNKS[-1]), fixed))
    extreme_rows = all_shapes[0].rows, all_shapes[-1].rows
    return [
        candidate
        for candidate in all_shapes
        if candidate.rows in extreme_rows and not candidate.twice
    ]
