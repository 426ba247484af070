"""A single-threaded sgemm: register tiles of fused multiply-adds over packed panels of b.

Every element of c is a sum over k in order, whatever the tile.
"""

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from packtrain.kernels import simd
from packtrain.kernels.call import kernel
from packtrain.kernels.simd import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    address,
    load_part,
    scratch,
    store,
    store_part,
)

AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
ROWS, WIDE = (12, 2) if AVX512 else (6, 1)
PANEL = WIDE * LANES
DEPTH = 256
STACK = DEPTH * PANEL
CHUNK = 10 * ROWS  # columns of a transposed a packed at once
TURNED = DEPTH * CHUNK
i64, f32 = types.int64, types.float32
SGEMM = types.void(i64, i64, i64, i64, i64, f32, i64, i64, i64, i64, f32, i64, i64)


def lanes_pointer(builder, base):
    return builder.inttoptr(base, VECTOR.as_pointer())


def bytes_on(builder, base, count):
    return builder.add(base, builder.mul(count, I64(4)))


def emit_sums(builder, rows, a, row_step, step, panel, depth):
    """rows x WIDE sums over k: a[r * row_step + k * step] * panel[k], strides in elements."""
    spots = [bytes_on(builder, a, builder.mul(I64(r), row_step)) for r in range(rows)]
    step_bytes = builder.mul(step, I64(4))
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    before = builder.block
    loop = builder.append_basic_block("k")
    after = builder.append_basic_block("sums")
    builder.cbranch(builder.icmp_signed(">", depth, I64(0)), loop, after)
    builder.position_at_end(loop)
    k, offset, source = (builder.phi(I64) for _ in range(3))
    sums = [builder.phi(VECTOR) for _ in range(rows * WIDE)]
    columns = [
        builder.load(lanes_pointer(builder, builder.add(source, I64(64 * w))), align=64)
        for w in range(WIDE)
    ]
    updated = []
    for r, spot in enumerate(spots):
        one = builder.load(builder.inttoptr(builder.add(spot, offset), F32.as_pointer()))
        many = simd.spread(builder, one, VECTOR)
        for w in range(WIDE):
            args = (many, columns[w], sums[r * WIDE + w])
            updated.append(simd.call(builder, "llvm.fma.v16f32", VECTOR, *args))
    steps = ((k, I64(1), I64(0)), (offset, step_bytes, I64(0)), (source, I64(4 * PANEL), panel))
    for phi, by, start in steps:
        phi.add_incoming(start, before)
        phi.add_incoming(builder.add(phi, by), loop)
    for phi, value in zip(sums, updated, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", builder.add(k, I64(1)), depth), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(VECTOR) for _ in sums]
    for phi, value in zip(results, updated, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, loop)
    return results


def emit_write(builder, value, alpha, beta, c, left):
    """c = alpha * value + beta * c on the first `left` lanes; c is not read if beta = 0."""
    pointer = lanes_pointer(builder, c)
    mask = simd.first_lanes(builder, left)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    scaled = builder.fmul(value, simd.spread(builder, alpha, VECTOR))
    with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (new, old):
        with new:
            start = builder.block
        with old:
            was = simd.call(
                builder, "llvm.masked.load.v16f32.p0", VECTOR, pointer, I32(4), mask, zero
            )
            many = simd.spread(builder, beta, VECTOR)
            mixed = simd.call(builder, "llvm.fma.v16f32", VECTOR, was, many, scaled)
            end = builder.block
    result = builder.phi(VECTOR)
    result.add_incoming(scaled, start)
    result.add_incoming(mixed, end)
    simd.call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), result, pointer, I32(4), mask)


@intrinsic(prefer_literal=True)
def tile(typingctx, rows, a, row_step, step, panel, depth, alpha, beta, c, ldc, left):
    """c = alpha * a @ panel + beta * c for `rows` (a literal) rows and `left` columns."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        _, a, row_step, step, panel, depth, alpha, beta, c, ldc, left = args
        count = rows.literal_value
        results = emit_sums(builder, count, a, row_step, step, panel, depth)
        for at, value in enumerate(results):
            r, w = divmod(at, WIDE)
            start = builder.add(builder.mul(I64(r), ldc), I64(w * LANES))
            room = builder.sub(left, I64(w * LANES))
            emit_write(builder, value, alpha, beta, bytes_on(builder, c, start), room)
        return context.get_dummy_value()

    sig = types.void(rows, i64, i64, i64, i64, i64, f32, f32, i64, i64, i64)
    return sig, codegen


@intrinsic
def transpose(typingctx, source, ld, last, left, target, ld_target):
    """16 x 16 of `source` transposed; its rows stop at `last`, its columns at `left`."""

    def codegen(context, builder, sig, args):
        source, ld, last, left, target, ld_target = args
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        rows = []
        for r in range(LANES):
            number = builder.select(builder.icmp_signed("<", I64(r), last), I64(r), last)
            at = lanes_pointer(builder, bytes_on(builder, source, builder.mul(number, ld)))
            mask = simd.first_lanes(builder, left)
            rows.append(
                simd.call(builder, "llvm.masked.load.v16f32.p0", VECTOR, at, I32(4), mask, zero)
            )
        low, high = (
            ir.Constant(simd.BITS, [start + i // 2 + i % 2 * LANES for i in range(LANES)])
            for start in (0, LANES // 2)
        )
        for _ in range(4):
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            rows = [builder.shuffle_vector(a, b, half) for a, b in pairs for half in (low, high)]
        for r, value in enumerate(rows):
            at = bytes_on(builder, target, builder.mul(I64(r), ld_target))
            builder.store(value, lanes_pointer(builder, at), align=4)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64, i64, i64), codegen


@kernel(types.void(i64, i64, i64, i64, i64, i64))
def pack(panel, b, tb, ldb, depth, n):
    """panel (depth, PANEL) = the first n <= PANEL columns of op(b), zeros beyond them."""
    if tb == 0:
        for k in range(depth):
            for w in range(0, PANEL, LANES):
                store(panel, k * PANEL + w, load_part(b, k * ldb + w, n - w))
        return
    for w in range(0, n, LANES):
        for k in range(0, depth, LANES):
            source = address(b, w * ldb + k)
            last = min(n - w, LANES) - 1
            transpose(source, ldb, last, depth - k, address(panel, k * PANEL + w), PANEL)


@kernel(types.void(i64, i64, i64, i64, i64))
def pack_turned(block, a, lda, depth, m):
    """`block` = m <= CHUNK columns of a in groups (depth, ROWS): in a itself they are pages apart."""
    for k in range(depth):
        for i in range(0, m, ROWS):
            v = load_part(a, k * lda + i, min(m - i, ROWS))
            store_part(block, i * depth + k * ROWS, v, ROWS)


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64, f32, f32, i64, i64, i64))
def tiles(turned, m, a, row_step, step, panel, depth, alpha, beta, c, ldc, left):
    """All rows of c against one panel of b; a is packed by `pack_turned` if `turned`."""
    i = 0
    while i < m:
        source = address(a, i * row_step)
        if turned:
            source = address(a, i // ROWS * ROWS * depth + i % ROWS)
        target = address(c, i * ldc)
        if m - i >= ROWS:
            tile(ROWS, source, row_step, step, panel, depth, alpha, beta, target, ldc, left)
            i += ROWS
        elif m - i >= 4:
            tile(4, source, row_step, step, panel, depth, alpha, beta, target, ldc, left)
            i += 4
        else:
            tile(1, source, row_step, step, panel, depth, alpha, beta, target, ldc, left)
            i += 1


@kernel(SGEMM)
def own_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Like matmul.sgemm. A block of a stays in the L2 cache, a panel of b in L1.

    The packed block takes 120 KiB of stack, the panel 32.
    """
    panel = scratch(STACK)
    block = scratch(TURNED)
    rows = CHUNK if ta else max(m, 1)
    for p in range(0, max(k, 1), DEPTH):
        depth = min(k - p, DEPTH)
        keep = beta if p == 0 else f32(1.0)
        for i in range(0, m, rows):
            height = min(m - i, rows)
            source, row_step, step = address(a, i * lda + p), lda, i64(1)
            if ta:
                pack_turned(block, address(a, p * lda + i), lda, depth, height)
                source, row_step, step = block, i64(1), i64(ROWS)
            for j in range(0, n, PANEL):
                left = min(n - j, PANEL)
                columns = address(b, j * ldb + p if tb else p * ldb + j)
                pack(panel, columns, tb, ldb, depth, left)
                target = address(c, i * ldc + j)
                tiles(
                    *(ta, height, source, row_step, step, panel, depth),
                    *(alpha, keep, target, ldc, left),
                )
