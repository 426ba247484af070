"""The order of an epoch as a keyed permutation: each position is computed on demand, nothing is stored.

A Feistel network over the next power of four, walked until it is inside. Black and Rogaway 2002, "Ciphers with
Arbitrary Finite Domains"; the rounds mix as splitmix64 does.
"""

from dataclasses import dataclass

import numpy as np

ROUNDS = 8
WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Order:
    """Permutations of any number of items, from one key; each `salt` gives a different one."""

    keys: tuple[int, ...]

    @classmethod
    def of(cls, seed: int, epoch: int) -> "Order":
        drawn = np.random.SeedSequence([seed % (1 << 64), epoch])
        return cls(tuple(drawn.generate_state(ROUNDS, np.uint64).tolist()))

    def __call__(self, place: int, count: int, salt: int = 0) -> int:
        """Which of `count` items comes at a place, 0 ≤ place < count."""
        half = (count - 1).bit_length() + 1 >> 1
        mask = (1 << half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self.keys:
                left, right = right, left ^ mixed(key + right ^ salt) & mask
            place = left << half | right
            if place < count:
                return place


def mixed(z: int) -> int:
    """Hash 64 bits to 64 bits."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31
