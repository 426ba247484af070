"""Gradients of a sample, and the slopes that they must equal."""

from collections.abc import Callable, Sequence

import numpy as np

from packtrain.devtools.check.op_samples import Values, input_leaves
from packtrain.dtypes import f32
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.tensor import Tensor, constant

Weighting = Callable[[Tensor], Tensor]


def dense(y: Tensor) -> Tensor:
    """Multiply y by random weights."""
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
    """Return a graph of `loss`, the sum of weighted(y), and `d/<label>` of `wrt` (default: f32 leaves); and `wrt`."""
    if wrt is None:
        wrt = [leaf for leaf in input_leaves(Graph([y])) if leaf.dtype == f32]
    loss = ops.sum(weighted(y))
    grads = differentiate(loss, wrt)
    return Graph({"loss": loss} | {f"d/{t.label}": g for t, g in grads.items()}), list(grads)


def slope_error(y: Tensor, weighted: Weighting, leaf_values: Values) -> float:
    """Return how far the gradients are from central differences in a random direction, in float64."""
    graph, leaves = gradients(y, weighted)
    grads = interpret(graph, leaf_values)
    rng = np.random.default_rng(11)
    directions = {leaf.label: rng.standard_normal(leaf.shape) for leaf in leaves}
    measured_slope = slope(Graph({"loss": graph.outputs["loss"]}), leaf_values, directions)
    return slope_deviation(
        measured_slope, {n: grads[f"d/{n}"] * direction for n, direction in directions.items()}
    )


def slope_deviation(measured: float, terms: Values) -> float:
    """Return |sum of all terms - measured slope| / (root of the terms' sum of squares)."""
    flat_terms = np.concatenate([term.ravel() for term in terms.values()])
    return abs(float(flat_terms.sum()) - measured) / (float(np.sqrt((flat_terms**2).sum())) + 1e-3)


def slope(graph: Graph, leaf_values: Values, directions: Values) -> float:
    """Return how fast the graph's `loss` changes along `directions`: central differences of fourth order."""

    def loss(step: float) -> float:
        moved_values = {
            n: v + step * directions[n] if n in directions else v for n, v in leaf_values.items()
        }
        return float(interpret(graph, moved_values)["loss"])

    h = 1e-4
    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
