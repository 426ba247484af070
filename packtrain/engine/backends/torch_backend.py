"""PyTorch: `torch:cpu` runs on the host's own arrays; `cuda` and `mps` have memories of their own.

PyTorch is loaded when a device of these is asked for. Kernels are those that ops declare for `torch`.
"""

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES, NUMPY, Dtype, bf16, f64
from packtrain.engine.backends import cuda_streams, host, triton
from packtrain.engine.backends.cuda_caching import (
    CONFIG,
    Trace,
    buffers_nbytes,
    pool_nbytes,
    room_nbytes,
)
from packtrain.engine.backends.cuda_graphs import cuda_of, make_room, recorded
from packtrain.engine.backends.host import LARGE, LIBC, Backend, Host, Inputs, Made, Run
from packtrain.engine.backends.torch_temporaries import (
    Measured,
    measured,
    temporaries,
    torch_name,
    torch_type,
)
from packtrain.engine.ops.torch_kernels import Blocks, torch
from packtrain.engine.tensor import Kernel, Op, Spec

NAME = "torch"  # of the kernels
CUDA = "cuda"  # of those in Triton, which are taken first where they run
DONTNEED = 4  # of mman.h
TENSOR_NBYTES = 1_200  # of PyTorch's view of an array, which a call keeps, and of what it is called with; measured
OF_MKL = {
    "MKL_DISABLE_FAST_MM": "1"
}  # what products take is free when they end, and in no baseline
TYPES = {f"torch.{torch_name(t)}": t for t in DTYPES.values() if not t.quantized}


def kernel_of(op: Op[..., Any], convert: Any, name: str = NAME) -> Kernel | None:
    """The op's kernel; of the first call, arrays become tensors, which are kept for later calls."""
    kernel = op.kernels.get(name)
    return kernel and Kernel(_launched(kernel.run, convert), kernel.strided)


def _launched(run: Any, convert: Any) -> Any:
    def launch(*arrays: Any, work: Any = (), **attrs: Any) -> Any:
        tensors = [regular(convert(x)) for x in arrays]
        pages = [page_range for x in work if (page_range := pages_of(x))]

        def again() -> None:
            for begin, nbytes in pages:
                LIBC.madvise(begin, nbytes, DONTNEED)
            run(*tensors, **attrs)

        again()
        return again

    return launch


def regular(x: Any) -> Any:
    """The tensor with the strides that it would have if it were dense, where an axis is of one element.

    PyTorch refuses to write over an input whose strides differ, also those that say nothing.
    """
    if isinstance(x, tuple) and not isinstance(x, Blocks):
        return tuple(map(regular, x))
    if not isinstance(x, torch.Tensor) or 1 not in x.shape:
        return x
    strides, step = list(x.stride()), 1
    for axis in reversed(range(x.ndim)):
        strides[axis] = step if x.shape[axis] == 1 else strides[axis]
        step = strides[axis] * x.shape[axis]
    return x.as_strided(x.shape, strides, x.storage_offset())


def reserved(op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]) -> tuple[Spec, ...]:
    """Room for the tensors that a kernel makes while it runs: counted in plans, and not given to it."""
    return temporaries(op, inputs, attrs) if NAME in op.kernels else ()


# ---- temporaries on the host ----------------------------------------------------------------------------------
#
# They are PyTorch's own allocations. So that they do not count twice, the room that a plan reserves for them is given
# back to the system before a kernel runs: what it makes takes the place of these pages.


def pages_of(work: Any) -> tuple[ctypes.c_void_p, ctypes.c_size_t] | None:
    """The whole pages of NumPy's array, if they are worth a call."""
    if not isinstance(work, np.ndarray) or work.nbytes < LARGE or not hasattr(LIBC, "madvise"):
        return None
    begin, end = work.ctypes.data, work.ctypes.data + work.nbytes
    begin, end = host.aligned(begin, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)


# ---- on the host ---------------------------------------------------------------------------------------------


def seen(x: Any) -> Any:
    """NumPy's array as a tensor of the same bytes."""
    if isinstance(x, tuple):
        return tuple(map(seen, x))
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == bf16.numpy:
        return _tensor(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype.names:
        raw = _tensor(x.view(np.uint8).reshape(*x.shape, x.itemsize))
        return Blocks(raw, NUMPY[x.dtype])
    return _tensor(x)


def _tensor(x: np.ndarray) -> Any:
    with warnings.catch_warnings():  # of arrays that kernels only read, such as mapped weights
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(x)


@dataclass(frozen=True, slots=True)
class OnHost(Host):
    """NumPy arrays in ordinary memory, seen as tensors."""

    def kernel(self, op: Op[..., Any], inputs: Inputs) -> Kernel | None:
        _as_many_threads()
        return kernel_of(op, seen)

    def workspaces(
        self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]
    ) -> tuple[Spec, ...]:
        return reserved(op, inputs, attrs)

    def pool(self, made: Iterable[Made], buffers: Sequence[int] = ()) -> int:
        return sum(TENSOR_NBYTES * (len(inputs) + 1) for _, inputs, _ in made)


# ---- elsewhere -----------------------------------------------------------------------------------------------


def _as_many_threads() -> None:
    """Let PyTorch use the threads of the kernels."""
    if torch.get_num_threads() != kernels.threads():
        torch.set_num_threads(kernels.threads())


def raw_of(array: Any) -> Any:
    """The tensor: bytes where it holds blocks."""
    return array.raw if isinstance(array, Blocks) else array


def tensor_of(array: Any) -> Any:
    """Its numbers, or its bytes where it holds blocks, of an array of the device or of the host."""
    return raw_of(array if isinstance(array, Blocks) else seen(array))


def dtype_of(array: Any) -> Dtype:
    return array.dtype if isinstance(array, Blocks) else TYPES[str(array.dtype)]


def extent(raw: Any) -> range:
    """Addresses from the first byte to the last."""
    last = sum((n - 1) * step for n, step in zip(raw.shape, raw.stride(), strict=True))
    begin = raw.data_ptr()
    return range(begin, begin + (last + 1) * raw.itemsize if raw.numel() else begin)


@dataclass(frozen=True, slots=True)
class Apart:
    """Views of one tensor of bytes, on a device whose memory is not for the host to read."""

    name: str
    device: str
    alignment: int = 512
    fused: bool = False  # whether it runs kernels in Triton

    @property
    def space(self) -> str:
        return self.name

    @property
    def capacity(self) -> int | None:
        """What is free there now."""
        if self.device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(torch.mps.recommended_max_memory()) if self.device == "mps" else None

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    def kernel(self, op: Op[..., Any], inputs: Inputs) -> Kernel | None:
        _as_many_threads()
        unknown = any(t is not None and self._only_bytes(t.dtype) for t in inputs)
        return None if unknown else kernel_of(op, lambda x: x, self._named(op))

    def _named(self, op: Op[..., Any]) -> str:
        """Which of the op's kernels it runs."""
        return CUDA if self.fused and CUDA in op.kernels else NAME

    def _measured(self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]) -> Measured:
        return measured(op, inputs, attrs, self._named(op))

    def _only_bytes(self, dtype: Dtype) -> bool:
        """Whether PyTorch has no such type there: `mps` has no f64."""
        return self.name.startswith("mps") and dtype == f64

    def workspaces(
        self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]
    ) -> tuple[Spec, ...]:
        return ()  # PyTorch has a pool for what kernels make

    def pool(self, op_calls: Iterable[Made], buffers: Sequence[int] = ()) -> int:
        measurements = [self._measured(*call) for call in op_calls if NAME in call[0].kernels]
        if self.device == "cpu":  # malloc keeps nothing
            return max((call.nbytes for call in measurements), default=0)
        times = 1 if cuda_of(self.device) is None else 2  # graphs have a pool of their own
        pool_size = times * pool_nbytes(traces_of(measurements)) if measurements else 0
        return pool_size + buffers_nbytes(buffers) - sum(buffers)

    def reserve(self, op_calls: Iterable[Made]) -> None:
        if cuda_of(self.device) is not None:
            traces = traces_of(
                self._measured(*call) for call in op_calls if NAME in call[0].kernels
            )
            make_room(self.device, room_nbytes(traces))

    @property
    def taken(self) -> int | None:
        cuda = cuda_of(self.device)
        return None if cuda is None else int(cuda.max_memory_reserved(self.device))

    def alloc(self, nbytes: int) -> Any:
        aligned_nbytes = host.aligned(nbytes, self.alignment)
        return torch.zeros(aligned_nbytes, dtype=torch.uint8, device=self.device)

    def share(self, values: np.ndarray) -> Any:
        buffer = self.alloc(values.nbytes)
        buffer[: values.nbytes] = _tensor(values.reshape(-1).view(np.uint8))
        return buffer

    def view(self, buffer: Any, offset: int, spec: Spec, strides: tuple[int, ...]) -> Any:
        dtype, shape = spec.dtype, spec.dtype.array_shape(spec.shape)
        if dtype.quantized or self._only_bytes(dtype):
            raw_layout = (*shape, dtype.block_nbytes), (*strides, 1), offset
            return Blocks(buffer.as_strided(*raw_layout), dtype)
        size = dtype.block_nbytes
        steps = tuple(step // size for step in strides)
        return buffer.view(torch_type(dtype)).as_strided(shape, steps, offset // size)

    def window(self, array: Any) -> np.ndarray | None:
        return None

    def write(self, array: Any, values: np.ndarray) -> None:
        dense = np.ascontiguousarray(values, dtype_of(array).numpy).reshape(values.shape)
        if isinstance(array, Blocks):
            array.raw.copy_(_tensor(dense.reshape(-1).view(np.uint8)).view(array.raw.shape))
        else:
            array.copy_(seen(dense))

    def read(self, array: Any) -> np.ndarray:
        dtype, raw = dtype_of(array), raw_of(array).contiguous()
        host_bytes = raw.view(-1).view(torch.uint8).to("cpu", copy=True).numpy()
        return host_bytes.view(dtype.numpy).reshape(dtype.array_shape(tuple(array.shape)))  # type: ignore[no-any-return]

    def fetch(self, array: Any, destination: np.ndarray) -> None:
        raw = raw_of(array).view(-1).view(torch.uint8)
        _tensor(destination.reshape(-1).view(np.uint8)).copy_(raw)

    def fill(self, array: Any, byte: int) -> None:
        raw_of(array).view(-1).view(torch.uint8).fill_(byte)

    def finite(self, array: Any) -> bool:
        return bool(array.isfinite().all())

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether their extents do, which are whole for what is asked."""
        first, second = extent(raw_of(a)), extent(raw_of(b))
        return max(first.start, second.start) < min(first.stop, second.stop)

    def sync(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        elif self.device == "mps":
            torch.mps.synchronize()

    @property
    def streams(self) -> bool:
        return cuda_of(self.device) is not None

    def begin(self, to: Any, source: Any, other: Backend) -> None:
        cuda_streams.begin(self.device, tensor_of(to), tensor_of(source))

    def arrived(self) -> None:
        cuda_streams.arrived(self.device)

    def lock(self, buffer: Any) -> None:
        cuda_streams.lock(self.device, buffer)

    def recorded(self, op_calls: Sequence[Made | None], calls: Sequence[Run]) -> Sequence[Run]:
        recordable = [call is not None and self._measured(*call).alone for call in op_calls]
        return recorded(self.device, calls, recordable)


def traces_of(measurements: Iterable[Measured]) -> tuple[Trace, ...]:
    """What calls make and drop, each once."""
    return tuple(dict.fromkeys(measurement.trace for measurement in measurements))


# ---- devices by name -----------------------------------------------------------------------------------------


class _Asked(dict[str, Backend]):
    """Backends, made when they are asked for: then a missing package or device is reported. Raises InputError."""

    def __missing__(self, name: str) -> Backend:
        if find_spec("torch") is None:
            raise InputError(
                f"--device {name} needs PyTorch: pip install torch (or packtrain with its extra: packtrain[torch])"
            )
        kind, _, number = name.removeprefix("torch:").partition(":")
        for variable, value in (CONFIG if kind == "cuda" else OF_MKL).items():
            os.environ.setdefault(variable, value)
        if not _there(kind, int(number or 0)):
            raise InputError(f"--device {name}: PyTorch finds no such device on this machine")
        _warm()
        if name == "torch:cpu":
            return self.setdefault(name, OnHost(name))
        device = "cpu" if kind == "cpu" else name
        return self.setdefault(name, Apart(name, device, fused=kind == "cuda" and triton.there()))


def _there(kind: str, number: int) -> bool:
    """Whether PyTorch has the device of such a kind."""
    if kind == "cuda":
        return bool(number < torch.cuda.device_count() and torch.cuda.is_available())
    return kind == "cpu" or bool(torch.mps.is_available())


def _warm() -> None:
    """Load what PyTorch loads late, so that the memory of this process is known before a run is planned."""
    host.return_freed()
    torch.set_num_threads(kernels.threads())
    x = torch.ones(512, 512)
    x.addmm_(x, x).double().sum()
    torch.empty(1, device="meta").add_(1)


BACKENDS = _Asked()
