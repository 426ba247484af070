"""Samples of functions composed of ops, whose gradients follow from those of ops: shapes of inputs, and attributes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input


class FunctionSample(NamedTuple):
    """A call of a composed function, with the results, inputs and attributes that an op's Call has."""

    results: tuple[Tensor, ...]
    inputs: tuple[Tensor | None, ...]
    attrs: dict[str, Any]


class CheckedFunction(NamedTuple):
    """A function of tensors, and its samples: shapes of inputs, then attributes."""

    function: Callable[..., Any]
    sample_inputs: tuple[tuple[tuple[tuple[int, ...], ...], dict[str, Any]], ...]


def _concat(*tensors: Tensor, axis: int) -> Tensor:
    return ops.concat(tensors, axis=axis)


FUNCTIONS = {
    "add_cast": CheckedFunction(ops.add_cast, ((((4, 9), (4, 9)), {}), (((4, 9), (9,)), {}))),
    "alibi": CheckedFunction(ops.alibi, ((((2, 3, 5, 7), (3,), (5, 7)), {}),)),
    "attention_to_all": CheckedFunction(
        ops.attention_to_all, ((((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)), {"scale": 0.3}),)
    ),
    "concat": CheckedFunction(_concat, ((((3, 2), (3, 5), (3, 1)), {"axis": 1}),)),
    "conv_1d": CheckedFunction(
        ops.conv_1d, ((((2, 3, 11), (4, 3, 3)), {"stride": 2, "padding": 1, "dilation": 2}),)
    ),
    "gelu_erf": CheckedFunction(ops.gelu_erf, ((((4, 9),), {}),)),
    "group_norm": CheckedFunction(ops.group_norm, ((((2, 6, 4, 5),), {"groups": 3, "eps": 1e-5}),)),
    "l2_norm": CheckedFunction(ops.l2_norm, ((((4, 9),), {"eps": 1e-6}),)),
    "mean": CheckedFunction(ops.mean, ((((3, 5),), {}),)),
    "mean_rows": CheckedFunction(ops.mean_rows, ((((3, 5),), {}),)),
    "mean_squared_error": CheckedFunction(ops.mean_squared_error, ((((3, 5), (3, 5)), {}),)),
    "outer": CheckedFunction(
        ops.outer, ((((2, 1, 7, 3), (4, 7, 5)), {}), (((7, 3), (7, 5)), {}))
    ),
    "pad": CheckedFunction(ops.pad, ((((4, 5),), {"before": (1, 0), "after": (2, 3)}),)),
    "pool_1d": CheckedFunction(
        ops.pool_1d, ((((2, 3, 11),), {"largest": False, "window": 3, "stride": 2, "padding": 1}),)
    ),
    "repeat": CheckedFunction(
        ops.repeat, ((((3, 1),), {"shape": (2, 3, 4)}), (((2, 3),), {"shape": (5, 4, 9)}))
    ),
    "soft_cross_entropy": CheckedFunction(ops.soft_cross_entropy, ((((4, 9), (4, 9), (4,)), {}),)),
    "soft_max_sinks": CheckedFunction(
        ops.soft_max_sinks,
        ((((2, 3, 5, 7), (3,)), {}), (((2, 3, 5, 7), (3,), (2, 1, 5, 7)), {"scale": 0.5})),
    ),
    "transpose": CheckedFunction(ops.transpose, ((((2, 3, 5),), {}),)),
    "upscale": CheckedFunction(ops.upscale, ((((2, 3, 4, 5),), {"factor": 3}),)),
}  # fmt: skip


def samples_of(name: str) -> list[FunctionSample]:
    """Build the samples of a composed function."""
    function, samples = FUNCTIONS[name], []
    for shapes, attrs in function.sample_inputs:
        leaves = tuple(input(f"x{i}", shape) for i, shape in enumerate(shapes))
        results = function.function(*leaves, **attrs)
        samples.append(
            FunctionSample(results if isinstance(results, tuple) else (results,), leaves, attrs)
        )
    return samples
