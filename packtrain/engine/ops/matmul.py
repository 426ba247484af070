"""Matrix products, with weights in any readable type."""

import math
from functools import partial

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, ROUNDABLE, TRAINABLE, bf16, dtype_of, f16, f32
from packtrain.engine.ops import arrays, costs, torch_kernels
from packtrain.engine.ops.arrays import num_bf16_terms, packed, rows, run_replayable
from packtrain.engine.ops.reduce import sum_like
from packtrain.engine.ops.shape import transpose
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require
from packtrain.kernels.runtime.environment import has_cpu_feature

MAX_INTEGER_ROWS = 8  # most rows whose products with packed weights are summed in integers
PLANES = 3  # of 8 bits, which make up an integer


def is_matrix(index: int, t: Tensor) -> bool:
    """Whether a kernel reads input `index` without a copy: w (1) if an f32 matrix, one of its axes contiguous."""
    if index != 1 or t.spec.dtype != f32:
        return False
    (row, column), (n, k) = t.strides[-2:], t.spec.shape[-2:]
    return (column == 4 and row >= 4 * k) or (row == 4 and column >= 4 * n)


@op(inplace=(2,), acc=2)
def matmul(x: Tensor, w: Tensor, acc: Tensor | None = None, *, precision: str = "f32") -> Spec:
    """Multiply rows of x by rows of w: y = x @ w.T (+ acc). ggml_mul_mat.

    x    (..., K)   f32
    w    (N, K)     any readable type; f32 may be a transposed view, or (..., N, K): leading axes broadcast
    acc  (..., N)   f32
    y    (..., N)   f32

    precision  bf16 rounds x and w to it, for gradients too, and sums in f32; for CPUs with AVX512_BF16.
               bf16x3 takes them as sums of two bf16, and leaves out the least product; for CPUs with AMX
    """
    if precision != "f32":
        arrays.check_precision(precision)
    x_shape, w_shape = x.spec.shape, w.spec.shape
    require(x.spec.dtype == f32, "x is {}; it must be f32", x)
    _check_readable(w)
    fact = "x is {} and w is {}; w needs two axes, and x too where w has more"
    require(len(w_shape) >= 2 and 1 <= len(x_shape) >= min(len(w_shape) - 1, 2), fact, x, w)
    fact = f"last axis of x {{}} ({x_shape[-1]}) must equal last axis of w {{}} ({w_shape[-1]})"
    require(x_shape[-1] == w_shape[-1], fact, x, w)
    leading_shape = x_shape[:-2] if len(w_shape) == 2 else _leading_shape(x, w)
    spec = Spec((*leading_shape, *x_shape[-2:-1], w_shape[-2]))
    return spec if acc is None else spec.require(acc=acc)


def _leading_shape(x: Tensor, w: Tensor) -> tuple[int, ...]:
    """Return the axes of the result before rows and columns, where w has more than two axes."""
    try:
        return np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    except ValueError:
        require(False, f"leading axes of x {x.spec} and w {w.spec} do not broadcast")
        raise


def _check_readable(w: Tensor) -> None:
    dtype = w.spec.dtype
    if dtype != f32 and (dtype not in READABLE or len(w.spec.shape) != 2):
        require(False, "w is {}; it must be f32, or a matrix of a type that can be read", w)


@matmul.vjp
def matmul_vjp(dy, y, x, w, acc, **attrs):
    # dw is written first: the saved x dies before dx is computed, which lowers the bound of plans with recomputation by
    # 2 to 13 %
    dtype, dw = w.spec.dtype, None
    if dtype in TRAINABLE and len(w.spec.shape) > 2:
        dw = sum_like(matmul(transpose(dy), transpose(x), **attrs), w)
    elif dtype in TRAINABLE:
        dw = out_prod(dy, x, **attrs)
    is_f32 = dtype == f32
    dx = sum_like(matmul(dy, transpose(w), **attrs), x) if is_f32 else matmul_back(dy, w, **attrs)
    return dx, dw, (None if acc is None else dy)


@matmul.kernel("numpy")
def matmul_numpy(y, x, w, acc, precision):
    product = arrays.times(x, np.swapaxes(arrays.floats(w), -1, -2), precision)
    y[...] = product if acc is None else product + acc


@matmul.kernel("cpu", strided=is_matrix)
def matmul_cpu(y, x, w, acc, precision, work=()):
    options = acc is not None, num_bf16_terms(precision)
    copy = arrays.copy_acc(y, acc)
    if w.ndim == 2:
        return arrays.replay_after(copy, _run_product(rows(y), rows(x), w, options, work))
    leading_shape = y.shape[:-2]
    x, w = (np.broadcast_to(t, (*leading_shape, *t.shape[-2:])) for t in (x, w))
    for index in np.ndindex(leading_shape):
        kernels.matmul_f32.product(y[index], x[index], w[index].T, *options)
    return None


def matmul_torch(y, x, w, acc, precision, unpack_size=torch_kernels.CHUNK):
    if w.ndim > 2:
        product = arrays.times(x, w.mT, precision)
        y.copy_(product if acc is None else product.add_(acc))
        return
    options = {"fresh": torch_kernels.start_product(y, acc), "unpack_size": unpack_size}
    torch_kernels.add_product(rows(y), rows(x), w, precision, **options)


matmul.kernel("torch", strided=is_matrix)(matmul_torch)
matmul.kernel("cuda", strided=is_matrix)(partial(matmul_torch, unpack_size=torch_kernels.LARGE))


def _run_product(y, x, w, options, work):
    if w.dtype == np.float32:
        return run_replayable(kernels.matmul_f32.product, y, x, w.T, *options)
    if work:
        return run_replayable(kernels.rounded.product, y, x, *packed(w), options[0], PLANES, *work)
    return run_replayable(kernels.packed.product, y, x, *packed(w), *options)


@matmul.workspace("cpu")
def matmul_workspace(x, w, acc, precision):
    w_spec, num_values = w.spec, math.prod(x.spec.shape)
    has_few_rows = num_values <= MAX_INTEGER_ROWS * w_spec.shape[-1] and precision == "f32"
    if not has_few_rows or w_spec.dtype not in ROUNDABLE:
        return ()
    # without VNNI, products with signed codes are faster in f32
    is_faster = has_cpu_feature("avx512vnni") or not w.dtype.code["codes"].is_signed
    return (arrays.integers_of(x, PLANES),) if is_faster else ()


@matmul.cost
def matmul_cost(y, x, w, acc, precision):
    y_shape = y.spec.shape
    m, num_products = math.prod(y_shape) // max(w.spec.shape[-2], 1), math.prod(y_shape[:-2])
    return costs.at(precision, costs.weight_product_cost(m, w, num_products))


@matmul.samples
def matmul_samples():
    shapes = (1, 1, 1), (3, 15, 16), (17, 64, 63), (9, 65, 33), (70, 300, 129), (130, 1100, 129)
    for m, n, k in (*shapes, (1, 65, 17), (2, 700, 65), (4, 17, 256)):
        yield matmul(input("x", (m, k)), input("w", (n, k)))
    yield matmul(input("x", (2, 3, 16)), transpose(input("w", (16, 8))))
    yield matmul(input("x", (5, 7)), input("w", (9, 7)), input("acc", (5, 9)))
    yield matmul(input("x", (2, 3, 5, 8)), input("w", (2, 3, 4, 8)))
    yield matmul(input("x", (2, 3, 5, 8)), input("w", (2, 1, 4, 8)))
    yield matmul(input("x", (5, 8)), input("w", (3, 4, 8)))
    yield matmul(input("x", (2, 5, 8)), transpose(input("w", (2, 8, 4))), input("acc", (2, 5, 4)))
    yield matmul(transpose(input("x", (8, 5))), input("w", (3, 8)))
    for shape, w in zip(((2, 3), (300,), (1,), (5,)), _packed_weights(), strict=True):
        yield matmul(input("x", (*shape, w.shape[1])), w)
    yield matmul(input("x", (3, 768)), w, input("acc", (3, 40)))


def _packed_weights():
    """Yield sample weights, one of each kind of storage: f16, bf16, and blocks of two sizes."""
    random = np.random.default_rng(1)
    yield constant("w", random.standard_normal((17, 33)).astype(np.float16), f16)
    high_halves = random.standard_normal((300, 270)).astype(np.float32).view(np.uint16)[:, 1::2]
    yield constant("w", np.ascontiguousarray(high_halves).view(bf16.numpy), bf16)
    for name, blocks_shape in (("q4_K", (300, 3)), ("q8_0", (40, 24))):
        bits = random.integers(0, 256, (*blocks_shape, BLOCK_TYPES[name].block_nbytes), np.uint8)
        bits[..., :4] = np.float16([0.01, 0.02]).view(np.uint8)  # scales
        yield constant("w", bits.view(BLOCK_TYPES[name].numpy)[..., 0], BLOCK_TYPES[name])


@op(inplace=(2,), acc=2)
def matmul_back(
    dy: Tensor, w: Tensor, acc: Tensor | None = None, *, precision: str = "f32"
) -> Spec:
    """Gradient of matmul for x where w is quantized: dx = dy @ w (+ acc).

    dy   (..., N)   f32
    w    (N, K)     any readable type
    acc  (..., K)   f32
    dx   (..., K)   f32
    """
    arrays.check_precision(precision)
    require(dy.dtype == f32, f"dy is {dy.spec}; it must be f32")
    _check_readable(w)
    fact = f"last axis of dy {dy.spec} must equal first of w {w.spec}"
    require(dy.shape[-1:] == w.shape[:1], fact)
    return Spec((*dy.shape[:-1], w.shape[1])).require(acc=acc)


@matmul_back.vjp
def matmul_back_vjp(ddx, dx, dy, w, acc, **attrs):
    dw = out_prod(dy, ddx, **attrs) if w.dtype in TRAINABLE else None
    return matmul(ddx, w, **attrs), dw, (None if acc is None else ddx)


@matmul_back.kernel("numpy")
def matmul_back_numpy(dx, dy, w, acc, precision):
    product = arrays.times(dy, arrays.floats(w), precision)
    dx[...] = product if acc is None else product + acc


@matmul_back.kernel("cpu")
def matmul_back_cpu(dx, dy, w, acc, precision):
    copy = arrays.copy_acc(dx, acc)
    args = rows(dx), rows(dy), dtype_of(w).block, *packed(w)
    options = acc is not None, num_bf16_terms(precision)
    return arrays.replay_after(copy, run_replayable(kernels.packed.product_back, *args, *options))


@matmul_back.kernel("torch")
def matmul_back_torch(dx, dy, w, acc, precision, unpack_size=torch_kernels.CHUNK):
    options = {"fresh": torch_kernels.start_product(dx, acc), "unpack_size": unpack_size}
    torch_kernels.add_product_back(rows(dx), rows(dy), w, precision, **options)


matmul_back.kernel("cuda")(partial(matmul_back_torch, unpack_size=torch_kernels.LARGE))


@matmul_back.cost
def matmul_back_cost(dx, dy, w, acc, precision):
    return costs.at(precision, costs.weight_product_back_cost(dy.spec.size // w.shape[0], w))


@matmul_back.samples
def matmul_back_samples():
    yield matmul_back(input("dy", (3, 5)), input("w", (5, 256)))
    for w in _packed_weights():
        yield matmul_back(input("dy", (2, 3, w.shape[0])), w)
    yield matmul_back(input("dy", (300, 40)), w, input("acc", (300, 768)))


@op(inplace=(2,), acc=2)
def out_prod(a: Tensor, b: Tensor, acc: Tensor | None = None, *, precision: str = "f32") -> Spec:
    """Sum of outer products over all leading axes: y = a.T @ b (+ acc); a weight's gradient. See outer.

    a    (..., P)   f32
    b    (..., Q)   f32, leading axes as a
    acc  (P, Q)     f32
    y    (P, Q)     f32
    """
    if precision != "f32":
        arrays.check_precision(precision)
    a_shape, b_shape = a.spec.shape, b.spec.shape
    is_f32 = a.spec.dtype == f32 == b.spec.dtype
    require(is_f32, "a is {} and b is {}; both must be f32", a, b)
    fact = "leading axes of a {} and b {} must be equal"
    require(a_shape[:-1] == b_shape[:-1], fact, a, b)
    spec = Spec((a_shape[-1], b_shape[-1]))
    return spec if acc is None else spec.require(acc=acc)


@out_prod.vjp
def out_prod_vjp(dy, y, a, b, acc, **attrs):
    return matmul(b, dy, **attrs), matmul(a, transpose(dy), **attrs), (None if acc is None else dy)


@out_prod.kernel("numpy")
def out_prod_numpy(y, a, b, acc, precision):
    product = arrays.times(rows(a).T, rows(b), precision)
    y[...] = product if acc is None else product + acc


@out_prod.kernel("cpu")
def out_prod_cpu(y, a, b, acc, precision):
    copy = arrays.copy_acc(y, acc)
    options = acc is not None, num_bf16_terms(precision)
    call = run_replayable(kernels.matmul_f32.product, y, rows(a).T, rows(b), *options)
    return arrays.replay_after(copy, call)


@out_prod.kernel("torch")
def out_prod_torch(y, a, b, acc, precision):
    torch_kernels.multiply(y, rows(a).mT, rows(b), torch_kernels.start_product(y, acc), precision)


@out_prod.cost
def out_prod_cost(y, a, b, acc, precision):
    num_rows = math.prod(a.spec.shape[:-1])
    product_cost = costs.f32_product_cost(*y.spec.shape, num_rows, transposed=True)
    return costs.at(precision, product_cost)


@out_prod.samples
def out_prod_samples():
    for r, p, q in ((1, 1, 1), (17, 3, 16), (64, 65, 15), (300, 63, 70), (300, 300, 200)):
        yield out_prod(input("a", (r, p)), input("b", (r, q)))
    yield out_prod(input("a", (2, 3, 5)), input("b", (2, 3, 4)), input("acc", (5, 4)))


def outer(a: Tensor, b: Tensor) -> Tensor:
    """y = a.T @ b of the last two axes; leading axes broadcast. ggml_out_prod.

    a  (..., N, P)  f32, or (N, P) of any readable type
    b  (..., N, Q)  f32
    y  (..., P, Q)  f32
    """
    is_valid = min(len(a.shape), len(b.shape)) >= 2 and a.shape[-2] == b.shape[-2]
    message = f"a is {a.spec} and b is {b.spec}; their last axes but one must be equal"
    arrays.demand("outer", is_valid, message, a, b)
    is_supported = a.dtype == f32 or len(a.shape) == len(b.shape) == 2
    arrays.demand("outer", is_supported, f"a is {a.spec}, b is {b.spec}; matrices are needed", a, b)
    if a.dtype != f32:
        return transpose(matmul_back(transpose(b), a))
    return matmul(transpose(a), transpose(b))
