"""Products with packed weights beside the same products with their values in f32: forward and backward.

    python -m benchmarks.quantized [--types q8_0 q4_K] [--rows 512] [--rounds 15]

Shapes are those of the 110m preset, the last one its head. A ratio is the median of pairs that alternate in one run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import packtrain as pt
from packtrain import kernels, ops
from packtrain.dtypes import DTYPES, WRITABLE
from packtrain.quant import dequantize, quantize

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
    packed = quantize(random.standard_normal((n, k), np.float32), DTYPES[name])
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [t.name for t in WRITABLE[1:]]
    parser.add_argument("--types", nargs="+", choices=names, default=["q8_0", "q4_K"])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"{args.rows} rows, {kernels.threads()} threads; milliseconds")
    print(f"{'type':6} {'weights':>12} {'f32':>8} {'packed':>8} {'ratio':>6} "
          f"{'f32 back':>9} {'packed':>8} {'ratio':>6}")  # fmt: skip
    for name in args.types:
        for n, k in SHAPES:
            a, b, c, d = compare(name, args.rows, n, k, args.rounds)
            print(f"{name:6} {f'{n} x {k}':>12} {a * 1e3:8.2f} {b * 1e3:8.2f} {b / a:6.2f} "
                  f"{c * 1e3:9.2f} {d * 1e3:8.2f} {d / c:6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
