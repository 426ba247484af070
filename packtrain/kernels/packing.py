"""Search offsets below a height exactly: depth first, each buffer at the lowest possible offset.

A key is the lowest offset still possible, then `bits` bits of rank and as many of number: buffers not yet placed
form a frame of the stack, sorted by key. The next buffer is never placed lower than the previous one (canonical
order; Moffitt 2023, doi 10.1145/3623278.3624752). Where no unplaced buffer crosses, both sides are searched
separately. A step costs what it changes: the keys below the new buffer's top, and the sections of its life.

Worked example: lives A 0..2, B 1..3, C 2..4, sizes 2, 3, 2, target 5; sections 0 to 3 hold 2, 5, 5, 2 bytes.
    frame A0 B0 C0   place A at 0: B overlaps A and is lifted to A's top, C does not
    frame C0 B2      place C at 0: B is at C's top already
    frame B2         place B at 2: its top is 5, solved. With target 4, section 1 is too full for any offsets.
"""

from packtrain.kernels.runtime.jit import kernel, part

NONE, SOLVED, STOPPED = 0, 1, 2
KEY = 62  # bits of a key
FIRST, LAST, SIZE, RANK = 0, 1, 2, 3  # rows of buffers
WORK, STOP, TARGET, BITS = 0, 1, 2, 3  # places in limits
# rows of sections: bytes not yet placed, buffers over the left edge, scratch
TOTAL, CROSSING, FILLED = 0, 1, 2


@kernel("out_longs1, i64, i64")
def sort_keys(keys, key_start, key_stop):
    """Sort keys[key_start:key_stop] in place, by Shellsort: short, and fast for the few hundred keys of a frame."""
    gap = 1
    while 3 * gap + 1 < key_stop - key_start:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(key_start + gap, key_stop):
            key, insert_at = keys[i], i
            while insert_at >= key_start + gap and keys[insert_at - gap] > key:
                keys[insert_at] = keys[insert_at - gap]
                insert_at -= gap
            keys[insert_at] = key
        gap //= 3


@part("i64(i64, i64)", forceinline=True)
def buffer_of_key(key, index_bits):
    return key & ((1 << index_bits) - 1)


@part("out_longs2, out_longs2, i64, i64", forceinline=False)
def count_buffer(buffers, sections, i, sign):
    """Add the size of buffer i to the unplaced bytes of its sections (sign 1), or remove it (sign -1)."""
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        sections[TOTAL, s] += sign * buffers[SIZE, i]
    for s in range(buffers[FIRST, i] + 1, buffers[LAST, i]):
        sections[CROSSING, s] += sign


@kernel("i64(out_longs2, out_longs2, out_longs1, i64, i64, i64, i64, i64, out_longs1)")
def place_buffer(buffers, sections, stack, top, count, c, free, bits, limits):
    """Place buffer c of the frame stack[top : top + count]: its key moves to `top`, the others become the next frame.

    Those that overlap it rise to its top; returns how many. Their keys before and after, sorted, go to stack[free], ….
    """
    key, frame_end = stack[top + c], top + count
    i, shift = buffer_of_key(key, bits), 2 * bits
    floor = ((key >> shift) + buffers[SIZE, i]) << shift
    count_buffer(buffers, sections, i, -1)
    for d in range(top + c, top, -1):
        stack[d] = stack[d - 1]
    stack[top] = key
    lifted_at, write_at, read_at = free, top + 1, top + 1
    while read_at < frame_end and stack[read_at] < floor:
        j = buffer_of_key(stack[read_at], bits)
        if buffers[FIRST, j] < buffers[LAST, i] and buffers[FIRST, i] < buffers[LAST, j]:
            stack[lifted_at] = stack[read_at]
            lifted_at += 1
        else:
            stack[write_at] = stack[read_at]
            write_at += 1
        read_at += 1
    limits[WORK] -= read_at - top
    n = lifted_at - free
    for d in range(free, lifted_at):
        stack[d + n] = floor | (stack[d] & ((1 << shift) - 1))
    sort_keys(stack, lifted_at, lifted_at + n)
    for d in range(lifted_at, lifted_at + n):  # merged with those that have been at the floor
        while read_at < frame_end and stack[read_at] < stack[d]:
            stack[write_at] = stack[read_at]
            write_at, read_at = write_at + 1, read_at + 1
        stack[write_at] = stack[d]
        write_at += 1
    return n


@kernel("out_longs2, out_longs2, out_longs1, i64, i64, i64, i64, i64")
def undo_placement(buffers, sections, stack, top, c, free, n, bits):
    """Undo `place_buffer` of these arguments, which lifted n keys: their old values are from stack[free] on."""
    first_lifted, last_lifted = top + 1, top + 1
    if n > 0:
        while stack[first_lifted] < stack[free + n]:
            first_lifted += 1
        last_lifted = first_lifted
        while stack[last_lifted] != stack[free + 2 * n - 1]:
            last_lifted += 1
        write_at, after_at = last_lifted, free + 2 * n - 1
        for d in range(last_lifted, first_lifted - 1, -1):
            if after_at >= free + n and stack[d] == stack[after_at]:
                after_at -= 1
            else:
                stack[write_at] = stack[d]
                write_at -= 1
        d = first_lifted - 1
        for before_at in range(free + n - 1, free - 1, -1):
            while d > top and stack[d] > stack[before_at]:
                stack[write_at] = stack[d]
                write_at, d = write_at - 1, d - 1
            stack[write_at] = stack[before_at]
            write_at -= 1
    key = stack[top]
    for d in range(top, top + c):
        stack[d] = stack[d + 1]
    stack[top + c] = key
    count_buffer(buffers, sections, buffer_of_key(key, bits), 1)


@part("i64(out_longs2, out_longs2, i64)", forceinline=False)
def max_beside(buffers, sections, i):
    """Return the most unplaced bytes, in any section that buffer i lives in, of the other buffers."""
    max_total = 0
    for s in range(buffers[FIRST, i], buffers[LAST, i]):
        max_total = max(max_total, sections[TOTAL, s])
    return max_total - buffers[SIZE, i]


@part("boolean(out_longs2, out_longs2, i64, i64, i64, i64, i64)", forceinline=False)
def add_under(buffers, sections, i, offset, left, right, target):
    """Count buffer i as FILLED in its sections left … right - 1; return if offset + TOTAL - FILLED <= target in all."""
    for s in range(max(left, buffers[FIRST, i]), min(right, buffers[LAST, i])):
        if offset + sections[TOTAL, s] - sections[FILLED, s] > target:
            return False
        sections[FILLED, s] += buffers[SIZE, i]
    return True


@kernel("boolean(out_longs2, out_longs2, out_longs1, i64, i64, i64, i64, i64, i64, i64)")
def fits(buffers, sections, stack, top, count, min_key, target, bits, lifted_at, n):
    """Return whether frame stack[top : top + count] may end below `target` if none of it is placed before key min_key.

    In each section, buffers that cannot be placed below h need their bytes above h, for every h. That is checked only
    where buffers rose: the n keys at lifted_at that `place_buffer` lifted, and those before min_key: by one or more.
    """
    frame_end, min_offset, cursor = top + count, min_key >> 2 * bits, top
    left, right = sections.shape[1], 0
    while cursor < frame_end and stack[cursor] < min_key:
        i = buffer_of_key(stack[cursor], bits)
        left, right = min(left, buffers[FIRST, i]), max(right, buffers[LAST, i])
        cursor += 1
    for d in range(lifted_at, lifted_at + n):
        i = buffer_of_key(stack[d], bits)
        left, right = min(left, buffers[FIRST, i]), max(right, buffers[LAST, i])
    if left >= right:
        return True
    for s in range(left, right):
        sections[FILLED, s] = 0
    read_at, floor = cursor, stack[lifted_at] >> 2 * bits if n > 0 else min_offset
    while read_at < frame_end and stack[read_at] >> 2 * bits == min_offset:
        if not add_under(
            buffers, sections, buffer_of_key(stack[read_at], bits), min_offset, left, right, target
        ):
            return False
        read_at += 1
    for d in range(top, cursor):
        if not add_under(
            buffers, sections, buffer_of_key(stack[d], bits), min_offset + 1, left, right, target
        ):
            return False
    while read_at < frame_end and stack[read_at] >> 2 * bits <= floor:
        i, offset = buffer_of_key(stack[read_at], bits), stack[read_at] >> 2 * bits
        if not add_under(buffers, sections, i, offset, left, right, target):
            return False
        read_at += 1
    return True


@kernel("i64(out_longs2, out_longs2, out_longs1, i64, i64, i64, i64, i64, i64, out_longs1)")
def rank_keys(buffers, sections, stack, top, count, to, left_edge, right_edge, bits, offsets):
    """Write to stack[to] a frame of those of stack[top : top + count] that live between two edges (sections).

    Their keys get new ranks, by RANK, fullest section and number. Returns the frame's size; `offsets` (n,) is scratch.
    """
    new_end, shift = to, 2 * bits
    max_total = (1 << (KEY - shift)) - 1
    for d in range(top, top + count):
        i = buffer_of_key(stack[d], bits)
        if left_edge <= buffers[FIRST, i] and buffers[LAST, i] <= right_edge:
            fullest = max_beside(buffers, sections, i) + buffers[SIZE, i]
            offsets[i] = stack[d] >> shift
            stack[new_end] = buffers[RANK, i] << (KEY - bits) | (max_total - fullest) << bits | i
            new_end += 1
    sort_keys(stack, to, new_end)
    for rank in range(new_end - to):
        i = buffer_of_key(stack[to + rank], bits)
        stack[to + rank] = offsets[i] << shift | rank << bits | i
    sort_keys(stack, to, new_end)
    return new_end - to


@part("i64(out_longs2, i64, i64)", forceinline=False)
def edge(sections, left_edge, right_edge):
    """Return the first section after left_edge that no unplaced buffer crosses into from its left; or `right_edge`."""
    for s in range(left_edge + 1, right_edge):
        if sections[CROSSING, s] == 0:
            return s
    return right_edge


@part("boolean(out_longs2, out_longs1, i64, i64, i64)", forceinline=False)
def has_twin(buffers, stack, top, c, bits):
    """Return whether an equal buffer, as low, comes before key c of the frame at `top`: that one is placed first."""
    i = buffer_of_key(stack[top + c], bits)
    for d in range(top + c - 1, top - 1, -1):
        if stack[d] >> 2 * bits != stack[top + c] >> 2 * bits:
            return False
        j = buffer_of_key(stack[d], bits)
        equal = buffers[FIRST, i] == buffers[FIRST, j] and buffers[LAST, i] == buffers[LAST, j]
        if equal and buffers[SIZE, i] == buffers[SIZE, j]:
            return True
    return False


@part("i64(out_longs2, out_longs1, i64, i64, i64)", forceinline=False)
def lowest_top(buffers, stack, top, count, bits):
    """Return the lowest end that a buffer of the frame can have: to begin above it would leave room for that buffer."""
    lowest = 1 << KEY
    for d in range(top, top + count):
        if stack[d] >> 2 * bits >= lowest:
            break
        lowest = min(lowest, (stack[d] >> 2 * bits) + buffers[SIZE, buffer_of_key(stack[d], bits)])
    return lowest


@kernel(
    "i64(out_longs2, out_longs2, out_longs1, i64, i64, i64, i64, i64, i64, out_longs2, out_longs1)"
)
def search(buffers, sections, stack, top, count, free, left, right, min_key, offsets, limits):
    """Place frame stack[top : top + count], none of it before key min_key: SOLVED (sets offsets[0]), NONE, STOPPED."""
    target, bits = limits[TARGET], limits[BITS]
    max_offset = lowest_top(buffers, stack, top, count, bits)
    for c in range(count):
        key = stack[top + c]
        offset, i = key >> 2 * bits, buffer_of_key(key, bits)
        if offset >= max_offset:
            break
        if key < min_key or has_twin(buffers, stack, top, c, bits):
            continue
        limits[WORK] -= 1 + buffers[LAST, i] - buffers[FIRST, i]
        if limits[WORK] < 0 or limits[STOP] != 0 or free + 3 * count > len(stack):
            return STOPPED
        neighbor_nbytes = max_beside(buffers, sections, i)
        possible = offset + buffers[SIZE, i] + neighbor_nbytes <= target
        if possible:
            rest, size = top + 1, count - 1
            n = place_buffer(buffers, sections, stack, top, count, c, free, bits, limits)
            possible = fits(buffers, sections, stack, rest, size, key, target, bits, free + n, n)
            offsets[0, i] = offset
            status, a = SOLVED if possible else NONE, left
            is_single_part = edge(sections, buffers[FIRST, i], buffers[LAST, i]) == buffers[LAST, i]
            while status == SOLVED and a < right:
                b, to, m, start, room = right, rest, size, key, free + 2 * n
                if not is_single_part:
                    b, to, start = edge(sections, a, right), room, offset << 2 * bits
                    m = rank_keys(buffers, sections, stack, rest, size, to, a, b, bits, offsets[1])
                    limits[WORK], room = limits[WORK] - count, to + m
                status = search(buffers, sections, stack, to, m, room, a, b, start, offsets, limits)
                a = b
            undo_placement(buffers, sections, stack, top, c, free, n, bits)
            if status != NONE:
                return status
        is_viable = possible or fits(buffers, sections, stack, top, count, key, target, bits, 0, 0)
        # the buffer hinders no other, or all that is left is too much
        if neighbor_nbytes == 0 or not is_viable:
            break
    return NONE if count else SOLVED


@kernel("i64(out_longs2, out_longs2, out_longs1, out_longs2, out_longs1)")
def pack(buffers, sections, stack, offsets, limits):
    """Find offsets below a target height: SOLVED; NONE if there are none; STOPPED if work or stack ran out.

    buffers   (4, n)  first section, one past the last, size, rank; by number
    sections  (3, S)  zeros
    stack             scratch: 5 n at least
    offsets   (2, n)  the result and scratch
    limits    (4,)    WORK: keys and sections to look at, decremented; STOP if not 0; TARGET; BITS of a number
    """
    n, num_sections, bits = buffers.shape[1], sections.shape[1], limits[BITS]
    for i in range(n):
        count_buffer(buffers, sections, i, 1)
        stack[i] = i
    for s in range(num_sections):
        if sections[TOTAL, s] > limits[TARGET]:
            return NONE
    rank_keys(buffers, sections, stack, 0, n, n, 0, num_sections, bits, offsets[1])
    return search(buffers, sections, stack, n, n, 2 * n, 0, num_sections, 0, offsets, limits)


# ---- heuristics for many buffers -------------------------------------------------------------------------------

START, END, NBYTES = 0, 1, 2  # columns of lives
BOTTOM, TOP = 2, 3  # columns of placed, after START and END
KEYS, FIRST_START, LAST_END, MIN_KEY = 0, 1, 2, 3  # columns of blocks
BLOCK_SIZE = 128


@part("i64(out_longs2, i64, i64)", forceinline=False)
def first_above(placed, n, floor):
    """Return the first of n placed buffers (rows by bottom) whose bottom is not below the floor; n if there is none."""
    low_index, high_index = 0, n
    while low_index < high_index:
        middle = (low_index + high_index) // 2
        if placed[middle, BOTTOM] < floor:
            low_index = middle + 1
        else:
            high_index = middle
    return low_index


@kernel("i64(out_longs2, out_longs1, out_longs1, out_longs2, out_longs1)")
def first_fit(lives, order, offsets, placed, limits):
    """Write the offsets of `packing.pack.first_fit`, each buffer in the lowest gap; returns SOLVED, or STOPPED.

    lives   (n, 3)  start, end, bytes; order (n,) numbers the buffers, the first to be placed first; limits as in pack
    placed  (n, 4)  scratch: start, end, bottom and top of the placed buffers, by bottom
    """
    for n in range(len(order)):
        if limits[STOP] != 0:
            return STOPPED
        i = order[n]
        life_start, life_end, size = lives[i, START], lives[i, END], lives[i, NBYTES]
        floor, at = 0, 0
        while at < n and placed[at, BOTTOM] - floor < size:  # higher ones leave room, too
            if placed[at, START] < life_end and life_start < placed[at, END]:
                floor = max(floor, placed[at, TOP])
            at += 1
        slot = first_above(placed, n, floor)
        for k in range(n, slot, -1):
            for column in range(4):
                placed[k, column] = placed[k - 1, column]
        placed[slot, START], placed[slot, END] = life_start, life_end
        placed[slot, BOTTOM], placed[slot, TOP] = floor, floor + size
        offsets[i] = floor
    return SOLVED


@part("out_longs2, out_longs2, i64, i64", forceinline=False)
def measure_block(lives, blocks, b, n):
    """Write first start, last end and least key of block b, BLOCK_SIZE of n buffers; placed buffers do not count."""
    block_start, end, min_key = 1 << KEY, -(1 << KEY), 1 << KEY
    for i in range(b * BLOCK_SIZE, min(n, (b + 1) * BLOCK_SIZE)):
        if blocks[i, KEYS] < 1 << KEY:
            block_start, end = min(block_start, lives[i, START]), max(end, lives[i, END])
            min_key = min(min_key, blocks[i, KEYS])
    blocks[b, FIRST_START], blocks[b, LAST_END], blocks[b, MIN_KEY] = block_start, end, min_key


@part("out_longs2, out_longs2, i64, i64, i64, i64", forceinline=False)
def lift_keys(lives, blocks, start, end, floor, n):
    """Raise to a floor the keys (offset * n + rank) of those of n buffers that are alive between start and end."""
    for b in range((n + BLOCK_SIZE - 1) // BLOCK_SIZE):
        has_overlap = blocks[b, FIRST_START] < end and start < blocks[b, LAST_END]
        if has_overlap and blocks[b, MIN_KEY] < floor * n:
            for i in range(b * BLOCK_SIZE, min(n, (b + 1) * BLOCK_SIZE)):
                if blocks[i, KEYS] < floor * n and lives[i, START] < end and start < lives[i, END]:
                    blocks[i, KEYS] = floor * n + blocks[i, KEYS] % n
            measure_block(lives, blocks, b, n)


@kernel("i64(out_longs2, out_longs1, out_longs1, out_longs2, out_longs1)")
def skyline(lives, order, offsets, blocks, limits):
    """Write the offsets of `packing.pack.skyline`, each time the lowest buffer; returns SOLVED, or STOPPED.

    blocks  (n, 4)  scratch: each buffer's key; for each BLOCK_SIZE buffers first start, last end and least key
    """
    n = len(order)
    for rank in range(n):
        blocks[order[rank], KEYS] = rank
    num_blocks = (n + BLOCK_SIZE - 1) // BLOCK_SIZE
    for b in range(num_blocks):
        measure_block(lives, blocks, b, n)
    for _ in range(n):
        if limits[STOP] != 0:
            return STOPPED
        b = 0
        for other in range(1, num_blocks):
            if blocks[other, MIN_KEY] < blocks[b, MIN_KEY]:
                b = other
        i = b * BLOCK_SIZE
        while blocks[i, KEYS] != blocks[b, MIN_KEY]:
            i += 1
        offsets[i] = blocks[i, KEYS] // n
        blocks[i, KEYS] = 1 << KEY
        measure_block(lives, blocks, b, n)
        lift_keys(lives, blocks, lives[i, START], lives[i, END], offsets[i] + lives[i, NBYTES], n)
    return SOLVED
