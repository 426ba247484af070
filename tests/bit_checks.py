"""What must not change a bit of an op's results: what is left out, in place, strides, threads."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import packtrain as pt
from packtrain import kernels
from packtrain.devtools.check.check_cases import dense, gradients, run_graph
from packtrain.devtools.check.op_samples import (
    Values,
    constant_values,
    free_constant,
    graph_of,
    input_leaves,
    random_values,
    rewrite_call,
    samples_of_op,
)
from packtrain.engine import backends, ops
from packtrain.engine.backends import Backend
from packtrain.engine.backends.torch_backend import as_tensor
from packtrain.engine.tensor import OPS, Call, Tensor
from tests.checks import NO_GRADIENT, assert_all_close, assert_close, assert_same_bits

OWN_ORDER = {
    "matmul",
    "matmul_id",
}  # the library sums in another order where an input is transposed

# ---- results left out ----------------------------------------------------------------------------------------


def check_optional(name: str, among: Sequence[Backend] = (backends.cpu, backends.numpy)) -> None:
    """Leaving out results that nobody reads changes no bit of the others."""
    for k, call in enumerate(samples_of_op(name)):
        graph = graph_of(call.results)
        inputs = random_values(graph)
        for backend in among:
            full_results = run_graph(graph, inputs, (backend,))
            for result_indices in _subsets(call):
                part = pt.Graph(
                    {n: t for n, t in graph.outputs.items() if t.index in result_indices}
                )
                given_part = {leaf.label: inputs[leaf.label] for leaf in input_leaves(part)}
                got = run_graph(part, given_part, (backend,))
                expected = {n: full_results[n] for n in part.outputs}
                assert_same_bits(
                    got, expected, f"{name} sample {k} results {result_indices} on {backend.name}"
                )


def _subsets(call: Call) -> Iterator[tuple[int, ...]]:
    indices = range(len(call.results))
    for count in range(1, len(indices)):
        for subset in itertools.combinations(indices, count):
            if set(indices) - set(subset) <= set(call.op.optional):
                yield subset


# ---- in place ------------------------------------------------------------------------------------------------


def arrays(call: Call, seed: int = 0) -> list[np.ndarray | None]:
    """Dense f32 arrays for the call's inputs."""
    graph = pt.Graph({str(i): t for i, t in enumerate(call.inputs) if t is not None})
    outputs = pt.interpret(graph, random_values(graph, seed), np.float32)
    return [None if t is None else outputs[str(i)] for i, t in enumerate(call.inputs)]


def run_kernel(
    call: Call, backend: str, inputs: list[Any], overwrites: Mapping[int, int]
) -> Values:
    """Results of one kernel; `overwrites` says which result is written over which input."""
    inputs = [x if x is None else x.copy() for x in inputs]
    fresh = [np.full(t.shape, np.nan, np.float32) for t in call.results]
    results = tuple(
        inputs[overwrites[i]] if i in overwrites else array for i, array in enumerate(fresh)
    )
    rule = call.op.workspaces.get(backend)
    specs = rule(*call.inputs, **call.attrs) if rule else ()
    work = {"work": tuple(np.full(s.shape, np.nan, np.float32) for s in specs)} if rule else {}
    with np.errstate(all="ignore"):
        out = results if call.returns_tuple else results[0]
        arguments = [as_tensor(x) for x in (out, *inputs)] if backend == "torch" else (out, *inputs)
        call.op.kernels[backend].run(*arguments, **call.attrs, **work)
    return {str(i): array for i, array in enumerate(results)}


def check_inplace(name: str, among: Sequence[str] = ("cpu", "numpy")) -> None:
    """Every permitted way of writing over inputs gives the same bits as writing elsewhere, with these kernels."""
    unused = {(i, k) for i, inputs in OPS[name].inplace.items() for k in inputs}
    for n, call in enumerate(samples_of_op(name)):
        inputs = arrays(call)
        overwrite_maps = [overwrite_map for overwrite_map in _overwrite_maps(call) if overwrite_map]
        unused -= {pair for overwrite_map in overwrite_maps for pair in overwrite_map.items()}
        for backend in among if overwrite_maps else ():
            expected = run_kernel(call, backend, inputs, {})
            for overwrite_map in overwrite_maps:
                got = run_kernel(call, backend, inputs, overwrite_map)
                assert_same_bits(
                    got,
                    expected,
                    f"{name} sample {n} on {backend}, results over inputs {overwrite_map}",
                )
    assert not unused, f"{name}: no sample can be done in place as (result, input) {sorted(unused)}"


def _overwrite_maps(call: Call) -> Iterator[dict[int, int]]:
    """Maps result -> input that the op permits and whose specs agree."""
    indices = sorted(call.op.inplace)
    choices = [(None, *call.op.inplace[i]) for i in indices]
    for combination in itertools.product(*choices):
        overwrite_map = {i: k for i, k in zip(indices, combination, strict=True) if k is not None}
        overwritten_inputs = [call.inputs[k] for k in overwrite_map.values()]
        fits = all(
            x is not None and x.spec == call.results[i].spec
            for i, x in zip(overwrite_map, overwritten_inputs, strict=True)
        )
        if fits and len(set(overwrite_map.values())) == len(overwrite_map):
            yield overwrite_map


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
    at_least_1d = array if array.ndim else array.reshape(1)
    stored = np.full([n + 3 for n in at_least_1d.shape], np.nan, np.float32)
    t = pt.input(leaf.label, stored.shape)
    stored[tuple(slice(1, n + 1) for n in at_least_1d.shape)] = at_least_1d
    for axis, n in enumerate(at_least_1d.shape):
        t = ops.narrow(t, axis=axis, start=1, length=n)
    return (t if array.ndim else ops.reshape(t, shape=())), stored


def repeated(leaf: Tensor, array: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
    """The leaf as one that is repeated along its first axis, if its value is so."""
    if not array.ndim or (array[:1] != array).any():
        return None
    return ops.broadcast_to(pt.input(leaf.label, (1, *leaf.shape[1:])), shape=leaf.shape), array[:1]


def check_strided(name: str, on: Backend = backends.cpu) -> set[str]:
    """Any f32 input may be a permuted, narrowed or repeated view: same bits on our own backends, else close to them.

    Returns what the op refused.
    """
    refused = set()
    for k, original in enumerate(samples_of_op(name)):
        call = rewrite_call(original, free_constant)
        inputs = random_values(graph_of(call.results)) | constant_values(original)
        written = {call.inputs[i] for i in call.op.writes}
        for leaf in input_leaves(graph_of(call.results)):
            if leaf.dtype != pt.f32 or leaf in written:
                continue
            for view in (permuted, narrowed, repeated):
                refused |= _strided(f"{name} sample {k}", call, leaf, dict(inputs), view, on)
    return refused


def _strided(
    label: str,
    call: Call,
    leaf: Tensor,
    leaf_values: dict[str, np.ndarray],
    view: View,
    on: Backend,
) -> set[str]:
    if view is repeated and leaf.shape:
        leaf_values[leaf.label] = np.broadcast_to(leaf_values[leaf.label][:1], leaf.shape)
    viewed = view(leaf, leaf_values[leaf.label])
    if viewed is None:
        return set()
    try:
        view_call = rewrite_call(call, lambda t: viewed[0] if t is leaf else t)
    except pt.GraphError as error:
        assert "use cont" in str(error), error
        return {f"{view.__name__} {leaf.name}"}
    expected = run_graph(graph_of(call.results), leaf_values, (on,))
    got = run_graph(graph_of(view_call.results), {**leaf_values, leaf.label: viewed[1]}, (on,))
    label = f"{label} with {leaf.name} {view.__name__}"
    if call.op.name in OWN_ORDER or on is not backends.cpu:
        assert_all_close(got, expected, label)
    else:
        assert_same_bits(got, expected, label)
    if on is backends.cpu and call.op.name not in NO_GRADIENT and call.results[0].dtype == pt.f32:
        _strided_gradient(label, call, leaf, leaf_values, view_call, *viewed)
    return set()


def _strided_gradient(
    label: str,
    call: Call,
    leaf: Tensor,
    leaf_values: Values,
    other: Call,
    t: Tensor,
    stored: np.ndarray,
) -> None:
    """The gradient for a view is the gradient for the dense tensor it equals."""
    graph, _ = gradients(call.results[0], dense, [leaf])
    through, _ = gradients(other.results[0], dense, [t])
    expected = pt.interpret(graph, leaf_values)[f"d/{leaf.label}"]
    got = pt.interpret(through, {**leaf_values, leaf.label: stored})[f"d/{t.label}"]
    assert_close(got, expected, f"{label}, gradient")


# ---- threads -------------------------------------------------------------------------------------------------


def check_threads(name: str, counts: tuple[int, ...] = (1, 2, 4)) -> None:
    """Results are the same bits for any number of threads, also for more threads than rows."""
    for k, call in enumerate(samples_of_op(name)):
        graph = graph_of(call.results)
        inputs = random_values(graph)
        outputs = []
        for count in counts:
            kernels.set_threads(count)
            outputs.append(run_graph(graph, inputs))
        for count, got in zip(counts, outputs, strict=True):
            assert_same_bits(got, outputs[0], f"{name} sample {k} with {count} threads")
