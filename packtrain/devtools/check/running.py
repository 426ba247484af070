"""Runs a graph on a backend, and measures how far apart two results are."""

import numpy as np

from packtrain.devtools.check.op_samples import Values
from packtrain.dtypes import bf16
from packtrain.engine.backends import Backend, Target
from packtrain.engine.backends import cpu as cpu
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.placement import place
from packtrain.kernels.quant.quantized_arrays import dequantize

# relative to the largest value, or to 1 where all values are smaller
TOLERANCE = {"float32": 2e-5, "float64": 1e-9, "finite difference": 1e-6, "rounded otherwise": 1e-3}
TOLERANCE["int8"] = TOLERANCE["rounded otherwise"]


def run_graph(
    graph: Graph, leaf_values: Values, backends: tuple[Backend, ...] = (cpu,)
) -> dict[str, np.ndarray]:
    """Run a graph in a fresh session; returns outputs and new values of updated leaves, as `interpret` does."""
    return execute(Session().executor(place(graph, Target(backends))), leaf_values)


def execute(executor: Executor, leaf_values: Values) -> dict[str, np.ndarray]:
    """Set the leaves, run once, and return outputs and new values of updated leaves."""
    session, graph = executor.session, executor.placed.graph
    leaf_kinds = {leaf.label: leaf.kind for leaf in graph.leaves}
    session.set({n: v for n, v in leaf_values.items() if leaf_kinds.get(n) in ("weight", "state")})
    outputs = executor({n: v for n, v in leaf_values.items() if leaf_kinds.get(n) == "input"})
    return {t.base.label: session.get(t.base.label) for t in graph.updates} | outputs


def error_limit(actual: np.ndarray) -> float:
    """Return the largest `max_difference` allowed for results of this element type."""
    name = "rounded otherwise" if actual.dtype == bf16.numpy else actual.dtype.name
    return TOLERANCE.get(name, 0.0)


def max_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value or to 1 where all values are smaller.

    Infinite if infinities and NaNs are in different places, or the shapes differ. For bf16, which is rounded at random,
    and codes in 8 bits: the share of values that are rounded to the next.
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
