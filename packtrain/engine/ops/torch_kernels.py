"""PyTorch for the kernels of the backend `torch`, loaded at the first call, and what these kernels share.

They get tensors, on any device, and write their results into those given. An array of a block type is a Blocks.
What a kernel does depends on shapes alone, where it can: on tensors without values (`meta`) it allocates as much.
"""

import math
from importlib import import_module
from typing import Any, NamedTuple

from packtrain import kernels
from packtrain.dtypes import Dtype
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import factors

CHUNK = 1 << 20  # values that are computed at a time, where a whole tensor has no room twice
LARGE = 1 << 24  # the same on a GPU, which fewer would not fill
SPLIT = triton.late("elementwise", "split")
ALL = 1 << 32  # ids are below it
# of kernels.counter, as signed words
GOLDEN, FIRST, SECOND = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class _Torch:
    """The module torch: imported when a name of it is first used."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(kernels.torch(), name)
        setattr(self, name, attribute)
        return attribute


torch: Any = _Torch()


class Blocks(NamedTuple):
    """An array of a block type: bytes (..., blocks, bytes of a block) u8."""

    raw: Any
    dtype: Dtype

    @property
    def shape(self):
        return self.dtype.tensor_shape(self.raw.shape[:-1])

    @property
    def ndim(self):
        return self.raw.ndim - 1

    def __getitem__(self, rows):
        return Blocks(self.raw[rows], self.dtype)


def filled(name, *extra_args, **named):
    """A kernel that is a function of PyTorch with `out`."""

    def run(y, *args):
        getattr(torch, name)(*args, *extra_args, **named, out=y)

    return run


def filled_by_aten(name, *extra_args, **named):
    """The same of torch.ops.aten."""

    def run(y, *args):
        getattr(torch.ops.aten, name).out(*args, *extra_args, **named, out=y)

    return run


def copied(function):
    """A kernel that copies what the function gives."""

    def run(y, *args, **attrs):
        y.copy_(function(*args, **attrs))

    return run


def real(w):
    """w in f32, unless it is f32 or f64."""
    if isinstance(w, Blocks):
        y = torch.empty(w.shape, dtype=torch.float32, device=w.raw.device)
        unpack(y, w)
        return y
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def unpack(y, w):
    """Write the values of w, of any readable type, to y."""
    if isinstance(w, Blocks):
        blocks().unpack(y, w)
    else:
        y.copy_(w)


def blocks():
    """The module for block types, which is loaded where one comes up."""
    return import_module("packtrain.engine.ops.torch_blocks")


def wide(x):
    """x in f64, in which sums are added up; in f32 on `mps`, which has no f64."""
    return x.float() if x.is_mps else x.double()


def rows(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def table(x, axes):
    return x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))


ASKED = {"times": 0}  # how often kernels have, see on_host


def on_host(x):
    """Whether the host can look at values of x: not if there are none. A kernel that asks is never recorded."""
    ASKED["times"] += 1
    return not x.is_meta


def spans(n, size, x):
    """(start, end) of parts of n, each of `size`; of the first two where x has no values, as all are alike."""
    size = max(size, 1)
    for start in range(0, min(n, 2 * size) if x.is_meta else n, size):
        yield start, min(start + size, n)


def same(a, b):
    return not a.is_meta and a.data_ptr() == b.data_ptr()


def start_with(y, acc):
    """Copy acc to y, unless they share their bytes; zeros without acc."""
    if acc is None:
        y.zero_()
    elif not same(y, acc):
        y.copy_(acc)


def check_ids(name, ids, count, *, least=None, what=None):
    """Raise IndexError for the first id that is not below `count`, or below `least`."""
    invalid = ids >= count
    if least is not None:
        invalid |= ids < least
    any_invalid = invalid.any()
    if on_host(ids) and bool(any_invalid):
        at = int(invalid.reshape(-1).nonzero()[0, 0])
        invalid_id = int(ids.reshape(-1)[at])
        valid_rows = what or (f"the {count} rows" if least is None else f"{least} to {count - 1}")
        noun = "index" if what is None else "target"
        raise IndexError(f"{name}: {noun} {invalid_id} at position {at} is outside {valid_rows}")


def times(a, b, precision):
    """a @ b with factors of this precision."""
    return sum(x @ y for x, y in factors(a, b, precision, rounded))


def rounded(x):
    return x if x.dtype != torch.float32 else x.bfloat16().float()


def halves(x):
    """The same, as bf16 where PyTorch multiplies that and sums in f32: on `cuda`."""
    return x.bfloat16() if x.is_cuda and x.dtype == torch.float32 else rounded(x)


def add_product(y, x, w, precision="f32", *, fresh, part=CHUNK):
    """y (M, N) = x (M, K) @ w (N, K).T, added to y unless it is `fresh`; packed w is unpacked a `part` at a time."""
    if not isinstance(w, Blocks) and w.dtype == torch.float32:
        multiply(y, x, w.mT, fresh, precision)
        return
    n, k = w.shape
    for start, end in spans(n, part // max(k, 1), x):
        multiply(y[:, start:end], x, real(w[start:end]).mT, fresh, precision)


def add_product_back(y, x, w, precision="f32", *, fresh, part=CHUNK):
    """y (M, K) = x (M, N) @ w (N, K), in the same way."""
    if not isinstance(w, Blocks) and w.dtype == torch.float32:
        multiply(y, x, w, fresh, precision)
        return
    n, k = w.shape
    if fresh:
        y.zero_()
    for start, end in spans(n, part // max(k, 1), x):
        multiply(y, x[:, start:end], real(w[start:end]), False, precision)


def pairs_of(a, b, precision):
    """Pairs whose products are summed."""
    if precision == "bf16x3" and triton.here(a) and a.dtype == b.dtype == torch.float32:
        (high, low), (other, rest) = SPLIT(a), SPLIT(b)
        return (high, rest), (low, other), (high, other)
    return factors(a, b, precision, halves)


def multiply(y, a, b, fresh, precision="f32"):
    for x, w in pairs_of(a, b, precision):
        wide = {} if x.dtype == y.dtype else {"out_dtype": y.dtype}
        if fresh:
            torch.mm(x, w, out=y, **wide)
        else:
            torch.addmm(y, x, w, out=y, **wide)
        fresh = False


# ---- random numbers ------------------------------------------------------------------------------------------


def right(z, by):
    """Unsigned words, shifted."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def mix(z):
    z = z + GOLDEN
    z = (z ^ right(z, 30)) * FIRST
    z = (z ^ right(z, 27)) * SECOND
    return z ^ right(z, 31)


def key_of(key, stream):
    """kernels.counter.key of a tensor (2,) i64, seed and step."""
    return mix(mix(mix(key[0]) + key[1]) + stream)


def uniform(mixed, start, end):
    """The uniforms of `kernels.counter`, from an even start to the end: the same bits."""
    first, last = start // 2 + 1, (end + 1) // 2 + 1
    z = torch.arange(first, last, dtype=torch.int64, device=mixed.device) * GOLDEN
    z += mixed
    z ^= right(z, 30)
    z *= FIRST
    z ^= right(z, 27)
    z *= SECOND
    z ^= right(z, 31)
    words = z.view(torch.int32)[: end - start]
    return ((words >> 8) & 0xFFFFFF).float().mul_(2.0**-24)


# ---- the largest ---------------------------------------------------------------------------------------------


def largest(x, k):
    """Indices (N, k) i64 of the k largest of each row, the largest first; the lower index on ties."""
    bits = (x + 0.0).view(torch.int32)  # 0 for -0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    n = x.shape[-1]
    order = (order << 32) + torch.arange(n - 1, -1, -1, device=x.device)
    return n - 1 - (order.topk(k, dim=-1).values & 0xFFFFFFFF)
