"""What every op must satisfy, as functions of its name that raise AssertionError.

Tests run them over the registry; planted faults show that each of them can fail. They know of no single op, apart
from the tables at the top.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import packtrain as pt
from packtrain import backends, kernels, ops
from packtrain.backends import Backend
from packtrain.tensor import OPS, Call, Kind, Tensor

Values = Mapping[str, np.ndarray]

# of the largest value, or of 1 where all are smaller
TOLERANCE = {"float32": 2e-5, "float64": 1e-9, "finite difference": 1e-6}

# by how much inputs are scaled, beside 1: so small that an eps counts, so large that exp overflows
SMALL = 1e-3
LARGE = {
    "soft_max": 40, "cross_entropy": 100, "cross_entropy_back": 100, "linear_cross_entropy": 8, "attention": 8,
}  # fmt: skip
NO_GRADIENT = {
    "silu_back", "swiglu_back", "soft_max_back", "rms_norm_back", "attention_back", "cross_entropy_back",
    "opt_step_adamw", "clip_gate",
}  # fmt: skip
OWN_ORDER = {"matmul"}  # the library sums in another order where an input is transposed


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
    assert leaf.dtype == pt.f32, f"{leaf.name} is {leaf.spec}; give it as a constant"
    normal = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
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


def graph_of(call: Call) -> pt.Graph:
    return pt.Graph({f"result {i}": t for i, t in enumerate(call.results)})


# ---- running and comparing -----------------------------------------------------------------------------------


def run(
    graph: pt.Graph, given: Values, among: tuple[Backend, ...] = (backends.cpu,)
) -> dict[str, np.ndarray]:
    """Outputs and new values of updated leaves of one run in a fresh session, as `interpret` gives them."""
    return execute(pt.Session().executor(pt.place(graph, among)), given)


def execute(executor: pt.Executor, given: Values) -> dict[str, np.ndarray]:
    """Set the leaves, run once, and give outputs and new values of updated leaves."""
    session, graph = executor.session, executor.placed.graph
    kinds: dict[str, Kind | None] = {leaf.label: leaf.kind for leaf in graph.leaves}
    session.set({n: v for n, v in given.items() if kinds.get(n) in ("weight", "state")})
    outputs = executor({n: v for n, v in given.items() if kinds.get(n) == "input"})
    return {t.base.label: session.get(t.base.label) for t in graph.updates} | outputs


def close(got: np.ndarray, want: np.ndarray, what: str, tolerance: float | None = None) -> None:
    """Raise unless got is want, to the tolerance of got's dtype; infinities and NaNs in the same places."""
    if tolerance is None:
        tolerance = TOLERANCE.get(got.dtype.name, 0.0)
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all(), f"{what}: not finite in other places"
    top = max(1.0, float(np.abs(want[finite]).max(initial=0)))
    worst = float(np.abs(got[finite] - want[finite]).max(initial=0))
    assert worst <= tolerance * top, f"{what}: off by {worst:.3g}, largest value {top:.3g}"
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), f"{what}: inf or NaN"


def all_close(got: Values, want: Values, what: str, tolerance: float | None = None) -> None:
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name in want:
        close(got[name], want[name], f"{what}: {name}", tolerance)


def same_bits(got: Values, want: Values, what: str) -> None:
    """Raise unless both hold the same names and bytes; NaNs are equal to each other."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name, array in want.items():
        equal = np.array_equal(got[name], array, equal_nan=array.dtype.kind == "f")
        assert equal, f"{what}: {name} differs, by {np.nanmax(np.abs(got[name] - array)):.3g}"


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


def check_optional(name: str) -> None:
    """Leaving out results that nobody reads changes no bit of the others."""
    for k, call in enumerate(samples(name)):
        graph = graph_of(call)
        given = values(graph)
        for backend in (backends.cpu, backends.numpy):
            whole = run(graph, given, (backend,))
            for kept in _subsets(call):
                part = pt.Graph({n: t for n, t in graph.outputs.items() if t.index in kept})
                given_part = {leaf.label: given[leaf.label] for leaf in _given(part)}
                got = run(part, given_part, (backend,))
                want = {n: whole[n] for n in part.outputs}
                same_bits(got, want, f"{name} sample {k} results {kept} on {backend.name}")


def _given(graph: pt.Graph) -> list[Tensor]:
    return [leaf for leaf in graph.leaves if leaf.kind != "constant"]


def _subsets(call: Call) -> Iterator[tuple[int, ...]]:
    every = range(len(call.results))
    for count in range(1, len(every)):
        for kept in itertools.combinations(every, count):
            if set(every) - set(kept) <= set(call.op.optional):
                yield kept


# ---- gradient ------------------------------------------------------------------------------------------------


def differentiable(name: str) -> list[tuple[Call, Values]]:
    """Samples over inputs only, and float64 values for them."""
    made = []
    for original in samples(name):
        call = rewritten(original, free)
        given = values(graph_of(call)) | constants(original)
        made.append((call, {n: v.astype(np.float64) for n, v in given.items()}))
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
        wrt = [leaf for leaf in _given(graph_of(call)) if leaf.dtype == pt.f32]
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


# ---- in place ------------------------------------------------------------------------------------------------


def arrays(call: Call, seed: int = 0) -> list[np.ndarray | None]:
    """Dense f32 arrays for the call's inputs."""
    graph = pt.Graph({str(i): t for i, t in enumerate(call.inputs) if t is not None})
    made = pt.interpret(graph, values(graph, seed), np.float32)
    return [None if t is None else made[str(i)] for i, t in enumerate(call.inputs)]


def run_kernel(call: Call, backend: str, inputs: list[Any], taken: Mapping[int, int]) -> Values:
    """Results of one kernel; `taken` says which result is written over which input."""
    inputs = [x if x is None else x.copy() for x in inputs]
    fresh = [np.full(t.shape, np.nan, np.float32) for t in call.results]
    results = tuple(inputs[taken[i]] if i in taken else array for i, array in enumerate(fresh))
    rule = call.op.workspaces.get(backend)
    specs = rule(*call.inputs, **call.attrs) if rule else ()
    work = {"work": tuple(np.full(s.shape, np.nan, np.float32) for s in specs)} if rule else {}
    with np.errstate(all="ignore"):
        out = results if call.several else results[0]
        call.op.kernels[backend].run(out, *inputs, **call.attrs, **work)
    return {str(i): array for i, array in enumerate(results)}


def check_inplace(name: str) -> None:
    """Every permitted way of writing over inputs gives the same bits as writing elsewhere."""
    unused = {(i, k) for i, inputs in OPS[name].inplace.items() for k in inputs}
    for n, call in enumerate(samples(name)):
        inputs = arrays(call)
        ways = [way for way in _ways(call) if way]
        unused -= {pair for way in ways for pair in way.items()}
        for backend in ("cpu", "numpy") if ways else ():
            want = run_kernel(call, backend, inputs, {})
            for way in ways:
                got = run_kernel(call, backend, inputs, way)
                same_bits(got, want, f"{name} sample {n} on {backend}, results over inputs {way}")
    assert not unused, f"{name}: no sample can be done in place as (result, input) {sorted(unused)}"


def _ways(call: Call) -> Iterator[dict[int, int]]:
    """Maps result -> input that the op permits and whose specs agree."""
    indices = sorted(call.op.inplace)
    choices = [(None, *call.op.inplace[i]) for i in indices]
    for chosen in itertools.product(*choices):
        way = {i: k for i, k in zip(indices, chosen, strict=True) if k is not None}
        given = [call.inputs[k] for k in way.values()]
        fits = all(
            x is not None and x.spec == call.results[i].spec
            for i, x in zip(way, given, strict=True)
        )
        if fits and len(set(way.values())) == len(way):
            yield way


# ---- strides -------------------------------------------------------------------------------------------------

View = Callable[[Tensor, np.ndarray], tuple[Tensor, np.ndarray] | None]


def permuted(leaf: Tensor, array: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
    """The leaf as a view of one with its axes in reverse."""
    if len(leaf.shape) < 2:
        return None
    axes = tuple(reversed(range(len(leaf.shape))))
    return ops.permute(pt.input(leaf.label, leaf.shape[::-1]), axes=axes), array.transpose(axes)


def narrowed(leaf: Tensor, array: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
    """The leaf as the middle of a larger one that is NaN elsewhere."""
    wide = array if array.ndim else array.reshape(1)
    stored = np.full([n + 3 for n in wide.shape], np.nan, np.float32)
    t = pt.input(leaf.label, stored.shape)
    stored[tuple(slice(1, n + 1) for n in wide.shape)] = wide
    for axis, n in enumerate(wide.shape):
        t = ops.narrow(t, axis=axis, start=1, length=n)
    return (t if array.ndim else ops.reshape(t, shape=())), stored


def repeated(leaf: Tensor, array: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
    """The leaf as one that is repeated along its first axis, if its value is so."""
    if not array.ndim or (array[:1] != array).any():
        return None
    return ops.broadcast_to(pt.input(leaf.label, (1, *leaf.shape[1:])), shape=leaf.shape), array[:1]


def check_strided(name: str) -> set[str]:
    """Any f32 input may be a permuted, narrowed or repeated view: same bits. Returns what the op refused."""
    refused = set()
    for k, original in enumerate(samples(name)):
        call = rewritten(original, free)
        given = values(graph_of(call)) | constants(original)
        written = {call.inputs[i] for i in call.op.writes}
        for leaf in _given(graph_of(call)):
            if leaf.dtype != pt.f32 or leaf in written:
                continue
            for view in (permuted, narrowed, repeated):
                refused |= _strided(f"{name} sample {k}", call, leaf, dict(given), view)
    return refused


def _strided(
    what: str, call: Call, leaf: Tensor, given: dict[str, np.ndarray], view: View
) -> set[str]:
    if view is repeated and leaf.shape:
        given[leaf.label] = np.broadcast_to(given[leaf.label][:1], leaf.shape)
    made = view(leaf, given[leaf.label])
    if made is None:
        return set()
    try:
        other = rewritten(call, lambda t: made[0] if t is leaf else t)
    except pt.GraphError as error:
        assert "use cont" in str(error), error
        return {f"{view.__name__} {leaf.name}"}
    want = run(graph_of(call), given)
    got = run(graph_of(other), {**given, leaf.label: made[1]})
    what = f"{what} with {leaf.name} {view.__name__}"
    if call.op.name in OWN_ORDER:
        all_close(got, want, what)
    else:
        same_bits(got, want, what)
    if call.op.name not in NO_GRADIENT:
        _strided_gradient(what, call, leaf, given, other, *made)
    return set()


def _strided_gradient(
    what: str, call: Call, leaf: Tensor, given: Values, other: Call, t: Tensor, stored: np.ndarray
) -> None:
    """The gradient for a view is the gradient for the dense tensor it equals."""
    graph, _ = gradients(call, dense, [leaf])
    through, _ = gradients(other, dense, [t])
    want = pt.interpret(graph, given)[f"d/{leaf.label}"]
    got = pt.interpret(through, {**given, leaf.label: stored})[f"d/{t.label}"]
    close(got, want, f"{what}, gradient")


# ---- threads -------------------------------------------------------------------------------------------------


def check_threads(name: str, counts: tuple[int, ...] = (1, 2, 4)) -> None:
    """Results are the same bits for any number of threads, also for more threads than rows."""
    for k, call in enumerate(samples(name)):
        graph = graph_of(call)
        given = values(graph)
        made = []
        for count in counts:
            kernels.set_threads(count)
            made.append(run(graph, given))
        for count, got in zip(counts, made, strict=True):
            same_bits(got, made[0], f"{name} sample {k} with {count} threads")
