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
    """A function of tensors, and its samples: shapes of inputs, and attributes."""

    function: Callable[..., Any]
    sample_inputs: list[tuple[tuple[tuple[int, ...], ...], dict[str, Any]]]


FUNCTIONS: dict[str, CheckedFunction] = {}


def _add_sample(function: Callable[..., Any], *shapes: tuple[int, ...], **attrs: Any) -> None:
    checked_function = FUNCTIONS.setdefault(function.__name__, CheckedFunction(function, []))
    checked_function.sample_inputs.append((shapes, attrs))


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
    function, samples = FUNCTIONS[name], []
    for shapes, attrs in function.sample_inputs:
        leaves = tuple(input(f"x{i}", shape) for i, shape in enumerate(shapes))
        y = function.function(*leaves, **attrs)
        samples.append(FunctionSample(y if isinstance(y, tuple) else (y,), leaves, attrs))
    return samples
