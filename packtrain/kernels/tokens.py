"""Text to token ids: classes of characters, words by an automaton, merges, and a cache of words of fixed size.

Text is UTF-8 in a byte array. A table of strings is `text` (all of them joined), `starts` and `slots`, a hash table of
numbers with -1 for a free slot; the sizes of hash tables are powers of two. Ids depend on the text alone.
"""

from numba import types

from packtrain.kernels.call import kernel, part

i32, i64, void, boolean = types.int32, types.int64, types.void, types.boolean
u8 = types.Array(types.uint8, 1, "C", readonly=True)
u8_out, u8_rows = types.Array(types.uint8, 1, "C"), types.Array(types.uint8, 2, "C")
ints, int_rows = types.Array(i32, 1, "C"), types.Array(i32, 2, "C")
longs, long_rows = types.Array(i64, 1, "C"), types.Array(i64, 2, "C")

UNKNOWN = 255  # the class of a character that the table does not have yet
INSIDE = 0  # the class of the bytes of a character after its first
ENDING = 1  # the class of the end of a part
MATCHED, DEAD = 1, 0
NONE = -1
PRIME, BASIS = 1099511628211, 1469598103934665603  # of FNV-1a
GOLDEN = -7046029254386353131  # 2**64 over the golden ratio
LENGTH, COUNT, IDS = 0, 1, 2  # columns of a word that is kept
PARTS, AFTER, BEFORE, AT = 0, 1, 2, 3  # rows of the room for a word
LOW = 0xFFFFFFFF


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
    found = i64(BASIS)
    for i in range(start, stop):
        found = (found ^ i64(raw[i])) * PRIME
    return found ^ (found >> 32)


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


# ---- words


@kernel(i64(u8, i64, u8, u8_out))
def classify(raw, at, classes, out):
    """Write the class of each byte from `at` on; returns where a character has none, or the length."""
    while at < len(raw):
        code = code_at(raw, at)
        found = classes[code]
        if found == UNKNOWN:
            return at
        out[at] = found
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
        begun = start  # of what lies between words
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
                if begun < start:
                    ends[total] = start
                    total += 1
                ends[total] = end
                total += 1
                begun = start = end
            else:
                start += 1
                while start < stop and symbols[start] == INSIDE:
                    start += 1
        if begun < stop:
            ends[total] = stop
            total += 1
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


# ---- tables


@kernel(void(u8, ints, ints))
def fill_strings(text, starts, slots):
    """Enter all strings that are not empty; they must differ."""
    mask = len(slots) - 1
    for n in range(len(starts) - 1):
        if starts[n] < starts[n + 1]:
            slot = hash_of(text, starts[n], starts[n + 1]) & mask
            while slots[slot] != NONE:
                slot = (slot + 1) & mask
            slots[slot] = n


@kernel(void(ints, ints, ints, long_rows))
def fill_pairs(lefts, rights, made, pairs):
    """Enter merges in their order: row (pair, order << 32 | what it makes); of equal ones the first counts."""
    mask = len(pairs) - 1
    for n in range(len(lefts)):
        pair = i64(lefts[n]) << 32 | i64(rights[n])
        slot = mixed(pair) & mask
        while pairs[slot, 0] != NONE and pairs[slot, 0] != pair:
            slot = (slot + 1) & mask
        if pairs[slot, 0] == NONE:
            pairs[slot, 0] = pair
            pairs[slot, 1] = n << 32 | i64(made[n])


@part(i64(u8, i64, i64, u8, ints, ints), forceinline=False)
def find_string(raw, start, stop, text, starts, slots):
    """The number of a string, or NONE."""
    mask, count = len(slots) - 1, stop - start
    slot = hash_of(raw, start, stop) & mask
    while True:
        n = i64(slots[slot])
        if n == NONE:
            return i64(NONE)
        if starts[n + 1] - starts[n] == count and same(text, starts[n], raw, start, count):
            return n
        slot = (slot + 1) & mask


@part(i64(i64, i64, long_rows), forceinline=False)
def find_pair(left, right, pairs):
    """order << 32 | what a pair makes, or NONE."""
    pair, mask = left << 32 | right, len(pairs) - 1
    slot = mixed(pair) & mask
    while pairs[slot, 0] != NONE:
        if pairs[slot, 0] == pair:
            return pairs[slot, 1]
        slot = (slot + 1) & mask
    return i64(NONE)


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


# ---- merging


@part(i64(longs, i64, i64))
def push(heap, size, key):
    at = size
    while at > 0 and heap[(at - 1) >> 1] > key:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = key
    return size + 1


@part(i64(longs, i64))
def pop(heap, size):
    """Remove the first key, which the caller has read."""
    size -= 1
    key, at = heap[size], 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key
    return size


@part(i64(i64, u8, u8, ints, ints, long_rows, ints, int_rows), forceinline=False)
def price(i, raw, text, starts, slots, pairs, order, room):
    """order << 32 | what part i makes with the part after it, or NONE."""
    j = room[AFTER, i]
    if len(order) == 0:
        return find_pair(i64(room[PARTS, i]), i64(room[PARTS, j]), pairs)
    n = find_string(raw, room[AT, i], room[AT, room[AFTER, j]], text, starts, slots)
    return n if n == NONE else i64(order[n]) << 32 | n


@kernel(void(i64, u8, u8, ints, ints, long_rows, ints, int_rows, longs, longs))
def merge(count, raw, text, starts, slots, pairs, order, room, found, heap):
    """Join adjacent parts, the first in the order first (leftmost of equals), until no pair is in the tables.

    An entry of the heap, order << 32 | part, is stale if the pair that begins there now has another order.
    """
    size = 0
    found[count - 1] = NONE
    for i in range(count - 1):
        found[i] = price(i, raw, text, starts, slots, pairs, order, room)
        if found[i] != NONE:
            size = push(heap, size, found[i] & ~LOW | i)
    while size:
        key = heap[0]
        size = pop(heap, size)
        i = key & LOW
        if found[i] == NONE or found[i] >> 32 != key >> 32:
            continue
        j = i64(room[AFTER, i])
        after = i64(room[AFTER, j])
        room[PARTS, i], room[AFTER, i] = found[i] & LOW, after
        found[i] = found[j] = NONE
        if after < count:
            room[BEFORE, after] = i
            found[i] = price(i, raw, text, starts, slots, pairs, order, room)
            if found[i] != NONE:
                size = push(heap, size, found[i] & ~LOW | i)
        before = i64(room[BEFORE, i])
        if before >= 0:
            found[before] = price(before, raw, text, starts, slots, pairs, order, room)
            if found[before] != NONE:
                size = push(heap, size, found[before] & ~LOW | before)


@part(i64(u8, i64, i64, ints, boolean, int_rows), forceinline=False)
def begin(raw, start, stop, singles, scored, room):
    """Lay out a word as parts: bytes, or characters if tokens have scores; returns how many."""
    count, at = 0, start
    while at < stop:
        room[AT, count], room[PARTS, count] = at, NONE if scored else singles[raw[at]]
        room[BEFORE, count], room[AFTER, count] = count - 1, count + 1
        at += width_at(raw, at) if scored else 1
        count += 1
    room[AT, count] = stop
    return count


@part(i64(u8, i64, i64, ints, i64, ints, i64), forceinline=False)
def spell(raw, start, stop, singles, unknown, ids, total):
    """The tokens of the bytes of a character, a space being U+2581; else the unknown token; NONE without one."""
    before = total
    for i in range(start, stop):
        count = 3 if raw[i] == 0x20 else 1
        for k in range(count):
            byte = raw[i] if count == 1 else (0xE2 if k == 0 else 0x96 if k == 1 else 0x81)
            if singles[byte] == NONE:
                if unknown == NONE:
                    return i64(NONE)
                ids[before] = unknown
                return before + 1
            ids[total] = singles[byte]
            total += 1
    return total


@kernel(
    i64(u8, i64, i64, u8, ints, ints, long_rows, ints, ints, i64, i64, int_rows, longs, longs, ints, i64)
)  # fmt: skip
def word(
    raw, start, stop, text, starts, slots, pairs, order, singles, tokens, unknown, room, found, heap, ids, total
):  # fmt: skip
    """Write the ids of a word that is not in the cache; returns the new total, or NONE."""
    scored = len(order) > 0
    count = begin(raw, start, stop, singles, scored, room)
    merge(count, raw, text, starts, slots, pairs, order, room, found, heap)
    i = 0
    while i < count:
        n, after = i64(room[PARTS, i]), i64(room[AFTER, i])
        if scored and n == NONE:
            n = find_string(raw, room[AT, i], room[AT, after], text, starts, slots)
        if n == NONE and scored:
            total = spell(raw, room[AT, i], room[AT, after], singles, unknown, ids, total)
            if total == NONE:
                return i64(NONE)
        elif n < tokens:  # what a merge makes may be no token
            ids[total] = n
            total += 1
        i = after
    return total


@kernel(
    i64(u8, ints, i64, longs, u8, ints, ints, long_rows, ints, ints, i64, i64, boolean, u8_rows, int_rows, int_rows,
        longs, longs, ints, longs)
)  # fmt: skip
def encode(
    raw, ends, count, parts, text, starts, slots, pairs, order, singles, tokens, unknown, whole, kept_text, kept,
    room, found, heap, ids, totals
):  # fmt: skip
    """Write the ids of all words, and how many there are up to the end of each part; NONE if one has none.

    whole  a word that is one of the strings becomes that token, whatever the merges
    """
    start, total, at, mask = i64(0), i64(0), 0, len(kept) - 1
    most, longest = kept.shape[1] - IDS, kept_text.shape[1]
    for n in range(count):
        stop = i64(ends[n])
        size = stop - start
        slot = hash_of(raw, start, stop) & mask
        short = size <= longest
        if short and kept[slot, LENGTH] == size and same(kept_text[slot], 0, raw, start, size):
            for k in range(kept[slot, COUNT]):
                ids[total + k] = kept[slot, IDS + k]
            total += kept[slot, COUNT]
        else:
            before, known = total, i64(NONE)
            if whole:
                known = find_string(raw, start, stop, text, starts, slots)
            if known != NONE:
                ids[total] = known
                total += 1
            else:
                total = word(
                    raw, start, stop, text, starts, slots, pairs, order, singles, tokens, unknown, room, found, heap,
                    ids, total
                )  # fmt: skip
                if total == NONE:
                    return i64(NONE)
            if short and total - before <= most:
                kept[slot, LENGTH], kept[slot, COUNT] = size, total - before
                for k in range(size):
                    kept_text[slot, k] = raw[start + k]
                for k in range(total - before):
                    kept[slot, IDS + k] = ids[before + k]
        start = stop
        while at < len(parts) and parts[at] <= start:
            totals[at] = total
            at += 1
    while at < len(parts):
        totals[at] = total
        at += 1
    return total
