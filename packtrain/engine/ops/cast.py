"""Values stored in another element type."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, TRAINABLE, Dtype, bf16, dtype_of, f16, f32, i32
from packtrain.engine.ops.arrays import flat, floats, rounded
from packtrain.engine.ops.elementwise import add
from packtrain.engine.ops.torch_kernels import Blocks, real, unpack
from packtrain.engine.tensor import Call, Spec, Tensor, constant, input, op, want

FLOATS = (f32, f16, bf16)


@op()
def cast(x: Tensor, *, dtype: Dtype = f32) -> Spec:
    """x in f32, f16 or bf16, rounded to nearest even; x of any readable type, or i32. ggml_cpy, ggml_cast.

    The gradient is f32 and passes unchanged. f16 carries none.
    """
    want(x.dtype in (*READABLE, i32), f"x is {x.spec}, a type that cannot be read")
    want(dtype in FLOATS, f"dtype is {dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    return Spec(x.shape, dtype)


cast.vjp(lambda dy, y, x, *, dtype: (dy if x.dtype in TRAINABLE else None,))


@cast.kernel("numpy")
def cast_numpy(y, x, *, dtype):
    if dtype == bf16:
        x = _floats(x).astype(np.float32)
        short = np.where(np.isnan(x), 0x7FC0, rounded(x).view(np.uint32) >> 16)
        y[...] = short.astype(np.uint16).view(bf16.numpy)
    else:
        with np.errstate(over="ignore"):  # beyond f16 is infinite
            y[...] = _floats(x)


def _floats(x):
    return x.astype(np.float32) if x.dtype == np.int32 else floats(x)


@cast.kernel("cpu")
def cast_cpu(y, x, *, dtype):
    if (dtype_of(y), dtype_of(x)) == (bf16, f32):
        kernels.cast.narrow(flat(y.view(np.uint16)), flat(x))
    elif (dtype_of(y), dtype_of(x)) == (f32, bf16):
        kernels.cast.widen(flat(y), flat(x.view(np.uint16)))
    else:
        cast_numpy(y, x, dtype=dtype)


@cast.kernel("torch")
def cast_torch(y, x, *, dtype):
    if isinstance(x, Blocks) and dtype == f32:
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
    blocks = np.arange(4 * 2 * 34, dtype=np.uint8).reshape(4, 2, 34)
    blocks[..., :2] = np.float16([0.01]).view(np.uint8)  # scales
    q8_0 = BLOCK_TYPES["q8_0"]
    yield cast(constant("w", blocks.view(q8_0.numpy)[..., 0], q8_0))


def widens(call: Call | None) -> bool:
    """Whether a call only reads what was stored in bf16 back: there is no need to keep its result."""
    return call is not None and call.op is cast and call.reads[0].dtype == bf16


def add_cast(a: Tensor, b: Tensor) -> Tensor:
    """y = a + b in f32, a of any readable type. ggml_add_cast."""
    return add(a, b)
