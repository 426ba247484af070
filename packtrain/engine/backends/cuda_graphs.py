"""Stretches of calls as CUDA graphs: the host launches each of them at once, and what their kernels make is in a pool.

A call that looks at values, brings some from the host, or copies from another memory stays by itself. What is recorded
reads and writes the same addresses each time. Tests use a stand-in for CUDA.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from packtrain.engine.backends.host import later
from packtrain.engine.ops.torch_kernels import torch

MIN_GRAPH_CALLS = 4  # calls that are worth a graph

Run = Callable[[], Any]
FAILED_DEVICES = set[
    str
]()  # devices on which a stretch could not be recorded; the others then stay as they are
GRAPH_POOLS: dict[
    str, Any
] = {}  # with a graph that is never launched: a pool without one is dropped
ROOM_NBYTES: dict[
    str, int
] = {}  # bytes of what kernels make at once, by device; of each of its two pools


def cuda_of(device: str) -> Any:
    """What records for the device; None: nothing does."""
    return torch.cuda if device.startswith("cuda") else None


def make_room(device: str, nbytes: int) -> None:
    """Let the allocator's pool have a segment for so many bytes, if it has none."""
    if nbytes > ROOM_NBYTES.get(device, -1):
        ROOM_NBYTES[device] = nbytes
        fill_pool(device, nbytes)


def fill_pool(device: str, nbytes: int) -> None:
    """What stays comes first, the workspaces of products; a segment of the size of a tensor is kept when that goes."""
    x = torch.ones(8, 8, device=device)
    torch.addmm(x[0], x, x)
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def record_graphs(device: str, calls: Sequence[Run], recordable: Sequence[bool]) -> list[Run]:
    """As many calls, which do the same in the same order: of each stretch the last does all of it.

    calls  have all been run before, so that nothing is made for the first time while they are recorded
    recordable  which of them need no host
    """
    recorded_calls, start = list(calls), 0
    if cuda_of(device) is None:
        return recorded_calls
    for is_recordable, flag_run in groupby(recordable):
        stop = start + len([*flag_run])
        if (
            is_recordable
            and stop - start >= MIN_GRAPH_CALLS
            and (replay := _record_graph(device, calls[start:stop]))
        ):
            recorded_calls[start:stop] = [*[later] * (stop - start - 1), replay]
        start = stop
    return recorded_calls


def _record_graph(device: str, calls: Sequence[Run]) -> Run | None:
    """One call for all; None, with a warning, if they cannot be recorded."""
    cuda = cuda_of(device)
    if device in FAILED_DEVICES:
        return None
    try:
        with cuda.device(device):
            if device not in GRAPH_POOLS:
                pool = cuda.graph_pool_handle()
                fill_call = partial(fill_pool, device, ROOM_NBYTES.get(device, 0))
                GRAPH_POOLS[device] = pool, _capture_graph(cuda, pool, [fill_call])
            graph = _capture_graph(cuda, GRAPH_POOLS[device][0], calls)
    except RuntimeError as error:
        FAILED_DEVICES.add(device)
        error_line = str(error).partition("\n")[0]
        warnings.warn(
            f"--device {device}: its calls run one by one, a CUDA graph of them could not be recorded: {error_line}",
            stacklevel=2,
        )
        return None

    def replay() -> None:
        graph.replay()

    return replay


def _capture_graph(cuda: Any, pool: Any, calls: Sequence[Run]) -> Any:
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph
