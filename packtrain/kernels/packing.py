"""Exact search for offsets below a height: depth first, each buffer at the lowest possible offset.

A key is the lowest offset still possible, then `bits` bits of rank and as many of number: buffers not yet placed
form a frame of the stack, sorted by key. The next buffer is never placed lower than the previous one (canonical
order; Moffitt 2023, doi 10.1145/3623278.3624752). Where no unplaced buffer crosses, both sides are searched
separately. A step costs what it changes: the keys below the new buffer's top, and the sections of its life.
"""

from numba import types

from packtrain.kernels.call import kernel, part

i64, void, boolean = types.int64, types.void, types.boolean
line, table = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")

NONE, FOUND, STOPPED = 0, 1, 2
KEY = 62  # bits of a key
FIRST, LAST, SIZE, RANK = 0, 1, 2, 3  # rows of buffers
WORK, STOP, TARGET, BITS = 0, 1, 2, 3  # limits
# rows of sections: bytes not yet placed, buffers over the left edge, scratch
TOTAL, CROSSING, FILLED = 0, 1, 2


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


@part(i64(i64, i64), forceinline=True)
def number(key, bits):
    return key & ((1 << bits) - 1)


@part(void(table, table, i64, i64), forceinline=False)
def count_in(buffers, sections, i, sign):
    """Add buffer i to the unplaced ones, or remove it."""
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        sections[TOTAL, s] += sign * buffers[SIZE, i]
    for s in range(buffers[FIRST, i] + 1, buffers[LAST, i]):
        sections[CROSSING, s] += sign


@kernel(i64(table, table, line, i64, i64, i64, i64, i64, line))
def lay(buffers, sections, stack, top, count, c, free, bits, limits):
    """Place buffer c of the frame: the others become the frame after it, lifted if they overlap it; returns how many.

    Their keys before and, sorted, after go to `free`, for `take_back`. Keys above the new floor stay where they are.
    """
    key, end = stack[top + c], top + count
    i, low = number(key, bits), 2 * bits
    floor = ((key >> low) + buffers[SIZE, i]) << low
    count_in(buffers, sections, i, -1)
    for d in range(top + c, top, -1):
        stack[d] = stack[d - 1]
    stack[top] = key
    lifted, to, at = free, top + 1, top + 1
    while at < end and stack[at] < floor:
        j = number(stack[at], bits)
        if buffers[FIRST, j] < buffers[LAST, i] and buffers[FIRST, i] < buffers[LAST, j]:
            stack[lifted] = stack[at]
            lifted += 1
        else:
            stack[to] = stack[at]
            to += 1
        at += 1
    limits[WORK] -= at - top
    n = lifted - free
    for d in range(free, lifted):
        stack[d + n] = floor | (stack[d] & ((1 << low) - 1))
    sort(stack, lifted, lifted + n)
    for d in range(lifted, lifted + n):  # merged with those that have been at the floor
        while at < end and stack[at] < stack[d]:
            stack[to] = stack[at]
            to, at = to + 1, at + 1
        stack[to] = stack[d]
        to += 1
    return n


@kernel(void(table, table, line, i64, i64, i64, i64, i64))
def take_back(buffers, sections, stack, top, c, free, n, bits):
    """Undo `lay`, which lifted n keys."""
    first, last = top + 1, top + 1
    if n > 0:
        while stack[first] < stack[free + n]:
            first += 1
        last = first
        while stack[last] != stack[free + 2 * n - 1]:
            last += 1
        to, after = last, free + 2 * n - 1
        for d in range(last, first - 1, -1):
            if after >= free + n and stack[d] == stack[after]:
                after -= 1
            else:
                stack[to] = stack[d]
                to -= 1
        d = first - 1
        for before in range(free + n - 1, free - 1, -1):
            while d > top and stack[d] > stack[before]:
                stack[to] = stack[d]
                to, d = to - 1, d - 1
            stack[to] = stack[before]
            to -= 1
    key = stack[top]
    for d in range(top, top + c):
        stack[d] = stack[d + 1]
    stack[top + c] = key
    count_in(buffers, sections, number(key, bits), 1)


@part(i64(table, table, i64), forceinline=False)
def most_beside(buffers, sections, i):
    """The most unplaced bytes of a section of buffer i, without its own."""
    max_total = 0
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        max_total = max(max_total, sections[TOTAL, s])
    return max_total - buffers[SIZE, i]


@part(boolean(table, table, i64, i64, i64, i64, i64), forceinline=False)
def stays_under(buffers, sections, i, low, left, right, target):
    """Whether all of the sections but what lies below, FILLED, fits above `low`; then buffer i lies below, too."""
    for s in range(max(left, buffers[FIRST, i]), min(right, buffers[LAST, i])):
        if low + sections[TOTAL, s] - sections[FILLED, s] > target:
            return False
        sections[FILLED, s] += buffers[SIZE, i]
    return True


@kernel(boolean(table, table, line, i64, i64, i64, i64, i64, i64, i64))
def fits(buffers, sections, stack, top, count, least, target, bits, lifted, n):
    """Whether a frame may still end below the target, if none of it will be placed before key `least`.

    In each section, buffers that cannot be placed below h need their bytes above h, for every h. That is looked at
    where buffers rose: the n keys that `lay` lifted, and those before `least`, to be lifted by one at its offset or
    higher.
    """
    end, min_offset, cursor = top + count, least >> 2 * bits, top
    left, right = sections.shape[1], 0
    while cursor < end and stack[cursor] < least:
        i = number(stack[cursor], bits)
        left, right = min(left, buffers[FIRST, i]), max(right, buffers[LAST, i])
        cursor += 1
    for d in range(lifted, lifted + n):
        i = number(stack[d], bits)
        left, right = min(left, buffers[FIRST, i]), max(right, buffers[LAST, i])
    if left >= right:
        return True
    for s in range(left, right):
        sections[FILLED, s] = 0
    at, floor = cursor, stack[lifted] >> 2 * bits if n > 0 else min_offset
    while at < end and stack[at] >> 2 * bits == min_offset:
        if not stays_under(
            buffers, sections, number(stack[at], bits), min_offset, left, right, target
        ):
            return False
        at += 1
    for d in range(top, cursor):
        if not stays_under(
            buffers, sections, number(stack[d], bits), min_offset + 1, left, right, target
        ):
            return False
    while at < end and stack[at] >> 2 * bits <= floor:
        i, low = number(stack[at], bits), stack[at] >> 2 * bits
        if not stays_under(buffers, sections, i, low, left, right, target):
            return False
        at += 1
    return True


@kernel(i64(table, table, line, i64, i64, i64, i64, i64, i64, line))
def choose(buffers, sections, stack, top, count, to, left, right, bits, lows):
    """A frame of the buffers between two edges, ranked by RANK, then by the fullest of their sections, then number."""
    end, low = to, 2 * bits
    highest = (1 << (KEY - low)) - 1
    for d in range(top, top + count):
        i = number(stack[d], bits)
        if left <= buffers[FIRST, i] and buffers[LAST, i] <= right:
            fullest = most_beside(buffers, sections, i) + buffers[SIZE, i]
            lows[i] = stack[d] >> low
            stack[end] = buffers[RANK, i] << (KEY - bits) | (highest - fullest) << bits | i
            end += 1
    sort(stack, to, end)
    for rank in range(end - to):
        i = number(stack[to + rank], bits)
        stack[to + rank] = lows[i] << low | rank << bits | i
    sort(stack, to, end)
    return end - to


@part(i64(table, i64, i64), forceinline=False)
def edge(sections, after, right):
    """The next section that no buffer enters from its left; or `right`."""
    for s in range(after + 1, right):
        if sections[CROSSING, s] == 0:
            return s
    return right


@part(boolean(table, line, i64, i64, i64), forceinline=False)
def has_twin(buffers, stack, top, c, bits):
    """Whether an equal buffer that can be as low comes earlier in the frame, and so must be placed first."""
    i = number(stack[top + c], bits)
    for d in range(top + c - 1, top - 1, -1):
        if stack[d] >> 2 * bits != stack[top + c] >> 2 * bits:
            return False
        j = number(stack[d], bits)
        equal = buffers[FIRST, i] == buffers[FIRST, j] and buffers[LAST, i] == buffers[LAST, j]
        if equal and buffers[SIZE, i] == buffers[SIZE, j]:
            return True
    return False


@part(i64(table, line, i64, i64, i64), forceinline=False)
def lowest_top(buffers, stack, top, count, bits):
    """The lowest end that a buffer of the frame can have: one that began above it would leave room for it."""
    lowest = 1 << KEY
    for d in range(top, top + count):
        if stack[d] >> 2 * bits >= lowest:
            break
        lowest = min(lowest, (stack[d] >> 2 * bits) + buffers[SIZE, number(stack[d], bits)])
    return lowest


@kernel(i64(table, table, line, i64, i64, i64, i64, i64, i64, table, line))
def search(buffers, sections, stack, top, count, free, left, right, least, offsets, limits):
    """Place a frame, from key `least` on: FOUND with offsets[0] filled in, NONE, or STOPPED."""
    target, bits = limits[TARGET], limits[BITS]
    roof = lowest_top(buffers, stack, top, count, bits)
    for c in range(count):
        key = stack[top + c]
        low, i = key >> 2 * bits, number(key, bits)
        if low >= roof:
            break
        if key < least or has_twin(buffers, stack, top, c, bits):
            continue
        limits[WORK] -= 1 + buffers[LAST, i] - buffers[FIRST, i]
        if limits[WORK] < 0 or limits[STOP] != 0 or free + 3 * count > len(stack):
            return STOPPED
        neighbor_nbytes = most_beside(buffers, sections, i)
        possible = low + buffers[SIZE, i] + neighbor_nbytes <= target
        if possible:
            rest, size = top + 1, count - 1
            n = lay(buffers, sections, stack, top, count, c, free, bits, limits)
            possible = fits(buffers, sections, stack, rest, size, key, target, bits, free + n, n)
            offsets[0, i] = low
            status, a = FOUND if possible else NONE, left
            is_single_part = edge(sections, buffers[FIRST, i], buffers[LAST, i]) == buffers[LAST, i]
            while status == FOUND and a < right:
                b, to, m, start, room = right, rest, size, key, free + 2 * n
                if not is_single_part:
                    b, to, start = edge(sections, a, right), room, low << 2 * bits
                    m = choose(buffers, sections, stack, rest, size, to, a, b, bits, offsets[1])
                    limits[WORK], room = limits[WORK] - count, to + m
                status = search(buffers, sections, stack, to, m, room, a, b, start, offsets, limits)
                a = b
            take_back(buffers, sections, stack, top, c, free, n, bits)
            if status != NONE:
                return status
        is_viable = possible or fits(buffers, sections, stack, top, count, key, target, bits, 0, 0)
        # it hinders no other, or all that is left is too much
        if neighbor_nbytes == 0 or not is_viable:
            break
    return NONE if count else FOUND


@kernel(i64(table, table, line, table, line))
def pack(buffers, sections, stack, offsets, limits):
    """Offsets below a target height, in units: FOUND; NONE if there are none; STOPPED: no work or stack is left.

    buffers   (4, n)  first section, one past the last, size, rank; by number
    sections  (3, S)  zeros
    stack             scratch: 5 n at least
    offsets   (2, n)  the result and scratch
    limits    (4,)    keys and sections to look at, decremented; not 0: stop; the target; the bits of a number
    """
    n, count, bits = buffers.shape[1], sections.shape[1], limits[BITS]
    for i in range(n):
        count_in(buffers, sections, i, 1)
        stack[i] = i
    for s in range(count):
        if sections[TOTAL, s] > limits[TARGET]:
            return NONE
    choose(buffers, sections, stack, 0, n, n, 0, count, bits, offsets[1])
    return search(buffers, sections, stack, n, n, 2 * n, 0, count, 0, offsets, limits)


# ---- heuristics for many buffers -------------------------------------------------------------------------------

START, END, NBYTES = 0, 1, 2  # columns of lives
BOTTOM, TOP = 2, 3  # columns of placed, after START and END
KEYS, FIRST_START, LAST_END, LEAST = 0, 1, 2, 3  # columns of left
BLOCK = 128


@part(i64(table, i64, i64), forceinline=False)
def first_above(placed, n, floor):
    """The first of n placed buffers whose bottom is not below the floor."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if placed[middle, BOTTOM] < floor:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(i64(table, line, line, table, line))
def first_fit(lives, order, offsets, placed, limits):
    """Offsets as those of `packing.pack.first_fit`: FOUND, or STOPPED.

    lives   (n, 3)  start, end, bytes
    placed  (n, 4)  scratch: start, end, bottom and top of the placed buffers, by bottom
    """
    for n in range(len(order)):
        if limits[STOP] != 0:
            return STOPPED
        i = order[n]
        start, end, size = lives[i, START], lives[i, END], lives[i, NBYTES]
        floor, at = 0, 0
        while at < n and placed[at, BOTTOM] - floor < size:  # higher ones leave room, too
            if placed[at, START] < end and start < placed[at, END]:
                floor = max(floor, placed[at, TOP])
            at += 1
        slot = first_above(placed, n, floor)
        for k in range(n, slot, -1):
            for column in range(4):
                placed[k, column] = placed[k - 1, column]
        placed[slot, START], placed[slot, END] = start, end
        placed[slot, BOTTOM], placed[slot, TOP] = floor, floor + size
        offsets[i] = floor
    return FOUND


@part(void(table, table, i64, i64), forceinline=False)
def measure(lives, left, b, n):
    """First start, last end and least key of a block; what has been placed does not count."""
    start, end, min_key = 1 << KEY, -(1 << KEY), 1 << KEY
    for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
        if left[i, KEYS] < 1 << KEY:
            start, end = min(start, lives[i, START]), max(end, lives[i, END])
            min_key = min(min_key, left[i, KEYS])
    left[b, FIRST_START], left[b, LAST_END], left[b, LEAST] = start, end, min_key


@part(void(table, table, i64, i64, i64, i64), forceinline=False)
def lift(lives, left, start, end, floor, n):
    """Raise the keys of what is alive during an interval to a floor."""
    for b in range((n + BLOCK - 1) // BLOCK):
        met = left[b, FIRST_START] < end and start < left[b, LAST_END]
        if met and left[b, LEAST] < floor * n:
            for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
                if left[i, KEYS] < floor * n and lives[i, START] < end and start < lives[i, END]:
                    left[i, KEYS] = floor * n + left[i, KEYS] % n
            measure(lives, left, b, n)


@kernel(i64(table, line, line, table, line))
def skyline(lives, order, offsets, left, limits):
    """Offsets as those of `packing.pack.skyline`, fastest if lives are sorted by start: FOUND, or STOPPED.

    left  (n, 4)  scratch: its key for each buffer, then for each BLOCK of them first start, last end and least key
    """
    n = len(order)
    for rank in range(n):
        left[order[rank], KEYS] = rank
    blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        measure(lives, left, b, n)
    for _ in range(n):
        if limits[STOP] != 0:
            return STOPPED
        b = 0
        for other in range(1, blocks):
            if left[other, LEAST] < left[b, LEAST]:
                b = other
        i = b * BLOCK
        while left[i, KEYS] != left[b, LEAST]:
            i += 1
        offsets[i] = left[i, KEYS] // n
        left[i, KEYS] = 1 << KEY
        measure(lives, left, b, n)
        lift(lives, left, lives[i, START], lives[i, END], offsets[i] + lives[i, NBYTES], n)
    return FOUND
