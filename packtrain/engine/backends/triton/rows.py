"""Adds rows by index in their order, which gives equal bits each time, unlike atomic additions."""

import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

BLOCK = 1024  # ids that are compared at a time


@triton.jit
def _add(dest, x, ids, num_ids, num_columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Add rows of x: of the programs, one for each id, the first with an id adds all rows of that id, others none."""
    program, at, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    target_id, mask = tl.load(ids + program), column < num_columns
    has_earlier = 0
    for start in range(0, program, BLOCK):
        is_same_id = tl.load(ids + start + at, mask=start + at < program, other=-1) == target_id
        has_earlier = tl.maximum(has_earlier, tl.max(is_same_id.to(tl.int32)))
    if (target_id >= 0) & (has_earlier == 0):
        pointers = dest + target_id.to(tl.int64) * num_columns + column
        row_sum = tl.load(pointers, mask=mask, other=0.0)
        for start in range(program // BLOCK * BLOCK, num_ids, BLOCK):
            is_same_id = tl.load(ids + start + at, mask=start + at < num_ids, other=-1) == target_id
            matching_rows = tl.where(is_same_id & (start + at >= program), at, BLOCK)
            first = tl.min(matching_rows)
            while first < BLOCK:
                row_sum += tl.load(x + (start + first) * num_columns + column, mask=mask, other=0.0)
                first = tl.min(tl.where(matching_rows > first, matching_rows, BLOCK))
        tl.store(pointers, row_sum, mask=mask)


def add_rows(dest, x, ids):
    """dest[ids[i]] += x[i] for each id (N,) i32 that is not negative; dest (V, C) and x (N, C) f32 are dense."""
    count, columns = x.shape
    launch(_add, (count,), dest, x, ids, count, columns, BLOCK=BLOCK, COLUMNS=power_of_two(columns))
