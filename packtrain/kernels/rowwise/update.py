"""Run optimizer steps in one pass over weight, gradient and state.

A weight is passed as bytes: f32, or bf16, of which a part at a time is converted, updated and rounded stochastically.
"""

import math

from numba import njit

from packtrain.kernels.quant.dequantize import F32, row
from packtrain.kernels.rowwise.elementwise import uniform
from packtrain.kernels.runtime.jit import each_task, kernel, parallel, part
from packtrain.kernels.runtime.kernel_types import f32, f64, i64
from packtrain.kernels.simd.simd_f32 import (
    I32, LANES, absolute, address, fma, largest, load, load_part, maximum, peek, poke, scratch, splat, sqrt, store,
    store_part, total,
)  # fmt: skip
from packtrain.kernels.simd.simd_i32 import (
    I16, byte_at, char_at, i32x16, put_byte, put_short, reading, short_at, to_bits, vector16, word_at,
    writing_intrinsic,
)  # fmt: skip

SERIAL = 1 << 13
VALUES_PER_RUN = 8 * LANES  # products added in f32 lanes before they go to f64
CODED_BLOCK = 256  # values that share a scale in 8 bits
FIRST_CODED = 103 << 7  # upper 16 bits of 2^-24
PART_SIZE = 1 << 10  # elements of a bf16 weight converted to f32 at a time

words_at = reading(vector16(I32), i32x16, lambda builder, v: v)
put_shorts = writing_intrinsic(i32x16, lambda builder, v: builder.trunc(v, vector16(I16)))


@kernel("i64, i64, i64, i64, i64")
def round_at_random(w, part_ptr, key, first_element, n):
    """Round n f32 at `part_ptr`, elements `first_element` … of a tensor, to bf16 at `w`; overwrites `part_ptr`.

    Stochastic rounding: 16 random bits are added to the 16 that are dropped, and the carry is kept. Vectors of bits
    have no addition, so the random ones are negated.
    """
    for i in range(0, n, LANES):
        noise_bits = to_bits(uniform(key, first_element + i) * -65536.0)
        rounded_bits = (words_at(part_ptr, i) - noise_bits) >> 16
        if n - i >= LANES:
            put_shorts(w, i, rounded_bits)
        else:
            put_shorts(part_ptr, 0, rounded_bits)
            for k in range(n - i):
                put_short(w, i + k, short_at(part_ptr, k))


@njit(inline="always")
def update_parts(update_span, args, qtype, w, gate, key, span_start, span_stop):
    """Call update_span(address of f32 weights, *args, gate, start, stop) on w; bf16 (`qtype`) is converted in parts."""
    factor = gate[0] if gate.size else f32(1.0)
    if not math.isfinite(factor):
        return
    if qtype == F32:
        update_span(w.ctypes.data, *args, factor, span_start, span_stop)
        return
    part_ptr = scratch(PART_SIZE)
    for i in range(span_start, span_stop, PART_SIZE):
        weight_ptr, part_length = w.ctypes.data + 2 * i, min(PART_SIZE, span_stop - i)
        row(qtype, part_ptr, weight_ptr, part_length)
        update_span(part_ptr - 4 * i, *args, factor, i, i + part_length)
        round_at_random(weight_ptr, part_ptr, key, i, part_length)


@kernel("i64, in1, out1, out1, in1, f32, f32, i64, i64")
def adamw_span(w, g, m, v, hyper, decay, gate, span_start, span_stop):
    """Update f32 weights at address w, elements span_start … span_stop - 1, and m, v; see adamw."""
    decay_factor = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[4]) * decay))
    rate = splat(f32(-f64(hyper[0]) / f64(hyper[5])))
    root_factor = splat(f32(1.0 / math.sqrt(f64(hyper[6]))))
    beta1, one_minus_beta1 = splat(hyper[1]), splat(f32(1.0 - f64(hyper[1])))
    beta2, one_minus_beta2 = splat(hyper[2]), splat(f32(1.0 - f64(hyper[2])))
    eps, gate_lanes = splat(hyper[3]), splat(gate)
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        gradient = load_part(g, i, num_left) * gate_lanes
        first_moment = fma(load_part(m, i, num_left), beta1, gradient * one_minus_beta1)
        second_moment = fma(load_part(v, i, num_left), beta2, gradient * gradient * one_minus_beta2)
        step = first_moment / fma(sqrt(second_moment), root_factor, eps)
        store_part(m, i, first_moment, num_left)
        store_part(v, i, second_moment, num_left)
        store_part(w, i, fma(rate, step, load_part(w, i, num_left) * decay_factor), num_left)


@parallel(
    "i64, out_bytes1, in1, out1, out1, in1, f32, in1, i64", lambda g: (g.size, 1), serial=SERIAL
)
def adamw(qtype, w, g, m, v, hyper, decay, gate, key, span_start, span_stop):
    """Update w, m and v in place by AdamW with decoupled decay, as torch.optim.AdamW.

    g = gate * g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    w = w * (1 - lr * wd * decay) - lr * (m / c1) / (sqrt(v / c2) + eps)

    qtype, w          F32 or BF16, and the bytes of N of them
    g, m, v     (N,)  f32
    hyper       (7,)  f32: lr, b1, b2, eps, wd, c1 = 1 - b1**t, c2 = 1 - b2**t
    decay             f32: 0 or 1
    gate        (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    key               i64: key of bf16's stochastic rounding, see counter_rng
    """
    update_parts(adamw_span, (g, m, v, hyper, decay), qtype, w, gate, key, span_start, span_stop)


@part("i64, i64, in1, f32, i64")
def unpack_codes(values, codes, levels, scale, is_signed):
    """Write levels[code] * scale, with a code's sign if is_signed, of 256 codes at an address to f32 at `values`."""
    for i in range(CODED_BLOCK):
        code = char_at(codes, i) if is_signed else byte_at(codes, i)
        level = levels[abs(code)] * scale
        poke(values, i, level if code >= 0 else -level)


@part("i64, i64, f32, in1, bytes1, i64")
def pack_codes(codes, values, scale, limits, starts, is_signed):
    """Write codes of 256 f32 at `values`, then overwritten; `scale` is the largest size. See adamw8bit.code_table."""
    divisor = splat(scale if scale > 0 else f32(1.0))
    for i in range(0, CODED_BLOCK, LANES):
        store(values, i, load(values, i) / divisor)
    for i in range(CODED_BLOCK):
        upper_bits, value = (word_at(values, i) & 0x7FFFFFFF) >> 16, peek(values, i)
        code = i64(starts[min(max(upper_bits - FIRST_CODED, 0), starts.size - 1)])
        code += i64(abs(value) > limits[code])
        if not is_signed:
            code = max(code, i64(value > 0))
        put_byte(codes, i, code if value >= 0 else -code)


@parallel(
    "out1, in1, out_bytes1, out1, out_bytes1, out1, in1, in1, in1, in1, bytes1, in1, in1, bytes1",
    lambda m_scale: (m_scale.size, CODED_BLOCK),
    serial=SERIAL,
)
def adamw8bit(
    direction, g, m, m_scale, v, v_scale, hyper, gate,
    m_levels, m_limits, m_starts, v_levels, v_limits, v_starts, first_block, last_block,
):  # fmt: skip
    """Update moments in 8 bits, and write the direction of the step: see optim.adamw8bit, also for the tables.

    direction, g      (N,)       f32
    m, v              (B * 256,) codes of N values: of m, and of the root of v, unsigned
    m_scale, v_scale  (B,)       f32: sizes of the blocks' largest values
    hyper             (7,)       f32, as for adamw
    """
    moments, roots = scratch(CODED_BLOCK), scratch(CODED_BLOCK)
    beta1, one_minus_beta1 = splat(hyper[1]), splat(f32(1.0 - f64(hyper[1])))
    beta2, one_minus_beta2 = splat(hyper[2]), splat(f32(1.0 - f64(hyper[2])))
    root_factor, eps = splat(f32(1.0 / math.sqrt(f64(hyper[6])))), splat(hyper[3])
    for block in range(first_block, last_block):
        start = block * CODED_BLOCK
        m_codes, v_codes, length = m.ctypes.data + start, v.ctypes.data + start, g.size - start
        if not math.isfinite(gate[0]):
            direction[start : start + min(length, CODED_BLOCK)] = 0.0
            continue
        unpack_codes(moments, m_codes, m_levels, m_scale[block], 1)
        unpack_codes(roots, v_codes, v_levels, v_scale[block], 0)
        m_max, root_max = splat(0.0), splat(0.0)
        for i in range(0, CODED_BLOCK, LANES):
            gradient = load_part(g, start + i, length - i) * splat(gate[0])
            new_m = fma(load(moments, i), beta1, gradient * one_minus_beta1)
            old_root = load(roots, i)
            new_root = sqrt(fma(old_root * old_root, beta2, gradient * gradient * one_minus_beta2))
            step = new_m / fma(new_root, root_factor, eps)
            store_part(direction, start + i, step, length - i)
            store(moments, i, new_m)
            store(roots, i, new_root)
            m_max = maximum(absolute(new_m), m_max)
            root_max = maximum(new_root, root_max)
        m_scale[block], v_scale[block] = largest(m_max), largest(root_max)
        pack_codes(m_codes, moments, m_scale[block], m_limits, m_starts, 1)
        pack_codes(v_codes, roots, v_scale[block], v_limits, v_starts, 0)


@kernel("i64, in1, in1, f32, f32, i64, i64")
def sgd_span(w, g, hyper, decay, gate, span_start, span_stop):
    """Update f32 weights at address w, elements span_start … span_stop - 1; see sgd."""
    decay_factor = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[1]) * decay))
    rate = splat(-hyper[2 if hyper.size == 3 else 0] * gate)
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        w_new = fma(rate, load_part(g, i, num_left), load_part(w, i, num_left) * decay_factor)
        store_part(w, i, w_new, num_left)


@parallel("i64, out_bytes1, in1, in1, f32, in1, i64", lambda g: (g.size, 1), serial=SERIAL)
def sgd(qtype, w, g, hyper, decay, gate, key, span_start, span_stop):
    """Update w in place by SGD: w = w * (1 - lr * wd * decay) - rate * gate * g.

    qtype, w     F32 or BF16, and the bytes of N of them
    g      (N,)  f32
    hyper  (2,)  f32: lr, wd; rate = lr, or the third of (3,) numbers
    decay        f32: 0 or 1
    gate   (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    key          i64: key of bf16's stochastic rounding, see counter_rng
    """
    update_parts(sgd_span, (g, hyper, decay), qtype, w, gate, key, span_start, span_stop)


@parallel("out1, in1, f32, f32", lambda g: (g.size, 1), serial=SERIAL)
def momentum(b, g, momentum, gate, span_start, span_stop):
    """b = momentum * b + gate * g, in place; b, g (N,) f32."""
    momentum_factor, factor = splat(momentum), splat(gate)
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        store_part(
            b, i, fma(load_part(b, i, left), momentum_factor, load_part(g, i, left) * factor), left
        )


@parallel(
    "out1, in1, out_bytes1, out1, f32, f32, in1, in1, bytes1",
    lambda b_scale: (b_scale.size, CODED_BLOCK),
    serial=SERIAL,
)
def momentum8bit(
    value, g, b, b_scale, momentum, gate, levels, limits, starts, first_block, last_block
):
    """Update a momentum in 8 bits, and write it as f32 to `value`: see optim.muon8bit, also for the tables.

    value, g     (N,)       f32
    b            (B * 256,) codes of N values
    b_scale      (B,)       f32: sizes of the blocks' largest values
    """
    sums = scratch(CODED_BLOCK)
    for block in range(first_block, last_block):
        start = block * CODED_BLOCK
        codes, length, max_size = b.ctypes.data + start, g.size - start, splat(0.0)
        if not math.isfinite(gate):
            value[start : start + min(length, CODED_BLOCK)] = 0.0
            continue
        unpack_codes(sums, codes, levels, b_scale[block], 1)
        for i in range(0, CODED_BLOCK, LANES):
            gradient = load_part(g, start + i, length - i) * splat(gate)
            new_sum = fma(load(sums, i), splat(momentum), gradient)
            store_part(value, start + i, new_sum, length - i)
            store(sums, i, new_sum)
            max_size = maximum(absolute(new_sum), max_size)
        b_scale[block] = largest(max_size)
        pack_codes(codes, sums, b_scale[block], limits, starts, 1)


@parallel("out1, in1, in2, in2, in1", lambda g: (g.size, 1), serial=SERIAL)
def combine(p, g, s, y, c, span_start, span_stop):
    """p = c[0] g + sum over k of c[1 + k] s[k] + c[1 + M + k] y[k]; p, g (N,), s, y (M, N), c (1 + 2 M,), f32."""
    m, n = s.shape
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        direction = load_part(g, i, left) * splat(c[0])
        for k in range(m):
            direction = fma(load_part(address(s, k * n), i, left), splat(c[1 + k]), direction)
            direction = fma(load_part(address(y, k * n), i, left), splat(c[1 + m + k]), direction)
        store_part(p, i, direction, left)


@kernel("f64(i64, i64, i64)")
def dot_runs(a, b, n):
    """Return the dot product of n f32 at two addresses: short runs in f32 lanes, everything longer in f64."""
    total_sum = f64(0.0)
    for run_start in range(0, n, VALUES_PER_RUN):
        lane_sums = splat(0.0)
        for i in range(run_start, min(run_start + VALUES_PER_RUN, n), LANES):
            lane_sums = fma(load_part(a, i, n - i), load_part(b, i, n - i), lane_sums)
        total_sum += f64(total(lane_sums))
    return total_sum


@kernel("out1, in1, in1")
def product(y, a, b):
    """y[0] += a · b; a, b (N,) f32."""
    y[0] = f32(y[0] + dot_runs(address(a, 0), address(b, 0), a.size))


@each_task("out1, in1, in2, in2", lambda z, g: (z.size, g.size), serial=SERIAL)
def products(z, g, s, y, product_index):
    """z[i, j] += u_i · v_j, where u is g, s[0] …, y[0] …, and v is g, y[0] …; one task for each element of z.

    z ((2 M + 1) (M + 1),), g (N,), s, y (M, N), f32
    """
    m, n = s.shape
    row_index, column_index = product_index // (m + 1), product_index % (m + 1)
    column_vector = address(g, 0) if column_index == 0 else address(y, (column_index - 1) * n)
    if row_index == 0:
        row_vector = address(g, 0)
    elif row_index <= m:
        row_vector = address(s, (row_index - 1) * n)
    else:
        row_vector = address(y, (row_index - 1 - m) * n)
    z[product_index] = f32(z[product_index] + dot_runs(row_vector, column_vector, n))
