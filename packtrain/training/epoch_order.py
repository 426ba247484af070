"""The order of an epoch as a keyed permutation: each position is computed on demand, nothing is stored.

A Feistel network over the next power of four, walked until it is inside. Black and Rogaway 2002, "Ciphers with
Arbitrary Finite Domains"; the rounds mix as splitmix64 does.
"""

import numpy as np

ROUNDS = 8
WORD = (1 << 64) - 1
Keys = tuple[int, ...]  # of an epoch: they permute any number of items


def keys_of(seed: int, epoch: int, key: int = 0) -> Keys:
    drawn = np.random.SeedSequence([seed % (1 << 64), epoch, *([key] if key else [])])
    return tuple(drawn.generate_state(ROUNDS, np.uint64).tolist())


def item_at(place: int, count: int, keys: Keys, salt: int = 0) -> int:
    """Which of `count` items comes at a place, 0 ≤ place < count; each `salt` gives another order."""
    half = (count - 1).bit_length() + 1 >> 1
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ mixed(key + right ^ salt) & mask
        place = left << half | right
        if place < count:
            return place


def mixed(z: int) -> int:
    """Hash 64 bits to 64 bits."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31
