"""Rows by index: gather, scatter, add back. Indices below zero are skipped.

Each function returns -1, or the position of the first index that is too large, and then writes
nothing.
"""

from numba import types

from packtrain import dtypes
from packtrain.kernels import bits, codes, simd
from packtrain.kernels.call import kernel, part, spans
from packtrain.kernels.dequantize import packed2, row
from packtrain.kernels.rooms import compiled, explain
from packtrain.kernels.simd import LANES, ids1, in2, out2

i64, f32, void = types.int64, types.float32, types.void
SERIAL = 1 << 14
BATCH = 1 << 13  # elements of a task
COLUMNS = 64  # columns of one task where the order of rows matters
bytes2 = types.Array(types.uint8, 2, "C")
explain(simd, bits, codes)
as_part = part(void(i64, i64, i64), forceinline=False)
f16 = compiled(dtypes.f16.code["pack"], as_part, {})
q8_0 = compiled(dtypes.BLOCK_TYPES["q8_0"].code["pack"], as_part, {})
BLOCK = dtypes.BLOCK_TYPES["q8_0"].block


@kernel(i64(ids1, i64))
def first_bad(ids, limit):
    for i in range(ids.size):
        if ids[i] >= limit:
            return i
    return -1


@kernel(void(i64, i64, i64))
def copy(target, source, count):
    for i in range(0, count, LANES):
        simd.store_part(target, i, simd.load_part(source, i, count - i), count - i)


@kernel(void(i64, i64))
def clear(target, count):
    for i in range(0, count, LANES):
        simd.store_part(target, i, simd.splat(0.0), count - i)


@kernel(void(out2, i64, packed2, ids1, i64, i64))
def gather(y, kind, w, ids, start, stop):
    width = y.shape[1]
    for i in range(start, stop):
        if ids[i] >= 0:
            source = w.ctypes.data + i64(ids[i]) * w.shape[1]
            row(kind, simd.address(y, i * width), source, width)
        else:
            clear(simd.address(y, i * width), width)


@kernel(i64(out2, i64, packed2, ids1))
def get_rows(y, kind, w, ids):
    """y[i] = w[ids[i]], zeros where ids[i] < 0; see dequantize for kinds.

    w    (V, row bytes)  packed
    ids  (N,)            i32
    y    (N, C)          f32
    """
    n, width = y.shape
    bad = first_bad(ids, w.shape[0])
    if bad >= 0:
        return bad
    if y.size <= SERIAL:
        gather(y, kind, w, ids, 0, n)
    else:
        rows = max(1, BATCH // width)
        spans(gather, (y, kind, w, ids), n, rows)
    return -1


@kernel(void(out2, in2, ids1, types.boolean, i64, i64))
def scatter(w, x, ids, add, start, stop):
    """Columns start .. stop of w[ids[i]] = x[i], or += x[i], in the order of i."""
    width = x.shape[1]
    for i in range(ids.size):
        if ids[i] < 0:
            continue
        at = i64(ids[i]) * width
        for j in range(start, stop, LANES):
            v = simd.load_part(x, i * width + j, stop - j)
            if add:
                v += simd.load_part(w, at + j, stop - j)
            simd.store_part(w, at + j, v, stop - j)


@kernel(void(out2, in2, ids1, types.boolean))
def scatter_all(w, x, ids, add):
    width = x.shape[1]
    spans(scatter, (w, x, ids, add), width, COLUMNS if x.size > SERIAL else width)


@kernel(void(out2, i64, i64))
def clear_span(y, start, stop):
    clear(simd.address(y, start), stop - start)


@kernel(void(out2))
def clear_all(y):
    size = y.size
    spans(clear_span, (y,), size, BATCH if size > SERIAL else size)


@kernel(i64(out2, in2, ids1, types.boolean))
def get_rows_back(dw, dy, ids, accumulate):
    """dw[ids[i]] += dy[i] in the order of i; dw starts from zero unless `accumulate`.

    dy   (N, C)  f32
    ids  (N,)    i32
    dw   (V, C)  f32
    """
    bad = first_bad(ids, dw.shape[0])
    if bad >= 0:
        return bad
    if not accumulate:
        clear_all(dw)
    scatter_all(dw, dy, ids, True)
    return -1


@kernel(i64(out2, in2, ids1))
def set_rows(w, x, ids):
    """w[ids[i]] = x[i]; of equal indices the last wins.

    x    (N, C)  f32
    ids  (N,)    i32
    w    (V, C)  f32
    """
    bad = first_bad(ids, w.shape[0])
    if bad < 0:
        scatter_all(w, x, ids, False)
    return bad


@kernel(void(types.boolean, bytes2, in2, ids1, i64, i64))
def pack_span(halves, w, x, ids, start, stop):
    nbytes, width = w.shape[1], x.shape[1]
    for i in range(start, stop):
        if ids[i] >= 0:
            target, source = w.ctypes.data + i64(ids[i]) * nbytes, simd.address(x, i * width)
            if halves:
                f16(target, source, width)
            else:
                q8_0(target, source, width // BLOCK)


@kernel(i64(types.boolean, bytes2, in2, ids1))
def pack_rows(halves, w, x, ids):
    """w[ids[i]] = x[i], as f16 or Q8_0; indices are distinct.

    x    (N, C)          f32
    ids  (N,)            i32
    w    (V, row bytes)  u8
    """
    bad = first_bad(ids, w.shape[0])
    if bad >= 0:
        return bad
    if x.size <= SERIAL:
        pack_span(halves, w, x, ids, 0, ids.size)
    else:
        spans(pack_span, (halves, w, x, ids), ids.size, BATCH // x.shape[1])
    return -1


@kernel(void(out2, in2, i64, i64))
def copy_span(y, x, start, stop):
    copy(simd.address(y, start), simd.address(x, start), stop - start)


@kernel(i64(out2, in2, ids1))
def zero_rows(y, x, ids):
    """y = x with rows ids[i] zero; y may be x.

    x, y  (N, C)  f32
    ids   (M,)    i32
    """
    n, width = x.shape
    bad = first_bad(ids, n)
    if bad >= 0:
        return bad
    if simd.address(x, 0) != simd.address(y, 0):
        spans(copy_span, (y, x), x.size, BATCH)
    for i in range(ids.size):
        if ids[i] >= 0:
            clear(simd.address(y, i64(ids[i]) * width), width)
    return -1
