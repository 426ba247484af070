"""Join products of the same rows with several weights, such as q, k and v or gate and up, into one call.

Activations are rounded once, and threads begin together once. Each sum is what it is in a call of its own. Calls are
joined when they are tabled, not in the graph: graphs, gradients and plans stay as they are.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from packtrain.kernels.runtime import loader, machine_code

# by symbol of a kernel: the module that has `products`, and whether the last argument is a workspace
JOINABLE_PRODUCTS = {
    f"packtrain.kernels.matmul.{module}.product": (module, has_workspace)
    for module, has_workspace in (("rounded", True), ("packed", False))
}


def join_calls(kernel_calls: Sequence[Any]) -> Iterator[tuple[int, int, partial[None]]]:
    """Yield (first, end, joined call) for each run kernel_calls[first:end] of products that one call can replace."""
    join_keys = [_join_key(call) for call in kernel_calls]
    for join_key, index_group in groupby(range(len(join_keys)), join_keys.__getitem__):
        first_index, *later_indices = index_group
        if join_key is not None and later_indices:
            end_index = first_index + 1 + len(later_indices)
            merged_call = _merge_calls([kernel_calls[at] for at in range(first_index, end_index)])
            if merged_call is not None:
                yield first_index, end_index, merged_call


def _join_key(call: Any) -> tuple[Any, ...] | None:
    """Return a key, equal for calls that can be joined (by x, type and options); None for one that cannot be."""
    _, kernel = machine_code.entered.get(getattr(call, "func", None), (0, None))
    if kernel is None or kernel.symbol not in JOINABLE_PRODUCTS:
        return None
    module, has_workspace = JOINABLE_PRODUCTS[kernel.symbol]
    _, x, qtype, _, _, *options = call.args
    options = options[: len(options) - has_workspace]
    is_joinable = module == "rounded" or (
        options[0] == 0 and loader.load(module).fused(*x.shape, qtype)
    )
    return (module, *spans(x), x.shape, qtype, *options) if is_joinable else None


def _merge_calls(kernel_calls: Sequence[Any]) -> partial[None] | None:
    """Return one call for all, or None if one of them writes what another reads."""
    module, works = JOINABLE_PRODUCTS[machine_code.entered[kernel_calls[0].func][1].symbol]
    rooms = [kernel_calls[-1].args[-1]] if works else []  # the last one's: its inputs live as long
    _, x, qtype, _, _, *options = kernel_calls[0].args
    weights = {spans(call.args[3]) for call in kernel_calls}  # calls may share computed weights
    ranges = sorted([*weights, *map(spans, [x, *rooms, *(call.args[0] for call in kernel_calls)])])
    if any(end_address > start for (_, end_address), (start, _) in pairwise(ranges)):
        return None
    product_rows = [
        (y.ctypes.data, len(w), w.ctypes.data, w.strides[0], add)
        for y, _, _, w, add, *_ in (call.args for call in kernel_calls)
    ]
    product_args = (
        np.array(product_rows, np.int64), x, qtype, *options[: len(options) - works], *rooms,
    )  # fmt: skip
    return partial(loader.load(module).products, *product_args)


def spans(x: np.ndarray) -> tuple[int, int]:
    """Return (first address, address behind the last byte) of a contiguous array."""
    return x.ctypes.data, x.ctypes.data + x.nbytes
