"""Samples and values for any op, and its two main checks: the value and the gradient are as specified.

Checks are functions of an op's name that raise AssertionError. Tests run them over the registry; planted faults show
that each can fail. They know of no single op, apart from the tables at the top. See also bit_checks.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import packtrain as pt
import packtrain.optim  # its ops are tested as all others
from packtrain import backends, ops
from packtrain.backends import Backend, Target
from packtrain.dtypes import TRAINABLE
from packtrain.quant import quantize
from packtrain.tensor import OPS, Call, Kind, Tensor

Values = Mapping[str, np.ndarray]

# of the largest value, or of 1 where all are smaller
TOLERANCE = {"float32": 2e-5, "float64": 1e-9, "finite difference": 1e-6, "rounded otherwise": 1e-3}

# by how much inputs are scaled, beside 1: so small that an eps counts, so large that exp overflows
SMALL = 1e-3
LARGE = {
    "soft_max": 40, "cross_entropy": 100, "cross_entropy_back": 100, "linear_cross_entropy": 8, "attention": 8,
}  # fmt: skip
NO_GRADIENT = {
    "silu_back", "swiglu_back", "geglu_back", "soft_max_back", "rms_norm_back", "attention_back", "cross_entropy_back",
    "opt_step_adamw", "opt_step_sgd", "clip_gate", "accumulate", "top_k", "group_rows", "weighted_rows_back",
    "opt_momentum", "opt_step_lbfgs", "lbfgs_dots",
    "rope_table", "argmax", "argsort", "count_equal", "pool_2d_back",
}  # fmt: skip


# ---- samples and values --------------------------------------------------------------------------------------


def samples(name: str) -> list[Call]:
    """The different calls that an op's room gives as samples."""
    rule = OPS[name].sample_rule
    made = list(rule()) if rule else []
    assert made, f"{name} has no samples"
    calls = dict.fromkeys(t.call for t in made if t.call is not None and t.call.op.name == name)
    assert calls, f"no sample of {name} is a call of {name}"
    return list(calls)


def value(leaf: Tensor, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """A value that depends on the leaf's name, shape and kind; a state is not negative, as moments are not."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{leaf.name} {leaf.shape}".encode())])
    assert leaf.dtype in TRAINABLE, f"{leaf.name} is {leaf.spec}; give it as a constant"
    normal = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
    if leaf.dtype != pt.f32:
        return quantize(normal, leaf.dtype)
    return np.abs(normal) if leaf.kind == "state" else normal


def values(graph: pt.Graph, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    given = (leaf for leaf in graph.leaves if leaf.kind != "constant")
    return {leaf.label: value(leaf, seed, scale) for leaf in given}


def rewritten(call: Call, leaf: Callable[[Tensor], Tensor]) -> Call:
    """The call and what it needs, written again over other leaves."""
    made: dict[Tensor, Tensor] = {}

    def again(t: Tensor) -> Tensor:
        if t not in made and t.call is None:
            made[t] = leaf(t)
        elif t not in made:
            assert t.call is not None
            made.update(zip(t.call.results, repeat(t.call), strict=True))
        return made[t]

    def repeat(call: Call) -> tuple[Tensor, ...]:
        results = call.op(*(t and again(t) for t in call.inputs), **call.attrs)
        return results if isinstance(results, tuple) else (results,)

    return repeat(call)[0].call  # type: ignore[return-value]


def free(leaf: Tensor) -> Tensor:
    """An input in place of a finite f32 constant, so that it can be varied too."""
    if leaf.kind != "constant" or leaf.dtype != pt.f32 or not np.isfinite(leaf.value).all():
        return leaf
    return pt.input(leaf.label, leaf.shape)


def constants(call: Call) -> dict[str, np.ndarray]:
    """What the constants that `free` turns into inputs held."""
    leaves = pt.Graph(call.results[:1]).leaves
    return {t.label: t.value for t in leaves if t.kind == "constant" and free(t) is not t}


def given_leaves(graph: pt.Graph) -> list[Tensor]:
    return [leaf for leaf in graph.leaves if leaf.kind != "constant"]


def graph_of(call: Call) -> pt.Graph:
    return pt.Graph({f"result {i}": t for i, t in enumerate(call.results)})


# ---- running and comparing -----------------------------------------------------------------------------------


def run(
    graph: pt.Graph, given: Values, among: tuple[Backend, ...] = (backends.cpu,)
) -> dict[str, np.ndarray]:
    """Outputs and new values of updated leaves of one run in a fresh session, as `interpret` gives them."""
    return execute(pt.Session().executor(pt.place(graph, Target(among))), given)


def execute(executor: pt.Executor, given: Values) -> dict[str, np.ndarray]:
    """Set the leaves, run once, and give outputs and new values of updated leaves."""
    session, graph = executor.session, executor.placed.graph
    kinds: dict[str, Kind | None] = {leaf.label: leaf.kind for leaf in graph.leaves}
    session.set({n: v for n, v in given.items() if kinds.get(n) in ("weight", "state")})
    outputs = executor({n: v for n, v in given.items() if kinds.get(n) == "input"})
    return {t.base.label: session.get(t.base.label) for t in graph.updates} | outputs


def close(got: np.ndarray, want: np.ndarray, what: str, tolerance: float | None = None) -> None:
    """Raise unless got is want, to the tolerance of got's dtype; infinities and NaNs in the same places."""
    if got.dtype == pt.bf16.numpy:
        rounded_alike(got, want, what)
        return
    if tolerance is None:
        tolerance = TOLERANCE.get(got.dtype.name, 0.0)
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all(), f"{what}: not finite in other places"
    top = max(1.0, float(np.abs(want[finite]).max(initial=0)))
    worst = float(np.abs(got[finite] - want[finite]).max(initial=0))
    assert worst <= tolerance * top, f"{what}: off by {worst:.3g}, largest value {top:.3g}"
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), f"{what}: inf or NaN"


def rounded_alike(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Raise unless bf16 that were rounded at random are equal, but for a few on the edge: the next one is as good."""
    steps = np.abs(got.view(np.int16).astype(int) - want.view(np.int16))
    assert steps.max(initial=0) <= 1, f"{what}: apart by {steps.max()} of bf16's steps"
    other = np.count_nonzero(steps) / max(steps.size, 1)
    assert other <= TOLERANCE["rounded otherwise"], f"{what}: {other:.2%} are rounded otherwise"


def all_close(got: Values, want: Values, what: str, tolerance: float | None = None) -> None:
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name in want:
        close(got[name], want[name], f"{what}: {name}", tolerance)


def same_bits(got: Values, want: Values, what: str) -> None:
    """Raise unless both hold the same names and bytes; NaNs are equal to each other."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name, array in want.items():
        equal = np.array_equal(got[name], array, equal_nan=array.dtype.kind == "f")
        if not equal:
            other = int((got[name] != array).sum())
            worst = float(np.abs(np.nan_to_num(got[name]) - np.nan_to_num(array)).max())
            raise AssertionError(f"{what}: {other} elements of {name} differ, by up to {worst:.3g}")


# ---- value ---------------------------------------------------------------------------------------------------


def check_value(name: str) -> None:
    """cpu and numpy, through place, plan and run, give what the float64 specification gives."""
    for scale in (1.0, SMALL, *([LARGE[name]] if name in LARGE else [])):
        for k, call in enumerate(samples(name)):
            graph = graph_of(call)
            given = values(graph, scale=scale)
            want = pt.interpret(graph, given)
            for backend in (backends.cpu, backends.numpy):
                what = f"{name} sample {k} times {scale:g} on {backend.name}"
                all_close(run(graph, given, (backend,)), want, what)


# ---- gradient ------------------------------------------------------------------------------------------------


def differentiable(name: str) -> list[tuple[Call, Values]]:
    """Samples over inputs only that read some f32, and float64 values for them; none whose result is rounded."""
    made = []
    for original in samples(name):
        call = rewritten(original, free)
        leaves = given_leaves(graph_of(call))
        given = values(graph_of(call)) | constants(original)
        rounded = call.results[0].dtype in (pt.f16, pt.bf16)
        if given and not rounded and all(leaf.dtype == pt.f32 for leaf in leaves):
            made.append((call, {n: v.astype(np.float64) for n, v in given.items()}))
    assert made, f"no sample of {name} reads an f32 tensor"
    return made


def dense(y: Tensor) -> Tensor:
    return ops.mul(y, pt.constant("random", np.random.default_rng(7).standard_normal(y.shape)))


def reversed_axes(y: Tensor) -> Tensor:
    return dense(ops.permute(y, axes=tuple(reversed(range(len(y.shape))))))


def as_it_is(y: Tensor) -> Tensor:
    return y


# what is summed to a loss: the gradient that reaches y is then a dense, a permuted or a repeated array
WEIGHTINGS = (dense, reversed_axes, as_it_is)


def gradients(
    call: Call, weighted: Callable[[Tensor], Tensor], wrt: Sequence[Tensor] | None = None
) -> tuple[pt.Graph, list[Tensor]]:
    """A graph of `loss`, the sum of result 0 weighted, and `d/<label>` for every f32 leaf or for `wrt`."""
    if wrt is None:
        wrt = [leaf for leaf in given_leaves(graph_of(call)) if leaf.dtype == pt.f32]
    loss = ops.sum(weighted(call.results[0]))
    made = pt.differentiate(loss, wrt)
    return pt.Graph({"loss": loss} | {f"d/{t.label}": g for t, g in made.items()}), list(made)


def check_gradient(name: str) -> None:
    """The vjp against central differences of fourth order in a random direction, in float64."""
    for k, (call, given) in enumerate(differentiable(name)):
        for weighted in WEIGHTINGS if call.results[0].spec.size < 10_000 else (dense,):
            graph, leaves = gradients(call, weighted)
            assert leaves, f"{name} sample {k} has nothing to differentiate"
            made = pt.interpret(graph, given)
            rng = np.random.default_rng(11)
            way = {leaf.label: rng.standard_normal(leaf.shape) for leaf in leaves}
            measured = slope(pt.Graph({"loss": graph.outputs["loss"]}), given, way)
            terms = {n: made[f"d/{n}"] * direction for n, direction in way.items()}
            is_slope(measured, terms, f"{name} sample {k}, result {weighted.__name__}")


def is_slope(measured: float, terms: Values, what: str) -> None:
    """Raise unless the sum of all terms is the slope, relative to the terms' root of the sum of squares."""
    every = np.concatenate([term.ravel() for term in terms.values()])
    off = abs(float(every.sum()) - measured) / (float(np.sqrt((every**2).sum())) + 1e-3)
    limit = TOLERANCE["finite difference"]
    assert off <= limit, f"{what}: gradient of {', '.join(terms)} is off by {off:.3g}"


def slope(graph: pt.Graph, given: Values, way: Values) -> float:
    """How fast the graph's `loss` changes along `way`: central differences of fourth order."""

    def loss(by: float) -> float:
        return float(
            pt.interpret(graph, {n: v + by * way.get(n, 0) for n, v in given.items()})["loss"]
        )

    h = 1e-4
    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
