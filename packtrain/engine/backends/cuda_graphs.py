"""Records stretches of calls as CUDA graphs, which the host launches at once; temporaries come from one pool.

Copies from and to a GPU run on a stream of their own, beside its kernels. Not yet run on a GPU by the authors.

A call that reads values on the host, brings values from it, or copies between memories runs by itself. Recorded calls
use the same addresses each time. Tests use a stand-in for CUDA. A failed capture may break PyTorch's allocator. Calls
that cannot be captured are therefore found on tensors without values, and a first failure ends recording there."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from packtrain.engine.backends.host import done_by_later_call
from packtrain.engine.ops.torch_kernels import torch

MIN_GRAPH_CALLS = 4  # fewest calls that are worth a graph

Run = Callable[[], Any]
FAILED_DEVICES = set[str]()  # devices on which recording failed once and is not tried again
GRAPH_POOLS: dict[str, Any] = {}  # with a graph that is never launched: a pool without one is freed
ROOM_NBYTES: dict[str, int] = {}  # by device: most bytes of temporaries, for each of its two pools


def cuda_of(device: str) -> Any:
    """Return torch.cuda for a CUDA device, on which calls can be recorded, else None."""
    return torch.cuda if device.startswith("cuda") else None


def make_room(device: str, nbytes: int) -> None:
    """Make PyTorch's allocator reserve a segment of `nbytes` on the device, unless it has reserved that much before."""
    if nbytes > ROOM_NBYTES.get(device, -1):
        ROOM_NBYTES[device] = nbytes
        fill_pool(device, nbytes)


def fill_pool(device: str, nbytes: int) -> None:
    """Allocate the workspaces of cuBLAS, which stay, then free a tensor of `nbytes`; its segment stays reserved."""
    x = torch.ones(8, 8, device=device)
    torch.addmm(x[0], x, x)
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def record_graphs(device: str, calls: Sequence[Run], recordable: Sequence[bool]) -> list[Run]:
    """Record stretches of calls as CUDA graphs; return as many calls to make instead: the last call of a recorded
    stretch replays all of it, the others do nothing. `calls` have all run before, so that recording initializes
    nothing; `recordable` says for each call whether it runs without the host."""
    recorded_calls, start = list(calls), 0
    if cuda_of(device) is None:
        return recorded_calls
    for is_recordable, flag_run in groupby(recordable):
        stop = start + len([*flag_run])
        is_graph = is_recordable and stop - start >= MIN_GRAPH_CALLS
        if is_graph and (replay := _record_graph(device, calls[start:stop])):
            recorded_calls[start:stop] = [*[done_by_later_call] * (stop - start - 1), replay]
        start = stop
    return recorded_calls


def _record_graph(device: str, calls: Sequence[Run]) -> Run | None:
    """Record the calls as one CUDA graph and return what replays it; None, and a warning the first time, on failure."""
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


STREAMS: dict[str, Any] = {}
LOCKED_ADDRESSES = set[int]()  # where locked buffers begin


def begin_copy(device: str, to: Any, source: Any) -> None:
    """Begin to copy tensor `source` to `to` once earlier kernels are done; one of the two is on the device."""
    cuda = cuda_of(device)
    if device not in STREAMS:
        STREAMS[device] = cuda.Stream(device)
    stream = STREAMS[device]
    for place in {device, *(str(tensor.device) for tensor in (to, source) if tensor.is_cuda)}:
        stream.wait_stream(cuda.current_stream(place))
    with cuda.stream(stream):
        to.copy_(source, non_blocking=True)


def wait_for_copies(device: str) -> None:
    """Make the host wait for all copies begun on the device; their sources and destinations may then be used again."""
    if device in STREAMS:
        STREAMS[device].synchronize()


def lock_pages(device: str, buffer: Any) -> None:
    """Lock (pin) the pages of a host array, so that CUDA copies it without a detour; do nothing where CUDA refuses."""
    runtime, address = cuda_of(device).cudart(), buffer.ctypes.data
    if not buffer.nbytes or address in LOCKED_ADDRESSES:
        return
    if runtime.cudaHostRegister(address, buffer.nbytes, 0) == runtime.cudaError.success:
        LOCKED_ADDRESSES.add(address)
        weakref.finalize(buffer, _unlock_pages, runtime, address)


def _unlock_pages(runtime: Any, address: int) -> None:
    LOCKED_ADDRESSES.discard(address)
    runtime.cudaHostUnregister(address)
