"""All checks of one op, or of a function composed of ops."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from packtrain.devtools.check import op_samples
from packtrain.devtools.check.op_samples import FUNCTIONS, Values, graph_of, random_values
from packtrain.dtypes import READABLE, bf16, f32
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.backends import Backend, Target, cpu
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.placement import place
from packtrain.engine.tensor import OPS, Call, Tensor, constant
from packtrain.kernels.quant.quantized_arrays import dequantize

# relative to the largest value, or to 1 where all values are smaller
TOLERANCE = {"float32": 2e-5, "float64": 1e-9, "finite difference": 1e-6, "rounded otherwise": 1e-3}
TOLERANCE["int8"] = TOLERANCE["rounded otherwise"]


def run_graph(
    graph: Graph, leaf_values: Values, backends: tuple[Backend, ...] = (cpu,)
) -> dict[str, np.ndarray]:
    """Run a graph once on `leaf_values`, by leaf, in a new session; returns outputs and updated states by name."""
    return execute(Session().executor(place(graph, Target(backends))), leaf_values)


def execute(executor: Executor, leaf_values: Values) -> dict[str, np.ndarray]:
    """Set the graph's weights, states and inputs, run once, and return outputs and updated weights and states."""
    session, graph = executor.session, executor.placed.graph
    leaf_kinds = {leaf.label: leaf.kind for leaf in graph.leaves}
    session.set({n: v for n, v in leaf_values.items() if leaf_kinds.get(n) in ("weight", "state")})
    outputs = executor({n: v for n, v in leaf_values.items() if leaf_kinds.get(n) == "input"})
    return {t.base.label: session.get(t.base.label) for t in graph.updates} | outputs


def error_limit(actual: np.ndarray) -> float:
    """Return the largest `max_difference` allowed for results of the element type of `actual`; 0 for exact types."""
    name = "rounded otherwise" if actual.dtype == bf16.numpy else actual.dtype.name
    return TOLERANCE.get(name, 0.0)


def max_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value or to 1 where all values are smaller.

    Infinite if infinities and NaNs are in different places, or the shapes differ. For bf16, which is rounded at random,
    and codes in 8 bits: the share of values that are off by one step; infinite if one is off by more.
    """
    if actual.shape != expected.shape:
        return np.inf
    if actual.dtype.names:  # blocks
        actual, expected = dequantize(actual), dequantize(expected)
    if actual.dtype in (bf16.numpy, np.int8):
        as_int = np.dtype(f"i{actual.dtype.itemsize}")
        steps = np.abs((actual.view(as_int) - expected.view(as_int)).astype(int))  # wraps around
        return np.inf if steps.max(initial=0) > 1 else np.count_nonzero(steps) / max(steps.size, 1)
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=expected.dtype.kind == "f"):
        return np.inf
    a, b = actual[finite].astype(np.float64), expected[finite].astype(np.float64)
    largest_error = float(np.abs(a - b).max(initial=0)) / max(1.0, float(np.abs(b).max(initial=0)))
    return largest_error if np.isfinite(largest_error) else np.inf


CheckSample = Call | op_samples.FunctionSample

# factors of inputs beside 1: so small that an eps counts, or so large that exp overflows
SMALL_SCALE = 1e-3
LARGE_SCALES = {
    "soft_max": 40, "cross_entropy": 100, "cross_entropy_back": 100, "linear_cross_entropy": 8, "attention": 8,
}  # fmt: skip
LARGE_SIZE = 10_000  # elements of a result from which only one weighting is checked
STRAIGHT_THROUGH = {"matmul_stored"}  # ops with the gradient of the function without rounding
FLOAT64 = "float64"  # the specification itself, in place of a backend
VALUE, SLOPE, PEER = "value", "gradient", "PyTorch"  # PEER: of benchmarks.check
NO_KERNEL = "no kernel"  # case of a backend without a kernel, where `place` would run NumPy's


class CheckResult(NamedTuple):
    """One check: what was compared, the error found, and the error allowed (`limit`)."""

    op: str
    dtype: str
    backend: str
    check: str
    case: str
    error: float
    limit: float

    @property
    def has_passed(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.case == NO_KERNEL:
            return f"{self.op} has no kernel for {self.backend}, and nothing was checked there"
        return (
            f"{self.op} {self.case}, {self.dtype} on {self.backend}: {self.check} off by {self.error:.3g},"
            f" allowed {self.limit:g}"
        )


def checkable_names() -> list[str]:
    """Return the names of all ops, and of the functions composed of ops."""
    return sorted({*OPS, *FUNCTIONS})


def has_gradient(name: str) -> bool:
    """Whether an op or function has a gradient that is the slope of its value, so that differences can check it."""
    return name in FUNCTIONS or (OPS[name].vjp_rule is not None and name not in STRAIGHT_THROUGH)


def check_op(name: str, backends: Sequence[Backend], seed: int = 0) -> Iterator[CheckResult]:
    """Run every check of an op or function: `check_values` and `check_slopes`."""
    capable_backends = [backend for backend in backends if has_kernel(name, backend)]
    for backend in (candidate for candidate in backends if candidate not in capable_backends):
        yield CheckResult(name, "f32", backend.name, VALUE, NO_KERNEL, math.inf, 0.0)
    yield from check_values(name, capable_backends, seed)
    if has_gradient(name):
        yield from check_slopes(name)


def has_kernel(name: str, backend: Backend) -> bool:
    """Whether a backend has a kernel of its own for an op; functions and views need none."""
    if name in FUNCTIONS or not OPS[name].kernels:
        return True
    samples = op_samples.samples_of_op(name)
    return all(backend.kernel(OPS[name], sample.inputs) for sample in samples)


def kind(sample: CheckSample) -> str:
    """Return the element type, for tables, of the first readable input that is not f32; f32 if all are."""
    reads = (t.dtype for t in sample.inputs if t is not None)
    return next((str(t) for t in reads if t in READABLE and t != f32), "f32")


# ---- values --------------------------------------------------------------------------------------------------


def check_values(name: str, backends: Sequence[Backend], seed: int = 0) -> Iterator[CheckResult]:
    """Yield a check of each backend's results, planned, on each sample of an op against the float64 specification."""
    samples: Sequence[CheckSample] = (
        op_samples.samples_of(name) if name in FUNCTIONS else op_samples.samples_of_op(name)
    )
    for scale in (1.0, SMALL_SCALE, *([LARGE_SCALES[name]] if name in LARGE_SCALES else [])):
        for k, sample in enumerate(samples):
            graph = graph_of(sample.results)
            leaf_values = random_values(graph, seed, scale)
            expected = interpret(graph, leaf_values)
            for backend in backends:
                case = f"sample {k} times {scale:g}"
                yield _compared(name, kind(sample), backend, case, graph, leaf_values, expected)
    for variant in op_samples.typed_samples(name) if name in OPS else ():
        graph, leaf_values, unpacked_values = _unpack_variant(variant, seed)
        wide_results = interpret(graph_of(variant.f32_call.results), unpacked_values)
        rounded = {n: v for n, v in interpret(graph, leaf_values).items() if v.dtype != np.float64}
        case, expected = f"with {variant.packed_name} in {variant.dtype}", wide_results | rounded
        for backend in backends:
            yield _compared(name, str(variant.dtype), backend, case, graph, leaf_values, expected)


def _unpack_variant(
    variant: op_samples.TypedSample, seed: int
) -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (graph, leaf values, leaf values with the packed operand as floats) of a typed sample."""
    graph = graph_of(variant.call.results)
    leaf_values = random_values(graph, seed)
    packed_array = leaf_values[variant.packed_name]
    return graph, leaf_values, {**leaf_values, variant.packed_name: as_floats(packed_array)}


def as_floats(packed: np.ndarray) -> np.ndarray:
    return dequantize(packed).astype(np.float64)


def _compared(
    name: str, dtype: str, backend: Backend, case: str, graph: Graph, leaf_values: Values, expected: Values,
) -> CheckResult:  # fmt: skip
    """Run a graph on a backend and compare results with `expected`; `name` (the op), `dtype`, `case` label it."""
    actual = run_graph(graph, leaf_values, (backend,))
    pairs = [(max_difference(actual[n], expected[n]), error_limit(actual[n])) for n in actual]
    error, allowed = max(pairs, key=lambda pair: pair[0] - pair[1])
    return CheckResult(name, dtype, backend.name, VALUE, case, error, allowed)


# ---- gradients -----------------------------------------------------------------------------------------------


def samples_with_values(name: str) -> list[tuple[CheckSample, Values]]:
    """Return the differentiable samples of an op or function, with float64 values of their inputs."""
    if name in OPS:
        return list(op_samples.differentiable_samples(name))
    leaf_values = [(s, random_values(graph_of(s.results))) for s in op_samples.samples_of(name)]
    return [(s, {n: v.astype(np.float64) for n, v in values.items()}) for s, values in leaf_values]


def check_slopes(name: str) -> Iterator[CheckResult]:
    """Compare every gradient with central differences of fourth order in a random direction, in float64."""
    allowed = TOLERANCE["finite difference"]
    for k, (sample, leaf_values) in enumerate(samples_with_values(name)):
        y = sample.results[0]
        finite = np.isfinite(interpret(Graph({"y": y}), leaf_values)["y"]).all()
        weightings = WEIGHTINGS if finite else (softened,)
        weightings = (dense,) if y.spec.size >= LARGE_SIZE else weightings
        for weighting in weightings:
            case = f"sample {k}, result {weighting.__name__}"
            error = slope_error(y, weighting, leaf_values)
            yield CheckResult(name, "f32", FLOAT64, SLOPE, case, error, allowed)
    for variant in op_samples.typed_samples(name) if name in OPS else ():
        y = variant.call.results[0]
        reads = (t for t in variant.call.reads if t.label != variant.packed_name)
        if y.dtype == f32 and any(t.dtype == f32 for t in reads):
            _, leaf_values, _ = _unpack_variant(variant, 0)
            is_f32 = {n: v.dtype == np.float32 for n, v in leaf_values.items()}
            exact = {n: v.astype(np.float64) if is_f32[n] else v for n, v in leaf_values.items()}
            error = slope_error(y, dense, exact)
            case = f"with {variant.packed_name} in {variant.dtype}"
            yield CheckResult(name, str(variant.dtype), FLOAT64, SLOPE, case, error, allowed)


Weighting = Callable[[Tensor], Tensor]


def dense(y: Tensor) -> Tensor:
    """Multiply y by random weights, so that a sum of the result depends on all of y."""
    return ops.mul(y, constant("random", np.random.default_rng(7).standard_normal(y.shape)))


def reversed_axes(y: Tensor) -> Tensor:
    return dense(ops.permute(y, axes=tuple(reversed(range(len(y.shape))))))


def softened(y: Tensor) -> Tensor:
    """Multiply soft_max(y) by random weights, for results that may be infinite."""
    return dense(ops.soft_max(y))


# the loss is the sum of the result, whose gradient is then a dense, a permuted or a repeated array
WEIGHTINGS = (dense, reversed_axes, lambda y: y)


def gradients(
    y: Tensor, weighted: Weighting, wrt: Sequence[Tensor] | None = None
) -> tuple[Graph, list[Tensor]]:
    """Return (graph of `loss` = sum of weighted(y) and gradients `d/<label>`; wrt), `wrt` by default y's f32 leaves."""
    if wrt is None:
        wrt = [leaf for leaf in op_samples.input_leaves(Graph([y])) if leaf.dtype == f32]
    loss = ops.sum(weighted(y))
    grads = differentiate(loss, wrt)
    return Graph({"loss": loss} | {f"d/{t.label}": g for t, g in grads.items()}), list(grads)


def slope_error(y: Tensor, weighted: Weighting, leaf_values: Values) -> float:
    """Return how far y's gradients are from central differences in a random direction, by slope_deviation."""
    graph, leaves = gradients(y, weighted)
    grads = interpret(graph, leaf_values)
    rng = np.random.default_rng(11)
    directions = {leaf.label: rng.standard_normal(leaf.shape) for leaf in leaves}
    measured_slope = slope(Graph({"loss": graph.outputs["loss"]}), leaf_values, directions)
    return slope_deviation(
        measured_slope, {n: grads[f"d/{n}"] * direction for n, direction in directions.items()}
    )


def slope_deviation(measured: float, terms: Values) -> float:
    """Return |sum of `terms` (gradients * directions) - measured slope| / (root of the terms' sum of squares)."""
    flat_terms = np.concatenate([term.ravel() for term in terms.values()])
    return abs(float(flat_terms.sum()) - measured) / (float(np.sqrt((flat_terms**2).sum())) + 1e-3)


def slope(graph: Graph, leaf_values: Values, directions: Values) -> float:
    """Return the derivative of the graph's `loss` along `directions`, arrays by leaf, by central differences."""

    def loss(step: float) -> float:
        moved_values = {
            n: v + step * directions[n] if n in directions else v for n, v in leaf_values.items()
        }
        return float(interpret(graph, moved_values)["loss"])

    h = 1e-4
    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
