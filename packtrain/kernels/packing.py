"""Exact search for offsets below a height: depth first, each buffer at the lowest possible offset.

A key is 38 bits of the lowest offset still possible, 12 of rank, 12 of number: buffers not yet placed form a
frame of the stack, sorted by key. The next buffer is never placed lower than the previous one (canonical
order; Moffitt 2023, doi 10.1145/3623278.3624752). Where no unplaced buffer crosses, both sides are searched
separately.
"""

from numba import types

from packtrain.kernels.call import kernel, part

i64, void, boolean = types.int64, types.void, types.boolean
line, table = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")

NONE, FOUND, STOPPED = 0, 1, 2
BITS = 12
NUMBER = (1 << BITS) - 1
LOW = 2 * BITS  # the first bit of the offset
HIGHEST = (1 << 38) - 1
FIRST, LAST, SIZE, RANK = 0, 1, 2, 3  # rows of buffers
TOTAL, CROSSING, FILLED = (
    0,
    1,
    2,
)  # rows of sections: bytes not yet placed, buffers over the left edge, scratch


@kernel(void(line, i64, i64))
def sort(keys, start, stop):
    """Shellsort: short, in place, and fast for the few hundred keys of a frame."""
    gap = 1
    while 3 * gap + 1 < stop - start:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(start + gap, stop):
            key, to = keys[i], i
            while to >= start + gap and keys[to - gap] > key:
                keys[to] = keys[to - gap]
                to -= gap
            keys[to] = key
        gap //= 3


@kernel(boolean(table, line, i64, i64, i64))
def lay(buffers, stack, top, count, c):
    """Place buffer c of the frame; the others form the next frame, lifted if they overlap it. Returns if any do."""
    i = stack[top + c] & NUMBER
    floor = ((stack[top + c] >> LOW) + buffers[SIZE, i]) << LOW
    start, high = top + count, top + 2 * count
    end, met = start, False
    raised = high
    for d in range(top, top + count):
        key = stack[d]
        j = key & NUMBER
        if j == i:
            continue
        meets = buffers[FIRST, j] < buffers[LAST, i] and buffers[FIRST, i] < buffers[LAST, j]
        met |= meets
        if meets and key < floor:
            stack[raised] = floor | (key & ((1 << LOW) - 1))
            raised += 1
        else:
            stack[end] = key
            end += 1
    sort(stack, high, raised)
    to = start + count - 2
    while raised > high:  # merge the two from the end
        if end > start and stack[end - 1] > stack[raised - 1]:
            end -= 1
            stack[to] = stack[end]
        else:
            raised -= 1
            stack[to] = stack[raised]
        to -= 1
    return met


@part(boolean(table, table, i64, i64, i64), forceinline=False)
def stays_under(buffers, sections, i, low, target):
    """Add buffer i to its sections; returns whether everything at `low` or higher still ends below the target."""
    most = 0
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        sections[FILLED, s] += buffers[SIZE, i]
        most = max(most, sections[FILLED, s])
    return low + most <= target


@kernel(boolean(table, table, line, i64, i64, i64, i64, i64, i64))
def fits(buffers, sections, stack, top, count, left, right, least, target):
    """Whether a frame may still end below the target, if none of it will be placed before key `least`.

    In each section, buffers that cannot be placed below h need their bytes above h, for every h. Buffers before
    `least` will be lifted by one at its offset or higher.
    """
    for s in range(left, right):
        sections[FILLED, s] = 0
    here, end = least >> LOW, top + count
    skipped = top
    while skipped < end and stack[skipped] < least:
        skipped += 1
    level = skipped
    while level < end and stack[level] >> LOW == here:
        level += 1
    for d in range(end - 1, level - 1, -1):
        if not stays_under(buffers, sections, stack[d] & NUMBER, stack[d] >> LOW, target):
            return False
    for d in range(top, level):
        low = here + 1 if d < skipped else here
        if not stays_under(buffers, sections, stack[d] & NUMBER, low, target):
            return False
    return True


@kernel(i64(table, table, line, i64, i64, i64, i64, i64, line))
def choose(buffers, sections, stack, top, count, to, left, right, lows):
    """A frame of the buffers between two edges, ranked by RANK, then by the fullest of their sections, then number."""
    end = to
    for d in range(top, top + count):
        i = stack[d] & NUMBER
        if left <= buffers[FIRST, i] and buffers[LAST, i] <= right:
            most = 0
            for s in range(buffers[FIRST, i], buffers[LAST, i]):
                most = max(most, sections[TOTAL, s])
            lows[i] = stack[d] >> LOW
            stack[end] = buffers[RANK, i] << 50 | (HIGHEST - most) << BITS | i
            end += 1
    sort(stack, to, end)
    for rank in range(end - to):
        i = stack[to + rank] & NUMBER
        stack[to + rank] = lows[i] << LOW | rank << BITS | i
    sort(stack, to, end)
    return end - to


@part(void(table, table, i64, i64), forceinline=False)
def count_in(buffers, sections, i, sign):
    """Add buffer i to the unplaced ones, or remove it."""
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        sections[TOTAL, s] += sign * buffers[SIZE, i]
    for s in range(buffers[FIRST, i] + 1, buffers[LAST, i]):
        sections[CROSSING, s] += sign


@part(i64(table, i64, i64), forceinline=False)
def edge(sections, after, right):
    """The next section that no buffer enters from its left; or `right`."""
    for s in range(after + 1, right):
        if sections[CROSSING, s] == 0:
            return s
    return right


@part(boolean(table, line, i64, i64), forceinline=False)
def has_twin(buffers, stack, top, c):
    """Whether an equal buffer that can be as low comes earlier in the frame, and so must be placed first."""
    i = stack[top + c] & NUMBER
    for d in range(top + c - 1, top - 1, -1):
        if stack[d] >> LOW != stack[top + c] >> LOW:
            return False
        j = stack[d] & NUMBER
        equal = buffers[FIRST, i] == buffers[FIRST, j] and buffers[LAST, i] == buffers[LAST, j]
        if equal and buffers[SIZE, i] == buffers[SIZE, j]:
            return True
    return False


@part(i64(table, line, i64, i64), forceinline=False)
def lowest_top(buffers, stack, top, count):
    """The lowest end that a buffer of the frame can have: one that began above it would leave room for it."""
    lowest = HIGHEST
    for d in range(top, top + count):
        lowest = min(lowest, (stack[d] >> LOW) + buffers[SIZE, stack[d] & NUMBER])
    return lowest


@kernel(i64(table, table, line, i64, i64, i64, i64, i64, i64, table, line))
def search(buffers, sections, stack, top, count, left, right, least, target, offsets, work):
    """Place a frame, from key `least` on: FOUND with offsets[0] filled in, NONE, or STOPPED when `work` runs out."""
    roof = lowest_top(buffers, stack, top, count)
    behind = top + count
    for c in range(count):
        key = stack[top + c]
        low, i = key >> LOW, key & NUMBER
        if low >= roof:
            break
        if key < least or has_twin(buffers, stack, top, c):
            continue
        if work[0] <= 0:
            return STOPPED
        work[0] -= count
        met = lay(buffers, stack, top, count, c)
        if fits(buffers, sections, stack, behind, count - 1, left, right, key, target):
            offsets[0, i] = low
            count_in(buffers, sections, i, -1)
            result, a = FOUND, left
            while result == FOUND and a < right:
                b = edge(sections, a, right)
                to, n, then = behind, count - 1, key
                if b - a < right - left:
                    to, then = behind + n, low << LOW
                    n = choose(buffers, sections, stack, behind, n, to, a, b, offsets[1])
                result = search(buffers, sections, stack, to, n, a, b, then, target, offsets, work)
                a = b
            count_in(buffers, sections, i, 1)
            if result != NONE:
                return result
        elif not fits(buffers, sections, stack, top, count, left, right, key, target):
            break
        if not met:
            break
    return NONE if count else FOUND


@kernel(i64(table, i64, table, line, table, line))
def pack(buffers, target, sections, stack, offsets, work):
    """Offsets below a target height, in units: FOUND, or NONE if there are none, or STOPPED when `work` runs out.

    buffers   (4, n)            first section, one past the last, size, rank; by number
    sections  (3, S)            zeros
    stack     (n * (n + 4),)    scratch
    offsets   (2, n)            the result and scratch
    work      (1,)              limit of visited buffers; decremented
    """
    n, count = buffers.shape[1], sections.shape[1]
    for i in range(n):
        count_in(buffers, sections, i, 1)
        stack[i] = i
    choose(buffers, sections, stack, 0, n, n, 0, count, offsets[1])
    if not fits(buffers, sections, stack, n, n, 0, count, 0, target):
        return NONE
    return search(buffers, sections, stack, n, n, 0, count, 0, target, offsets, work)
