"""Words of a UTF-8 text: by an automaton over classes of characters, or between characters that no token joins.

Ends of parts go in, ends of words come out. Hash tables have -1 for a free slot, and a power of two of slots.
"""

from numba import types

from packtrain.kernels.call import kernel, part

i32, i64, void, boolean = types.int32, types.int64, types.void, types.boolean
u8 = types.Array(types.uint8, 1, "C", readonly=True)
u8_out = types.Array(types.uint8, 1, "C")
ints, int_rows = types.Array(i32, 1, "C"), types.Array(i32, 2, "C")
longs = types.Array(i64, 1, "C")

UNKNOWN = 255  # the class of a character that the table does not have yet
INSIDE = 0  # the class of the bytes of a character after its first
ENDING = 1  # the class of the end of a part
MATCHED, DEAD = 1, 0
NONE = -1
PRIME, BASIS = 1099511628211, 1469598103934665603  # of FNV-1a
GOLDEN = -7046029254386353131  # 2**64 over the golden ratio


@part(i64(u8, i64))
def width_at(raw, at):
    """Bytes of the character that begins here."""
    first = raw[at]
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


@part(i64(u8, i64))
def code_at(raw, at):
    """The code point of the character that begins here."""
    first = i64(raw[at])
    if first < 0x80:
        return first
    if first < 0xE0:
        return (first & 0x1F) << 6 | (raw[at + 1] & 0x3F)
    low = i64(raw[at + 1] & 0x3F) << 6 | (raw[at + 2] & 0x3F)
    if first < 0xF0:
        return (first & 0x0F) << 12 | low
    return (first & 0x07) << 18 | low << 6 | (raw[at + 3] & 0x3F)


@part(i64(u8, i64, i64))
def hash_of(raw, start, stop):
    hash_value = i64(BASIS)
    for i in range(start, stop):
        hash_value = (hash_value ^ i64(raw[i])) * PRIME
    return hash_value ^ (hash_value >> 32)


@part(i64(i64))
def mixed(key):
    key = (key ^ (key >> 31)) * GOLDEN
    return key ^ (key >> 29) ^ (key >> 47)


@part(boolean(u8, i64, u8, i64, i64))
def same(a, i, b, j, count):
    k = 0
    while k < count and a[i + k] == b[j + k]:
        k += 1
    return k == count


@kernel(i64(u8, i64, u8, u8_out))
def classify(raw, at, classes, out):
    """Write the class of each byte from `at` on; returns where a character has none, or the length."""
    while at < len(raw):
        code = code_at(raw, at)
        char_class = classes[code]
        if char_class == UNKNOWN:
            return at
        out[at] = char_class
        end = at + width_at(raw, at)
        for i in range(at + 1, end):
            out[i] = INSIDE
        at = end
    return at


@kernel(i64(u8, int_rows, i64, ints, i64, ints))
def split(symbols, steps, first, before, count, ends):
    """Divide each part into the words that an automaton finds, and what lies between them; returns their number.

    steps[state, class]  the next state times 2, plus MATCHED if a word ends before this character
    """
    start, total = 0, 0
    for n in range(count):
        stop = i64(before[n])
        gap_start = start  # of what lies between words
        while start < stop:
            state, at, end = first, start, start
            while True:
                step = steps[state, symbols[at] if at < stop else ENDING]
                if step & MATCHED:
                    end = at
                state = step >> 1
                if state == DEAD:
                    break
                at += 1
            if end > start:
                if gap_start < start:
                    ends[total] = start
                    total += 1
                ends[total] = end
                total += 1
                gap_start = start = end
            else:
                start += 1
                while start < stop and symbols[start] == INSIDE:
                    start += 1
        if gap_start < stop:
            ends[total] = stop
            total += 1
    return total


@kernel(i64(u8, u8, boolean, ints, i64, ints))
def threes(symbols, inside, after, before, count, ends):
    """Divide runs of characters whose class is inside into threes from their end; returns how many parts there are.

    after  a run stays together with what is before it, and its end is cut; else a cut is before each three
    """
    start, total = 0, 0
    for n in range(count):
        stop = i64(before[n])
        at = part_start = start
        while at < stop:
            if not inside[symbols[at]]:
                at += 1
                continue
            left, end, first = 0, at, at
            while end < stop and (symbols[end] == INSIDE or inside[symbols[end]]):
                left += symbols[end] != INSIDE
                end += 1
            while at < end:
                if symbols[at] != INSIDE:
                    if left % 3 == 0 and at > part_start and (at > first or not after):
                        ends[total] = part_start = at
                        total += 1
                    left -= 1
                at += 1
            if after:
                ends[total] = part_start = end
                total += 1
        if part_start < stop:
            ends[total] = stop
            total += 1
        start = stop
    return total


@kernel(i64(u8, longs, ints, i64, ints))
def cut(raw, joins, before, count, ends):
    """Divide each part between characters that no token has side by side; returns how many there are."""
    start, total, mask = 0, 0, len(joins) - 1
    for n in range(count):
        stop = i64(before[n])
        left = i64(NONE)
        while start < stop:
            right = code_at(raw, start)
            if left != NONE:
                pair = left << 21 | right
                slot = mixed(pair) & mask
                while joins[slot] != NONE and joins[slot] != pair:
                    slot = (slot + 1) & mask
                if joins[slot] == NONE:
                    ends[total] = start
                    total += 1
            left = right
            start += width_at(raw, start)
        if left != NONE:
            ends[total] = stop
            total += 1
    return total


@kernel(void(longs, longs))
def fill_joins(pairs, joins):
    mask = len(joins) - 1
    for pair in pairs:
        slot = mixed(pair) & mask
        while joins[slot] != NONE:
            slot = (slot + 1) & mask
        joins[slot] = pair


@kernel(void(u8, u8, ints, ints, ints, u8_out))
def spot(raw, text, starts, heads, items, seen):
    """Mark the strings that occur in a text, by number; they have two bytes at least.

    items from heads[pair] up to heads[pair + 1] begin with a pair of bytes
    """
    for i in range(len(raw) - 1):
        pair = i64(raw[i]) << 8 | raw[i + 1]
        for k in range(heads[pair], heads[pair + 1]):
            n = items[k]
            count = i64(starts[n + 1] - starts[n])
            if not seen[n] and i + count <= len(raw) and same(text, starts[n], raw, i, count):
                seen[n] = 1
