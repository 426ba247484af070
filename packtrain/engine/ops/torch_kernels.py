"""PyTorch, loaded at the first call, and functions that kernels of the backend `torch` share.

Kernels take tensors, on any device, and write into results passed to them. An array of a block type is a BlockArray.
Where possible, a kernel depends on shapes alone: on tensors without values (`meta`) it allocates as much.
"""

from importlib import import_module
from typing import Any, NamedTuple

from packtrain import kernels
from packtrain.dtypes import Dtype
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import copy_acc_or_zero, factor_pairs, round_to_bf16

CHUNK = 1 << 20  # values computed at a time, where memory has no room for a second tensor
LARGE = 1 << 24  # values computed at a time on a GPU, which fewer would not fill
TRITON_SPLIT = triton.lazy_kernel("elementwise", "split_bf16")
# of kernels.counter_rng, as signed words
GOLDEN, FIRST_MIXER, SECOND_MIXER = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class _Torch:
    """The module torch, imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(kernels.torch(), name)
        setattr(self, name, attribute)
        return attribute


torch: Any = _Torch()


class BlockArray(NamedTuple):
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
        return BlockArray(self.raw[rows], self.dtype)


def filled(name, *extra_args, **fixed_kwargs):
    """Return a kernel that calls PyTorch's function `name` on the inputs with its result y as `out`."""

    def run_kernel(y, *args):
        getattr(torch, name)(*args, *extra_args, **fixed_kwargs, out=y)

    return run_kernel


def filled_by_aten(name, *extra_args, **fixed_kwargs):
    """Return a kernel that calls torch.ops.aten's function `name` on the inputs with its result y as `out`."""

    def run_kernel(y, *args):
        getattr(torch.ops.aten, name).out(*args, *extra_args, **fixed_kwargs, out=y)

    return run_kernel


def real(w):
    """Return w, of any readable type, as an f32 tensor; an f64 one stays."""
    if isinstance(w, BlockArray):
        y = torch.empty(w.shape, dtype=torch.float32, device=w.raw.device)
        unpack(y, w)
        return y
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def unpack(y, w):
    """Write the values of w, of any readable type, to y (f32)."""
    if isinstance(w, BlockArray):
        blocks().unpack(y, w)
    else:
        y.copy_(w)


def blocks():
    """Return the module torch_blocks, which is imported when a block type first comes up."""
    return import_module("packtrain.engine.ops.torch_blocks")


def to_sum_dtype(x):
    """Return x in f64, in which sums are added up; in f32 on `mps`, which has no f64."""
    return x.float() if x.is_mps else x.double()


def sum_chunks(x, term=lambda values: values):
    """Return the sum over all elements of term(x), computed for CHUNK elements at a time in the type of sums."""
    x = x.view(-1)
    running_sum = to_sum_dtype(x.new_zeros(()))
    for chunk_start, chunk_end in chunk_bounds(len(x), CHUNK, x):
        running_sum += term(to_sum_dtype(x[chunk_start:chunk_end])).sum()
    return running_sum


def chunk_bounds(n, chunk_size, x):
    """Yield (start, end) of parts of range(n), each of `chunk_size`; on `meta` only the first two, as all are alike."""
    chunk_size = max(chunk_size, 1)
    for chunk_start in range(0, min(n, 2 * chunk_size) if x.is_meta else n, chunk_size):
        yield chunk_start, min(chunk_start + chunk_size, n)


def start_product(y, acc):
    """Prepare y for a product: copy acc to y, if there is one. Return whether the product must overwrite y."""
    if acc is not None:
        copy_acc_or_zero(y, acc)
    return acc is None


def as_bf16_factor(x):
    """Round x to bf16: to a bf16 tensor on `cuda`, where PyTorch multiplies these and sums in f32, else to f32."""
    return x.bfloat16() if x.is_cuda and x.dtype == torch.float32 else round_to_bf16(x)


def add_product(y, x, w, precision="f32", *, fresh, unpack_size=CHUNK):
    """Add x (M, K) @ w (N, K).T to y (M, N), or overwrite y if `fresh`; unpack `unpack_size` values of w at a time."""
    if not isinstance(w, BlockArray) and w.dtype == torch.float32:
        multiply(y, x, w.mT, fresh, precision)
        return
    n, k = w.shape
    for row_start, row_end in chunk_bounds(n, unpack_size // max(k, 1), x):
        multiply(y[:, row_start:row_end], x, real(w[row_start:row_end]).mT, fresh, precision)


def add_product_back(y, x, w, precision="f32", *, fresh, unpack_size=CHUNK):
    """Add x (M, N) @ w (N, K) to y (M, K), or overwrite y if `fresh`; unpack w as in add_product."""
    if not isinstance(w, BlockArray) and w.dtype == torch.float32:
        multiply(y, x, w, fresh, precision)
        return
    n, k = w.shape
    if fresh:
        y.zero_()
    for row_start, row_end in chunk_bounds(n, unpack_size // max(k, 1), x):
        multiply(y, x[:, row_start:row_end], real(w[row_start:row_end]), False, precision)


def product_pairs(a, b, precision):
    """Return pairs of factors whose products add up to a @ b in a precision: f32, bf16, or bf16x3."""
    if precision == "bf16x3" and triton.runs_on(a) and a.dtype == b.dtype == torch.float32:
        (a_high, a_low), (b_high, b_low) = TRITON_SPLIT(a), TRITON_SPLIT(b)
        return (a_high, b_low), (a_low, b_high), (a_high, b_high)
    return factor_pairs(a, b, precision, as_bf16_factor)


def multiply(y, a, b, fresh, precision="f32"):
    """Add a @ b to y, or overwrite y if `fresh`, with factors in this precision: f32, bf16, or bf16x3."""
    for x, w in product_pairs(a, b, precision):
        dtype_option = {} if x.dtype == y.dtype else {"out_dtype": y.dtype}
        if fresh:
            torch.mm(x, w, out=y, **dtype_option)
        else:
            torch.addmm(y, x, w, out=y, **dtype_option)
        fresh = False


# ---- random numbers ------------------------------------------------------------------------------------------


def shift_right(z, num_bits):
    """Shift i64 words to the right by `num_bits`, filling with zeros, as unsigned words."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)


def mix(z):
    z = z + GOLDEN
    z = (z ^ shift_right(z, 30)) * FIRST_MIXER
    z = (z ^ shift_right(z, 27)) * SECOND_MIXER
    return z ^ shift_right(z, 31)


def key_of(key, stream):
    """Return kernels.counter_rng's key for random numbers, from seed and step (`key`, i64 (2,)) and a stream."""
    return mix(mix(mix(key[0]) + key[1]) + stream)


def uniform(mixed_key, start, end):
    """Return random numbers `start` (even) to `end` of a key_of, f32 from 0 to 1, with the bits of counter_rng."""
    first_word, last_word = start // 2 + 1, (end + 1) // 2 + 1
    z = torch.arange(first_word, last_word, dtype=torch.int64, device=mixed_key.device) * GOLDEN
    z += mixed_key
    z ^= shift_right(z, 30)
    z *= FIRST_MIXER
    z ^= shift_right(z, 27)
    z *= SECOND_MIXER
    z ^= shift_right(z, 31)
    words = z.view(torch.int32)[: end - start]
    return ((words >> 8) & 0xFFFFFF).float().mul_(2.0**-24)


# ---- the largest ---------------------------------------------------------------------------------------------


def top_k_indices(x, k):
    """Return indices (N, k) i64 of the k largest of each row, largest first; the lower index on ties."""
    bits = (x + 0.0).view(torch.int32)  # 0 for -0
    sort_keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    n = x.shape[-1]
    sort_keys = (sort_keys << 32) + torch.arange(n - 1, -1, -1, device=x.device)
    return n - 1 - (sort_keys.topk(k, dim=-1).values & 0xFFFFFFFF)
