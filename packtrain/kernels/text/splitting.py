"""Split UTF-8 text into words: by an automaton over classes of characters, or between characters that no token joins.

Ends of parts go in, ends of words come out. Hash tables have -1 for a free slot, and a power of two of slots.
"""

from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import i64

UNKNOWN_CLASS = 255  # the class of a character that the table does not have yet
INSIDE = 0  # the class of the bytes of a character after its first
END_CLASS = 1  # the class of the end of a part
MATCHED_FLAG, DEAD_STATE = 1, 0
NONE = -1
FNV_PRIME, FNV_BASIS = 1099511628211, 1469598103934665603  # of FNV-1a
GOLDEN = -7046029254386353131  # 2**64 over the golden ratio


@part("i64(bytes1, i64)")
def char_nbytes(raw, byte_index):
    """Return the number of bytes of the character that begins at `byte_index`."""
    first_byte = raw[byte_index]
    return 1 if first_byte < 0x80 else 2 if first_byte < 0xE0 else 3 if first_byte < 0xF0 else 4


@part("i64(bytes1, i64)")
def code_point_at(raw, byte_index):
    """Return the code point of the character that begins at `byte_index`."""
    first_byte = i64(raw[byte_index])
    if first_byte < 0x80:
        return first_byte
    if first_byte < 0xE0:
        return (first_byte & 0x1F) << 6 | (raw[byte_index + 1] & 0x3F)
    low_bits = i64(raw[byte_index + 1] & 0x3F) << 6 | (raw[byte_index + 2] & 0x3F)
    if first_byte < 0xF0:
        return (first_byte & 0x0F) << 12 | low_bits
    return (first_byte & 0x07) << 18 | low_bits << 6 | (raw[byte_index + 3] & 0x3F)


@part("i64(bytes1, i64, i64)")
def hash_bytes(raw, start, stop):
    """Return the FNV hash of raw[start:stop]."""
    hash_value = i64(FNV_BASIS)
    for i in range(start, stop):
        hash_value = (hash_value ^ i64(raw[i])) * FNV_PRIME
    return hash_value ^ (hash_value >> 32)


@part("i64(i64)")
def mix_key(key):
    key = (key ^ (key >> 31)) * GOLDEN
    return key ^ (key >> 29) ^ (key >> 47)


@part("boolean(bytes1, i64, bytes1, i64, i64)")
def equal_bytes(a, i, b, j, num_bytes):
    k = 0
    while k < num_bytes and a[i + k] == b[j + k]:
        k += 1
    return k == num_bytes


@kernel("i64(bytes1, i64, bytes1, out_bytes1)")
def classify(raw, byte_index, classes, class_out):
    """Write classes[code point] of characters from byte_index on; returns where one has no class, or the length."""
    while byte_index < len(raw):
        code_point = code_point_at(raw, byte_index)
        char_class = classes[code_point]
        if char_class == UNKNOWN_CLASS:
            return byte_index
        class_out[byte_index] = char_class
        char_end = byte_index + char_nbytes(raw, byte_index)
        for i in range(byte_index + 1, char_end):
            class_out[i] = INSIDE
        byte_index = char_end
    return byte_index


@kernel("i64(bytes1, out_ints2, i64, out_ints1, i64, out_ints1)")
def split(symbols, transitions, first_state, part_ends, count, word_ends):
    """Divide each part into the words that an automaton finds and the gaps between them; returns how many there are.

    symbols                      class of each byte, as classify writes it
    part_ends, word_ends         byte offsets of the ends of `count` parts, and of words and gaps: the result
    transitions[state, class]    the next state times 2, plus MATCHED_FLAG if a word ends before this character
    """
    word_start, num_words = 0, 0
    for part_index in range(count):
        part_stop = i64(part_ends[part_index])
        gap_start = word_start
        while word_start < part_stop:
            state, at, match_end = first_state, word_start, word_start
            while True:
                next_step = transitions[state, symbols[at] if at < part_stop else END_CLASS]
                if next_step & MATCHED_FLAG:
                    match_end = at
                state = next_step >> 1
                if state == DEAD_STATE:
                    break
                at += 1
            if match_end > word_start:
                if gap_start < word_start:
                    word_ends[num_words] = word_start
                    num_words += 1
                word_ends[num_words] = match_end
                num_words += 1
                gap_start = word_start = match_end
            else:
                word_start += 1
                while word_start < part_stop and symbols[word_start] == INSIDE:
                    word_start += 1
        if gap_start < part_stop:
            word_ends[num_words] = part_stop
            num_words += 1
    return num_words


@kernel("i64(bytes1, bytes1, boolean, out_ints1, i64, out_ints1)")
def cut_threes(symbols, is_in_run, after, part_ends, count, new_ends):
    """Divide runs of characters whose class `is_in_run` into threes from their end; returns how many parts result.

    symbols              class of each byte, as classify writes it
    part_ends, new_ends  byte offsets of the ends of `count` parts, and of the parts that result
    after                whether a run stays with what is before it and its end is cut; else a cut is before each three
    """
    part_begin, num_ends = 0, 0
    for part_index in range(count):
        stop = i64(part_ends[part_index])
        at = part_start = part_begin
        while at < stop:
            if not is_in_run[symbols[at]]:
                at += 1
                continue
            num_left, run_end, run_start = 0, at, at
            while run_end < stop and (symbols[run_end] == INSIDE or is_in_run[symbols[run_end]]):
                num_left += symbols[run_end] != INSIDE
                run_end += 1
            while at < run_end:
                if symbols[at] != INSIDE:
                    if num_left % 3 == 0 and at > part_start and (at > run_start or not after):
                        new_ends[num_ends] = part_start = at
                        num_ends += 1
                    num_left -= 1
                at += 1
            if after:
                new_ends[num_ends] = part_start = run_end
                num_ends += 1
        if part_start < stop:
            new_ends[num_ends] = stop
            num_ends += 1
        part_begin = stop
    return num_ends


@kernel("i64(bytes1, out_longs1, out_ints1, i64, out_ints1)")
def cut_unjoined(raw, join_table, part_ends, count, new_ends):
    """Divide parts, ending at part_ends, between characters that no token (join_table) joins; new_ends gets all ends.

    join_table is a hash table of pairs of code points, left << 21 | right; returns how many parts result
    """
    byte_index, num_ends, mask = 0, 0, len(join_table) - 1
    for part_index in range(count):
        part_stop = i64(part_ends[part_index])
        left_code = i64(NONE)
        while byte_index < part_stop:
            right_code = code_point_at(raw, byte_index)
            if left_code != NONE:
                pair_key = left_code << 21 | right_code
                slot = mix_key(pair_key) & mask
                while join_table[slot] != NONE and join_table[slot] != pair_key:
                    slot = (slot + 1) & mask
                if join_table[slot] == NONE:
                    new_ends[num_ends] = byte_index
                    num_ends += 1
            left_code = right_code
            byte_index += char_nbytes(raw, byte_index)
        if left_code != NONE:
            new_ends[num_ends] = part_stop
            num_ends += 1
    return num_ends


@kernel("out_longs1, out_longs1")
def fill_join_table(pair_keys, join_table):
    """Enter keys of pairs of characters into a hash table that has NONE everywhere; see cut_unjoined."""
    mask = len(join_table) - 1
    for pair_key in pair_keys:
        slot = mix_key(pair_key) & mask
        while join_table[slot] != NONE:
            slot = (slot + 1) & mask
        join_table[slot] = pair_key


@kernel("bytes1, bytes1, out_ints1, out_ints1, out_ints1, out_bytes1")
def find_names(raw, names_text, name_starts, pair_heads, name_ids, is_present):
    """Set is_present[number] of those names of a string table, two bytes long at least, that occur in `raw`.

    name_ids from pair_heads[pair] up to pair_heads[pair + 1] are names that begin with a pair of bytes
    """
    for i in range(len(raw) - 1):
        pair_key = i64(raw[i]) << 8 | raw[i + 1]
        for k in range(pair_heads[pair_key], pair_heads[pair_key + 1]):
            name_id = name_ids[k]
            count = i64(name_starts[name_id + 1] - name_starts[name_id])
            if (
                not is_present[name_id]
                and i + count <= len(raw)
                and equal_bytes(names_text, name_starts[name_id], raw, i, count)
            ):
                is_present[name_id] = 1
