"""Copies from and to a GPU on a stream of their own, beside its kernels, and locks the host memory that they reach.

Tested with a stand-in for CUDA; not yet run on a GPU by its authors.
"""

import weakref
from typing import Any

from packtrain.engine.backends.cuda_graphs import cuda_of

STREAMS: dict[str, Any] = {}
LOCKED_ADDRESSES = set[int]()  # where locked buffers begin


def begin_copy(device: str, to: Any, source: Any) -> None:
    """Begin to copy `source` to `to` once earlier kernels are done; at least one of them is on the device."""
    cuda = cuda_of(device)
    if device not in STREAMS:
        STREAMS[device] = cuda.Stream(device)
    stream = STREAMS[device]
    for place in {device, *(str(tensor.device) for tensor in (to, source) if tensor.is_cuda)}:
        stream.wait_stream(cuda.current_stream(place))
    with cuda.stream(stream):
        to.copy_(source, non_blocking=True)


def wait_for_copies(device: str) -> None:
    """Make the host wait for all copies begun on the device; both sides may then be used again."""
    if device in STREAMS:
        STREAMS[device].synchronize()


def lock_pages(device: str, buffer: Any) -> None:
    """Lock the pages of a host array, so that copies need no detour; do nothing where CUDA refuses."""
    runtime, address = cuda_of(device).cudart(), buffer.ctypes.data
    if not buffer.nbytes or address in LOCKED_ADDRESSES:
        return
    if runtime.cudaHostRegister(address, buffer.nbytes, 0) == runtime.cudaError.success:
        LOCKED_ADDRESSES.add(address)
        weakref.finalize(buffer, _unlock_pages, runtime, address)


def _unlock_pages(runtime: Any, address: int) -> None:
    LOCKED_ADDRESSES.discard(address)
    runtime.cudaHostUnregister(address)
