"""What a backend is, and those of the host: NumPy arrays in ordinary memory."""

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
LARGE = 1 << 16  # bytes that malloc gets from the system on their own

Inputs = tuple[Tensor | None, ...]
Run = Callable[[], Any]
OpCall = tuple[Op[..., Any], Inputs, dict[str, Any]]  # op, inputs and attributes of a call


def aligned(nbytes: int, alignment: int) -> int:
    """Bytes rounded up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


def return_freed() -> None:
    """Let malloc return what is freed to the system at once: by default it keeps ever larger pieces."""
    if hasattr(LIBC, "mallopt"):
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            LIBC.mallopt(threshold, LARGE)


def later() -> None:
    """Of recorded calls: the next that is not this one does its work, too."""


class Backend(Protocol):
    """Kernels by `name` over memory of one `space`; backends that share a space share arrays and their order.

    Buffers and arrays are the backend's own: nothing else looks inside. Work may be under way when a call returns,
    but `read`, `fetch`, `window` and `all_finite` wait for it, and what `write` was given may change at once. Children of
    this process get backends pickled.
    """

    @property
    def name(self) -> str: ...
    @property
    def space(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    @property
    def capacity(self) -> int | None:
        """Bytes of its space that a run may take; None where that is for others to say."""

    @property
    def on_host(self) -> bool:
        """Whether its space is memory of this process, which `--memory` counts."""

    # ---- what it can do
    def kernel(self, op: Op[..., Any], inputs: Inputs) -> Kernel | None:
        """What runs the op on such inputs; None if it cannot."""

    def workspaces(
        self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]
    ) -> tuple[Spec, ...]:
        """What that kernel needs while it runs, beside inputs and results."""

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        """Bytes of its space beside arenas and leaves: what such calls take while they run, one after the other and
        again and again, and by how much more than was asked for buffers of these sizes get."""

    def reserve(self, op_calls: Iterable[OpCall]) -> None:
        """Take that now, as far as it can be taken before."""

    @property
    def peak_reserved_nbytes(self) -> int | None:
        """The most bytes of its space that this process had so far, if the backend knows."""

    # ---- memory
    def alloc(self, nbytes: int) -> Any:
        """A buffer of zeros that begins at a multiple of `alignment`."""

    def share(self, values: np.ndarray) -> Any:
        """A buffer with the bytes of a dense array, which no kernel writes: that memory itself where it can be read."""

    def view(self, buffer: Any, offset: int, spec: Spec, strides: tuple[int, ...]) -> Any:
        """The array of `spec` at `offset` bytes."""

    def window(self, array: Any) -> np.ndarray | None:
        """The array's own memory for the host to read and write; None where it cannot."""

    def write(self, array: Any, values: np.ndarray) -> None: ...
    def read(self, array: Any) -> np.ndarray:
        """A copy that later runs do not change."""

    def fetch(self, array: Any, destination: np.ndarray) -> None:
        """Copy a dense array to an array of the host like it."""

    def fill(self, array: Any, byte: int) -> None:
        """Set every byte of a dense array."""

    def all_finite(self, array: Any) -> bool:
        """Whether every float of the array is."""

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether the arrays have bytes in common."""

    def sync(self) -> None:
        """Wait until all work is done."""

    # ---- copies beside its kernels
    @property
    def streams(self) -> bool:
        """Whether it can copy between its space and another while its kernels run."""

    def begin_copy(self, to: Any, source: Any, peer: "Backend") -> None:
        """Begin to copy a dense array to another like it: one is its own, the other of `peer`. It is read when
        the kernels called before are done, on both sides, and neither is touched until `arrived` returns."""

    def wait_for_copies(self) -> None:
        """Wait until the copies that it began are done."""

    def lock_pages(self, buffer: Any) -> None:
        """Let a buffer of the process's own memory be copied from and to without a detour, as long as it is there."""

    def recorded_calls(
        self, op_calls: Sequence[OpCall | None], calls: Sequence[Run]
    ) -> Sequence[Run]:
        """Calls that have been run once, of one plan and one after the other, as ones that do the same, perhaps with
        less work of the host, or `later`. None: it copies from another memory. Addresses always have the same array."""


@dataclass(frozen=True, slots=True)
class Host:
    """NumPy arrays in ordinary memory, and the kernels that ops declare for this name."""

    name: str
    space: str = HOST
    alignment: int = 64
    capacity: int | None = None
    on_host: bool = True

    def kernel(self, op: Op[..., Any], inputs: Inputs) -> Kernel | None:
        return op.kernels.get(self.name)

    def workspaces(
        self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]
    ) -> tuple[Spec, ...]:
        rule = op.workspaces.get(self.name)
        return rule(*inputs, **attrs) if rule else ()

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        return 0

    def reserve(self, op_calls: Iterable[OpCall]) -> None:
        """Workspaces are all that kernels need."""

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
        shape = spec.dtype.array_shape(spec.shape)
        return np.ndarray(shape, spec.dtype.numpy, buffer, offset, strides)

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
        """Kernels of the host are done when they return."""

    @property
    def streams(self) -> bool:
        return False

    def begin_copy(self, to: Any, source: Any, peer: "Backend") -> None:
        raise NotImplementedError(f"{self.name} copies nothing beside its kernels")

    def wait_for_copies(self) -> None:
        """Nothing was begun."""

    def lock_pages(self, buffer: Any) -> None:
        """Its memory needs no other."""

    def recorded_calls(
        self, op_calls: Sequence[OpCall | None], calls: Sequence[Run]
    ) -> Sequence[Run]:
        return calls


@dataclass(frozen=True, slots=True)
class SeparateHost(Host):
    """A part of ordinary memory that is counted apart, as that of a device: what is there was copied there."""

    def share(self, values: np.ndarray) -> np.ndarray:
        buffer = self.alloc(values.nbytes)
        buffer[:] = values.reshape(-1).view(np.uint8)
        return buffer


class _HostBackends(dict[str, Host]):
    """Backends, and `cpu:1`, `cpu:2`, … with memories of their own."""

    def __missing__(self, device: str) -> Host:
        return self.setdefault(device, SeparateHost(device.partition(":")[0], device))


BACKENDS: dict[str, Host] = _HostBackends(cpu=Host("cpu"), numpy=Host("numpy"))
