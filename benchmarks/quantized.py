"""The time of one row of x with a row of 1,024 packed weights, on one thread: weights in the L2 cache, and in memory.

    python -m benchmarks.quantized [--types q8_0 q4_K] [--rounds 15]

`packtrain bench --part products` has many rows at once, beside f32.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import DTYPES, READABLE, Dtype
from tests.test_products import random_weights

LITTLE, MUCH = 1 << 18, 1 << 26  # bytes of weights


def one_row(dtype: Dtype, nbytes: int, rounds: int) -> tuple[float, float]:
    """Seconds for a row of 1,024 weights, and bytes a second, of thread time: medians over `nbytes` of weights."""
    width = 1024
    sample_rows = random_weights(dtype, 64, width)
    packed = sample_rows.view(np.uint8).reshape(64, -1)
    w = np.tile(packed, (max(nbytes // packed.nbytes, 1), 1))
    x = np.random.default_rng(0).standard_normal((1, width), np.float32)
    y = np.empty((1, len(w)), np.float32)
    compiled: Any = kernels.packed
    times = []
    for _ in range(rounds):
        start_time = time.thread_time()
        for _ in range(LITTLE * 40 // nbytes or 1):
            compiled.product(y, x, dtype.number, w, False, 0)
        times.append((time.thread_time() - start_time) / (LITTLE * 40 // nbytes or 1))
    median_s = statistics.median(times)
    return median_s / len(w), w.nbytes / median_s


def print_rows(types: list[str], rounds: int) -> None:
    kernels.load_all()
    kernels.set_threads(1)
    print(f"{'type':8} {'ns, L2':>8} {'GB/s':>7} {'ns, memory':>11} {'GB/s':>7}")
    for name in types:
        (cache_seconds, cache_rate), (memory_seconds, memory_rate) = (
            one_row(DTYPES[name], nbytes, rounds) for nbytes in (LITTLE, MUCH)
        )
        print(
            f"{name:8} {cache_seconds * 1e9:8.1f} {cache_rate / 1e9:7.2f} {memory_seconds * 1e9:11.1f}"
            f" {memory_rate / 1e9:7.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [t.name for t in READABLE[1:]]
    parser.add_argument("--types", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print_rows(args.types, args.rounds)


if __name__ == "__main__":
    main()
