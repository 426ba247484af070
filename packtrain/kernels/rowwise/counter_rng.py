"""Draw uniform random numbers by counter: value = f(seed, step, stream, index), in any order, on any thread.

This NumPy twin of `elementwise.dropout`'s generator loads no numba.
"""

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
MIX_FACTOR_1 = 0xBF58476D1CE4E5B9
MIX_FACTOR_2 = 0x94D049BB133111EB
WORD_MASK = (1 << 64) - 1


def mix(z: int) -> int:
    """Scramble a 64-bit integer by one step of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z + GOLDEN) & WORD_MASK
    z = ((z ^ (z >> 30)) * MIX_FACTOR_1) & WORD_MASK
    z = ((z ^ (z >> 27)) * MIX_FACTOR_2) & WORD_MASK
    return z ^ (z >> 31)


def stream_key(seed: int, step: int, stream: int) -> int:
    """Return the 64-bit key of a random stream (any number tells streams apart) at one step, as a signed integer."""
    mixed_bits = mix((mix((mix(seed & WORD_MASK) + step) & WORD_MASK) + stream) & WORD_MASK)
    return mixed_bits - (1 << 64) if mixed_bits >> 63 else mixed_bits


def uniform_numpy(
    seed: int, step: int, stream: int, n: int, first: int = 0
) -> npt.NDArray[np.float32]:
    """Return numbers first … first + n - 1 (first even) of a stream, uniform in [0, 1), 24 bits: two from each hash."""
    pair = first // 2
    z = np.arange(pair + 1, pair + (n + 1) // 2 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z += np.uint64(stream_key(seed, step, stream) & WORD_MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_FACTOR_2)
    z ^= z >> np.uint64(31)
    bits = z.astype("<u8", copy=False).view("<u4")[:n] >> np.uint32(8)
    return bits.astype(np.float32) * np.float32(2.0**-24)
