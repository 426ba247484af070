"""Samples of ops, in every element type that an op takes, and of functions composed of ops; values for their leaves."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packtrain.dtypes import READABLE, WRITABLE, Dtype, bf16, f16, f32
from packtrain.engine import ops
from packtrain.engine import optim as optim  # registers its ops, which are checked, too
from packtrain.engine import row_tiles as row_tiles  # as well
from packtrain.engine.graph import Graph
from packtrain.engine.tensor import OPS, Call, GraphError, Tensor, input, state, weight
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize

Values = Mapping[str, np.ndarray]
NUM_RANDOM_BLOCKS = 4096  # number of random blocks, of which those with ordinary values serve


def samples_of_op(name: str) -> list[Call]:
    """Return the distinct sample calls that an op's module declares."""
    rule = OPS[name].sample_rule
    results = list(rule()) if rule else []
    calls = (t.call for t in results if t.call is not None and t.call.op.name == name)
    return list(dict.fromkeys(calls))


def leaf_value(leaf: Tensor, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Return random values that depend on a leaf's name, shape and kind; a state is not negative, as moments are."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{leaf.name} {leaf.shape}".encode())])
    normal = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
    normal = np.abs(normal) if leaf.kind == "state" else normal
    return normal if leaf.dtype == f32 else store_values(normal, leaf.dtype)


def store_values(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Convert f32 values to an element type; types that packtrain cannot write get random blocks instead."""
    if dtype == f16:
        return values.astype(np.float16)
    if dtype in WRITABLE:
        return quantize(values, dtype)
    rng = np.random.default_rng(zlib.crc32(f"{dtype} {values.shape}".encode()))
    if dtype.numpy == np.int8:
        return rng.integers(-127, 128, values.shape, np.int8)
    block_bits = rng.integers(0, 256, (NUM_RANDOM_BLOCKS, dtype.block_nbytes), np.uint8)
    with np.errstate(all="ignore"):
        largest = np.abs(dequantize(block_bits.view(dtype.numpy))).max(-1)
    ordinary_blocks = block_bits[(largest > 0.1) & (largest < 10)]
    shape = dtype.array_shape(values.shape)
    blocks: np.ndarray = ordinary_blocks[rng.integers(0, len(ordinary_blocks), int(np.prod(shape)))]
    return blocks.view(dtype.numpy).reshape(shape)


def input_leaves(graph: Graph) -> list[Tensor]:
    return [leaf for leaf in graph.leaves if leaf.kind != "constant"]


def random_values(graph: Graph, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {leaf.label: leaf_value(leaf, seed, scale) for leaf in input_leaves(graph)}


def graph_of(results: Sequence[Tensor]) -> Graph:
    return Graph({f"result {i}": t for i, t in enumerate(results)})


def rewrite_call(call: Call, new_leaf: Callable[[Tensor], Tensor]) -> Call:
    """Return a copy of a call and of the calls that make its inputs, with new_leaf(leaf) in place of each leaf."""
    rewritten_tensors: dict[Tensor, Tensor] = {}

    def rewrite_tensor(t: Tensor) -> Tensor:
        if t not in rewritten_tensors and t.call is None:
            rewritten_tensors[t] = new_leaf(t)
        elif t not in rewritten_tensors:
            assert t.call is not None
            rewritten_tensors.update(zip(t.call.results, rewrite_inputs(t.call), strict=True))
        return rewritten_tensors[t]

    def rewrite_inputs(call: Call) -> tuple[Tensor, ...]:
        results = call.op(*(t and rewrite_tensor(t) for t in call.inputs), **call.attrs)
        return results if isinstance(results, tuple) else (results,)

    return rewrite_inputs(call)[0].call  # type: ignore[return-value]


def free_constant(leaf: Tensor) -> Tensor:
    """Return an input in place of a finite f32 constant, so that checks can vary it; other leaves as they are."""
    if leaf.kind != "constant" or leaf.dtype != f32 or not np.isfinite(leaf.value).all():  # type: ignore[arg-type]
        return leaf
    return input(leaf.label, leaf.shape)


def constant_values(call: Call) -> dict[str, np.ndarray]:
    """Return, by input name, the values of a call's constants, for which `free_constant` puts inputs in the graph."""
    leaves = Graph(call.results[:1]).leaves
    return {t.label: t.value for t in leaves if t.value is not None and free_constant(t) is not t}


def differentiable_samples(name: str) -> list[tuple[Call, Values]]:
    """Return samples whose inputs are all f32 and whose result is not rounded, with float64 values by input's name."""
    samples_with_values: list[tuple[Call, Values]] = []
    for original in samples_of_op(name):
        call = rewrite_call(original, free_constant)
        graph = graph_of(call.results)
        leaf_values = random_values(graph) | constant_values(original)
        is_rounded = call.results[0].dtype in (f16, bf16)
        if leaf_values and not is_rounded and all(t.dtype == f32 for t in input_leaves(graph)):
            samples_with_values.append(
                (call, {n: v.astype(np.float64) for n, v in leaf_values.items()})
            )
    return samples_with_values


class TypedSample(NamedTuple):
    """A sample whose leaf `packed_name` has another element type than f32, and the same call in f32."""

    dtype: Dtype
    packed_name: str
    call: Call
    f32_call: Call


def typed_samples(name: str) -> Iterator[TypedSample]:
    """Yield one sample for each input and each element type other than f32 that the op takes for this input."""
    seen_types = set()
    for original in samples_of_op(name):
        call = rewrite_call(original, free_constant)
        for i, t in enumerate(call.inputs):
            if t is None or t.call is not None or t.dtype != f32 or not t.shape:
                continue
            for dtype in READABLE:
                if dtype == f32 or (i, dtype) in seen_types or t.shape[-1] % dtype.block:
                    continue
                try:
                    typed_call = rewrite_call(call, _retype_leaf(t, dtype))
                except GraphError:
                    continue
                seen_types.add((i, dtype))
                yield TypedSample(dtype, t.label, typed_call, call)


def _retype_leaf(leaf: Tensor, dtype: Dtype) -> Callable[[Tensor], Tensor]:
    make = {"weight": weight, "state": state}.get(leaf.kind or "", input)
    typed_leaf = make(leaf.label, leaf.shape, dtype)
    return lambda t: typed_leaf if t is leaf else t


class FunctionSample(NamedTuple):
    """A call of a composed function, with the results, inputs and attributes that an op's Call has."""

    results: tuple[Tensor, ...]
    inputs: tuple[Tensor | None, ...]
    attrs: dict[str, Any]


# functions of tensors by name, and their samples: shapes of inputs, and attributes
FUNCTIONS: dict[str, Callable[..., Any]] = {}
SAMPLE_INPUTS = defaultdict[str, list[tuple[tuple[tuple[int, ...], ...], dict[str, Any]]]](list)


def _add_sample(function: Callable[..., Any], *shapes: tuple[int, ...], **attrs: Any) -> None:
    FUNCTIONS[function.__name__] = function
    SAMPLE_INPUTS[function.__name__].append((shapes, attrs))


def concat(*tensors: Tensor, axis: int) -> Tensor:
    return ops.concat(tensors, axis=axis)


_add_sample(ops.add_cast, (4, 9), (4, 9))
_add_sample(ops.add_cast, (4, 9), (9,))
_add_sample(ops.alibi, (2, 3, 5, 7), (3,), (5, 7))
_add_sample(ops.attention_to_all, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), scale=0.3)
_add_sample(concat, (3, 2), (3, 5), (3, 1), axis=1)
_add_sample(ops.conv_1d, (2, 3, 11), (4, 3, 3), stride=2, padding=1, dilation=2)
_add_sample(ops.gelu_erf, (4, 9))
_add_sample(ops.group_norm, (2, 6, 4, 5), groups=3, eps=1e-5)
_add_sample(ops.l2_norm, (4, 9), eps=1e-6)
_add_sample(ops.mean, (3, 5))
_add_sample(ops.mean_rows, (3, 5))
_add_sample(ops.mean_squared_error, (3, 5), (3, 5))
_add_sample(ops.outer, (2, 1, 7, 3), (4, 7, 5))
_add_sample(ops.outer, (7, 3), (7, 5))
_add_sample(ops.pad, (4, 5), before=(1, 0), after=(2, 3))
_add_sample(ops.pool_1d, (2, 3, 11), largest=False, window=3, stride=2, padding=1)
_add_sample(ops.repeat, (3, 1), shape=(2, 3, 4))
_add_sample(ops.repeat, (2, 3), shape=(5, 4, 9))
_add_sample(ops.soft_cross_entropy, (4, 9), (4, 9), (4,))
_add_sample(ops.soft_max_sinks, (2, 3, 5, 7), (3,))
_add_sample(ops.soft_max_sinks, (2, 3, 5, 7), (3,), (2, 1, 5, 7), scale=0.5)
_add_sample(ops.transpose, (2, 3, 5))
_add_sample(ops.upscale, (2, 3, 4, 5), factor=3)


def samples_of(name: str) -> list[FunctionSample]:
    """Build the sample calls with which a function made of several ops is checked."""
    samples = []
    for shapes, attrs in SAMPLE_INPUTS[name]:
        leaves = tuple(input(f"x{i}", shape) for i, shape in enumerate(shapes))
        y = FUNCTIONS[name](*leaves, **attrs)
        samples.append(FunctionSample(y if isinstance(y, tuple) else (y,), leaves, attrs))
    return samples
