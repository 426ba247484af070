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


def check(name: str, among: Sequence[Backend], seed: int = 0) -> Iterator[Found]:
    """Every check of an op or function: see `checked_values`, `checked_slopes` and `checked_peers`."""
    able = [backend for backend in among if has_kernel(name, backend)]
    for backend in (one for one in among if one not in able):
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


def checked_values(name: str, among: Sequence[Backend], seed: int = 0) -> Iterator[Found]:
    """What each backend gives, through place, plan and run, beside the specification in float64."""
    for scale in (1.0, SMALL, *([LARGE[name]] if name in LARGE else [])):
        for k, sample in enumerate(drawn(name)):
            graph = graph_of(sample.results)
            given = values(graph, seed, scale)
            want = interpret(graph, given)
            for backend in among:
                case = f"sample {k} times {scale:g}"
                yield _compared(name, kind(sample), backend, case, graph, given, want)
    for one in typed(name) if name in OPS else ():
        graph, given, plain = _unpacked(one, seed)
        wide = interpret(graph_of(one.plain.results), plain)
        rounded = {n: v for n, v in interpret(graph, given).items() if v.dtype != np.float64}
        for backend in among:
            case = f"with {one.packed} in {one.dtype}"
            yield _compared(name, str(one.dtype), backend, case, graph, given, wide | rounded)


def _unpacked(one: Typed, seed: int) -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A graph with an operand in another type, values for it, and the same with that operand unpacked."""
    graph = graph_of(one.call.results)
    given = values(graph, seed)
    packed = given[one.packed]
    return graph, given, {**given, one.packed: as_floats(packed)}


def as_floats(packed: np.ndarray) -> np.ndarray:
    return dequantize(packed).astype(np.float64)


def _compared(
    name: str, dtype: str, backend: Backend, case: str, graph: Graph, given: Values, want: Values
) -> Found:
    got = run(graph, given, (backend,))
    pairs = [(apart(got[n], want[n]), limit(got[n])) for n in got]
    error, allowed = max(pairs, key=lambda pair: pair[0] - pair[1])
    return Found(name, dtype, backend.name, VALUE, case, error, allowed)


# ---- gradients -----------------------------------------------------------------------------------------------


def variable(name: str) -> list[tuple[Drawn, Values]]:
    """Samples with something to differentiate, and float64 values for them."""
    if name in OPS:
        return list(input_samples.differentiable(name))
    made = [(sample, graph_of(sample.results)) for sample in samples_of(name)]
    return [(s, {n: v.astype(np.float64) for n, v in values(g).items()}) for s, g in made]


def checked_slopes(name: str) -> Iterator[Found]:
    """Every gradient against central differences of fourth order in a random direction, in float64."""
    allowed = TOLERANCE["finite difference"]
    for k, (sample, given) in enumerate(variable(name)):
        y = sample.results[0]
        finite = np.isfinite(interpret(Graph({"y": y}), given)["y"]).all()
        ways = (dense,) if y.spec.size >= MANY else WEIGHTINGS if finite else (softened,)
        for way in ways:
            case = f"sample {k}, result {way.__name__}"
            error = slope_error(y, way, given)
            yield Found(name, "f32", FLOAT64, SLOPE, case, error, allowed)
    for one in typed(name) if name in OPS else ():
        y = one.call.results[0]
        if y.dtype == f32 and any(t.dtype == f32 and t.label != one.packed for t in one.call.reads):
            _, given, _ = _unpacked(one, 0)
            exact = {
                n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in given.items()
            }
            error = slope_error(y, dense, exact)
            case = f"with {one.packed} in {one.dtype}"
            yield Found(name, str(one.dtype), FLOAT64, SLOPE, case, error, allowed)


# ---- PyTorch -------------------------------------------------------------------------------------------------

PEERS = "benchmarks.torch_ops"  # of the repository; they are not installed
has_torch = cache(partial(kernels.has_torch, PEERS))


@cache
def peers() -> dict[str, Any]:
    """Functions of PyTorch by the names of ops; loads PyTorch."""
    found: dict[str, Any] = importlib.import_module(PEERS).PEERS
    return found


def checked_peers(name: str) -> Iterator[Found]:
    """Value and, by autograd, every gradient beside PyTorch's, in float64; nothing for what it has not."""
    peer = peers().get(name)
    if peer is None:
        return
    for k, (sample, rounded) in enumerate(variable(name)):
        given = {n: _as_written(v) if n == "hyper" else v for n, v in rounded.items()}
        inputs = _tensors(sample, given)
        made = peer(*inputs, **sample.attrs)
        made = made if isinstance(made, tuple) else (made,)
        got = interpret(graph_of(sample.results), given)
        for i, y in enumerate(made):
            error = apart(got[f"result {i}"], y.detach().numpy())
            case = f"sample {k} result {i}"
            yield Found(name, kind(sample), FLOAT64, PEER, case, error, limit(got[f"result {i}"]))
        if trained(name) and made[0].requires_grad:
            yield from _peer_gradients(name, k, sample, given, inputs, made[0])


@np.vectorize
def _as_written(x: float) -> float:
    """0.9 for the f32 next to 0.9."""
    return float(f"{x:.6g}")


def _tensors(sample: Drawn, given: Values) -> list[Any]:
    """PyTorch's for the inputs; f32 ones are float64 and want a gradient, packed ones are unpacked."""
    torch: Any = kernels.torch()
    graph = Graph({str(i): t for i, t in enumerate(sample.inputs) if t is not None})
    made = {}
    for name, array in interpret(graph, given).items():
        packed = array.dtype.names is not None or dtype_of(array).numpy == np.float16
        made[name] = torch.from_numpy(as_floats(array) if packed else array)
        if array.dtype == np.float64:
            made[name].requires_grad_()
    return [made.get(str(i)) for i in range(len(sample.inputs))]


def _peer_gradients(
    name: str, k: int, sample: Drawn, given: Values, inputs: list[Any], y: Any
) -> Iterator[Found]:
    torch: Any = kernels.torch()
    places = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    places = [i for i in places if (name, i) != ("rope", 1)]  # no gradient for the table
    weights = np.random.default_rng(3).standard_normal(y.shape)
    want = torch.autograd.grad((y * torch.from_numpy(weights)).sum(), [inputs[i] for i in places])
    result = sample.results[0]
    loss = ops.sum(ops.mul(result, input("weights of results", result.shape)))
    chosen = [sample.inputs[i] for i in places]
    found = differentiate(loss, [t for t in chosen if t is not None])
    graph = Graph({str(i): d for i, d in zip(places, found.values(), strict=True)})
    made = interpret(graph, {**given, "weights of results": weights})
    for i, gradient in zip(places, want, strict=True):
        error = apart(made[str(i)], gradient.numpy())
        case = f"sample {k}, gradient of input {i}"
        yield Found(name, kind(sample), FLOAT64, PEER, case, error, limit(made[str(i)]))
