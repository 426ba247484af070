"""Measures PyTorch kernels on tensors without values: bytes of temporaries, and whether they need the host."""

import math
import weakref
from functools import cache
from typing import Any, NamedTuple

from packtrain import kernels
from packtrain.dtypes import Dtype, bf16, u8
from packtrain.engine.backends.cuda_caching import Trace
from packtrain.engine.backends.host import AnyOp, Attrs, Inputs, OpCall
from packtrain.engine.ops.arrays import HOST_READS
from packtrain.engine.ops.torch_kernels import BlockArray, torch
from packtrain.engine.tensor import Spec

# functions of PyTorch that copy values from the host
HOST_TRANSFER_FUNCTIONS = ("tensor", "as_tensor", "from_numpy")

# measured for MKL's products: most steps of a sum and rows whose tiles are in memory at once, and a margin
TILE_DEPTH, ROWS, TILE_MARGIN = 384, 4096, 1.05
# of attention on the CPU: below how many queries which number of them forms a block, and keys of a block
QUERY_BLOCKS, KEY_BLOCK = ((192, 32), (768, 64), (1 << 62, 256)), 512


class KernelFootprint(NamedTuple):
    """What a PyTorch kernel allocates while it runs, and whether a CUDA graph can hold it.

    nbytes         most bytes of temporaries at once, and what PyTorch's functions take unseen on the CPU
    is_recordable  whether the kernel never reads values on the host nor brings any from it
    trace          allocations and frees, in order
    """

    nbytes: int
    is_recordable: bool
    trace: Trace


KERNEL_FOOTPRINTS: dict[Any, KernelFootprint] = {}


def torch_name(dtype: Dtype) -> str:
    """Return PyTorch's name of an element type without blocks, such as `float32`."""
    return "bfloat16" if dtype == bf16 else dtype.numpy.name


def torch_type(dtype: Dtype) -> Any:
    return getattr(torch, torch_name(dtype))


def temporaries(op: AnyOp, inputs: Inputs, attrs: Attrs) -> tuple[Spec, ...]:
    """Return a workspace of bytes, as large as the temporaries of a call's PyTorch kernel; () if it has none."""
    nbytes = kernel_footprint(op, inputs, attrs).nbytes
    return (Spec((nbytes,), u8),) if nbytes else ()


def kernel_footprint(
    op: AnyOp, inputs: Inputs, attrs: Attrs, kernel: str = "torch"
) -> KernelFootprint:
    """Return what a call's kernel `kernel` allocates beside results; measured once for equal specs and attributes."""
    input_layouts = tuple(None if t is None else (t.spec, t.strides) for t in inputs)
    key = op.name, kernel, input_layouts, tuple(attrs.items())
    if key not in KERNEL_FOOTPRINTS:
        KERNEL_FOOTPRINTS[key] = _measure_kernel((op, inputs, attrs), kernel)
    return KERNEL_FOOTPRINTS[key]


def _measure_kernel(call: OpCall, kernel: str) -> KernelFootprint:
    """Run the kernel on tensors without values, or on zeros if it needs values; return what it allocates."""
    try:
        meter, num_host_accesses = _run_on_meta(call, kernel)
        if num_host_accesses:  # a kernel brings its tables once, and keeps them
            _, num_host_accesses = _run_on_meta(call, kernel)
    except (RuntimeError, NotImplementedError):
        meter, num_host_accesses = _run_kernel(call, "torch", "cpu"), 1
    return KernelFootprint(meter.peak_nbytes, not num_host_accesses, tuple(meter.trace))


def _run_on_meta(call: OpCall, kernel: str) -> tuple[Any, int]:
    """Run the kernel on `meta` tensors; return (its allocation_meter, how often it read or brought host values)."""
    accesses_before = HOST_READS["times"]
    with host_transfer_counter()() as transfer_counter:
        meter = _run_kernel(call, kernel, "meta")
    return meter, HOST_READS["times"] - accesses_before + transfer_counter.times


def _run_kernel(call: OpCall, kernel: str, device: str) -> Any:
    op, inputs, attrs = call
    arrays = [t and empty_array(t.spec, t.strides, device) for t in inputs]
    rule_result = op.rule(*inputs, **attrs)
    specs = rule_result if isinstance(rule_result, tuple) else (rule_result,)
    wrote = [arrays[i] for i in op.writes]
    fresh_arrays = [empty_array(spec, spec.strides, device) for spec in specs[len(wrote) :]]
    results = (*wrote, *fresh_arrays)
    with allocation_meter()() as meter:
        op.kernels[kernel].run(
            results if len(results) > 1 or op.writes else results[0], *arrays, **attrs
        )
    return meter


def empty_array(spec: Spec, strides: tuple[int, ...], device: str) -> Any:
    """Return an array of zeros on `device`, or an array without values on `meta`."""
    dtype, shape = spec.dtype, spec.dtype.array_shape(spec.shape)
    if dtype.quantized:
        raw_shape, raw_strides = (*shape, dtype.block_nbytes), (*strides, 1)
        return BlockArray(_empty(raw_shape, raw_strides, torch.uint8, device), dtype)
    return _empty(shape, [s // dtype.block_nbytes for s in strides], torch_type(dtype), device)


def _empty(shape: Any, strides: Any, dtype: Any, device: str) -> Any:
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor if device == "meta" else tensor.zero_()


@cache
def host_transfer_counter() -> Any:
    """Return a context class that counts, as `times`, how often PyTorch functions bring values from the host."""

    class HostTransferCounter(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        times = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.times += getattr(function, "__name__", "") in HOST_TRANSFER_FUNCTIONS
            return function(*args, **(kwargs or {}))

    return HostTransferCounter


@cache
def allocation_meter() -> Any:
    """Return a context class that meters tensors: `current_nbytes`, `peak_nbytes`, `trace` (allocations and frees)."""

    class AllocationMeter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.current_nbytes = self.peak_nbytes = 0
            self.storage_ids = set[int]()
            self.trace, self.num_allocated = list[int](), 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            results = function(*args, **(kwargs or {}))
            earlier_ids = {id(s) for s in _tensor_storages((args, kwargs))} | self.storage_ids
            for storage in _tensor_storages(results):
                if id(storage) not in earlier_ids:
                    self._add(storage)
            nbytes = self.current_nbytes + untracked_nbytes(function, args)
            self.peak_nbytes = max(self.peak_nbytes, nbytes)
            return results

        def _add(self, storage: Any) -> None:
            nbytes = storage.nbytes()
            self.current_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.current_nbytes)
            self.storage_ids.add(id(storage))
            allocation_index = self.num_allocated if nbytes else None
            self.trace += [nbytes] * bool(nbytes)
            self.num_allocated += bool(nbytes)
            weakref.finalize(storage, self._drop, id(storage), nbytes, allocation_index)

        def _drop(self, storage_id: int, nbytes: int, allocation_index: int | None) -> None:
            self.current_nbytes -= nbytes
            self.storage_ids.discard(storage_id)
            self.trace += [] if allocation_index is None else [-1 - allocation_index]

    return AllocationMeter


def untracked_nbytes(function: Any, args: Any) -> int:
    """Return the bytes that a PyTorch function takes unseen on the CPU: tiles of products, blocks of attention."""
    name = str(function).split(".")[1]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        (m, k), n = args[-2].shape[-2:], args[-1].shape[-1]
        tiles: int = min(k, TILE_DEPTH) * (n + min(m, ROWS)) + (m * n if k > 8 * max(m, n) else 0)
        return math.ceil(4 * TILE_MARGIN * tiles)
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    is_backward = name.endswith("backward")
    q, k = args[1:3] if is_backward else args[:2]
    query_rows = next(query_rows for below, query_rows in QUERY_BLOCKS if q.shape[2] < below)
    num_keys = min(KEY_BLOCK, k.shape[2])
    block_size: int = query_rows * ((2 * num_keys if is_backward else num_keys + q.shape[3]) + 2)
    return 4 * kernels.threads() * block_size


def _tensor_storages(value: Any) -> list[Any]:
    """Return the storages of all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [storage for item in value for storage in _tensor_storages(item)]
    return [value.untyped_storage()] if isinstance(value, torch.Tensor) else []
