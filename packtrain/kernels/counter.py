"""Counter-based uniform random numbers: value = f(seed, step, stream, index), in any order, on any thread.

The NumPy twin of `elementwise.dropout`; loads no numba.
"""

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
WORD = (1 << 64) - 1


def mix(z: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z + GOLDEN) & WORD
    z = ((z ^ (z >> 30)) * FIRST) & WORD
    z = ((z ^ (z >> 27)) * SECOND) & WORD
    return z ^ (z >> 31)


def key(seed: int, step: int, stream: int) -> int:
    """The 64-bit key of one stream at one step, as int64."""
    mixed = mix((mix((mix(seed & WORD) + step) & WORD) + stream) & WORD)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def uniform_numpy(seed: int, step: int, stream: int, n: int) -> npt.NDArray[np.float32]:
    """n uniforms in [0, 1) with 24 bits, two from each 64-bit hash, low half first."""
    z = np.arange(1, (n + 1) // 2 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z += np.uint64(key(seed, step, stream) & WORD)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    bits = z.astype("<u8", copy=False).view("<u4")[:n] >> np.uint32(8)
    return bits.astype(np.float32) * np.float32(2.0**-24)
