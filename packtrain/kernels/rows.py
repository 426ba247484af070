"""Gather, scatter and add rows by index. Indices below zero are skipped.

Each function returns -1, or the position of the first index that is too large, and then writes nothing.
"""

from numba import types

from packtrain import dtypes
from packtrain.kernels import bits, codes, simd
from packtrain.kernels.call import kernel, part, spans
from packtrain.kernels.dequantize import packed2, row
from packtrain.kernels.rooms import bind_placeholders, compiled
from packtrain.kernels.simd import LANES, ids1, in2, out2

i64, f32, void = types.int64, types.float32, types.void
SERIAL = 1 << 14
VALUES_PER_TASK = 1 << 13  # elements of a task
COLUMNS = 64  # columns of one task where the order of rows matters
bytes2_type = types.Array(types.uint8, 2, "C")
bind_placeholders(simd, bits, codes)
inline_part = part(void(i64, i64, i64), forceinline=False)
pack_f16 = compiled(dtypes.f16.code["pack"], inline_part, {})
pack_q8_0 = compiled(dtypes.BLOCK_TYPES["q8_0"].code["pack"], inline_part, {})
Q8_0_BLOCK = dtypes.BLOCK_TYPES["q8_0"].block


@kernel(i64(ids1, i64))
def first_invalid(ids, limit):
    for i in range(ids.size):
        if ids[i] >= limit:
            return i
    return -1


@kernel(void(i64, i64, i64))
def copy_values(target, source, count):
    for i in range(0, count, LANES):
        simd.store_part(target, i, simd.load_part(source, i, count - i), count - i)


@kernel(void(i64, i64))
def clear_values(target, count):
    for i in range(0, count, LANES):
        simd.store_part(target, i, simd.splat(0.0), count - i)


@kernel(void(out2, i64, packed2, ids1, i64, i64))
def gather_rows(y, qtype, w, ids, row_start, row_stop):
    width = y.shape[1]
    for i in range(row_start, row_stop):
        if ids[i] >= 0:
            source = w.ctypes.data + i64(ids[i]) * w.shape[1]
            row(qtype, simd.address(y, i * width), source, width)
        else:
            clear_values(simd.address(y, i * width), width)


@kernel(i64(out2, i64, packed2, ids1))
def get_rows(y, qtype, w, ids):
    """y[i] = w[ids[i]] as f32, zeros where ids[i] < 0; `qtype` is ggml's type number.

    w    (V, row bytes)  packed
    ids  (N,)            i32
    y    (N, C)          f32
    """
    n, width = y.shape
    invalid_index = first_invalid(ids, w.shape[0])
    if invalid_index >= 0:
        return invalid_index
    if y.size <= SERIAL:
        gather_rows(y, qtype, w, ids, 0, n)
    else:
        rows_per_task = max(1, VALUES_PER_TASK // width)
        spans(gather_rows, (y, qtype, w, ids), n, rows_per_task)
    return -1


@kernel(void(out2, in2, ids1, types.boolean, i64, i64))
def scatter_columns(w, x, ids, add, start, stop):
    """w[ids[i]] = x[i], or += x[i] if `add`, in columns start … stop - 1, in the order of i."""
    width = x.shape[1]
    for i in range(ids.size):
        if ids[i] < 0:
            continue
        offset = i64(ids[i]) * width
        for j in range(start, stop, LANES):
            v = simd.load_part(x, i * width + j, stop - j)
            if add:
                v += simd.load_part(w, offset + j, stop - j)
            simd.store_part(w, offset + j, v, stop - j)


@kernel(void(out2, in2, ids1, types.boolean))
def scatter_rows(w, x, ids, add):
    width = x.shape[1]
    spans(scatter_columns, (w, x, ids, add), width, COLUMNS if x.size > SERIAL else width)


@kernel(void(out2, i64, i64))
def clear_span(y, span_start, span_stop):
    clear_values(simd.address(y, span_start), span_stop - span_start)


@kernel(void(out2))
def clear_all(y):
    num_values = y.size
    spans(clear_span, (y,), num_values, VALUES_PER_TASK if num_values > SERIAL else num_values)


@kernel(i64(out2, in2, ids1, types.boolean))
def get_rows_back(dw, dy, ids, accumulate):
    """dw[ids[i]] += dy[i] in the order of i; dw starts from zero unless `accumulate`.

    dy   (N, C)  f32
    ids  (N,)    i32
    dw   (V, C)  f32
    """
    invalid_index = first_invalid(ids, dw.shape[0])
    if invalid_index >= 0:
        return invalid_index
    if not accumulate:
        clear_all(dw)
    scatter_rows(dw, dy, ids, True)
    return -1


@kernel(i64(out2, in2, ids1))
def set_rows(w, x, ids):
    """w[ids[i]] = x[i]; of equal indices the last wins.

    x    (N, C)  f32
    ids  (N,)    i32
    w    (V, C)  f32
    """
    invalid_index = first_invalid(ids, w.shape[0])
    if invalid_index < 0:
        scatter_rows(w, x, ids, False)
    return invalid_index


@kernel(void(types.boolean, bytes2_type, in2, ids1, i64, i64))
def pack_span(use_f16, w, x, ids, row_start, row_stop):
    row_nbytes, width = w.shape[1], x.shape[1]
    for i in range(row_start, row_stop):
        if ids[i] >= 0:
            target, source = w.ctypes.data + i64(ids[i]) * row_nbytes, simd.address(x, i * width)
            if use_f16:
                pack_f16(target, source, width)
            else:
                pack_q8_0(target, source, width // Q8_0_BLOCK)


@kernel(i64(types.boolean, bytes2_type, in2, ids1))
def pack_rows(use_f16, w, x, ids):
    """w[ids[i]] = x[i] packed as f16 or Q8_0; indices are distinct.

    x    (N, C)          f32
    ids  (N,)            i32
    w    (V, row bytes)  u8
    """
    invalid_index = first_invalid(ids, w.shape[0])
    if invalid_index >= 0:
        return invalid_index
    if x.size <= SERIAL:
        pack_span(use_f16, w, x, ids, 0, ids.size)
    else:
        spans(pack_span, (use_f16, w, x, ids), ids.size, VALUES_PER_TASK // x.shape[1])
    return -1


@kernel(void(out2, in2, i64, i64))
def copy_span(y, x, span_start, span_stop):
    copy_values(simd.address(y, span_start), simd.address(x, span_start), span_stop - span_start)


@kernel(i64(out2, in2, ids1))
def zero_rows(y, x, ids):
    """y = x with rows ids[i] zero; y may be x.

    x, y  (N, C)  f32
    ids   (M,)    i32
    """
    n, width = x.shape
    invalid_index = first_invalid(ids, n)
    if invalid_index >= 0:
        return invalid_index
    if simd.address(x, 0) != simd.address(y, 0):
        spans(copy_span, (y, x), x.size, VALUES_PER_TASK)
    for i in range(ids.size):
        if ids[i] >= 0:
            clear_values(simd.address(y, i64(ids[i]) * width), width)
    return -1
