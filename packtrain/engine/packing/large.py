"""The heuristics of `pack` for many buffers: compiled, with equal offsets. Knows no tensors."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from packtrain import kernels
from packtrain.engine.packing.exact import SOLVED, can_load, stopped_by
from packtrain.engine.packing.search_clock import SearchClock

Ints = npt.NDArray[np.int64]

MIN_BUFFERS = 8_000  # buffers with which loading kernels pays


def is_worthwhile(num_buffers: int, clock: SearchClock) -> bool:
    """Whether kernels pack so many buffers sooner than NumPy, loading included."""
    return num_buffers > MIN_BUFFERS and can_load(clock)


def packer_offsets(
    orders: Iterable[tuple[Callable[..., Ints | None], tuple[Ints, ...]]],
    lives: Ints,
    clock: SearchClock,
) -> Iterator[Ints]:
    """Yield the offsets of each packer for its order, in turn, until time runs out; packers run in parallel."""
    jobs = [(packer.__name__, np.lexsort(keys), np.zeros(4, np.int64)) for packer, keys in orders]
    with ThreadPoolExecutor(kernels.threads()) as pool:
        futures = [pool.submit(compiled, name, lives, by, stop, clock) for name, by, stop in jobs]
        try:
            for future in futures:
                offsets = future.result()
                if offsets is None:
                    return
                yield offsets
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for *_, limits in jobs:
                limits[1] = 1


def compiled(name: str, lives: Ints, order: Ints, limits: Ints, clock: SearchClock) -> Ints | None:
    """Run the compiled packer of that name on lives (n, 3): start, end, size; return offsets, None if stopped."""
    by = np.argsort(lives[:, 0], kind="stable")  # neighbours are alive together
    positions = np.empty_like(by)
    positions[by] = np.arange(len(by))
    scratch, packed_offsets = np.empty((len(lives), 4), np.int64), np.zeros(len(lives), np.int64)
    run_packer = partial(
        getattr(kernels.packing, name), lives[by], positions[order], packed_offsets, scratch, limits
    )
    return packed_offsets[positions] if stopped_by(clock, run_packer, limits) == SOLVED else None
