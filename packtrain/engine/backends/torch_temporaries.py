"""What a kernel of PyTorch does while it runs, found without memory: how many bytes the tensors take that it makes, and
whether it needs the host."""

import math
import weakref
from functools import cache
from typing import Any, NamedTuple

from packtrain import kernels
from packtrain.dtypes import Dtype, bf16, u8
from packtrain.engine.backends.cuda_caching import Trace
from packtrain.engine.backends.host import Inputs, Made
from packtrain.engine.ops.torch_kernels import ASKED, Blocks, torch
from packtrain.engine.tensor import Op, Spec

FROM_HOST = (
    "tensor",
    "as_tensor",
    "from_numpy",
)  # functions of PyTorch that copy values from the host


# of MKL's products, as measured: the most steps of a sum and rows whose tiles it has at once, and by how much more
DEPTH, ROWS, MARGIN = 384, 4096, 1.05
# of attention on the CPU: queries at a time, for fewer than so many of them, and keys
QUERIES, KEYS = ((192, 32), (768, 64), (1 << 62, 256)), 512


class Measured(NamedTuple):
    """What a kernel does while it runs.

    nbytes  of the tensors that it makes, at once, with what functions of PyTorch take unseen on the CPU
    alone   whether it never looks at values nor brings any
    trace   what it makes and drops, in order
    """

    nbytes: int
    alone: bool
    trace: Trace


KNOWN: dict[Any, Measured] = {}


def torch_name(dtype: Dtype) -> str:
    """PyTorch's name of a type without blocks."""
    return "bfloat16" if dtype == bf16 else dtype.numpy.name


def torch_type(dtype: Dtype) -> Any:
    return getattr(torch, torch_name(dtype))


def temporaries(op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]) -> tuple[Spec, ...]:
    """A workspace of so many bytes, if any are needed."""
    nbytes = measured(op, inputs, attrs).nbytes
    return (Spec((nbytes,), u8),) if nbytes else ()


def measured(
    op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any], kernel: str = "torch"
) -> Measured:
    """Of a call by this kernel; measured once for each op, specs and attributes."""
    input_layouts = tuple(None if t is None else (t.spec, t.strides) for t in inputs)
    key = op.name, kernel, input_layouts, tuple(attrs.items())
    if key not in KNOWN:
        KNOWN[key] = _measured((op, inputs, attrs), kernel)
    return KNOWN[key]


def _measured(call: Made, kernel: str) -> Measured:
    """On tensors without values; with them, zeros, if the kernel looks at values."""
    try:
        memory_meter, needs = _watched(call, kernel)
        if needs:  # a table of a kernel's is brought once, and kept
            _, needs = _watched(call, kernel)
    except (RuntimeError, NotImplementedError):
        memory_meter, needs = _run(call, "torch", "cpu"), 1
    return Measured(memory_meter.most, not needs, tuple(memory_meter.trace))


def _watched(call: Made, kernel: str) -> tuple[Any, int]:
    """A meter of what it makes, and how often it looks at values or brings some."""
    before = ASKED["times"]
    with bringing()() as brought:
        memory_meter = _run(call, kernel, "meta")
    return memory_meter, ASKED["times"] - before + brought.times


def _run(call: Made, kernel: str, device: str) -> Any:
    op, inputs, attrs = call
    arrays = [t and empty(t.spec, t.strides, device) for t in inputs]
    ruled = op.rule(*inputs, **attrs)
    specs = ruled if isinstance(ruled, tuple) else (ruled,)
    wrote = [arrays[i] for i in op.writes]
    fresh = [empty(spec, spec.strides, device) for spec in specs[len(wrote) :]]
    results = (*wrote, *fresh)
    with meter()() as count:
        op.kernels[kernel].run(
            results if len(results) > 1 or op.writes else results[0], *arrays, **attrs
        )
    return count


def empty(spec: Spec, strides: tuple[int, ...], device: str) -> Any:
    """Zeros, or nothing on `meta`."""
    dtype, shape = spec.dtype, spec.dtype.array_shape(spec.shape)
    if dtype.quantized:
        raw_shape, steps = (*shape, dtype.block_nbytes), (*strides, 1)
        return Blocks(_empty(raw_shape, steps, torch.uint8, device), dtype)
    return _empty(shape, [s // dtype.block_nbytes for s in strides], torch_type(dtype), device)


def _empty(shape: Any, strides: Any, dtype: Any, device: str) -> Any:
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor if device == "meta" else tensor.zero_()


@cache
def bringing() -> Any:
    """A context that counts the `times` that values are brought from the host."""

    class Bringing(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        times = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.times += getattr(function, "__name__", "") in FROM_HOST
            return function(*args, **(kwargs or {}))

    return Bringing


@cache
def meter() -> Any:
    """A context that counts the bytes of storages that operations in it make: `now`, and `most` at once; `trace` has
    each that is made and dropped."""

    class Meter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.now = self.most = 0
            self.known = set[int]()
            self.trace, self.made = list[int](), 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            results = function(*args, **(kwargs or {}))
            before = {id(s) for s in _storages((args, kwargs))} | self.known
            for storage in _storages(results):
                if id(storage) not in before:
                    self._add(storage)
            self.most = max(self.most, self.now + unseen_nbytes(function, args))
            return results

        def _add(self, storage: Any) -> None:
            nbytes = storage.nbytes()
            self.now += nbytes
            self.most = max(self.most, self.now)
            self.known.add(id(storage))
            number = self.made if nbytes else None
            self.trace += [nbytes] * bool(nbytes)
            self.made += bool(nbytes)
            weakref.finalize(storage, self._drop, id(storage), nbytes, number)

        def _drop(self, name: int, nbytes: int, number: int | None) -> None:
            self.now -= nbytes
            self.known.discard(name)
            self.trace += [] if number is None else [-1 - number]

    return Meter


def unseen_nbytes(function: Any, args: Any) -> int:
    """Bytes that a function of PyTorch takes on the CPU beside its result: tiles of products, blocks of attention."""
    name = str(function).split(".")[1]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        (m, k), n = args[-2].shape[-2:], args[-1].shape[-1]
        tiles: int = min(k, DEPTH) * (n + min(m, ROWS)) + (m * n if k > 8 * max(m, n) else 0)
        return math.ceil(4 * MARGIN * tiles)
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    back = name.endswith("backward")
    q, k = args[1:3] if back else args[:2]
    rows = next(rows for below, rows in QUERIES if q.shape[2] < below)
    keys = min(KEYS, k.shape[2])
    each: int = rows * ((2 * keys if back else keys + q.shape[3]) + 2)
    return 4 * kernels.threads() * each


def _storages(of: Any) -> list[Any]:
    """Of all tensors in nested lists, tuples and dictionaries."""
    if isinstance(of, dict):
        of = list(of.values())
    if isinstance(of, list | tuple):
        return [storage for one in of for storage in _storages(one)]
    return [of.untyped_storage()] if isinstance(of, torch.Tensor) else []
