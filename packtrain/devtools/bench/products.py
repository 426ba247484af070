"""Times our matrix products of training in three forms each, and packed weights beside f32 weights."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from packtrain.common.events import Counted
from packtrain.devtools.bench.bench_ops import BACK, FORWARD, WEIGHT, MatrixProduct
from packtrain.devtools.bench.bench_table import BenchTable, CellValue
from packtrain.devtools.bench.timing import CLOCK, Clock, burst_seconds, paired
from packtrain.dtypes import DTYPES, Dtype, f32
from packtrain.engine import ops
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.placement import place
from packtrain.engine.tensor import Tensor, input, weight
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize

PRODUCT_FORMS = FORWARD, BACK, WEIGHT
# M × N × K, tokens × rows × columns, for the matrices of a model's blocks, and of its head if it is not too large
SHAPES = {
    "15m": ((1024, 256, 256), (1024, 768, 256), (1024, 256, 768), (1024, 32000, 256)),
    "stories15M": ((1024, 288, 288), (1024, 768, 288), (1024, 288, 768), (1024, 32000, 288)),
    "110m": ((512, 768, 768), (512, 2048, 768), (512, 768, 2048), (512, 32000, 768)),
    "Gemma 3 270M": (
        *((2228, 1024, 640), (2228, 256, 640), (2228, 640, 1024)),
        *((2228, 2048, 640), (2228, 640, 2048)),
    ),
    "Llama-3.2-1B": ((512, 2048, 2048), (512, 512, 2048), (512, 8192, 2048), (512, 2048, 8192)),
}
SHORT_SHAPES = {"15m": SHAPES["15m"][:3], "110m": SHAPES["110m"][1:2]}
PACKED_SHAPES = {"110m": SHAPES["110m"][:3], "Llama-3.2-1B": SHAPES["Llama-3.2-1B"][:1]}
SHORT_PACKED_SHAPES = {"110m": SHAPES["110m"][1:2]}
TYPES = "q8_0", "q4_K"
Shapes = dict[str, tuple[tuple[int, int, int], ...]]
ProgressCounter = Callable[[str, str], AbstractContextManager[Counted]]
COLUMNS = {"model": "", "M × N × K": "", "form": "", "GFLOP/s": ".1f"}
TITLE = "Products in f32"


@dataclass(slots=True)
class TimedProduct:
    """A product of a model with the seconds of ours and of what it is compared with, round by round."""

    model: str
    product: MatrixProduct
    ours: list[float] = field(default_factory=list)
    peer_seconds: list[float] = field(default_factory=list)

    @property
    def labels(self) -> list[CellValue]:
        return [self.model, self.product.shape, self.product.form]

    @property
    def ratio(self) -> float:
        """Return how many times as fast as the peer's our product is."""
        return paired(self.ours, self.peer_seconds)

    def rate(self, seconds: Sequence[float]) -> float:
        return self.product.flops / statistics.median(seconds) / 1e9


def make_products(shapes: Shapes, forms: Sequence[str] = PRODUCT_FORMS) -> list[TimedProduct]:
    cases = ((model, shape, form) for model in shapes for shape in shapes[model] for form in forms)
    return [TimedProduct(model, MatrixProduct(form, *shape)) for model, shape, form in cases]


def product_graph(
    product: MatrixProduct, dtype: Dtype = f32
) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """Return (the tensor that computes the product, shapes of its f32 inputs by name); the matrix is the weight `w`."""
    m, n, k = product.m, product.n, product.k
    x, dy, w = input("x", (m, k)), input("dy", (m, n)), weight("w", (n, k), dtype)
    if product.form == FORWARD:
        return ops.matmul(x, w), {"x": (m, k)}
    if product.form == WEIGHT:
        return ops.out_prod(dy, x), {"dy": (m, n), "x": (m, k)}
    product_tensor = ops.matmul(dy, ops.transpose(w)) if dtype == f32 else ops.matmul_back(dy, w)
    return product_tensor, {"dy": (m, n)}


def bind_product(product: MatrixProduct, w: np.ndarray | None = None) -> Callable[[], None]:
    """Return a function that runs a product's kernel on random values; `w`: its matrix, packed or f32; None: random."""
    random = np.random.default_rng(0)
    if w is None:
        w = random.standard_normal((product.n, product.k), np.float32)
    dtype = f32 if w.dtype == np.float32 else next(t for t in DTYPES.values() if t.numpy == w.dtype)
    product_tensor, shapes = product_graph(product, dtype)
    session = Session()
    session.share({"w": w})
    executor = session.executor(place(Graph({"made": product_tensor})))
    executor({name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    return executor.calls[-1]


def f32_table(shapes: Shapes, rounds: int, count: Counted, clock: Clock = CLOCK) -> BenchTable:
    """Time our products with f32 weights in every form, `rounds` times; calls count(number, total) before each."""
    timed_products = make_products(shapes)
    for i, timed in enumerate(timed_products):
        count(i + 1, len(timed_products))
        bound_product = bind_product(timed.product)
        timed.ours += [burst_seconds(bound_product, clock) for _ in range(rounds)]
    rows = [[*timed.labels, timed.rate(timed.ours)] for timed in timed_products]
    return BenchTable("products", TITLE, COLUMNS, rows)


def ratio_summary(ratios: Sequence[float], peer_name: str) -> str:
    return f"As fast as {peer_name}: {statistics.median(ratios):.2f} × (median), {min(ratios):.2f} × (least)."


# ---- packed weights ------------------------------------------------------------------------------------------


def packed_table(shapes: Shapes, rounds: int, count: Counted, clock: Clock = CLOCK) -> BenchTable:
    """Time our products with packed weights beside f32 weights of equal values, forward and back, as in f32_table."""
    cases = [(timed, name) for name in TYPES for timed in make_products(shapes, (FORWARD, BACK))]
    rows = list[list[CellValue]]()
    for i, (timed, name) in enumerate(cases):
        count(i + 1, len(cases))
        w_shape = timed.product.n, timed.product.k
        w = quantize(np.random.default_rng(0).standard_normal(w_shape, np.float32), DTYPES[name])
        works = bind_product(timed.product, w), bind_product(timed.product, dequantize(w))
        for _ in range(rounds):
            timed.ours.append(burst_seconds(works[0], clock))
            timed.peer_seconds.append(burst_seconds(works[1], clock))
        rates = timed.rate(timed.ours), timed.rate(timed.peer_seconds), timed.ratio
        rows.append([name, *timed.labels, *rates])
    ratios = [timed.ratio for timed, _ in cases]
    columns = {"type": "", **COLUMNS, "f32 GFLOP/s": ".1f", "× f32": ".2f"}
    title = "Products with packed weights"
    notes = [ratio_summary(ratios, "our f32 with the same values")]
    return BenchTable("packed", title, columns, rows, notes)


def tables(
    is_short: bool, rounds: int, counting: ProgressCounter, measure_f32: Callable[..., BenchTable]
) -> Iterator[BenchTable]:
    """Yield tables of f32 products, which `measure_f32` times, and of packed weights; `is_short`: of few shapes."""
    with counting("products", "product") as count:
        f32_products = measure_f32(SHORT_SHAPES if is_short else SHAPES, rounds, count)
    yield f32_products
    with counting("packed weights", "product") as count:
        shapes = SHORT_PACKED_SHAPES if is_short else PACKED_SHAPES
        packed_products = packed_table(shapes, rounds, count)
    yield packed_products
