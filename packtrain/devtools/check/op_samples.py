"""Samples of ops, in every element type that an op takes, and values for their leaves."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packtrain.dtypes import READABLE, WRITABLE, Dtype, bf16, f16, f32
from packtrain.engine import optim as optim  # its ops are checked as all others
from packtrain.engine.graph import Graph
from packtrain.engine.tensor import OPS, Call, GraphError, Tensor, input, state, weight
from packtrain.kernels.quantized_arrays import dequantize, quantize

Values = Mapping[str, np.ndarray]
DRAWN = 4096  # random blocks of which those with ordinary values are taken


def samples(name: str) -> list[Call]:
    """The different calls that an op's room gives as samples."""
    rule = OPS[name].sample_rule
    results = list(rule()) if rule else []
    calls = (t.call for t in results if t.call is not None and t.call.op.name == name)
    return list(dict.fromkeys(calls))


def value(leaf: Tensor, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """A value that depends on the leaf's name, shape and kind; a state is not negative, as moments are not."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{leaf.name} {leaf.shape}".encode())])
    normal = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
    normal = np.abs(normal) if leaf.kind == "state" else normal
    return normal if leaf.dtype == f32 else stored(normal, leaf.dtype)


def stored(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The values in that type; random blocks where it cannot be written."""
    if dtype == f16:
        return values.astype(np.float16)
    if dtype in WRITABLE:
        return quantize(values, dtype)
    rng = np.random.default_rng(zlib.crc32(f"{dtype} {values.shape}".encode()))
    bits = rng.integers(0, 256, (DRAWN, dtype.block_nbytes), np.uint8)
    with np.errstate(all="ignore"):
        size = np.abs(dequantize(bits.view(dtype.numpy))).max(-1)
    ordinary = bits[(size > 0.1) & (size < 10)]
    shape = dtype.array_shape(values.shape)
    chosen: np.ndarray = ordinary[rng.integers(0, len(ordinary), int(np.prod(shape)))]
    return chosen.view(dtype.numpy).reshape(shape)


def given_leaves(graph: Graph) -> list[Tensor]:
    return [leaf for leaf in graph.leaves if leaf.kind != "constant"]


def values(graph: Graph, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {leaf.label: value(leaf, seed, scale) for leaf in given_leaves(graph)}


def graph_of(results: Sequence[Tensor]) -> Graph:
    return Graph({f"result {i}": t for i, t in enumerate(results)})


def rewritten(call: Call, leaf: Callable[[Tensor], Tensor]) -> Call:
    """The call and what it needs, written again over other leaves."""
    rewritten_tensors: dict[Tensor, Tensor] = {}

    def again(t: Tensor) -> Tensor:
        if t not in rewritten_tensors and t.call is None:
            rewritten_tensors[t] = leaf(t)
        elif t not in rewritten_tensors:
            assert t.call is not None
            rewritten_tensors.update(zip(t.call.results, repeat(t.call), strict=True))
        return rewritten_tensors[t]

    def repeat(call: Call) -> tuple[Tensor, ...]:
        results = call.op(*(t and again(t) for t in call.inputs), **call.attrs)
        return results if isinstance(results, tuple) else (results,)

    return repeat(call)[0].call  # type: ignore[return-value]


def free(leaf: Tensor) -> Tensor:
    """An input in place of a finite f32 constant, so that it can be varied too."""
    if leaf.kind != "constant" or leaf.dtype != f32 or not np.isfinite(leaf.value).all():  # type: ignore[arg-type]
        return leaf
    return input(leaf.label, leaf.shape)


def constants(call: Call) -> dict[str, np.ndarray]:
    """What the constants that `free` turns into inputs held."""
    leaves = Graph(call.results[:1]).leaves
    return {t.label: t.value for t in leaves if t.value is not None and free(t) is not t}


def differentiable(name: str) -> list[tuple[Call, Values]]:
    """Samples over inputs only that read some f32, and float64 values for them; none whose result is rounded."""
    samples_with_values: list[tuple[Call, Values]] = []
    for original in samples(name):
        call = rewritten(original, free)
        graph = graph_of(call.results)
        leaf_values = values(graph) | constants(original)
        rounded = call.results[0].dtype in (f16, bf16)
        if leaf_values and not rounded and all(t.dtype == f32 for t in given_leaves(graph)):
            samples_with_values.append(
                (call, {n: v.astype(np.float64) for n, v in leaf_values.items()})
            )
    return samples_with_values


class Typed(NamedTuple):
    """A sample with the leaf `packed` in another type, and the same in f32."""

    dtype: Dtype
    packed: str
    call: Call
    plain: Call


def typed(name: str) -> Iterator[Typed]:
    """One sample for each input and each other type that the op takes there."""
    seen = set()
    for original in samples(name):
        call = rewritten(original, free)
        for i, t in enumerate(call.inputs):
            if t is None or t.call is not None or t.dtype != f32 or not t.shape:
                continue
            for dtype in READABLE:
                if dtype == f32 or (i, dtype) in seen or t.shape[-1] % dtype.block:
                    continue
                try:
                    typed_call = rewritten(call, _stored_as(t, dtype))
                except GraphError:
                    continue
                seen.add((i, dtype))
                yield Typed(dtype, t.label, typed_call, call)


def _stored_as(chosen: Tensor, dtype: Dtype) -> Callable[[Tensor], Tensor]:
    make = {"weight": weight, "state": state}.get(chosen.kind or "", input)
    stored_leaf = make(chosen.label, chosen.shape, dtype)
    return lambda t: stored_leaf if t is chosen else t
