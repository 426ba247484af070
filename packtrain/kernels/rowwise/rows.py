"""Gather, scatter and add rows by index. Indices below zero are skipped.

Each function returns -1, or the position of the first index that is too large, and then writes nothing.
"""

from packtrain import dtypes
from packtrain.kernels.quant import codes
from packtrain.kernels.quant.dequantize import Q8_0, row
from packtrain.kernels.quant.type_dispatch import bind_placeholders, blocks_of, compiled, form
from packtrain.kernels.runtime.jit import kernel, parallel, part, spans
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import LANES, address, load_part, store_part
from packtrain.kernels.simd.f32_ranges import copy, fill

SERIAL = 1 << 14
COLUMNS = 64  # columns of one task where the order of rows matters
bind_placeholders(codes)
pack_f16, pack_q8_0 = (
    blocks_of("pack", dtype, compiled(dtype.code["pack"], part(form("pack", dtype)), {}))
    for dtype in (dtypes.f16, Q8_0)
)


@kernel("i64(ints1, i64)")
def first_invalid_id(ids, limit):
    """Return the first index at which ids is `limit` or more; -1 if there is none."""
    for i in range(ids.size):
        if ids[i] >= limit:
            return i
    return -1


@parallel("out2, i64, bytes2, ints1", lambda y: y.shape, serial=SERIAL)
def gather_rows(y, qtype, w, ids, row_start, row_stop):
    """y[i] = w[ids[i]] as f32, zeros where ids[i] < 0; see get_rows."""
    width = y.shape[1]
    for i in range(row_start, row_stop):
        if ids[i] >= 0:
            source = w.ctypes.data + i64(ids[i]) * w.shape[1]
            row(qtype, address(y, i * width), source, width)
        else:
            fill(address(y, i * width), width, f32(0.0))


@kernel("i64(out2, i64, bytes2, ints1)")
def get_rows(y, qtype, w, ids):
    """y[i] = w[ids[i]] as f32, zeros where ids[i] < 0; returns -1, or the first i with ids[i] >= V, and writes nothing.

    w    (V, row bytes)  packed as type `qtype`, ggml's number
    ids  (N,)            i32
    y    (N, C)          f32
    """
    invalid_index = first_invalid_id(ids, w.shape[0])
    if invalid_index >= 0:
        return invalid_index
    gather_rows(y, qtype, w, ids)
    return -1


@kernel("out2, in2, ints1, boolean, i64, i64")
def scatter_columns(w, x, ids, add, start, stop):
    """w[ids[i]] = x[i], or += x[i] if `add`, in columns start … stop - 1, in the order of i."""
    width = x.shape[1]
    for i in range(ids.size):
        if ids[i] < 0:
            continue
        offset = i64(ids[i]) * width
        for j in range(start, stop, LANES):
            v = load_part(x, i * width + j, stop - j)
            if add:
                v += load_part(w, offset + j, stop - j)
            store_part(w, offset + j, v, stop - j)


@kernel("out2, in2, ints1, boolean")
def scatter_rows(w, x, ids, add):
    width = x.shape[1]
    spans(scatter_columns, (w, x, ids, add), width, COLUMNS if x.size > SERIAL else width)


@parallel("out2", lambda y: (y.size, 1), serial=SERIAL)
def zero_span(y, span_start, span_stop):
    fill(address(y, span_start), span_stop - span_start, f32(0.0))


@kernel("i64(out2, in2, ints1, boolean)")
def get_rows_back(dw, dy, ids, accumulate):
    """dw[ids[i]] += dy[i] in order, from zero unless `accumulate`. Returns -1, or the first i with ids[i] >= V.

    dy   (N, C)  f32
    ids  (N,)    i32
    dw   (V, C)  f32
    """
    invalid_index = first_invalid_id(ids, dw.shape[0])
    if invalid_index >= 0:
        return invalid_index
    if not accumulate:
        zero_span(dw)
    scatter_rows(dw, dy, ids, True)
    return -1


@kernel("i64(out2, in2, ints1)")
def set_rows(w, x, ids):
    """w[ids[i]] = x[i]; of equal indices the last wins. Returns -1, or the first i with ids[i] >= V.

    x    (N, C)  f32
    ids  (N,)    i32
    w    (V, C)  f32
    """
    invalid_index = first_invalid_id(ids, w.shape[0])
    if invalid_index < 0:
        scatter_rows(w, x, ids, False)
    return invalid_index


@parallel("boolean, out_bytes2, in2, ints1", lambda x: x.shape, serial=SERIAL)
def pack_row_span(use_f16, w, x, ids, row_start, row_stop):
    """Pack rows of x as f16 or Q8_0 into rows ids of w; see pack_rows."""
    row_nbytes, width = w.shape[1], x.shape[1]
    for i in range(row_start, row_stop):
        if ids[i] >= 0:
            target, source = w.ctypes.data + i64(ids[i]) * row_nbytes, address(x, i * width)
            if use_f16:
                pack_f16(target, source, width)
            else:
                pack_q8_0(target, source, width)


@kernel("i64(boolean, out_bytes2, in2, ints1)")
def pack_rows(use_f16, w, x, ids):
    """w[ids[i]] = x[i] as f16 if use_f16, else Q8_0; indices differ. Returns -1, or the first i with ids[i] >= V.

    x    (N, C)          f32
    ids  (N,)            i32
    w    (V, row bytes)  u8
    """
    invalid_index = first_invalid_id(ids, w.shape[0])
    if invalid_index >= 0:
        return invalid_index
    pack_row_span(use_f16, w, x, ids)
    return -1


@parallel("out2, in2", lambda x: (x.size, 1))
def copy_span(y, x, span_start, span_stop):
    copy(address(y, span_start), address(x, span_start), span_stop - span_start)


@kernel("i64(out2, in2, ints1)")
def zero_rows(y, x, ids):
    """y = x (N, C) with rows ids[i] (M,) zero; y may be x. Returns -1, or the first i with ids[i] >= N."""
    n, width = x.shape
    invalid_index = first_invalid_id(ids, n)
    if invalid_index >= 0:
        return invalid_index
    if address(x, 0) != address(y, 0):
        copy_span(y, x)
    for i in range(ids.size):
        if ids[i] >= 0:
            fill(address(y, i64(ids[i]) * width), width, f32(0.0))
    return -1
