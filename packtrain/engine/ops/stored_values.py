"""Adds a low-rank product to quantized weights in their own blocks: scales stay, codes change.

Training then sees what the file will hold. Gradients pass the rounding as if it were not there (straight-through
estimator; Bengio et al. 2013, arXiv 1308.3432). Rounding to the nearest alone would leave small additions without
effect: codes are whole. So each code is first moved by its own fixed part of a step, up to DITHER to either side, and
the share of the codes that change is the addition in steps (dithering; Roberts 1962).
"""

from functools import cache
from itertools import pairwise

import numpy as np

from packtrain import kernels
from packtrain.dtypes import RECODABLE, dtype_of, f32
from packtrain.dtypes.recode import CODE_BIT_NUMBERS, CODE_VALUES, UNIT_CODE
from packtrain.engine.ops import costs
from packtrain.engine.ops.arrays import check_precision, packed
from packtrain.engine.ops.elementwise import rereads_bf16_weight, scale
from packtrain.engine.ops.matmul import matmul, matmul_back, out_prod
from packtrain.engine.ops.shape import transpose
from packtrain.engine.ops.torch_kernels import CHUNK, BlockArray, blocks, chunk_bounds, torch
from packtrain.engine.tensor import Call, Spec, Tensor, constant, input, op, require
from packtrain.kernels.quant.quantized_arrays import dequantize

DITHER = 0.4995  # less than half: without an addition no code changes, whatever the rounding errors
TURN, NUM_OFFSETS = 2654435761, 1 << 12  # ROW_HASH and NOISE_PERIOD of kernels.requantize


@cache
def moved(dither: float) -> np.ndarray:
    """Return what is added to codes before rounding (dither): NUM_OFFSETS f32 within ±dither, the first 256 twice."""
    z = np.arange(1, NUM_OFFSETS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return np.concatenate((uniform, uniform[:256])) * np.float32(dither)


# ---- w + B A in the blocks of w ----------------------------------------------------------------------------------


@op()
def stored_sum(
    w: Tensor, a: Tensor, b: Tensor, *, by: float, first: int = 0, dither: float = DITHER
) -> Spec:
    """Compute w + by * b @ a in the blocks of w, with their scales and the nearest codes.

    w  (N, K)  a type whose codes can be chosen anew
    a  (R, K)  f32
    b  (N, R)  f32
    y  (N, K)  the type of w

    first   index of w's first row in a larger matrix, of which w has some rows
    dither  each code is first moved by a fixed part of a step, up to this to either side
    """
    fact = f"w is {w.spec}; it must be a matrix in blocks"
    require(w.dtype in RECODABLE and len(w.shape) == 2, fact)
    require(a.dtype == f32 and b.dtype == f32, f"a is {a.spec} and b is {b.spec}; both must be f32")
    (n, k), rank = w.shape, a.shape[0]
    fits = a.shape == (rank, k) and b.shape == (n, rank)
    fact = f"a is {a.spec} and b is {b.spec}; for w {w.spec} they must be [R, {k}] and [{n}, R]"
    require(fits, fact)
    return Spec(w.shape, w.dtype)


@stored_sum.kernel("numpy")
def stored_sum_numpy(y, w, a, b, *, by, first, dither):
    target_values = dequantize(w).astype(a.dtype) + by * (b @ a)
    row_offset = np.arange(first, first + len(w))[:, None] * TURN >> 8
    offsets = moved(dither)[(row_offset + np.arange(a.shape[1])) & (NUM_OFFSETS - 1)]
    y[...] = _recode_numpy(w, target_values.reshape(*w.shape, -1), offsets.reshape(*w.shape, -1))


def _recode_numpy(w, values, offsets):
    dtype = dtype_of(w)
    raw_bytes, bit_positions = w.view(np.uint8).reshape(*w.shape, -1), CODE_BIT_NUMBERS[dtype]
    bits = np.unpackbits(raw_bytes, axis=-1, bitorder="little")

    def with_codes(codes):
        bits[..., bit_positions] = codes[..., None] >> np.arange(bit_positions.shape[1]) & 1
        packed_bytes = np.packbits(bits, axis=-1, bitorder="little")
        return packed_bytes.view(dtype.numpy)[..., 0]

    def all_of(code):
        return dequantize(with_codes(np.full(values.shape, code))).reshape(values.shape)

    codes = _nearest_codes(dtype, values, offsets, all_of, np.where, np.rint, np.clip)
    return with_codes(codes.astype(np.int64))


def _nearest_codes(dtype, values, offsets, all_of, select, rint, clip):
    """Return the codes nearest to `values`, moved by `offsets` of a step; all_of(code): what blocks filled with a code
    stand for; select, rint and clip: NumPy's or PyTorch's where, rounding and clip."""
    if dtype in CODE_VALUES:
        step, codes = all_of(UNIT_CODE), 0
        v, code_values = values / select(step == 0, 1.0, step), CODE_VALUES[dtype].tolist()
        for code_index, (low, high) in enumerate(pairwise(code_values)):
            fraction = (v - low) / (high - low) + offsets
            is_above = v > low if code_index else v == v
            codes = select(is_above, code_index + select(fraction > 0.5, 1.0, 0.0), codes)
        return codes
    low, max_code = all_of(0), (1 << CODE_BIT_NUMBERS[dtype].shape[1]) - 1
    step, is_signed = all_of(1) - low, max_code == 255
    rounded_codes = rint((values - low) / select(step == 0, 1.0, step) + offsets)
    return clip(rounded_codes, -127, 127) if is_signed else clip(rounded_codes, 0, max_code)


@stored_sum.kernel("cpu")
def stored_sum_cpu(y, w, a, b, *, by, first, dither):
    type_number, weight_rows = packed(w)
    kernels.requantize.add(packed(y)[1], weight_rows, type_number, a, b, by, moved(dither), first)


def stored_rows(w: np.ndarray, a: np.ndarray, b: np.ndarray, by: float, first: int) -> np.ndarray:
    """Return w + by * b @ a rounded into the blocks of w as training rounds it; w and b are rows from `first` on."""
    y = np.empty_like(w)
    stored_sum_cpu(y, w, a, b, by=by, first=first, dither=DITHER)
    return y


@stored_sum.kernel("torch")
def stored_sum_torch(y, w, a, b, *, by, first, dither):
    (n, k), dtype = w.shape, w.dtype
    offset_table = torch.tensor(moved(dither).tolist(), device=a.device)
    columns = torch.arange(k, device=a.device)
    for start, end in chunk_bounds(n, CHUNK // (8 * k), a):
        row_blocks = w[start:end]
        row_offset = torch.arange(first + start, first + end, device=a.device)[:, None] * TURN >> 8
        offsets = offset_table[(row_offset + columns) & (NUM_OFFSETS - 1)].view(-1, dtype.block)
        target_values = torch.empty((end - start, k), dtype=torch.float32, device=a.device)
        blocks().unpack(target_values, row_blocks)
        target_values.addmm_(b[start:end], a, alpha=by)
        raw_bytes = row_blocks.raw.reshape(-1, dtype.block_nbytes)
        recoded = _recode_torch(dtype, raw_bytes, target_values.view(-1, dtype.block), offsets)
        y.raw[start:end].copy_(recoded.view(y.raw[start:end].shape))


def _recode_torch(dtype, raw, values, offsets):
    bit_positions = torch.tensor(CODE_BIT_NUMBERS[dtype].tolist(), device=raw.device)
    byte_bits = torch.arange(8, dtype=torch.uint8, device=raw.device)
    bits = (raw[..., None] >> byte_bits & 1).flatten(1)
    code_bits = torch.arange(bit_positions.shape[1], device=raw.device)

    def with_codes(codes):
        bits[:, bit_positions] = (codes[..., None] >> code_bits & 1).to(torch.uint8)
        return (bits.view(*raw.shape, 8) << byte_bits).sum(-1, dtype=torch.uint8)

    def all_of(code):
        y = torch.empty_like(values)
        blocks().unpack(y, BlockArray(with_codes(torch.full_like(values, code).int()), dtype))
        return y

    return with_codes(
        _nearest_codes(dtype, values, offsets, all_of, torch.where, torch.round, torch.clip).int()
    )


@stored_sum.cost
def stored_sum_cost(y, w, a, b, *, by, first, dither):
    n, k = w.shape
    work = {"multiply": costs.multiplied(n, k, a.shape[0]), costs.pack_kind(w.dtype): 4.0 * n * k}
    return costs.Cost(work)


@stored_sum.samples
def stored_sum_samples():
    for dtype in RECODABLE:
        w = _sample_blocks(dtype, 9, 2 if dtype.block > 32 else 10)
        a, b = input("a", (3, w.shape[1])), input("b", (9, 3))
        yield stored_sum(w, a, b, by=0.01)
    yield stored_sum(w, a, b, by=0.5, first=5000, dither=0.0)


def _sample_blocks(dtype, num_rows, count):
    """Return a sample weight of `num_rows` rows of `count` blocks of a type, with random bits and small scales."""
    random = np.random.default_rng(dtype.number)
    bits = random.integers(0, 256, (num_rows, count, dtype.block_nbytes), np.uint8)
    scale_bytes = np.setdiff1d(np.arange(dtype.block_nbytes), CODE_BIT_NUMBERS[dtype] // 8)
    bits[..., scale_bytes] &= 0x2F  # halves of at most 0.12
    return constant("w", bits.view(dtype.numpy)[..., 0], dtype)


# ---- products with stored sums------------------------------------------------------------------------------------


@op(inplace=(4,), acc=4)
def matmul_stored(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, acc: Tensor | None = None, *, by: float,
    precision: str = "f32",
) -> Spec:  # fmt: skip
    """y = x @ w.T (+ acc), where w is the stored sum of a weight and by * b @ a; gradients are those of the exact sum.

    x    (..., K)  f32
    w    (N, K)    a result of `stored_sum`
    a    (R, K)    f32, gets a gradient
    b    (N, R)    f32, gets a gradient
    acc  (..., N)  f32
    y    (..., N)  f32
    """
    check_precision(precision)
    require(x.dtype == f32, f"x is {x.spec}; it must be f32")
    fact = f"w is {w.spec}; it must be a matrix in blocks"
    require(w.dtype in RECODABLE and len(w.shape) == 2, fact)
    require(x.shape[-1:] == w.shape[1:], f"last axis of x {x.spec} must equal that of w {w.spec}")
    rank = (*a.shape, 0)[0]
    is_valid = a.shape == (rank, w.shape[1]) and b.shape == (w.shape[0], rank)
    require(is_valid, f"a is {a.spec} and b is {b.spec}; they must be the factors of w {w.spec}")
    return Spec((*x.shape[:-1], w.shape[0])).require(acc=acc)


@matmul_stored.vjp
def matmul_stored_vjp(dy, y, x, w, a, b, acc, *, by, precision):
    attrs = {"precision": precision}
    low_rank_x = scale(matmul(x, a, **attrs), by=by)
    low_rank_dy = scale(matmul(dy, transpose(b), **attrs), by=by)
    da, db = out_prod(low_rank_dy, x, **attrs), out_prod(dy, low_rank_x, **attrs)
    return matmul_back(dy, w, **attrs), None, da, db, (None if acc is None else dy)


def _without_factors(matmul_rule):
    """Return a kernel or cost of matmul as one of matmul_stored, which ignores a and b: w holds their sum already."""
    return lambda y, x, w, a, b, acc, *, by, precision: matmul_rule(y, x, w, acc, precision)


for _backend in ("numpy", "cpu", "torch"):
    matmul_stored.kernel(_backend)(_without_factors(matmul.kernels[_backend].run))
matmul_stored.cost(_without_factors(matmul.cost_rule))


@matmul_stored.samples
def matmul_stored_samples():
    for dtype, num_blocks in ((RECODABLE[0], 4), (RECODABLE[-1], 1)):
        w = _sample_blocks(dtype, 5, num_blocks)
        a, b = input("a", (3, w.shape[1])), input("b", (5, 3))
        yield matmul_stored(input("x", (2, 3, w.shape[1])), w, a, b, by=0.5)
        yield matmul_stored(
            input("x", (3, w.shape[1])), w, a, b, input("acc", (3, 5)), by=0.5, precision="f32"
        )


def rereads_stored_weight(call: Call | None) -> bool:
    """Whether a call only converts or rounds a stored weight, so that the backward pass need not save its result."""
    return rereads_bf16_weight(call) or (call is not None and call.op is stored_sum)
