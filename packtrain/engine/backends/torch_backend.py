"""Backends of PyTorch: `torch:cpu` runs on the host's own arrays; `cuda` and `mps` have memories of their own.

PyTorch is loaded on first use of such a device. Kernels are those that ops declare for `torch`."""

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
from packtrain.dtypes import DTYPES, DTYPES_BY_NUMPY, Dtype, bf16, f64
from packtrain.engine.backends import cuda_caching, cuda_graphs, host, torch_temporaries, triton
from packtrain.engine.backends.cuda_graphs import cuda_of, make_room, record_graphs
from packtrain.engine.backends.host import AnyOp, Attrs, Backend, Host, Inputs, OpCall, Runs
from packtrain.engine.backends.torch_temporaries import KernelFootprint, torch_name, torch_type
from packtrain.engine.ops.torch_kernels import BlockArray, torch
from packtrain.engine.tensor import Kernel, Spec

NAME = "torch"  # under which ops declare kernels
# of PyTorch in a child, with what it imports to run kernels without values, and of the latter in this process; 204 and
# 75 MiB were measured with PyTorch 2.13
IMPORT_NBYTES = 288 << 20
CUDA_KERNEL = "cuda"  # of kernels in Triton, which come first where they run
MADV_DONTNEED = 4  # of mman.h
TENSOR_NBYTES = 1_200  # measured: PyTorch's view of an array and its arguments, which a call keeps
OF_MKL = {"MKL_DISABLE_FAST_MM": "1"}  # MKL frees buffers after a product: no baseline has any
DTYPES_BY_TORCH_NAME = {f"torch.{torch_name(t)}": t for t in DTYPES.values() if not t.quantized}


def kernel_of(op: AnyOp, convert: Any, name: str = NAME) -> Kernel | None:
    """Return the op's PyTorch kernel `name`, its arrays made tensors by `convert`; None if the op declares none."""
    kernel = op.kernels.get(name)
    return kernel and Kernel(_call_on_tensors(kernel.run, convert), kernel.strided)


def _call_on_tensors(run: Any, convert: Any) -> Any:
    def launch(*arrays: Any, work: Any = (), **attrs: Any) -> Any:
        tensors = [regular_strides(convert(x)) for x in arrays]
        pages = [page_range for x in work if (page_range := pages_of(x))]

        def relaunch() -> None:
            for page_address, nbytes in pages:
                host.LIBC.madvise(page_address, nbytes, MADV_DONTNEED)
            run(*tensors, **attrs)

        relaunch()
        return relaunch

    return launch


def regular_strides(x: Any) -> Any:
    """Return the tensor with the strides of a dense one along axes of one element. PyTorch refuses to write over an
    input whose strides differ, even where strides have no effect."""
    if isinstance(x, tuple) and not isinstance(x, BlockArray):
        return tuple(map(regular_strides, x))
    if not isinstance(x, torch.Tensor) or 1 not in x.shape:
        return x
    strides, step = list(x.stride()), 1
    for axis in reversed(range(x.ndim)):
        strides[axis] = step if x.shape[axis] == 1 else strides[axis]
        step = strides[axis] * x.shape[axis]
    return x.as_strided(x.shape, strides, x.storage_offset())


# ---- temporaries on the host ----------------------------------------------------------------------------------
#
# PyTorch allocates temporaries itself. So that they do not count twice, the pages of the room that a plan reserves for
# them are given back to the system before a kernel runs.


def pages_of(work: Any) -> tuple[ctypes.c_void_p, ctypes.c_size_t] | None:
    """Return address and bytes of a NumPy array's whole pages, which may go back to the system; None if it is small."""
    is_large = isinstance(work, np.ndarray) and work.nbytes >= host.LARGE
    if not is_large or not hasattr(host.LIBC, "madvise"):
        return None
    begin, end = work.ctypes.data, work.ctypes.data + work.nbytes
    begin, end = host.aligned(begin, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)


# ---- on the host ---------------------------------------------------------------------------------------------


def as_tensor(x: Any) -> Any:
    """Return a tensor that shares the bytes of a NumPy array; quantized blocks become a BlockArray."""
    if isinstance(x, tuple):
        return tuple(map(as_tensor, x))
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == bf16.numpy:
        return _tensor_over(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype.names:
        raw = _tensor_over(x.view(np.uint8).reshape(*x.shape, x.itemsize))
        return BlockArray(raw, DTYPES_BY_NUMPY[x.dtype])
    return _tensor_over(x)


def _tensor_over(x: np.ndarray) -> Any:
    with warnings.catch_warnings():  # of arrays that kernels only read, such as mapped weights
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(x)


@dataclass(frozen=True, slots=True)
class TorchHost(Host):
    """Backend `torch:cpu`: NumPy arrays in ordinary memory, on which PyTorch's kernels run."""

    import_nbytes: int = IMPORT_NBYTES

    def kernel(self, op: AnyOp, inputs: Inputs) -> Kernel | None:
        _match_num_threads()
        return kernel_of(op, as_tensor)

    def workspaces(self, op: AnyOp, inputs: Inputs, attrs: Attrs) -> tuple[Spec, ...]:
        """Return a workspace of the size of a kernel's temporaries: the plan counts it, PyTorch allocates its own."""
        return torch_temporaries.temporaries(op, inputs, attrs) if NAME in op.kernels else ()

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        return sum(TENSOR_NBYTES * (len(inputs) + 1) for _, inputs, _ in op_calls)


# ---- elsewhere -----------------------------------------------------------------------------------------------


def _match_num_threads() -> None:
    """Make PyTorch use as many threads as the compiled kernels."""
    if torch.get_num_threads() != kernels.threads():
        torch.set_num_threads(kernels.threads())


def raw_tensor_of(array: Any) -> Any:
    """Return the tensor of an array of the device: for quantized blocks, that of their bytes."""
    return array.raw if isinstance(array, BlockArray) else array


def tensor_of(array: Any) -> Any:
    """Return the tensor of an array of the device or of NumPy: for quantized blocks, that of their bytes."""
    return raw_tensor_of(array if isinstance(array, BlockArray) else as_tensor(array))


def dtype_of(array: Any) -> Dtype:
    return array.dtype if isinstance(array, BlockArray) else DTYPES_BY_TORCH_NAME[str(array.dtype)]


def address_range(raw: Any) -> range:
    """Return the addresses of a tensor's bytes, from the first to the last."""
    last_offset = sum((n - 1) * step for n, step in zip(raw.shape, raw.stride(), strict=True))
    begin = raw.data_ptr()
    return range(begin, begin + (last_offset + 1) * raw.itemsize if raw.numel() else begin)


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """Backend of a PyTorch device, such as `cuda`, whose memory the host cannot read: arrays view a tensor of bytes."""

    name: str
    device: str
    alignment: int = 512
    fused: bool = False  # whether it runs kernels in Triton
    import_nbytes: int = IMPORT_NBYTES

    @property
    def space(self) -> str:
        return self.name

    @property
    def capacity(self) -> int | None:
        """Bytes that are free on the device now."""
        if self.device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(torch.mps.recommended_max_memory()) if self.device == "mps" else None

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    def kernel(self, op: AnyOp, inputs: Inputs) -> Kernel | None:
        _match_num_threads()
        has_unknown_dtype = any(t is not None and self._is_missing_dtype(t.dtype) for t in inputs)
        return None if has_unknown_dtype else kernel_of(op, lambda x: x, self._kernel_name(op))

    def _kernel_name(self, op: AnyOp) -> str:
        """Return the name under which the op declares its kernel for this device: `cuda` (Triton) or `torch`."""
        return CUDA_KERNEL if self.fused and CUDA_KERNEL in op.kernels else NAME

    def _measured(self, op: AnyOp, inputs: Inputs, attrs: Attrs) -> KernelFootprint:
        return torch_temporaries.kernel_footprint(op, inputs, attrs, self._kernel_name(op))

    def _is_missing_dtype(self, dtype: Dtype) -> bool:
        """Whether PyTorch lacks this element type on the device: `mps` has no f64."""
        return self.name.startswith("mps") and dtype == f64

    def workspaces(self, op: AnyOp, inputs: Inputs, attrs: Attrs) -> tuple[Spec, ...]:
        return ()  # PyTorch's own pool holds temporaries

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        measurements = [self._measured(*call) for call in op_calls if NAME in call[0].kernels]
        if self.device == "cpu":  # malloc keeps nothing
            return max((measurement.nbytes for measurement in measurements), default=0)
        num_pools = 1 if cuda_of(self.device) is None else 2  # graphs have a pool of their own
        traces = traces_of(measurements)
        pooled_nbytes = num_pools * cuda_caching.pool_nbytes(traces) if traces else 0
        return pooled_nbytes + cuda_caching.buffers_nbytes(buffers) - sum(buffers)

    def reserve(self, op_calls: Iterable[OpCall]) -> None:
        if cuda_of(self.device) is not None:
            traces = traces_of(self._measured(*c) for c in op_calls if NAME in c[0].kernels)
            make_room(self.device, cuda_caching.largest_room_nbytes(traces))

    @property
    def peak_reserved_nbytes(self) -> int | None:
        cuda = cuda_of(self.device)
        return None if cuda is None else int(cuda.max_memory_reserved(self.device))

    def alloc(self, nbytes: int) -> Any:
        aligned_nbytes = host.aligned(nbytes, self.alignment)
        return torch.zeros(aligned_nbytes, dtype=torch.uint8, device=self.device)

    def share(self, values: np.ndarray) -> Any:
        buffer = self.alloc(values.nbytes)
        buffer[: values.nbytes] = _tensor_over(values.reshape(-1).view(np.uint8))
        return buffer

    def view(self, buffer: Any, offset: int, spec: Spec, strides: tuple[int, ...]) -> Any:
        dtype, shape = spec.dtype, spec.dtype.array_shape(spec.shape)
        if dtype.quantized or self._is_missing_dtype(dtype):
            raw_layout = (*shape, dtype.block_nbytes), (*strides, 1), offset
            return BlockArray(buffer.as_strided(*raw_layout), dtype)
        itemsize = dtype.block_nbytes
        element_strides = tuple(step // itemsize for step in strides)
        return buffer.view(torch_type(dtype)).as_strided(shape, element_strides, offset // itemsize)

    def window(self, array: Any) -> np.ndarray | None:
        return None

    def write(self, array: Any, values: np.ndarray) -> None:
        dense = np.ascontiguousarray(values, dtype_of(array).numpy).reshape(values.shape)
        if isinstance(array, BlockArray):
            array.raw.copy_(_tensor_over(dense.reshape(-1).view(np.uint8)).view(array.raw.shape))
        else:
            array.copy_(as_tensor(dense))

    def read(self, array: Any) -> np.ndarray:
        dtype, raw = dtype_of(array), raw_tensor_of(array).contiguous()
        host_bytes = raw.view(-1).view(torch.uint8).to("cpu", copy=True).numpy()
        return host_bytes.view(dtype.numpy).reshape(dtype.array_shape(tuple(array.shape)))  # type: ignore[no-any-return]

    def fetch(self, array: Any, destination: np.ndarray) -> None:
        raw = raw_tensor_of(array).view(-1).view(torch.uint8)
        _tensor_over(destination.reshape(-1).view(np.uint8)).copy_(raw)

    def fill(self, array: Any, byte: int) -> None:
        raw_tensor_of(array).view(-1).view(torch.uint8).fill_(byte)

    def all_finite(self, array: Any) -> bool:
        return bool(array.isfinite().all())

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether the address ranges of two arrays overlap; arrays that are compared have no gaps."""
        a_range, b_range = address_range(raw_tensor_of(a)), address_range(raw_tensor_of(b))
        return max(a_range.start, b_range.start) < min(a_range.stop, b_range.stop)

    def sync(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        elif self.device == "mps":
            torch.mps.synchronize()

    @property
    def streams(self) -> bool:
        """Whether this is a CUDA device, which copies while its kernels run."""
        return cuda_of(self.device) is not None

    def begin_copy(self, to: Any, source: Any, peer: Backend) -> None:
        cuda_graphs.begin_copy(self.device, tensor_of(to), tensor_of(source))

    def wait_for_copies(self) -> None:
        cuda_graphs.wait_for_copies(self.device)

    def lock_pages(self, buffer: Any) -> None:
        cuda_graphs.lock_pages(self.device, buffer)

    def recorded_calls(self, op_calls: Iterable[OpCall | None], calls: Runs) -> Runs:
        recordable = [call is not None and self._measured(*call).is_recordable for call in op_calls]
        return record_graphs(self.device, calls, recordable)


def traces_of(measurements: Iterable[KernelFootprint]) -> tuple[cuda_caching.Trace, ...]:
    """Return the distinct traces (allocations and frees) of kernels."""
    return tuple(dict.fromkeys(measurement.trace for measurement in measurements))


# ---- devices by name -----------------------------------------------------------------------------------------


class _LazyBackends(dict[str, Backend]):
    """Backends by device name, made, with PyTorch loaded, on first use. Raises InputError without package or device."""

    def __missing__(self, name: str) -> Backend:
        if find_spec("torch") is None:
            fact = f"--device {name} needs PyTorch: pip install torch"
            raise InputError(f"{fact} (or packtrain with its extra: packtrain[torch])")
        device_kind, _, device_index = name.removeprefix("torch:").partition(":")
        environment = cuda_caching.CUBLAS_ENVIRONMENT if device_kind == "cuda" else OF_MKL
        for variable, value in environment.items():
            os.environ.setdefault(variable, value)
        if device_kind == "cuda":
            num_devices = torch.cuda.device_count()
            has_device = int(device_index or 0) < num_devices and torch.cuda.is_available()
        else:
            has_device = device_kind == "cpu" or torch.mps.is_available()
        if not has_device:
            raise InputError(f"--device {name}: PyTorch finds no such device on this machine")
        # now PyTorch loads what it would load late, so that plans know the memory of this process
        host.return_freed()
        torch.set_num_threads(kernels.threads())
        x = torch.ones(512, 512)
        x.addmm_(x, x).double().sum()
        torch.empty(1, device="meta").add_(1)
        if name == "torch:cpu":
            return self.setdefault(name, TorchHost(name))
        device = "cpu" if device_kind == "cpu" else name
        is_fused = device_kind == "cuda" and triton.is_installed()
        return self.setdefault(name, TorchDevice(name, device, fused=is_fused))


BACKENDS = _LazyBackends()
