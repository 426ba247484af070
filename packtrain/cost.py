"""How long a plan will take: work counted from its steps, over rates measured on this machine."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from packtrain import ops
from packtrain.graph import Graph
from packtrain.place import Placed, Step, place
from packtrain.run import Session
from packtrain.tensor import Call, Tensor, input, weight

WIDTH, COPIED, ROUNDS = 512, 1 << 21, 15
CALL_SECONDS = 3e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does in a second: floating-point operations of a matrix product, and bytes moved."""

    flops: float
    nbytes: float


def measured() -> Rates:
    """The rates now: a matrix product that fits into the caches, and a scaled copy that does not. 0.1 s."""
    x, w = input("x", (WIDTH, WIDTH)), weight("w", (WIDTH, WIDTH))
    product = _seconds(ops.matmul(x, w), {"x": np.ones((WIDTH, WIDTH))})
    copy = _seconds(ops.scale(input("x", (COPIED,)), by=2.0), {"x": np.ones(COPIED)})
    return Rates(2 * WIDTH**3 / product, 2 * 4 * COPIED / copy)


def _seconds(y: Tensor, inputs: dict[str, np.ndarray]) -> float:
    """One call, without the bringing of its inputs."""
    session = Session()
    run = session.executor(place(Graph([y])))
    weights = (leaf for leaf in run.placed.graph.leaves if leaf.kind == "weight")
    session.set({leaf.label: np.ones(leaf.shape) for leaf in weights})
    run(inputs)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run.calls[0]()
        times.append(time.perf_counter() - began)
    return min(times)  # what else runs on this machine only adds to it


def seconds(placed: Placed, rates: Rates) -> float:
    """Expected time of one run: each step takes as long as its arithmetic or its bytes, whichever is more."""
    read = {t for step in placed.steps for t in step.reads}
    return sum(call_seconds(step, rates, read) for step in placed.steps)


def call_seconds(call: Call | Step, rates: Rates, read: Collection[Tensor] = ()) -> float:
    """Expected time of one call, see `flops` for `read`."""
    return max(flops(call, read) / rates.flops, _nbytes(call) / rates.nbytes) + CALL_SECONDS


def _nbytes(call: Call | Step) -> int:
    made = sum(t.spec.nbytes for t in call.results)
    if call.op.name == "get_rows":  # reads as much of the table as it gives
        return 2 * made
    return made + sum(t.spec.nbytes for t in call.reads)


def flops(step: Call | Step, read: Collection[Tensor]) -> float:
    """Floating-point operations of the matrix products in a step; 0 for what only moves bytes.

    read  tensors that some step reads: the head's gradients are made only if they are among them
    """
    if step.op.name not in PRODUCTS:
        return 0.0
    a, b = (t.shape for t in step.reads[:2])
    wanted = [t in read for t in step.results]
    return 2.0 * PRODUCTS[step.op.name](step.results[0].shape, a, b, wanted)


Shape = tuple[int, ...]


def _matmul(y: Shape, x: Shape, w: Shape, wanted: list[bool]) -> float:
    return math.prod(y) * w[-1]


def _out_prod(y: Shape, a: Shape, b: Shape, wanted: list[bool]) -> float:
    return math.prod(a) * b[-1]


def _head(y: Shape, x: Shape, w: Shape, wanted: list[bool]) -> float:
    """Logits, and the gradients of both sides where they are read."""
    return math.prod(x) * w[0] * (1 + sum(wanted[2:]))


def _attention(y: Shape, q: Shape, k: Shape, wanted: list[bool]) -> float:
    """Two products, of which a causal mask leaves half: q (B, T, H, D), k (B, S, K, D)."""
    return math.prod(q) * k[1]


def _attention_back(dq: Shape, dy: Shape, y: Shape, wanted: list[bool]) -> float:
    """Five products: two again, and three for dq, dk and dv."""
    return 2.5 * math.prod(dy) * dy[1]


PRODUCTS: dict[str, Callable[[Shape, Shape, Shape, list[bool]], float]] = {
    "matmul": _matmul,
    "matmul_id": _matmul,
    "matmul_back": _out_prod,
    "matmul_id_back": _out_prod,
    "out_prod": _out_prod,
    "out_prod_id": _out_prod,
    "linear_cross_entropy": _head,
    "attention": _attention,
    "attention_back": _attention_back,
}
