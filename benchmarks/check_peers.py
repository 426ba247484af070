"""Compares ops, and functions composed of ops, with their peers in PyTorch. Importing this loads PyTorch."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.torch_ops import PEERS
from packtrain import kernels
from packtrain.devtools.check.check_cases import (
    FLOAT64,
    PEER,
    CheckResult,
    CheckSample,
    as_floats,
    check_op,
    error_limit,
    has_gradient,
    kind,
    max_difference,
    samples_with_values,
)  # fmt: skip
from packtrain.devtools.check.op_samples import Values, graph_of
from packtrain.dtypes import dtype_of
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.backends import Backend
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.tensor import input


def check_op_and_peer(
    name: str, backends: Sequence[Backend], seed: int = 0
) -> Iterator[CheckResult]:
    """Run every check of an op or function, see check_cases.check_op, and `check_peers`."""
    yield from check_op(name, backends, seed)
    yield from check_peers(name)


def check_peers(name: str) -> Iterator[CheckResult]:
    """Compare the value and every gradient with PyTorch's, in float64; yields nothing if PyTorch has no peer."""
    peer = PEERS.get(name)
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
