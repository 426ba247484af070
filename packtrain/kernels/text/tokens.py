"""Encode words as token ids: merges in their order, and a cache of words of fixed size. Ids depend on the text alone.

A string table is all strings joined, their starts, and a hash table of their numbers. A vocabulary is its string
table, the pairs that merge, the order of its tokens if they have scores, and the token of each byte.
"""

from packtrain.kernels.runtime import kernel_types
from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import (
    Tuple, bytes1, i64, out_ints1, out_ints2, out_longs1,
)  # fmt: skip
from packtrain.kernels.text.splitting import NONE, char_nbytes, equal_bytes, hash_bytes, mix_key

table = Tuple((bytes1, out_ints1, out_ints1))
vocabulary_type = Tuple((table, kernel_types.out_longs2, out_ints1, out_ints1))
rooms = Tuple((out_ints2, out_longs1, out_longs1))  # for the longest word: parts, pair prices, heap

LENGTH, COUNT, IDS = 0, 1, 2  # columns of a cached word
PART_ID, NEXT_PART, PREVIOUS_PART, AT = 0, 1, 2, 3  # rows of the parts of a word
LOW_WORD = 0xFFFFFFFF
NEWLINE = 0x0A
LOOK_UP_WORDS, LINES = 1, 2  # words, or only those after a newline, are looked up before merging


@kernel("bytes1, out_ints1, out_ints1")
def fill_strings(joined_text, string_starts, slots):
    """Enter all strings that are not empty into the hash table `slots`, which has NONE everywhere; they must differ.

    String n is joined_text[string_starts[n] : string_starts[n + 1]]; its slot gets n.
    """
    mask = len(slots) - 1
    for n in range(len(string_starts) - 1):
        if string_starts[n] < string_starts[n + 1]:
            slot = hash_bytes(joined_text, string_starts[n], string_starts[n + 1]) & mask
            while slots[slot] != NONE:
                slot = (slot + 1) & mask
            slots[slot] = n


@kernel("out_ints1, out_ints1, out_ints1, kernel_types.out_longs2")
def fill_pairs(left_ids, right_ids, merged_ids, pair_table):
    """Enter merge n in a hash table: (left id << 32 | right id, n << 32 | merged id); of equal pairs the first."""
    mask = len(pair_table) - 1
    for n in range(len(left_ids)):
        pair_key = i64(left_ids[n]) << 32 | i64(right_ids[n])
        slot = mix_key(pair_key) & mask
        while pair_table[slot, 0] != NONE and pair_table[slot, 0] != pair_key:
            slot = (slot + 1) & mask
        if pair_table[slot, 0] == NONE:
            pair_table[slot, 0] = pair_key
            pair_table[slot, 1] = n << 32 | i64(merged_ids[n])


@part("i64(bytes1, i64, i64, table)", forceinline=False)
def find_string(raw, start, stop, strings):
    """Return the number of raw[start:stop] in a string table (text, starts, slots: see fill_strings), or NONE."""
    text, starts, slots = strings
    mask, count = len(slots) - 1, stop - start
    slot = hash_bytes(raw, start, stop) & mask
    while True:
        n = i64(slots[slot])
        if n == NONE:
            return i64(NONE)
        if starts[n + 1] - starts[n] == count and equal_bytes(text, starts[n], raw, start, count):
            return n
        slot = (slot + 1) & mask


@part("i64(i64, i64, kernel_types.out_longs2)", forceinline=False)
def find_pair(left_id, right_id, pair_table):
    """Return order << 32 | merged id of two ids, or NONE if they do not merge."""
    pair_key, mask = left_id << 32 | right_id, len(pair_table) - 1
    slot = mix_key(pair_key) & mask
    while pair_table[slot, 0] != NONE:
        if pair_table[slot, 0] == pair_key:
            return pair_table[slot, 1]
        slot = (slot + 1) & mask
    return i64(NONE)


# ---- merging


@part("i64(out_longs1, i64, i64)")
def push_heap(heap, heap_size, key):
    """Add a key to a heap of heap_size keys, the smallest first; returns the new size."""
    heap_index = heap_size
    while heap_index > 0 and heap[(heap_index - 1) >> 1] > key:
        heap[heap_index] = heap[(heap_index - 1) >> 1]
        heap_index = (heap_index - 1) >> 1
    heap[heap_index] = key
    return heap_size + 1


@part("i64(out_longs1, i64)")
def pop_heap(heap, heap_size):
    """Remove the first key, which the caller has read, from the heap; returns the new size."""
    heap_size -= 1
    key, heap_index = heap[heap_size], 0
    while True:
        child_index = 2 * heap_index + 1
        if child_index >= heap_size:
            break
        if child_index + 1 < heap_size and heap[child_index + 1] < heap[child_index]:
            child_index += 1
        if heap[child_index] >= key:
            break
        heap[heap_index] = heap[child_index]
        heap_index = child_index
    heap[heap_index] = key
    return heap_size


@part("i64(i64, bytes1, vocabulary_type, out_ints2)", forceinline=False)
def pair_merge(part_index, raw, vocabulary, parts):
    """Return order << 32 | merged id of a part (a column of `parts`) and the next, or NONE if they do not merge."""
    strings, pair_table, token_order, _ = vocabulary
    j = parts[NEXT_PART, part_index]
    if len(token_order) == 0:
        return find_pair(i64(parts[PART_ID, part_index]), i64(parts[PART_ID, j]), pair_table)
    n = find_string(raw, parts[AT, part_index], parts[AT, parts[NEXT_PART, j]], strings)
    return n if n == NONE else i64(token_order[n]) << 32 | n


@kernel("i64, bytes1, vocabulary_type, rooms")
def merge_parts(count, raw, vocabulary, buffers):
    """Join adjacent parts, `count` in buffers[0], lowest order first (leftmost of equals), until no pair merges.

    A heap entry, order << 32 | part, is stale if the pair that begins at the part now has another order.
    """
    part_rows, pair_prices, heap = buffers
    heap_size = 0
    pair_prices[count - 1] = NONE
    for i in range(count - 1):
        pair_prices[i] = pair_merge(i, raw, vocabulary, part_rows)
        if pair_prices[i] != NONE:
            heap_size = push_heap(heap, heap_size, pair_prices[i] & ~LOW_WORD | i)
    while heap_size:
        key = heap[0]
        heap_size = pop_heap(heap, heap_size)
        i = key & LOW_WORD
        if pair_prices[i] == NONE or pair_prices[i] >> 32 != key >> 32:
            continue
        j = i64(part_rows[NEXT_PART, i])
        part_after = i64(part_rows[NEXT_PART, j])
        part_rows[PART_ID, i], part_rows[NEXT_PART, i] = pair_prices[i] & LOW_WORD, part_after
        pair_prices[i] = pair_prices[j] = NONE
        if part_after < count:
            part_rows[PREVIOUS_PART, part_after] = i
            pair_prices[i] = pair_merge(i, raw, vocabulary, part_rows)
            if pair_prices[i] != NONE:
                heap_size = push_heap(heap, heap_size, pair_prices[i] & ~LOW_WORD | i)
        before = i64(part_rows[PREVIOUS_PART, i])
        if before >= 0:
            pair_prices[before] = pair_merge(before, raw, vocabulary, part_rows)
            if pair_prices[before] != NONE:
                heap_size = push_heap(heap, heap_size, pair_prices[before] & ~LOW_WORD | before)


@part("i64(bytes1, i64, i64, vocabulary_type, boolean, out_ints2)", forceinline=False)
def split_word(raw, start, stop, vocabulary, by_char, parts):
    """Write raw[start:stop]'s parts to `parts`: bytes or (by_char) characters, ids if pairs merge; returns how many."""
    strings, _, token_order, singles = vocabulary
    num_parts, at = 0, start
    while at < stop:
        part_nbytes = char_nbytes(raw, at) if by_char else 1
        parts[AT, num_parts], parts[PART_ID, num_parts] = at, NONE if by_char else singles[raw[at]]
        if by_char and len(token_order) == 0:
            parts[PART_ID, num_parts] = find_string(raw, at, at + part_nbytes, strings)
        parts[PREVIOUS_PART, num_parts], parts[NEXT_PART, num_parts] = num_parts - 1, num_parts + 1
        at += part_nbytes
        num_parts += 1
    parts[AT, num_parts] = stop
    return num_parts


@part("i64(bytes1, i64, i64, out_ints1, i64, out_ints1, i64)", forceinline=False)
def spell(raw, start, stop, byte_tokens, unknown, ids, num_ids):
    """Append tokens of a character's bytes (U+2581 for a space) to ids, or `unknown`; returns the count, or NONE."""
    first_id = num_ids
    for i in range(start, stop):
        num_bytes = 3 if raw[i] == 0x20 else 1
        for k in range(num_bytes):
            byte = raw[i] if num_bytes == 1 else (0xE2 if k == 0 else 0x96 if k == 1 else 0x81)
            if byte_tokens[byte] == NONE:
                if unknown == NONE:
                    return i64(NONE)
                ids[first_id] = unknown
                return first_id + 1
            ids[num_ids] = byte_tokens[byte]
            num_ids += 1
    return num_ids


@kernel("i64(bytes1, i64, i64, vocabulary_type, i64, i64, boolean, rooms, out_ints1, i64)")
def encode_word(raw, start, stop, vocabulary, vocab_size, unknown, by_char, buffers, ids, num_ids):
    """Merge word raw[start:stop] of bytes or (by_char) characters, append ids; returns num_ids, or NONE if no token."""
    strings, _, token_order, singles = vocabulary
    room, has_scores = buffers[0], len(token_order) > 0
    num_parts = split_word(raw, start, stop, vocabulary, by_char, room)
    merge_parts(num_parts, raw, vocabulary, buffers)
    i = 0
    while i < num_parts:
        n, next_part = i64(room[PART_ID, i]), i64(room[NEXT_PART, i])
        if has_scores and n == NONE:
            n = find_string(raw, room[AT, i], room[AT, next_part], strings)
        if NONE < n < vocab_size:  # what a merge makes may be no token
            ids[num_ids] = n
            num_ids += 1
        elif has_scores:
            num_ids = spell(raw, room[AT, i], room[AT, next_part], singles, unknown, ids, num_ids)
            if num_ids == NONE:
                return i64(NONE)
        elif by_char:
            for k in range(room[AT, i], room[AT, next_part]):
                if singles[raw[k]] != NONE:
                    ids[num_ids] = singles[raw[k]]
                    num_ids += 1
        i = next_part
    return num_ids


@part("bytes1, i64, i64, out_ints1, i64, i64, out_bytes2, out_ints2, i64", forceinline=False)
def cache_word(raw, start, stop, ids, first_id, num_ids, cached_text, cached_words, slot):
    """Write word raw[start:stop] and its tokens ids[first_id:num_ids] to a slot of the cache if they fit."""
    if stop - start <= cached_text.shape[1] and num_ids - first_id <= cached_words.shape[1] - IDS:
        cached_words[slot, LENGTH], cached_words[slot, COUNT] = stop - start, num_ids - first_id
        for k in range(stop - start):
            cached_text[slot, k] = raw[start + k]
        for k in range(num_ids - first_id):
            cached_words[slot, IDS + k] = ids[first_id + k]


@kernel(
    "i64(bytes1, out_ints1, i64, out_longs1, vocabulary_type, i64, i64, i64, boolean, out_bytes2, out_ints2,"
    " rooms, out_ints1, out_longs1)"
)
def encode(
    raw, word_ends, num_words, part_ends, vocabulary, tokens, unknown, look_up_mode, by_char,
    cached_text, cached_words, buffers, ids, part_totals
):  # fmt: skip
    """Encode all words and count the ids up to each part's end in `part_totals`; returns NONE if a word has none.

    look_up_mode  WORDS or LINES that are one of the strings become that token, whatever the merges
    by_char       what merges are characters, not bytes; tokens: their number; unknown: token of what has none, or NONE
    """
    start, num_ids, part_index, mask = i64(0), i64(0), 0, len(cached_words) - 1
    for n in range(num_words):
        stop = i64(word_ends[n])
        slot, first_id = hash_bytes(raw, start, stop) & mask, num_ids
        is_cached = cached_words[slot, LENGTH] == stop - start
        if is_cached and equal_bytes(cached_text[slot], 0, raw, start, stop - start):
            for k in range(cached_words[slot, COUNT]):
                ids[num_ids + k] = cached_words[slot, IDS + k]
            num_ids += cached_words[slot, COUNT]
        else:
            token_id = i64(NONE)
            if look_up_mode == LOOK_UP_WORDS or (look_up_mode == LINES and raw[start] == NEWLINE):
                token_id = find_string(raw, start, stop, vocabulary[0])
            if not NONE < token_id < tokens:
                num_ids = encode_word(
                    raw, start, stop, vocabulary, tokens, unknown, by_char, buffers, ids, num_ids
                )
                if num_ids == NONE:
                    return i64(NONE)
            else:
                ids[num_ids] = token_id
                num_ids += 1
            cache_word(raw, start, stop, ids, first_id, num_ids, cached_text, cached_words, slot)
        start = stop
        while part_index < len(part_ends) and part_ends[part_index] <= start:
            part_totals[part_index] = num_ids
            part_index += 1
    while part_index < len(part_ends):
        part_totals[part_index] = num_ids
        part_index += 1
    return num_ids
