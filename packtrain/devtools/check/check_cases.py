"""All checks of one op, or of a function composed of ops."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from packtrain.devtools.check import op_samples
from packtrain.devtools.check.function_checks import FUNCTIONS, FunctionSample, samples_of
from packtrain.devtools.check.gradients import WEIGHTINGS, dense, slope_error, softened
from packtrain.devtools.check.op_samples import Values, graph_of, random_values, samples_of_op
from packtrain.devtools.check.running import TOLERANCE, error_limit, max_difference, run_graph
from packtrain.dtypes import READABLE, f32
from packtrain.engine.backends import Backend
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.tensor import OPS, Call
from packtrain.kernels.quant.quantized_arrays import dequantize

CheckSample = Call | FunctionSample

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
    """Whether an op or function has a gradient that is the slope of its value."""
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
    return all(backend.kernel(OPS[name], sample.inputs) for sample in samples_of_op(name))


def kind(sample: CheckSample) -> str:
    """Return the element type of the first input that is not f32, else f32."""
    reads = (t.dtype for t in sample.inputs if t is not None)
    return next((str(t) for t in reads if t in READABLE and t != f32), "f32")


# ---- values --------------------------------------------------------------------------------------------------


def check_values(name: str, backends: Sequence[Backend], seed: int = 0) -> Iterator[CheckResult]:
    """Run a planned op on random inputs; compare each backend's results with the specification in float64."""
    samples: Sequence[CheckSample] = samples_of(name) if name in FUNCTIONS else samples_of_op(name)
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
    """Return the graph of a typed sample, values of its leaves, and these values with the packed operand unpacked."""
    graph = graph_of(variant.call.results)
    leaf_values = random_values(graph, seed)
    packed_array = leaf_values[variant.packed_name]
    return graph, leaf_values, {**leaf_values, variant.packed_name: as_floats(packed_array)}


def as_floats(packed: np.ndarray) -> np.ndarray:
    return dequantize(packed).astype(np.float64)


def _compared(
    name: str, dtype: str, backend: Backend, case: str, graph: Graph, leaf_values: Values, expected: Values,
) -> CheckResult:  # fmt: skip
    """Run a graph on a backend and compare the results with `expected`."""
    actual = run_graph(graph, leaf_values, (backend,))
    pairs = [(max_difference(actual[n], expected[n]), error_limit(actual[n])) for n in actual]
    error, allowed = max(pairs, key=lambda pair: pair[0] - pair[1])
    return CheckResult(name, dtype, backend.name, VALUE, case, error, allowed)


# ---- gradients -----------------------------------------------------------------------------------------------


def samples_with_values(name: str) -> list[tuple[CheckSample, Values]]:
    """Return the differentiable samples of an op or function, with float64 values of their leaves."""
    if name in OPS:
        return list(op_samples.differentiable_samples(name))
    leaf_values = [(s, random_values(graph_of(s.results))) for s in samples_of(name)]
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
