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

LEAST = 4  # calls that are worth a graph

Run = Callable[[], Any]
FAILED = set[
    str
]()  # devices on which a stretch could not be recorded; the others then stay as they are
POOLS: dict[str, Any] = {}  # with a graph that is never launched: a pool without one is dropped
ROOMS: dict[
    str, int
] = {}  # bytes of what kernels make at once, by device; of each of its two pools


def cuda_of(device: str) -> Any:
    """What records for the device; None: nothing does."""
    return torch.cuda if device.startswith("cuda") else None


def make_room(device: str, nbytes: int) -> None:
    """Let the allocator's pool have a segment for so many bytes, if it has none."""
    if nbytes > ROOMS.get(device, -1):
        ROOMS[device] = nbytes
        fill_pool(device, nbytes)


def fill_pool(device: str, nbytes: int) -> None:
    """What stays comes first, the workspaces of products; a segment of the size of a tensor is kept when that goes."""
    x = torch.ones(8, 8, device=device)
    torch.addmm(x[0], x, x)
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def recorded(device: str, calls: Sequence[Run], recordable: Sequence[bool]) -> list[Run]:
    """As many calls, which do the same in the same order: of each stretch the last does all of it.

    calls  have all been run before, so that nothing is made for the first time while they are recorded
    recordable  which of them need no host
    """
    recorded_calls, at = list(calls), 0
    if cuda_of(device) is None:
        return recorded_calls
    for is_recordable, run in groupby(recordable):
        end = at + len([*run])
        if is_recordable and end - at >= LEAST and (replay := _recorded(device, calls[at:end])):
            recorded_calls[at:end] = [*[later] * (end - at - 1), replay]
        at = end
    return recorded_calls


def _recorded(device: str, calls: Sequence[Run]) -> Run | None:
    """One call for all; None, with a warning, if they cannot be recorded."""
    cuda = cuda_of(device)
    if device in FAILED:
        return None
    try:
        with cuda.device(device):
            if device not in POOLS:
                pool = cuda.graph_pool_handle()
                fill = partial(fill_pool, device, ROOMS.get(device, 0))
                POOLS[device] = pool, _captured(cuda, pool, [fill])
            graph = _captured(cuda, POOLS[device][0], calls)
    except RuntimeError as error:
        FAILED.add(device)
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"--device {device}: its calls run one by one, a CUDA graph of them could not be recorded: {reason}",
            stacklevel=2,
        )
        return None

    def replay() -> None:
        graph.replay()

    return replay


def _captured(cuda: Any, pool: Any, calls: Sequence[Run]) -> Any:
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph
