"""All checks of one op, or of a function composed of ops."""

import importlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from packtrain import kernels
from packtrain.devtools.check import op_samples
from packtrain.devtools.check.function_checks import FUNCTIONS, FunctionSample, samples_of
from packtrain.devtools.check.gradients import WEIGHTINGS, dense, slope_error, softened
from packtrain.devtools.check.op_samples import Values, graph_of, random_values, samples_of_op
from packtrain.devtools.check.running import TOLERANCE, error_limit, max_difference, run_graph
from packtrain.dtypes import READABLE, dtype_of, f32
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.backends import Backend
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.tensor import OPS, Call, input
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
VALUE, SLOPE, PEER = "value", "gradient", "PyTorch"
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
    """Run every check of an op or function: `check_values`, `check_slopes` and `check_peers`."""
    capable_backends = [backend for backend in backends if has_kernel(name, backend)]
    for backend in (candidate for candidate in backends if candidate not in capable_backends):
        yield CheckResult(name, "f32", backend.name, VALUE, NO_KERNEL, math.inf, 0.0)
    yield from check_values(name, capable_backends, seed)
    if has_gradient(name):
        yield from check_slopes(name)
    if has_torch():
        yield from check_peers(name)


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


# ---- PyTorch -------------------------------------------------------------------------------------------------

PEER_MODULE = "benchmarks.torch_ops"  # a module of the repository, which is not installed
has_torch = cache(partial(kernels.has_torch, PEER_MODULE))


@cache
def load_peers() -> dict[str, Any]:
    """Import PyTorch and return its functions by the names of our ops."""
    peer_functions: dict[str, Any] = importlib.import_module(PEER_MODULE).PEERS
    return peer_functions


def check_peers(name: str) -> Iterator[CheckResult]:
    """Compare the value and every gradient with PyTorch's, in float64; yields nothing if PyTorch has no peer."""
    peer = load_peers().get(name)
    if peer is None:
        return
    for k, (sample, rounded) in enumerate(samples_with_values(name)):
        leaf_values = {n: _as_written(v) if n == "hyper" else v for n, v in rounded.items()}
        inputs = _peer_tensors(sample, leaf_values)
        peer_results = peer(*inputs, **sample.attrs)
        peer_results = peer_results if isinstance(peer_results, tuple) else (peer_results,)
        actual = interpret(graph_of(sample.results), leaf_values)
        for i, y in enumerate(peer_results):
            value, case = actual[f"result {i}"], f"sample {k} result {i}"
            error, limit = max_difference(value, y.detach().numpy()), error_limit(value)
            yield CheckResult(name, kind(sample), FLOAT64, PEER, case, error, limit)
        if has_gradient(name) and peer_results[0].requires_grad:
            yield from _peer_gradients(name, k, sample, leaf_values, inputs, peer_results[0])


@np.vectorize
def _as_written(x: float) -> float:
    """Return the short decimal that an f32 stands for: 0.9 for the f32 next to 0.9."""
    return float(f"{x:.6g}")


def _peer_tensors(sample: CheckSample, leaf_values: Values) -> list[Any]:
    """Return PyTorch tensors of a sample's inputs: f32 as float64 that requires a gradient, packed ones unpacked."""
    torch: Any = kernels.torch()
    graph = Graph({str(i): t for i, t in enumerate(sample.inputs) if t is not None})
    peer_inputs = {}
    for name, array in interpret(graph, leaf_values).items():
        is_packed = array.dtype.names is not None or dtype_of(array).numpy == np.float16
        peer_inputs[name] = torch.from_numpy(as_floats(array) if is_packed else array)
        if array.dtype == np.float64:
            peer_inputs[name].requires_grad_()
    return [peer_inputs.get(str(i)) for i in range(len(sample.inputs))]


def _peer_gradients(
    name: str, k: int, sample: CheckSample, leaf_values: Values, inputs: list[Any], y: Any
) -> Iterator[CheckResult]:
    torch: Any = kernels.torch()
    places = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    places = [i for i in places if (name, i) != ("rope", 1)]  # no gradient for the table
    weights = np.random.default_rng(3).standard_normal(y.shape)
    expected = torch.autograd.grad(
        (y * torch.from_numpy(weights)).sum(), [inputs[i] for i in places]
    )
    result = sample.results[0]
    loss = ops.sum(ops.mul(result, input("weights of results", result.shape)))
    wrt_inputs = [sample.inputs[i] for i in places]
    grads = differentiate(loss, [t for t in wrt_inputs if t is not None])
    graph = Graph({str(i): d for i, d in zip(places, grads.values(), strict=True)})
    grad_values = interpret(graph, {**leaf_values, "weights of results": weights})
    for i, gradient in zip(places, expected, strict=True):
        error = max_difference(grad_values[str(i)], gradient.numpy())
        case = f"sample {k}, gradient of input {i}"
        limit = error_limit(grad_values[str(i)])
        yield CheckResult(name, kind(sample), FLOAT64, PEER, case, error, limit)
