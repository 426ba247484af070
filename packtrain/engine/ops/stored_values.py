"""Quantized weights with a low-rank addition, as they will be stored: the scales that they have, other codes.

For training that sees what will be in the file. Gradients pass the rounding as if it were not there (straight-through
estimator; Bengio et al. 2013, arXiv 1308.3432). Rounding to the nearest alone would leave small additions without
effect: codes are whole. So each code is first moved by its own fixed part of a step, up to DITHER to either side, and
the share of the codes that change is the addition in steps (dithering; Roberts 1962).
"""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import RECODABLE, dtype_of, f32
from packtrain.dtypes.recode import PLACES, TABLES, UNIT
from packtrain.engine.ops import costs
from packtrain.engine.ops.arrays import packed, want_precision
from packtrain.engine.ops.cast import widens
from packtrain.engine.ops.elementwise import scale
from packtrain.engine.ops.matmul import (
    matmul,
    matmul_back,
    matmul_cost,
    matmul_cpu,
    matmul_numpy,
    matmul_torch,
    out_prod,
)
from packtrain.engine.ops.shape import transpose
from packtrain.engine.ops.torch_kernels import CHUNK, Blocks, blocks, spans, torch
from packtrain.engine.tensor import Call, Spec, Tensor, constant, input, op, want
from packtrain.kernels.quantized_arrays import dequantize

DITHER = 0.4995  # less than half: without an addition no code changes, whatever the rounding errors
TURN, PARTS = 2654435761, 1 << 12  # as in kernels.recoding


@cache
def moved(dither: float) -> np.ndarray:
    """By which part of a step codes are moved: PARTS f32 from -dither to dither, and 256 of them again."""
    z = np.arange(1, PARTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return np.concatenate((uniform, uniform[:256])) * np.float32(dither)


# ---- w + B A in the blocks of w ----------------------------------------------------------------------------------


@op()
def stored_sum(
    w: Tensor, a: Tensor, b: Tensor, *, by: float, first: int = 0, dither: float = DITHER
) -> Spec:
    """w + by * b @ a as it can be stored in the blocks of w, with their scales: the nearest codes.

    w  (N, K)  a type whose codes can be chosen anew
    a  (R, K)  f32
    b  (N, R)  f32
    y  (N, K)  the type of w

    first   the number of the first row in a larger matrix, of which w has some rows
    dither  each code is first moved by a fixed part of a step, up to this to either side
    """
    want(
        w.dtype in RECODABLE and len(w.shape) == 2, f"w is {w.spec}; it must be a matrix in blocks"
    )
    want(a.dtype == f32 and b.dtype == f32, f"a is {a.spec} and b is {b.spec}; both must be f32")
    (n, k), rank = w.shape, a.shape[0]
    fits = a.shape == (rank, k) and b.shape == (n, rank)
    want(
        fits, f"a is {a.spec} and b is {b.spec}; for w {w.spec} they must be [R, {k}] and [{n}, R]"
    )
    return Spec(w.shape, w.dtype)


@stored_sum.kernel("numpy")
def stored_sum_numpy(y, w, a, b, *, by, first, dither):
    values = dequantize(w).astype(a.dtype) + by * (b @ a)
    row_offset = np.arange(first, first + len(w))[:, None] * TURN >> 8
    parts = moved(dither)[(row_offset + np.arange(a.shape[1])) & (PARTS - 1)]
    y[...] = _recoded(w, values.reshape(*w.shape, -1), parts.reshape(*w.shape, -1))


def _recoded(w, values, parts):
    dtype = dtype_of(w)
    raw, at = w.view(np.uint8).reshape(*w.shape, -1), PLACES[dtype]
    bits = np.unpackbits(raw, axis=-1, bitorder="little")

    def with_codes(codes):
        bits[..., at] = codes[..., None] >> np.arange(at.shape[1]) & 1
        packed_bytes = np.packbits(bits, axis=-1, bitorder="little")
        return packed_bytes.view(dtype.numpy)[..., 0]

    def all_of(code):
        return dequantize(with_codes(np.full(values.shape, code))).reshape(values.shape)

    codes = _nearest(dtype, values, parts, all_of, np.where, np.rint, np.clip)
    return with_codes(codes.astype(np.int64))


def _nearest(dtype, values, parts, all_of, select, rint, clip):
    """The codes of NumPy's or PyTorch's values; all_of gives the values of blocks that have one code throughout."""
    if dtype in TABLES:
        step, codes = all_of(UNIT), 0
        v, table = values / select(step == 0, 1.0, step), TABLES[dtype].tolist()
        for at, (low, high) in enumerate(pairwise(table)):
            share = (v - low) / (high - low) + parts
            inside = v > low if at else v == v
            codes = select(inside, at + select(share > 0.5, 1.0, 0.0), codes)
        return codes
    low, max_code = all_of(0), (1 << PLACES[dtype].shape[1]) - 1
    step, signed = all_of(1) - low, max_code == 255
    rounded_codes = rint((values - low) / select(step == 0, 1.0, step) + parts)
    return clip(rounded_codes, -127, 127) if signed else clip(rounded_codes, 0, max_code)


@stored_sum.kernel("cpu")
def stored_sum_cpu(y, w, a, b, *, by, first, dither):
    kind, rows = packed(w)
    kernels.recoding.add(packed(y)[1], rows, kind, a, b, by, moved(dither), first)


def stored_rows(w: np.ndarray, a: np.ndarray, b: np.ndarray, by: float, first: int) -> np.ndarray:
    """Rows of the result, of w and b from row `first` on, on the cpu: the same bits as in a run."""
    y, (kind, rows) = np.empty_like(w), packed(w)
    compiled: Any = kernels
    compiled.recoding.add(packed(y)[1], rows, kind, a, b, by, moved(DITHER), first)
    return y


@stored_sum.kernel("torch")
def stored_sum_torch(y, w, a, b, *, by, first, dither):
    (n, k), dtype = w.shape, w.dtype
    table = torch.tensor(moved(dither).tolist(), device=a.device)
    columns = torch.arange(k, device=a.device)
    for start, end in spans(n, CHUNK // (8 * k), a):
        part = w[start:end]
        row_offset = torch.arange(first + start, first + end, device=a.device)[:, None] * TURN >> 8
        parts = table[(row_offset + columns) & (PARTS - 1)].view(-1, dtype.block)
        values = torch.empty((end - start, k), dtype=torch.float32, device=a.device)
        blocks().unpack(values, part)
        values.addmm_(b[start:end], a, alpha=by)
        raw = part.raw.reshape(-1, dtype.block_nbytes)
        recoded = _recoded_torch(dtype, raw, values.view(-1, dtype.block), parts)
        y.raw[start:end].copy_(recoded.view(y.raw[start:end].shape))


def _recoded_torch(dtype, raw, values, parts):
    at = torch.tensor(PLACES[dtype].tolist(), device=raw.device)
    eight = torch.arange(8, dtype=torch.uint8, device=raw.device)
    bits = (raw[..., None] >> eight & 1).flatten(1)
    inside = torch.arange(at.shape[1], device=raw.device)

    def with_codes(codes):
        bits[:, at] = (codes[..., None] >> inside & 1).to(torch.uint8)
        return (bits.view(*raw.shape, 8) << eight).sum(-1, dtype=torch.uint8)

    def all_of(code):
        y = torch.empty_like(values)
        blocks().unpack(y, Blocks(with_codes(torch.full_like(values, code).int()), dtype))
        return y

    return with_codes(
        _nearest(dtype, values, parts, all_of, torch.where, torch.round, torch.clip).int()
    )


@stored_sum.cost
def stored_sum_cost(y, w, a, b, *, by, first, dither):
    n, k = w.shape
    work = {"multiply": costs.multiplied(n, k, a.shape[0]), costs.laying(w.dtype): 4.0 * n * k}
    return costs.Cost(work)


@stored_sum.samples
def stored_sum_samples():
    for dtype in RECODABLE:
        w = _blocks(dtype, 9, 2 if dtype.block > 32 else 10)
        a, b = input("a", (3, w.shape[1])), input("b", (9, 3))
        yield stored_sum(w, a, b, by=0.01)
    yield stored_sum(w, a, b, by=0.5, first=5000, dither=0.0)


def _blocks(dtype, rows, count):
    """Random bits between small scales."""
    random = np.random.default_rng(dtype.number)
    bits = random.integers(0, 256, (rows, count, dtype.block_nbytes), np.uint8)
    free = np.setdiff1d(np.arange(dtype.block_nbytes), PLACES[dtype] // 8)
    bits[..., free] &= 0x2F  # halves of at most 0.12
    return constant("w", bits.view(dtype.numpy)[..., 0], dtype)


# ---- products with it --------------------------------------------------------------------------------------------


@op(inplace=(4,), acc=4)
def matmul_stored(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, acc: Tensor | None = None, *, by: float,
    precision: str = "f32",
) -> Spec:  # fmt: skip
    """y = x @ w.T (+ acc), where w is the stored sum of a weight and by * b @ a; gradients are those of the exact sum.

    x    (..., K)  f32
    w    (N, K)    what `stored_sum` gives
    a    (R, K)    f32, gets a gradient
    b    (N, R)    f32, gets a gradient
    acc  (..., N)  f32
    y    (..., N)  f32
    """
    want_precision(precision)
    want(x.dtype == f32, f"x is {x.spec}; it must be f32")
    want(
        w.dtype in RECODABLE and len(w.shape) == 2, f"w is {w.spec}; it must be a matrix in blocks"
    )
    want(x.shape[-1:] == w.shape[1:], f"last axis of x {x.spec} must equal that of w {w.spec}")
    rank = (*a.shape, 0)[0]
    fits = a.shape == (rank, w.shape[1]) and b.shape == (w.shape[0], rank)
    want(fits, f"a is {a.spec} and b is {b.spec}; they must be the factors of w {w.spec}")
    y = Spec((*x.shape[:-1], w.shape[0]))
    want(acc is None or acc.spec == y, f"acc is {acc and acc.spec}; it must be {y}")
    return y


@matmul_stored.vjp
def matmul_stored_vjp(dy, y, x, w, a, b, acc, *, by, precision):
    attrs = {"precision": precision}
    low = scale(matmul(x, a, **attrs), by=by)
    back = scale(matmul(dy, transpose(b), **attrs), by=by)
    da, db = out_prod(back, x, **attrs), out_prod(dy, low, **attrs)
    return matmul_back(dy, w, **attrs), None, da, db, (None if acc is None else dy)


@matmul_stored.kernel("numpy")
def matmul_stored_numpy(y, x, w, a, b, acc, *, by, precision):
    matmul_numpy(y, x, w, acc, precision)


@matmul_stored.kernel("cpu")
def matmul_stored_cpu(y, x, w, a, b, acc, *, by, precision):
    return matmul_cpu(y, x, w, acc, precision)


@matmul_stored.kernel("torch")
def matmul_stored_torch(y, x, w, a, b, acc, *, by, precision):
    matmul_torch(y, x, w, acc, precision)


@matmul_stored.cost
def matmul_stored_cost(y, x, w, a, b, acc, *, by, precision):
    return matmul_cost(y, x, w, acc, precision)


@matmul_stored.samples
def matmul_stored_samples():
    for dtype, count in ((RECODABLE[0], 4), (RECODABLE[-1], 1)):
        w = _blocks(dtype, 5, count)
        a, b = input("a", (3, w.shape[1])), input("b", (5, 3))
        yield matmul_stored(input("x", (2, 3, w.shape[1])), w, a, b, by=0.5)
        yield matmul_stored(
            input("x", (3, w.shape[1])), w, a, b, input("acc", (3, 5)), by=0.5, precision="f32"
        )


def reads_again(call: Call | None) -> bool:
    """Whether a call gives what is stored, in another form: its result need not be kept for the backward pass."""
    return widens(call) or (call is not None and call.op is stored_sum)
