"""Values of leaves and inputs: whether they fit."""

from typing import Any, Literal

import numpy as np

from packtrain.engine.tensor import Spec


class RunError(RuntimeError):
    """A run that cannot start; the message names what is missing or wrong."""


def fitting(
    name: str, value: Any, spec: Spec, casting: Literal["no", "same_kind"] = "same_kind"
) -> np.ndarray:
    """The value as an array of the spec: same shape, same kind of number, no overflow."""
    given, dtype, shape = np.asarray(value), spec.dtype.numpy, spec.dtype.array_shape(spec.shape)
    if given.shape == shape and given.dtype == dtype:
        return given
    if given.shape != shape:
        raise RunError(f"{name} is {spec}; a value of shape {list(given.shape)} does not fit")
    if not np.can_cast(given.dtype, dtype, "no" if dtype.names else casting):
        raise RunError(f"{name} is {spec}; a value of {given.dtype} does not fit")
    if dtype.kind in "iu" and given.size and not np.can_cast(given.dtype, dtype):
        low, high = int(given.min()), int(given.max())
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise RunError(f"{name} is {spec}; values from {low} to {high} do not fit")
    return given
