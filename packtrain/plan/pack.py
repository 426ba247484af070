"""Offsets for buffers of given (start, end, size) in one address range. Knows nothing of tensors.

Sizes are already multiples of the alignment. Intervals are half-open.
"""

import numpy as np

Ints = np.ndarray

TRIES = 30  # squeaky-wheel tries for few buffers,
CHEAP = 500**2  # fewer as the square of their number passes this


def lower_bound(start: Ints, end: Ints, size: Ints) -> tuple[int, int]:
    """The most bytes alive at once, and the first step at which they are: no packing can need less."""
    if not len(size):
        return 0, 0
    change = np.zeros(int(end.max()) + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    alive = np.cumsum(change)
    at = int(alive.argmax())
    return int(alive[at]), at


def pack(start: Ints, end: Ints, size: Ints) -> Ints:
    """The best of several first fits: int64 offsets (n,). Stops as soon as one reaches the lower bound.

    Orders are tried as they are; then, from each, the buffers that stick out above the bound go first in the
    next try, as long as tries are cheap (squeaky wheel; Joslin & Clements 1999, arXiv 1105.5454).
    """
    bound, _ = lower_bound(start, end, size)
    best = np.zeros(0, np.int64)

    def better(order: Ints) -> Ints:
        nonlocal best
        offsets = first_fit(start, end, size, order)
        if not len(best) or height(size, offsets) < height(size, best):
            best = offsets
        return offsets

    orders = _orders(start, end, size)
    tries = [better(orders[0])]
    for order in orders[1:]:
        if height(size, best) > bound:
            tries.append(better(order))
    for order, offsets in zip(orders, tries, strict=False):
        for _ in range(TRIES * CHEAP // (len(size) ** 2 + CHEAP)):
            if height(size, best) <= bound:
                return best
            high = offsets[order] + size[order] > bound
            order = np.concatenate((order[high], order[~high]))
            offsets = better(order)
    return best


def _orders(start: Ints, end: Ints, size: Ints) -> list[Ints]:
    """By distance from the peak instant, then size: best for one peak. The others are for many peaks."""
    _, peak = lower_bound(start, end, size)
    distance = np.maximum(np.maximum(start - peak, peak + 1 - end), 0)
    life = end - start
    return [
        np.lexsort((start, -size, distance)),
        np.lexsort((start, -size)),
        np.lexsort((-size, -np.log2(np.maximum(life, 1)).astype(np.int64))),
        np.lexsort((-size, -life, distance)),
        np.lexsort((-life, -size)),
    ]


def first_fit(start: Ints, end: Ints, size: Ints, order: Ints) -> Ints:
    """Each buffer in turn goes into the lowest gap that fits among those it overlaps in time."""
    offsets = np.zeros(len(size), np.int64)
    spans = np.zeros((2, len(size)), np.int32)  # of the placed ones, by offset: interval,
    extents = np.zeros((2, len(size)), np.int64)  # bottom and top
    for n, i in enumerate(order):
        (first, last), (bottom, top) = spans[:, :n], extents[:, :n]
        near = np.flatnonzero((first < end[i]) & (last > start[i]))
        floors = np.zeros(len(near) + 1, np.int64)
        np.maximum.accumulate(top[near], out=floors[1:])
        fits = bottom[near] - floors[:-1] >= size[i]
        at = int(floors[int(fits.argmax()) if fits.any() else len(near)])
        offsets[i] = at
        slot = int(np.searchsorted(bottom, at))
        for rows, new in ((spans, (start[i], end[i])), (extents, (at, at + size[i]))):
            rows[:, slot + 1 : n + 1] = rows[:, slot:n].copy()
            rows[:, slot] = new
    return offsets


def best_fit(start: Ints, end: Ints, size: Ints) -> Ints:
    """ggml's online allocator as a baseline: smallest free block that fits, the unbounded last one if none does.

    Buffers come in order of start and are freed after their last step; freed blocks merge with neighbours.
    """
    offsets = np.zeros(len(size), np.int64)
    free: list[list[int]] = [[0, 1 << 62]]
    events = sorted(
        [(int(s), 1, i) for i, s in enumerate(start)] + [(int(e), 0, i) for i, e in enumerate(end)]
    )
    for _, born, i in events:
        if born:
            fitting = [block for block in free[:-1] if block[1] >= size[i]]
            block = min(reversed(fitting), key=lambda b: b[1]) if fitting else free[-1]
            offsets[i] = block[0]
            block[0] += int(size[i])
            block[1] -= int(size[i])
            if not block[1]:
                free.remove(block)
        else:
            _release(free, int(offsets[i]), int(size[i]))
    return offsets


def _release(free: list[list[int]], offset: int, size: int) -> None:
    at = next(k for k, block in enumerate(free) if block[0] >= offset + size)
    if free[at][0] == offset + size:
        free[at][0], free[at][1] = offset, free[at][1] + size
    else:
        free.insert(at, [offset, size])
    if at and free[at - 1][0] + free[at - 1][1] == offset:
        free[at - 1][1] += free[at][1]
        del free[at]


def height(size: Ints, offsets: Ints) -> int:
    """Bytes from zero to the highest top."""
    return int((offsets + size).max()) if len(size) else 0
