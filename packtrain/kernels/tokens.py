"""Words to token ids: merges in their order, and a cache of words of fixed size. Ids depend on the text alone.

A table of strings is all of them joined, their starts, and a hash table of their numbers. A vocabulary is its strings,
pairs that merge, the order of its tokens if they have scores, and the token of each byte.
"""

from numba import types

from packtrain.kernels.call import kernel, part
from packtrain.kernels.splitting import NONE, hash_of, mixed, same, width_at

i32, i64, void, boolean = types.int32, types.int64, types.void, types.boolean
u8 = types.Array(types.uint8, 1, "C", readonly=True)
u8_rows = types.Array(types.uint8, 2, "C")
ints, int_rows = types.Array(i32, 1, "C"), types.Array(i32, 2, "C")
longs, long_rows = types.Array(i64, 1, "C"), types.Array(i64, 2, "C")
table = types.Tuple((u8, ints, ints))
given = types.Tuple((table, long_rows, ints, ints))  # a vocabulary
rooms = types.Tuple((int_rows, longs, longs))  # for the longest word: parts, pairs found, heap

LENGTH, COUNT, IDS = 0, 1, 2  # columns of a word that is kept
PARTS, AFTER, BEFORE, AT = 0, 1, 2, 3  # rows of the room for a word
LOW = 0xFFFFFFFF
LINE = 0x0A
WORDS, LINES = 1, 2  # what is looked up before it is merged


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


@part(i64(u8, i64, i64, table), forceinline=False)
def find_string(raw, start, stop, strings):
    """The number of a string, or NONE."""
    text, starts, slots = strings
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


@part(i64(i64, u8, given, int_rows), forceinline=False)
def price(i, raw, vocabulary, room):
    """order << 32 | what part i makes with the part after it, or NONE."""
    strings, pairs, order, _ = vocabulary
    j = room[AFTER, i]
    if len(order) == 0:
        return find_pair(i64(room[PARTS, i]), i64(room[PARTS, j]), pairs)
    n = find_string(raw, room[AT, i], room[AT, room[AFTER, j]], strings)
    return n if n == NONE else i64(order[n]) << 32 | n


@kernel(void(i64, u8, given, rooms))
def merge(count, raw, vocabulary, scratch):
    """Join adjacent parts, the first in the order first (leftmost of equals), until no pair is in the tables.

    An entry of the heap, order << 32 | part, is stale if the pair that begins there now has another order.
    """
    room, pair_prices, heap = scratch
    size = 0
    pair_prices[count - 1] = NONE
    for i in range(count - 1):
        pair_prices[i] = price(i, raw, vocabulary, room)
        if pair_prices[i] != NONE:
            size = push(heap, size, pair_prices[i] & ~LOW | i)
    while size:
        key = heap[0]
        size = pop(heap, size)
        i = key & LOW
        if pair_prices[i] == NONE or pair_prices[i] >> 32 != key >> 32:
            continue
        j = i64(room[AFTER, i])
        after = i64(room[AFTER, j])
        room[PARTS, i], room[AFTER, i] = pair_prices[i] & LOW, after
        pair_prices[i] = pair_prices[j] = NONE
        if after < count:
            room[BEFORE, after] = i
            pair_prices[i] = price(i, raw, vocabulary, room)
            if pair_prices[i] != NONE:
                size = push(heap, size, pair_prices[i] & ~LOW | i)
        before = i64(room[BEFORE, i])
        if before >= 0:
            pair_prices[before] = price(before, raw, vocabulary, room)
            if pair_prices[before] != NONE:
                size = push(heap, size, pair_prices[before] & ~LOW | before)


@part(i64(u8, i64, i64, given, boolean, int_rows), forceinline=False)
def begin(raw, start, stop, vocabulary, letters, room):
    """Lay out a word as parts: bytes, or characters (letters), which have a number if they merge in pairs; returns
    how many."""
    strings, _, order, singles = vocabulary
    count, at = 0, start
    while at < stop:
        width = width_at(raw, at) if letters else 1
        room[AT, count], room[PARTS, count] = at, NONE if letters else singles[raw[at]]
        if letters and len(order) == 0:
            room[PARTS, count] = find_string(raw, at, at + width, strings)
        room[BEFORE, count], room[AFTER, count] = count - 1, count + 1
        at += width
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


@kernel(i64(u8, i64, i64, given, i64, i64, boolean, rooms, ints, i64))
def word(raw, start, stop, vocabulary, tokens, unknown, letters, scratch, ids, total):
    """Write the ids of a word that is merged; returns the new total, or NONE if it has none."""
    strings, _, order, singles = vocabulary
    room, scored = scratch[0], len(order) > 0
    count = begin(raw, start, stop, vocabulary, letters, room)
    merge(count, raw, vocabulary, scratch)
    i = 0
    while i < count:
        n, after = i64(room[PARTS, i]), i64(room[AFTER, i])
        if scored and n == NONE:
            n = find_string(raw, room[AT, i], room[AT, after], strings)
        if NONE < n < tokens:  # what a merge makes may be no token
            ids[total] = n
            total += 1
        elif scored:
            total = spell(raw, room[AT, i], room[AT, after], singles, unknown, ids, total)
            if total == NONE:
                return i64(NONE)
        elif letters:
            for k in range(room[AT, i], room[AT, after]):
                if singles[raw[k]] != NONE:
                    ids[total] = singles[raw[k]]
                    total += 1
        i = after
    return total


@part(void(u8, i64, i64, ints, i64, i64, u8_rows, int_rows, i64), forceinline=False)
def keep(raw, start, stop, ids, before, total, kept_text, kept, slot):
    """Enter a word and its ids in the cache if they fit."""
    if stop - start <= kept_text.shape[1] and total - before <= kept.shape[1] - IDS:
        kept[slot, LENGTH], kept[slot, COUNT] = stop - start, total - before
        for k in range(stop - start):
            kept_text[slot, k] = raw[start + k]
        for k in range(total - before):
            kept[slot, IDS + k] = ids[before + k]


@kernel(
    i64(u8, ints, i64, longs, given, i64, i64, i64, boolean, u8_rows, int_rows, rooms, ints, longs)
)
def encode(
    raw, ends, count, parts, vocabulary, tokens, unknown, whole, letters, kept_text, kept, scratch, ids, totals
):  # fmt: skip
    """Write the ids of all words, and how many there are up to the end of each part; NONE if a word has none.

    whole    WORDS or LINES that are one of the strings become that token, whatever the merges
    letters  what merges are characters, not bytes
    """
    start, total, at, mask = i64(0), i64(0), 0, len(kept) - 1
    for n in range(count):
        stop = i64(ends[n])
        slot, before = hash_of(raw, start, stop) & mask, total
        if kept[slot, LENGTH] == stop - start and same(
            kept_text[slot], 0, raw, start, stop - start
        ):
            for k in range(kept[slot, COUNT]):
                ids[total + k] = kept[slot, IDS + k]
            total += kept[slot, COUNT]
        else:
            token_id = i64(NONE)
            if whole == WORDS or (whole == LINES and raw[start] == LINE):
                token_id = find_string(raw, start, stop, vocabulary[0])
            if not NONE < token_id < tokens:
                total = word(
                    raw, start, stop, vocabulary, tokens, unknown, letters, scratch, ids, total
                )
                if total == NONE:
                    return i64(NONE)
            else:
                ids[total] = token_id
                total += 1
            keep(raw, start, stop, ids, before, total, kept_text, kept, slot)
        start = stop
        while at < len(parts) and parts[at] <= start:
            totals[at] = total
            at += 1
    while at < len(parts):
        totals[at] = total
        at += 1
    return total
