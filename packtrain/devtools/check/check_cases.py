"""All checks of one op, or of a function composed of ops."""

import importlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from packtrain import kernels
from packtrain.devtools.check import op_samples as input_samples
from packtrain.devtools.check.function_checks import FUNCTIONS, Sample, samples_of
from packtrain.devtools.check.gradients import WEIGHTINGS, dense, slope_error, softened
from packtrain.devtools.check.op_samples import Typed, Values, graph_of, samples, typed, values
from packtrain.devtools.check.running import TOLERANCE, apart, limit, run
from packtrain.dtypes import READABLE, dtype_of, f32
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.backends import Backend
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.tensor import OPS, Call, input
from packtrain.kernels.quantized_arrays import dequantize

Drawn = Call | Sample

# by how much inputs are scaled, beside 1: so small that an eps counts, so large that exp overflows
SMALL = 1e-3
LARGE = {
    "soft_max": 40, "cross_entropy": 100, "cross_entropy_back": 100, "linear_cross_entropy": 8, "attention": 8,
}  # fmt: skip
MANY = 10_000  # elements from which a gradient is checked once
STRAIGHT = {"matmul_stored"}  # whose gradient is that of a function without the rounding
FLOAT64 = "float64"  # the specification itself, in place of a backend
VALUE, SLOPE, PEER = "value", "gradient", "PyTorch"
NO_KERNEL = "no kernel"  # the case of a backend on which place would run NumPy's


class Found(NamedTuple):
    """One check: what was compared, how far apart it was, and how far it may be."""

    op: str
    dtype: str
    backend: str
    check: str
    case: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.case == NO_KERNEL:
            return f"{self.op} has no kernel for {self.backend}, and nothing was checked there"
        return (
            f"{self.op} {self.case}, {self.dtype} on {self.backend}: {self.check} off by {self.error:.3g},"
            f" allowed {self.limit:g}"
        )


def names() -> list[str]:
    """Everything that can be checked: ops, and functions composed of them."""
    return sorted({*OPS, *FUNCTIONS})


def trained(name: str) -> bool:
    """Whether it has a gradient that is the slope of its value."""
    return name in FUNCTIONS or (OPS[name].vjp_rule is not None and name not in STRAIGHT)


def check(name: str, backends: Sequence[Backend], seed: int = 0) -> Iterator[Found]:
    """Every check of an op or function: see `checked_values`, `checked_slopes` and `checked_peers`."""
    able = [backend for backend in backends if has_kernel(name, backend)]
    for backend in (candidate for candidate in backends if candidate not in able):
        yield Found(name, "f32", backend.name, VALUE, NO_KERNEL, math.inf, 0.0)
    yield from checked_values(name, able, seed)
    if trained(name):
        yield from checked_slopes(name)
    if has_torch():
        yield from checked_peers(name)


def has_kernel(name: str, backend: Backend) -> bool:
    """Whether the backend computes an op by itself; functions and views need no kernel of their own."""
    if name in FUNCTIONS or not OPS[name].kernels:
        return True
    return all(backend.kernel(OPS[name], sample.inputs) for sample in samples(name))


def drawn(name: str) -> Sequence[Drawn]:
    return samples_of(name) if name in FUNCTIONS else samples(name)


def kind(sample: Drawn) -> str:
    """The type of the input that is not f32, if there is one."""
    reads = (t.dtype for t in sample.inputs if t is not None)
    return next((str(t) for t in reads if t in READABLE and t != f32), "f32")


# ---- values --------------------------------------------------------------------------------------------------


def checked_values(name: str, backends: Sequence[Backend], seed: int = 0) -> Iterator[Found]:
    """What each backend gives, through place, plan and run, beside the specification in float64."""
    for scale in (1.0, SMALL, *([LARGE[name]] if name in LARGE else [])):
        for k, sample in enumerate(drawn(name)):
            graph = graph_of(sample.results)
            leaf_values = values(graph, seed, scale)
            expected = interpret(graph, leaf_values)
            for backend in backends:
                case = f"sample {k} times {scale:g}"
                yield _compared(name, kind(sample), backend, case, graph, leaf_values, expected)
    for variant in typed(name) if name in OPS else ():
        graph, leaf_values, unpacked_values = _unpacked(variant, seed)
        wide = interpret(graph_of(variant.plain.results), unpacked_values)
        rounded = {n: v for n, v in interpret(graph, leaf_values).items() if v.dtype != np.float64}
        for backend in backends:
            case = f"with {variant.packed} in {variant.dtype}"
            yield _compared(
                name, str(variant.dtype), backend, case, graph, leaf_values, wide | rounded
            )


def _unpacked(
    variant: Typed, seed: int
) -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A graph with an operand in another type, values for it, and the same with that operand unpacked."""
    graph = graph_of(variant.call.results)
    leaf_values = values(graph, seed)
    packed = leaf_values[variant.packed]
    return graph, leaf_values, {**leaf_values, variant.packed: as_floats(packed)}


def as_floats(packed: np.ndarray) -> np.ndarray:
    return dequantize(packed).astype(np.float64)


def _compared(
    name: str,
    dtype: str,
    backend: Backend,
    case: str,
    graph: Graph,
    leaf_values: Values,
    expected: Values,
) -> Found:
    actual = run(graph, leaf_values, (backend,))
    pairs = [(apart(actual[n], expected[n]), limit(actual[n])) for n in actual]
    error, allowed = max(pairs, key=lambda pair: pair[0] - pair[1])
    return Found(name, dtype, backend.name, VALUE, case, error, allowed)


# ---- gradients -----------------------------------------------------------------------------------------------


def variable(name: str) -> list[tuple[Drawn, Values]]:
    """Samples with something to differentiate, and float64 values for them."""
    if name in OPS:
        return list(input_samples.differentiable(name))
    sample_graphs = [(sample, graph_of(sample.results)) for sample in samples_of(name)]
    return [(s, {n: v.astype(np.float64) for n, v in values(g).items()}) for s, g in sample_graphs]


def checked_slopes(name: str) -> Iterator[Found]:
    """Every gradient against central differences of fourth order in a random direction, in float64."""
    allowed = TOLERANCE["finite difference"]
    for k, (sample, leaf_values) in enumerate(variable(name)):
        y = sample.results[0]
        finite = np.isfinite(interpret(Graph({"y": y}), leaf_values)["y"]).all()
        weightings = (dense,) if y.spec.size >= MANY else WEIGHTINGS if finite else (softened,)
        for weighting in weightings:
            case = f"sample {k}, result {weighting.__name__}"
            error = slope_error(y, weighting, leaf_values)
            yield Found(name, "f32", FLOAT64, SLOPE, case, error, allowed)
    for variant in typed(name) if name in OPS else ():
        y = variant.call.results[0]
        if y.dtype == f32 and any(
            t.dtype == f32 and t.label != variant.packed for t in variant.call.reads
        ):
            _, leaf_values, _ = _unpacked(variant, 0)
            exact = {
                n: v.astype(np.float64) if v.dtype == np.float32 else v
                for n, v in leaf_values.items()
            }
            error = slope_error(y, dense, exact)
            case = f"with {variant.packed} in {variant.dtype}"
            yield Found(name, str(variant.dtype), FLOAT64, SLOPE, case, error, allowed)


# ---- PyTorch -------------------------------------------------------------------------------------------------

PEERS = "benchmarks.torch_ops"  # of the repository; they are not installed
has_torch = cache(partial(kernels.has_torch, PEERS))


@cache
def peers() -> dict[str, Any]:
    """Functions of PyTorch by the names of ops; loads PyTorch."""
    peer_functions: dict[str, Any] = importlib.import_module(PEERS).PEERS
    return peer_functions


def checked_peers(name: str) -> Iterator[Found]:
    """Value and, by autograd, every gradient beside PyTorch's, in float64; nothing for what it has not."""
    peer = peers().get(name)
    if peer is None:
        return
    for k, (sample, rounded) in enumerate(variable(name)):
        leaf_values = {n: _as_written(v) if n == "hyper" else v for n, v in rounded.items()}
        inputs = _tensors(sample, leaf_values)
        peer_results = peer(*inputs, **sample.attrs)
        peer_results = peer_results if isinstance(peer_results, tuple) else (peer_results,)
        actual = interpret(graph_of(sample.results), leaf_values)
        for i, y in enumerate(peer_results):
            error = apart(actual[f"result {i}"], y.detach().numpy())
            case = f"sample {k} result {i}"
            yield Found(
                name, kind(sample), FLOAT64, PEER, case, error, limit(actual[f"result {i}"])
            )
        if trained(name) and peer_results[0].requires_grad:
            yield from _peer_gradients(name, k, sample, leaf_values, inputs, peer_results[0])


@np.vectorize
def _as_written(x: float) -> float:
    """0.9 for the f32 next to 0.9."""
    return float(f"{x:.6g}")


def _tensors(sample: Drawn, leaf_values: Values) -> list[Any]:
    """PyTorch's for the inputs; f32 ones are float64 and want a gradient, packed ones are unpacked."""
    torch: Any = kernels.torch()
    graph = Graph({str(i): t for i, t in enumerate(sample.inputs) if t is not None})
    peer_inputs = {}
    for name, array in interpret(graph, leaf_values).items():
        packed = array.dtype.names is not None or dtype_of(array).numpy == np.float16
        peer_inputs[name] = torch.from_numpy(as_floats(array) if packed else array)
        if array.dtype == np.float64:
            peer_inputs[name].requires_grad_()
    return [peer_inputs.get(str(i)) for i in range(len(sample.inputs))]


def _peer_gradients(
    name: str, k: int, sample: Drawn, leaf_values: Values, inputs: list[Any], y: Any
) -> Iterator[Found]:
    torch: Any = kernels.torch()
    places = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    places = [i for i in places if (name, i) != ("rope", 1)]  # no gradient for the table
    weights = np.random.default_rng(3).standard_normal(y.shape)
    expected = torch.autograd.grad(
        (y * torch.from_numpy(weights)).sum(), [inputs[i] for i in places]
    )
    result = sample.results[0]
    loss = ops.sum(ops.mul(result, input("weights of results", result.shape)))
    chosen = [sample.inputs[i] for i in places]
    grads = differentiate(loss, [t for t in chosen if t is not None])
    graph = Graph({str(i): d for i, d in zip(places, grads.values(), strict=True)})
    grad_values = interpret(graph, {**leaf_values, "weights of results": weights})
    for i, gradient in zip(places, expected, strict=True):
        error = apart(grad_values[str(i)], gradient.numpy())
        case = f"sample {k}, gradient of input {i}"
        yield Found(name, kind(sample), FLOAT64, PEER, case, error, limit(grad_values[str(i)]))
