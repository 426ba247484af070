"""Sums of rows, in the order in which they come: the same bits each time, which sums by atomic additions are not."""

import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

BLOCK = 1024  # ids that are looked at at a time


@triton.jit
def _add(to, x, ids, count, columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A program for each id: the first that has it adds the rows of all that do."""
    program, at, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    target, mask = tl.load(ids + program), column < columns
    before = 0
    for start in range(0, program, BLOCK):
        is_same_id = tl.load(ids + start + at, mask=start + at < program, other=-1) == target
        before = tl.maximum(before, tl.max(is_same_id.to(tl.int32)))
    if (target >= 0) & (before == 0):
        place = to + target.to(tl.int64) * columns + column
        total = tl.load(place, mask=mask, other=0.0)
        for start in range(program // BLOCK * BLOCK, count, BLOCK):
            is_same_id = tl.load(ids + start + at, mask=start + at < count, other=-1) == target
            matching_rows = tl.where(is_same_id & (start + at >= program), at, BLOCK)
            first = tl.min(matching_rows)
            while first < BLOCK:
                total += tl.load(x + (start + first) * columns + column, mask=mask, other=0.0)
                first = tl.min(tl.where(matching_rows > first, matching_rows, BLOCK))
        tl.store(place, total, mask=mask)


def add_rows(to, x, ids):
    """to[id] += row of x, for each id (N,) i32 that is not negative; to (V, C) and x (N, C) f32 are dense."""
    count, columns = x.shape
    launch(_add, (count,), to, x, ids, count, columns, BLOCK=BLOCK, COLUMNS=power_of_two(columns))
