"""Checks of the values of leaves and inputs against their specs."""

from typing import Any, Literal

import numpy as np

from packtrain.engine.tensor import Spec


class Stopped(Exception):
    """Raised when a run is stopped between two steps, at the caller's request."""


class RunError(RuntimeError):
    """Raised if a run cannot start; the message names what is missing or wrong."""


def fitting(
    name: str, value: Any, spec: Spec, casting: Literal["no", "same_kind"] = "same_kind"
) -> np.ndarray:
    """Return the value as an array of the spec; raise RunError if its shape, kind of number or range does not fit."""
    array, dtype, shape = np.asarray(value), spec.dtype.numpy, spec.dtype.array_shape(spec.shape)
    if array.shape == shape and array.dtype == dtype:
        return array
    if array.shape != shape:
        raise RunError(f"{name} is {spec}; a value of shape {list(array.shape)} does not fit")
    if not np.can_cast(array.dtype, dtype, "no" if dtype.names else casting):
        raise RunError(f"{name} is {spec}; a value of {array.dtype} does not fit")
    if dtype.kind in "iu" and array.size and not np.can_cast(array.dtype, dtype):
        min_value, max_value = int(array.min()), int(array.max())
        if min_value < np.iinfo(dtype).min or max_value > np.iinfo(dtype).max:
            raise RunError(f"{name} is {spec}; values from {min_value} to {max_value} do not fit")
    return array
