"""Products of the same rows with several weights, one call after the other, as one call: q, k and v; gate and up.

Activations are rounded once, and threads begin together once. Each sum is what it is in a call of its own.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from packtrain.kernels import ahead, machine

# of kernels, by their symbols: the module that has `products`, and whether their last argument is room to work in
PRODUCTS = {
    f"packtrain.kernels.{module}.product": (module, works)
    for module, works in (("rounded", True), ("packed", False))
}


def joined(calls: Sequence[Any]) -> Iterator[tuple[int, int, partial[None]]]:
    """Of calls that one call can do instead: the first, the end, and the one."""
    numbers = range(len(calls))
    for key, group in groupby(numbers, lambda at: _alike(calls[at])):
        first, *following = group
        if key is not None and following:
            end = first + 1 + len(following)
            merged_call = _joined([calls[at] for at in range(first, end)])
            if merged_call is not None:
                yield first, end, merged_call


def _alike(call: Any) -> tuple[Any, ...] | None:
    """What calls have in common that can be one; None for a call that cannot be joined."""
    _, kernel = machine.entered.get(getattr(call, "func", None), (0, None))
    if kernel is None or kernel.symbol not in PRODUCTS:
        return None
    module, works = PRODUCTS[kernel.symbol]
    _, x, kind, _, _, *options = call.args
    options = options[: len(options) - works]
    is_joinable = module == "rounded" or (
        options[0] == 0 and ahead.load(module).fused(*x.shape, kind)
    )
    return (module, *spans(x), x.shape, kind, *options) if is_joinable else None


def _joined(calls: Sequence[Any]) -> partial[None] | None:
    """One call for all, unless one writes what another reads."""
    module, works = PRODUCTS[machine.entered[calls[0].func][1].symbol]
    rooms = [calls[-1].args[-1]] if works else []  # of the last: what it reads lives as long
    _, x, kind, _, _, *options = calls[0].args
    weights = {spans(call.args[3]) for call in calls}  # some may be the same, and computed
    ranges = sorted([*weights, *map(spans, [x, *rooms, *(call.args[0] for call in calls)])])
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        return None
    product_rows = [
        (y.ctypes.data, len(w), w.ctypes.data, w.strides[0], add)
        for y, _, _, w, add, *_ in (call.args for call in calls)
    ]
    product_args = (
        np.array(product_rows, np.int64),
        x,
        kind,
        *options[: len(options) - works],
        *rooms,
    )
    return partial(ahead.load(module).products, *product_args)


def spans(x: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's bytes."""
    return x.ctypes.data, x.ctypes.data + x.nbytes
