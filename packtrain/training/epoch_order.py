"""The random order of an epoch, computed position by position from a few keys: no array of the whole order is stored. A
Feistel network over the next power of four, applied again until the number is in range. Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains"; the rounds mix as splitmix64 does."""

import numpy as np

ROUNDS = 8
UINT64_MASK = (1 << 64) - 1
RoundKeys = tuple[int, ...]  # keys of an epoch, which permute any number of items


def round_keys(seed: int, epoch: int, key: int = 0) -> RoundKeys:
    """Draw the keys of an epoch's order, for `item_at`, by (seed, epoch, key); another `key` gives another order."""
    seed_sequence = np.random.SeedSequence([seed % (1 << 64), epoch, *([key] if key else [])])
    return tuple(seed_sequence.generate_state(ROUNDS, np.uint64).tolist())


def item_at(index: int, num_items: int, keys: RoundKeys, salt: int = 0) -> int:
    """Return the item at position `index` of a random permutation of range(num_items), which `keys` and `salt`
    determine: callers that draw several permutations with equal keys give each a salt (any number) of its own."""
    half_bits = (num_items - 1).bit_length() + 1 >> 1
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            # splitmix64's hash of 64 bits
            z = key + right ^ salt
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & UINT64_MASK
            z = (z ^ z >> 27) * 0x94D049BB133111EB & UINT64_MASK
            left, right = right, left ^ (z ^ z >> 31) & mask
        index = left << half_bits | right
        if index < num_items:
            return index


def items_at(positions: np.ndarray, num_items: int, keys: RoundKeys) -> np.ndarray:
    """Return the items at `positions` (an array) of a permutation of range(num_items), another than `item_at`'s. Four
    rounds of multiply, add and xor-shift: each maps the numbers below a power of two one to one."""
    num_bits = (num_items - 1).bit_length()
    mask, shift = (1 << num_bits) - 1, num_bits + 1 >> 1
    items = positions.astype(np.uint64)
    outside = np.arange(len(items))
    while len(outside):
        walked: np.ndarray = items[outside]
        for key in keys[:4]:
            walked = walked * (key | 1) + (key >> 32) & mask
            walked ^= walked >> shift
        items[outside] = walked
        outside = outside[walked >= num_items]
    return items.astype(np.int64)
