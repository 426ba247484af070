"""Products with activations rounded to 8 bits: in integers, with quantized weights."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import ROUNDABLE, f32
from packtrain.engine.ops import arrays, costs
from packtrain.engine.ops.torch_kernels import add_product, start_product
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require

BLOCK = 32
MAX_DOT_ROWS = 8  # more rows have their own tiles
MIN_STEP = np.float32(2**-126)  # smaller steps are 0


@op(inplace=(0,))
def rounded(x: Tensor) -> Spec:
    """Round each 32 values to multiples of a step, their largest size / 127: as ggml's q8_0, with a step in f32.

    x, y  (..., C)  f32; C is a multiple of 32
    """
    _check_blocks(x)
    return x.spec


def has_fast_integer_products() -> bool:
    """Whether products of many rows with quantized weights are faster in integers on this CPU than in f32."""
    return kernels.runtime.environment.has_cpu_feature("avx2")


def _check_blocks(x: Tensor) -> None:
    is_valid = x.dtype == f32 and len(x.shape) > 0 and x.shape[-1] % BLOCK == 0
    require(is_valid, f"x is {x.spec}; it must be f32, its last axis a multiple of {BLOCK}")


def _round_numpy(x):
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    step[step < MIN_STEP] = 0
    step[~np.isfinite(blocks).all(-1)] = np.nan
    codes = np.rint(blocks / np.where(step == 0, np.float32(1), step)).astype(x.dtype)
    return np.where(step == 0, 0, codes * step.astype(x.dtype)).reshape(x.shape)


rounded.kernel("numpy")(arrays.assigned(_round_numpy))
rounded.kernel("cpu")(arrays.compiled("rounded.rounded", arrays.flatten, arrays.flatten))


def _round_torch(x):
    blocks = x.view(-1, BLOCK)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    step.masked_fill_(step < float(MIN_STEP), 0)
    step.masked_fill_(~blocks.isfinite().all(-1, keepdim=True), np.nan)
    codes = (blocks / step.masked_fill(step == 0, 1)).round_()
    return codes.mul_(step).masked_fill_(step == 0, 0).view(x.shape)


rounded.kernel("torch")(arrays.assigned(_round_torch))
rounded.samples(lambda: (rounded(input("x", shape)) for shape in ((32,), (3, 64), (2, 3, 96))))


@op(inplace=(2,), acc=2)
def matmul_rounded(x: Tensor, w: Tensor, acc: Tensor | None = None) -> Spec:
    """Multiply rounded rows of x by rows of w: y = rounded(x) @ w.T (+ acc), in integers.

    x    (..., K)   f32
    w    (N, K)     of a type in dtypes.ROUNDABLE
    acc  (..., N)   f32
    y    (..., N)   f32
    """
    _check_blocks(x)
    has_products = w.dtype in ROUNDABLE and len(w.shape) == 2
    require(has_products, f"w is {w.spec}; its products are not rounded")
    k, rows_k = x.shape[-1], w.shape[-1]
    require(k == rows_k, f"last axis of x {x.spec} ({k}) must equal that of w {w.spec} ({rows_k})")
    return Spec((*x.shape[:-1], w.shape[0])).require(acc=acc)


@matmul_rounded.kernel("numpy")
def matmul_rounded_numpy(y, x, w, acc):
    product = _round_numpy(x) @ arrays.floats(w).T
    y[...] = product if acc is None else product + acc


@matmul_rounded.kernel("torch")
def matmul_rounded_torch(y, x, w, acc):
    add_product(arrays.rows(y), arrays.rows(_round_torch(x)), w, fresh=start_product(y, acc))


matmul_rounded.workspace("cpu")(lambda x, w, acc: (arrays.integers_of(x, 1),))


@matmul_rounded.kernel("cpu")
def matmul_rounded_cpu(y, x, w, acc, *, work):
    copy = arrays.copy_acc(y, acc)
    args = arrays.rows(y), arrays.rows(x), *arrays.packed(w), acc is not None
    if len(args[1]) > MAX_DOT_ROWS:
        call = arrays.run_replayable(kernels.rounded.product_of_many, *args, work[0])
    else:
        call = arrays.run_replayable(kernels.rounded.product, *args, 1, work[0])
    return arrays.replay_after(copy, call)


matmul_rounded.cost(lambda y, x, w, acc: costs.weight_product_cost(x.spec.size // x.shape[-1], w))


@matmul_rounded.samples
def matmul_rounded_samples():
    for w in _packed_weights():
        yield matmul_rounded(input("x", (2, w.shape[1])), w)
    yield matmul_rounded(input("x", (w.shape[1],)), w)
    for num_rows in (3, 11):
        acc = input("acc", (2, num_rows, w.shape[0]))
        yield matmul_rounded(input("x", (2, num_rows, w.shape[1])), w, acc)


def _packed_weights():
    """Yield sample weights of each type, with random bits and small scales; the last needs several threads."""
    random = np.random.default_rng(1)
    for dtype in ROUNDABLE:
        num_rows, blocks = (300, 3) if dtype == ROUNDABLE[-1] else (5, max(3, 96 // dtype.block))
        bits = random.integers(0, 256, (num_rows, blocks, dtype.block_nbytes), np.uint8)
        for byte_offset in dtype.layout.half_offsets if dtype.layout else (0,):
            bits[..., byte_offset : byte_offset + 2] = np.float16([0.01]).view(np.uint8)
        yield constant("w", bits.view(dtype.numpy)[..., 0], dtype)
