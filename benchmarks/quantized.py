"""Products with packed weights beside the same products with their values in f32: forward and backward.

    python -m benchmarks.quantized [--types q8_0 q4_K] [--rows 512] [--rounds 15]
    python -m benchmarks.quantized --one [--types …]

Shapes are those of the 110m preset, the last one its head. A ratio is the median of pairs that alternate in one run.
With --one, the time of one row of x with a row of 1,024 weights, on one thread: weights in the L2 cache, and in memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import packtrain as pt
from packtrain import kernels, ops
from packtrain.dtypes import DTYPES, READABLE, Dtype
from packtrain.quant import dequantize
from tests.test_products import random_weights

LITTLE, MUCH = 1 << 18, 1 << 26  # bytes of weights
SHAPES = ((768, 768), (2048, 768), (768, 2048), (32000, 768))


def call(y: pt.Tensor, given: dict[str, np.ndarray]) -> Callable[[], None]:
    """The bound kernel of the only step that makes y, with its inputs and weights in place."""
    session = pt.Session()
    weights = {n: v for n, v in given.items() if n != "x"}
    session.share(weights)
    run = session.executor(pt.place(pt.Graph({"y": y})))
    run({"x": given["x"]})
    return run.calls[0]


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, rows: int, n: int, k: int, rounds: int) -> tuple[float, float, float, float]:
    """Seconds of f32 and packed, forward and then backward: medians of rounds."""
    random = np.random.default_rng(0)
    packed = random_weights(DTYPES[name], n, k)
    w, q = pt.weight("w", (n, k)), pt.weight("w", (n, k), DTYPES[name])
    x, dy = pt.input("x", (rows, k)), pt.input("x", (rows, n))
    products = (
        (ops.matmul(x, w), ops.matmul(x, q), k),
        (ops.matmul(dy, ops.transpose(w)), ops.matmul_back(dy, q), n),
    )
    found: list[float] = []
    for plain, other, width in products:
        given = {"x": random.standard_normal((rows, width), np.float32)}
        calls = call(plain, given | {"w": dequantize(packed)}), call(other, given | {"w": packed})
        pairs = [[seconds(c) for c in calls] for _ in range(rounds)]
        found += map(statistics.median, zip(*pairs, strict=True))
    return found[0], found[1], found[2], found[3]


def one_row(dtype: Dtype, nbytes: int, rounds: int) -> tuple[float, float]:
    """Seconds for a row of 1,024 weights, and bytes a second, of thread time: medians over `nbytes` of weights."""
    width = 1024
    few = random_weights(dtype, 64, width)
    packed = few.view(np.uint8).reshape(64, -1)
    w = np.tile(packed, (max(nbytes // packed.nbytes, 1), 1))
    x = np.random.default_rng(0).standard_normal((1, width), np.float32)
    y = np.empty((1, len(w)), np.float32)
    compiled: Any = kernels.packed
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(LITTLE * 40 // nbytes or 1):
            compiled.product(y, x, dtype.number, w, False)
        times.append((time.thread_time() - began) / (LITTLE * 40 // nbytes or 1))
    took = statistics.median(times)
    return took / len(w), w.nbytes / took


def print_one_row(types: list[str], rounds: int) -> None:
    kernels.load_all()
    kernels.set_threads(1)
    print(f"{'type':8} {'ns, L2':>8} {'GB/s':>7} {'ns, memory':>11} {'GB/s':>7}")
    for name in types:
        (near, fast), (far, slow) = (
            one_row(DTYPES[name], nbytes, rounds) for nbytes in (LITTLE, MUCH)
        )
        print(
            f"{name:8} {near * 1e9:8.1f} {fast / 1e9:7.2f} {far * 1e9:11.1f} {slow / 1e9:7.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=[t.name for t in READABLE[1:]])
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.one:
        print_one_row(args.types or [t.name for t in READABLE[1:]], args.rounds)
        return
    print(f"{args.rows} rows, {kernels.threads()} threads; milliseconds")
    print(f"{'type':6} {'weights':>12} {'f32':>8} {'packed':>8} {'ratio':>6} "
          f"{'f32 back':>9} {'packed':>8} {'ratio':>6}")  # fmt: skip
    for name in args.types or ["q8_0", "q4_K"]:
        for n, k in SHAPES:
            a, b, c, d = compare(name, args.rows, n, k, args.rounds)
            print(f"{name:6} {f'{n} x {k}':>12} {a * 1e3:8.2f} {b * 1e3:8.2f} {b / a:6.2f} "
                  f"{c * 1e3:9.2f} {d * 1e3:8.2f} {d / c:6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
