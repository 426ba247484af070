"""What the engine itself costs: building, differentiating and planning; executor overhead; a parallel region.

    python -m benchmarks.engine

Ratios are medians of several rounds in one process.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import packtrain as pt
from packtrain import kernels
from packtrain.engine.optim import AdamW, training_graph
from packtrain.models import transformer
from packtrain.models.config import Config


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call."""
    durations = []
    for _ in range(rounds):
        start_time = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start_time)
    return statistics.median(durations)


def graph_of(blocks: int) -> tuple[int, float, float, float]:
    """Ops of a llama's training graph with this many blocks, and seconds to build, differentiate and plan it."""
    config = Config(64, 16, 16, blocks, 32, 2, 1)
    start_time = time.perf_counter()
    weights = transformer.weights(config)
    model_loss = transformer.loss(config, weights, 1, 16)
    built = time.perf_counter()
    graph = training_graph({"loss": model_loss.loss}, list(weights.values()), AdamW())
    differentiated = time.perf_counter()
    pt.make_plan(pt.place(graph))
    planned = time.perf_counter()
    return len(graph.calls), built - start_time, differentiated - built, planned - differentiated


def building() -> None:
    print(
        f"{'ops':>7} {'build s':>8} {'differentiate s':>16} {'place, plan s':>14} {'sum s':>7} {'ratio':>6}"
    )
    last_total = 0.0
    per_block = (graph_of(12)[0] - graph_of(2)[0]) / 10
    for num_calls in (10_000, 20_000):
        blocks = round(num_calls / per_block)
        rounds = [graph_of(blocks) for _ in range(5)]
        parts = [statistics.median(r[i] for r in rounds) for i in (1, 2, 3)]
        total = sum(parts)
        ratio = f"{total / last_total:6.2f}" if last_total else ""
        print(
            f"{rounds[0][0]:7} {parts[0]:8.3f} {parts[1]:16.3f} {parts[2]:14.3f} {total:7.3f} {ratio}"
        )
        last_total = total


def overhead() -> None:
    """The executor's loop against the same bound calls in a bare loop, on a chain of the smallest ops there are."""
    x, n = pt.input("x", (1,)), 2_000
    y = x
    for _ in range(n):
        y = pt.neg(y)
    run = pt.Session().executor(pt.place(pt.Graph({"y": y})))
    calls = run.calls

    def bare_loop() -> None:
        for call in calls:
            call()

    inputs = {"x": np.ones(1, np.float32)}
    run(inputs)
    pairs = [(seconds(lambda: run(inputs), 5), seconds(bare_loop, 5)) for _ in range(21)]
    extra = statistics.median(a - b for a, b in pairs) / n
    print(
        f"executor: {extra * 1e6:.3f} us an op over a bare loop ({pairs[0][1] / n * 1e6:.2f} us an op itself)"
    )


def region() -> None:
    """What two threads cost: a kernel on n elements in parallel, less the same kernel serially on n / 2."""
    n = 1 << 16
    a, y = np.ones(n, np.float32), np.ones(n, np.float32)
    elementwise: Any = kernels.elementwise
    run = elementwise.scale

    def full_array() -> None:
        run(y, a, 2.0, 0.0)

    def half_array() -> None:
        run(y[: n // 2], a[: n // 2], 2.0, 0.0)

    full_array()
    pairs = [(seconds(full_array, 201), seconds(half_array, 201)) for _ in range(21)]
    cost = statistics.median(a - b for a, b in pairs)
    print(
        f"a parallel region: {cost * 1e6:.1f} us ({n} elements {pairs[0][0] * 1e6:.1f} us, "
        f"half of them serially {pairs[0][1] * 1e6:.1f} us)"
    )


if __name__ == "__main__":
    building()
    overhead()
    region()
