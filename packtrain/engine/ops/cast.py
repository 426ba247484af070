"""Conversion of values to another element type."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, TRAINABLE, Dtype, bf16, dtype_of, f16, f32, i32
from packtrain.engine.ops.arrays import flatten, floats, round_to_bf16
from packtrain.engine.ops.elementwise import add
from packtrain.engine.ops.torch_kernels import BlockArray, real, unpack
from packtrain.engine.tensor import Call, Spec, Tensor, constant, input, op, require

FLOATS = (f32, f16, bf16)


@op()
def cast(x: Tensor, *, dtype: Dtype = f32) -> Spec:
    """Convert x, of any readable type or i32, to f32, f16 or bf16, rounded to nearest even. ggml_cpy, ggml_cast.

    The gradient is f32 and passes unchanged. f16 has none.
    """
    require(x.dtype in (*READABLE, i32), f"x is {x.spec}, a type that cannot be read")
    require(dtype in FLOATS, f"dtype is {dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    return Spec(x.shape, dtype)


cast.vjp(lambda dy, y, x, *, dtype: (dy if x.dtype in TRAINABLE else None,))


@cast.kernel("numpy")
def cast_numpy(y, x, *, dtype):
    if dtype == bf16:
        x = _as_float_array(x).astype(np.float32)
        bf16_bits = np.where(np.isnan(x), 0x7FC0, round_to_bf16(x).view(np.uint32) >> 16)
        y[...] = bf16_bits.astype(np.uint16).view(bf16.numpy)
    else:
        with np.errstate(over="ignore"):  # beyond f16 is infinite
            y[...] = _as_float_array(x)


def _as_float_array(x):
    return x.astype(np.float32) if x.dtype == np.int32 else floats(x)


@cast.kernel("cpu")
def cast_cpu(y, x, *, dtype):
    if (dtype_of(y), dtype_of(x)) == (bf16, f32):
        kernels.cast.narrow(flatten(y.view(np.uint16)), flatten(x))
    elif (dtype_of(y), dtype_of(x)) == (f32, bf16):
        kernels.cast.widen(flatten(y), flatten(x.view(np.uint16)))
    else:
        cast_numpy(y, x, dtype=dtype)


@cast.kernel("torch")
def cast_torch(y, x, *, dtype):
    if isinstance(x, BlockArray) and dtype == f32:
        unpack(y, x)
    else:
        y.copy_(real(x))


@cast.samples
def cast_samples():
    for dtype in FLOATS:
        yield cast(input("x", (3, 256)), dtype=dtype)
    yield cast(constant("ids", [[3, -1], [1 << 24, 0]], i32))
    upper = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32).view(np.uint16)
    yield cast(constant("w", np.ascontiguousarray(upper[:, 1::2]).view(bf16.numpy), bf16))
    block_bytes = np.arange(4 * 2 * 34, dtype=np.uint8).reshape(4, 2, 34)
    block_bytes[..., :2] = np.float16([0.01]).view(np.uint8)  # scales
    q8_0 = BLOCK_TYPES["q8_0"]
    yield cast(constant("w", block_bytes.view(q8_0.numpy)[..., 0], q8_0))


def rereads_bf16_weight(call: Call | None) -> bool:
    """Whether a call only converts stored bf16 values back, so that its result need not be saved."""
    return call is not None and call.op is cast and call.reads[0].dtype == bf16


def add_cast(a: Tensor, b: Tensor) -> Tensor:
    """Add in f32: y = a + b, a of any readable type. ggml_add_cast."""
    return add(a, b)
