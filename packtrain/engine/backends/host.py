"""The Backend protocol, and the backends of the host: NumPy arrays in ordinary memory."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from packtrain.engine.tensor import Kernel, Op, Spec, Tensor

HOST = "host"  # the space that is the process's own memory
LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of malloc.h
LARGE = 1 << 16  # bytes from which malloc maps an allocation by itself

Inputs = tuple[Tensor | None, ...]
Run = Callable[[], Any]
Runs = Sequence[Run]
AnyOp = Op[..., Any]
Attrs = dict[str, Any]
OpCall = tuple[AnyOp, Inputs, Attrs]  # op, inputs and attributes of a call


def aligned(nbytes: int, alignment: int) -> int:
    """Return `nbytes` rounded up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


def return_freed() -> None:
    """Make malloc return freed memory to the system at once; by default it keeps ever larger pieces for itself."""
    if hasattr(LIBC, "mallopt"):
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            LIBC.mallopt(threshold, LARGE)


def done_by_later_call() -> None:
    """Do nothing: takes the place of a call that a recorded stretch (CUDA graph), replayed by a later call, makes."""


class Backend(Protocol):
    """Kernels by `name` over memory of one `space`; backends that share a space share arrays and their order. Only the
    backend looks inside its buffers and arrays. Work may be under way when a call returns, but `read`, `fetch`,
    `window` and `all_finite` wait for it; the values passed to `write` may change at once. Child processes get backends
    pickled."""

    @property
    def name(self) -> str: ...
    @property
    def space(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    @property
    def capacity(self) -> int | None:
        """Bytes of its space (memory) that a run may take; None if the backend sets no limit."""

    @property
    def on_host(self) -> bool:
        """Whether its arrays are in memory of this process, which `--memory` counts."""

    @property
    def import_nbytes(self) -> int:
        """Bytes by which a process grows when it imports the backend and plans for it."""

    # ---- what it can do
    def kernel(self, op: AnyOp, inputs: Inputs) -> Kernel | None:
        """Return the kernel that runs the op on inputs of these specs; None if the backend has none."""

    def workspaces(self, op: AnyOp, inputs: Inputs, attrs: Attrs) -> tuple[Spec, ...]:
        """Return the specs of the scratch arrays that the kernel of such a call needs, which the plan gives it."""

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        """Return the bytes of its space beside arenas and leaves: temporaries of such calls, repeated in turn, and what
        buffers of these sizes take beyond their sizes."""

    def reserve(self, op_calls: Iterable[OpCall]) -> None:
        """Allocate in advance what `pool` counts for these calls, as far as possible."""

    @property
    def peak_reserved_nbytes(self) -> int | None:
        """Most bytes of its space that this process has held so far; None if unknown."""

    # ---- memory
    def alloc(self, nbytes: int) -> Any:
        """Return a buffer of `nbytes` zeros, whose address is a multiple of `alignment`."""

    def share(self, values: np.ndarray) -> Any:
        """Return a buffer with a dense array's bytes, for kernels to read: the array's own memory where possible."""

    def view(self, buffer: Any, offset: int, spec: Spec, strides: tuple[int, ...]) -> Any:
        """Return an array of `spec` over bytes of the buffer; `offset` and `strides` are in bytes."""

    def window(self, array: Any) -> np.ndarray | None:
        """Return the array's memory as a NumPy array that the host can read and write; None if it cannot."""

    def write(self, array: Any, values: np.ndarray) -> None: ...
    def read(self, array: Any) -> np.ndarray:
        """Return the array's values as a NumPy array, a copy that later runs do not change."""

    def fetch(self, array: Any, destination: np.ndarray) -> None:
        """Copy a dense array into a host array of equal shape and element type."""

    def fill(self, array: Any, byte: int) -> None:
        """Set every byte of a dense array to `byte`."""

    def all_finite(self, array: Any) -> bool:
        """Whether every float of the array is finite."""

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether two arrays have bytes in common."""

    def sync(self) -> None:
        """Wait until all work that was begun on the backend is done."""

    # ---- copies beside its kernels
    @property
    def streams(self) -> bool:
        """Whether the backend can copy between its memory and another while its kernels run."""

    def begin_copy(self, to: Any, source: Any, peer: "Backend") -> None:
        """Begin to copy a dense array to one of equal spec: one belongs to this backend, the other to `peer`. The copy
        waits for earlier kernels on both sides; neither array may be touched until `wait_for_copies` returns."""

    def wait_for_copies(self) -> None:
        """Wait until the copies begun by `begin_copy` are done."""

    def lock_pages(self, buffer: Any) -> None:
        """Lock (pin) the pages of a host buffer as long as it exists, so that copies need no detour."""

    def recorded_calls(self, op_calls: Iterable[OpCall | None], calls: Runs) -> Runs:
        """Return calls that do the work of `calls`, which follow each other in one plan and have run once, with less
        work of the host, as a CUDA graph; some are `done_by_later_call`. `op_calls`: op of each, None: a copy."""


@dataclass(frozen=True, slots=True)
class Host:
    """The backend of the CPU: NumPy arrays in ordinary memory, and the kernels that ops declare for its name."""

    name: str
    space: str = HOST
    alignment: int = 64
    capacity: int | None = None
    on_host: bool = True
    import_nbytes: int = 0

    def kernel(self, op: AnyOp, inputs: Inputs) -> Kernel | None:
        return op.kernels.get(self.name)

    def workspaces(self, op: AnyOp, inputs: Inputs, attrs: Attrs) -> tuple[Spec, ...]:
        rule = op.workspaces.get(self.name)
        return rule(*inputs, **attrs) if rule else ()

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        return 0

    def reserve(self, op_calls: Iterable[OpCall]) -> None:
        """Do nothing: kernels need only their workspaces."""

    @property
    def peak_reserved_nbytes(self) -> int | None:
        return None

    def alloc(self, nbytes: int) -> np.ndarray:
        raw = np.zeros(nbytes + self.alignment, np.uint8)
        padding = -raw.__array_interface__["data"][0] % self.alignment
        return raw[padding : padding + nbytes]

    def share(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(-1).view(np.uint8)

    def view(
        self, buffer: np.ndarray, offset: int, spec: Spec, strides: tuple[int, ...]
    ) -> np.ndarray:
        dtype, shape = spec.dtype, spec.shape
        array_shape = shape if dtype.block == 1 else dtype.array_shape(shape)
        return np.ndarray(array_shape, dtype.numpy, buffer, offset, strides)

    def window(self, array: np.ndarray) -> np.ndarray:
        return array

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        np.copyto(array, values)

    def read(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def fetch(self, array: np.ndarray, destination: np.ndarray) -> None:
        np.copyto(destination, array)

    def fill(self, array: np.ndarray, byte: int) -> None:
        array.reshape(-1).view(np.uint8).fill(byte)

    def all_finite(self, array: np.ndarray) -> bool:
        return bool(np.isfinite(array).all())

    def overlap(self, a: np.ndarray, b: np.ndarray) -> bool:
        return np.shares_memory(a, b)

    def sync(self) -> None:
        """Do nothing: kernels of the host are done when they return."""

    @property
    def streams(self) -> bool:
        """No: copies do not run beside kernels."""
        return False

    def begin_copy(self, to: Any, source: Any, peer: "Backend") -> None:
        raise NotImplementedError(f"{self.name} copies nothing beside its kernels")

    def wait_for_copies(self) -> None:
        """Do nothing: no copy was begun."""

    def lock_pages(self, buffer: Any) -> None:
        """Do nothing: this backend copies from ordinary memory."""

    def recorded_calls(self, op_calls: Iterable[OpCall | None], calls: Runs) -> Runs:
        """Return the calls themselves: this backend records nothing."""
        return calls


@dataclass(frozen=True, slots=True)
class SeparateHost(Host):
    """Ordinary memory that counts as the memory of a device of its own, such as cpu:1: `share` copies arrays there."""

    def share(self, values: np.ndarray) -> np.ndarray:
        buffer = self.alloc(values.nbytes)
        buffer[:] = values.reshape(-1).view(np.uint8)
        return buffer


class _HostBackends(dict[str, Host]):
    """Backends by device name; `cpu:1`, `cpu:2`, … are made on first use, each with a memory of its own."""

    def __missing__(self, device: str) -> Host:
        return self.setdefault(device, SeparateHost(device.partition(":")[0], device))


BACKENDS: dict[str, Host] = _HostBackends(cpu=Host("cpu"), numpy=Host("numpy"))
