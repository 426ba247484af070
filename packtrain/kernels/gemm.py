"""A single-threaded sgemm: both operands packed, register tiles of fused multiply-adds.

Every element of c is a sum over blocks of k, each of them in order; the blocks depend on k alone.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from packtrain.kernels import runtime, simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.simd import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    address,
    load_part,
    poke,
    scratch,
    splat,
    store,
    store_part,
)

AVX512 = runtime.has("avx512f")
ROWS, WIDE = (8, 3) if AVX512 else (6, 1)  # of a register tile, in rows and vectors
PANEL = WIDE * LANES
DEEP, BROAD = (512, 288) if AVX512 else (384, 384)  # most of k and of columns in a block of b
GROUP = 8  # places for the rows of a tile in packed a
GROUPS = 8  # packed at once
CHUNK = GROUPS * ROWS
UNROLL = 4
B_SIZE, A_SIZE = DEEP * BROAD, DEEP * GROUP * GROUPS
USED = B_SIZE + A_SIZE + DEEP * PANEL  # f32 of stack that products take, those with packed weights
PAGE = 1024  # f32 of a page of memory
AHEAD_B, AHEAD_ROW = (
    768 if AVX512 else 512,
    192,
)  # bytes prefetched ahead, of a block and of rows to be packed
i64, f32 = types.int64, types.float32
SGEMM = types.void(i64, i64, i64, i64, i64, f32, i64, i64, i64, i64, f32, i64, i64)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
BYTE = ir.IntType(8).as_pointer()


def vector_at(builder, base):
    return builder.inttoptr(base, VECTOR.as_pointer())


def beyond(builder, base, count):
    """The address `count` f32 behind base."""
    return builder.add(base, builder.mul(count, I64(4)))


def emit_prefetch(builder, place, write=0):
    simd.call(
        builder, "llvm.prefetch.p0", ir.VoidType(),
        builder.inttoptr(place, BYTE), I32(write), I32(3), I32(1),
    )  # fmt: skip


def emit_turn(builder, width, left, right, sums):
    """The sums after one more k: ROWS values at `left` times `width` vectors at `right`."""
    places = [builder.add(right, I64(64 * w)) for w in range(width)]
    for place in places:
        emit_prefetch(builder, builder.add(place, I64(AHEAD_B)))
    columns = [builder.load(vector_at(builder, place), align=64) for place in places]
    now = []
    for r in range(ROWS):
        spot = builder.inttoptr(builder.add(left, I64(4 * r)), F32.as_pointer())
        many = simd.spread(builder, builder.load(spot), VECTOR)
        for w, column in enumerate(columns):
            args = many, column, sums[r * width + w]
            now.append(simd.call(builder, "llvm.fma.v16f32", VECTOR, *args))
    return now


def emit_sums(builder, width, a, panel, depth, ahead):
    """ROWS x width sums over k of packed a and panel; depth is a multiple of UNROLL and above 0."""
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("k", "sums"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, left, right, next_a = (builder.phi(I64) for _ in range(4))
    sums = [builder.phi(VECTOR) for _ in range(ROWS * width)]
    now = sums
    for u in range(UNROLL):
        row = builder.add(left, I64(4 * GROUP * u))
        now = emit_turn(builder, width, row, builder.add(right, I64(4 * PANEL * u)), now)
    emit_prefetch(builder, next_a)
    steps = (
        (k, I64(UNROLL), I64(0)),
        (left, I64(4 * GROUP * UNROLL), a),
        (right, I64(4 * PANEL * UNROLL), panel),
        (next_a, I64(64), ahead),
    )
    for phi, by, start in steps:
        phi.add_incoming(start, before)
        phi.add_incoming(builder.add(phi, by), loop)
    for phi, value in zip(sums, now, strict=True):
        phi.add_incoming(ZERO, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", builder.add(k, I64(UNROLL)), depth), loop, after)
    builder.position_at_end(after)
    return now


def emit_write(builder, value, alpha, beta, c, left):
    """c = alpha * value + beta * c on the first `left` lanes; c is not read if beta = 0."""
    pointer = vector_at(builder, c)
    mask = simd.first_lanes(builder, left)
    scaled = builder.fmul(value, simd.spread(builder, alpha, VECTOR))
    with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (new, old):
        with new:
            start = builder.block
        with old:
            was = simd.call(
                builder, "llvm.masked.load.v16f32.p0", VECTOR, pointer, I32(4), mask, ZERO
            )
            many = simd.spread(builder, beta, VECTOR)
            mixed = simd.call(builder, "llvm.fma.v16f32", VECTOR, was, many, scaled)
            end = builder.block
    result = builder.phi(VECTOR)
    result.add_incoming(scaled, start)
    result.add_incoming(mixed, end)
    simd.call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), result, pointer, I32(4), mask)


@intrinsic(prefer_literal=True)
def tile(typingctx, width, a, panel, depth, ahead, alpha, beta, c, ldc, rows, left):
    """c = alpha * a @ panel + beta * c for `rows` <= ROWS rows and `left` <= 16 `width` (a literal) columns."""
    if not isinstance(width, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        _, a, panel, depth, ahead, alpha, beta, c, ldc, rows, left = args
        count = width.literal_value
        for r in range(ROWS):
            for w in range(count):
                at = beyond(builder, c, builder.add(builder.mul(I64(r), ldc), I64(w * LANES)))
                emit_prefetch(builder, at, write=1)
        sums = emit_sums(builder, count, a, panel, depth, ahead)
        for r in range(ROWS):
            with builder.if_then(builder.icmp_signed("<", I64(r), rows), likely=True):
                for w in range(count):
                    at = beyond(builder, c, builder.add(builder.mul(I64(r), ldc), I64(w * LANES)))
                    room = builder.sub(left, I64(w * LANES))
                    emit_write(builder, sums[r * count + w], alpha, beta, at, room)
        return context.get_dummy_value()

    sig = types.void(width, i64, i64, i64, i64, f32, f32, i64, i64, i64, i64)
    return sig, codegen


def emit_row(builder, source, ld, number, last, left):
    """16 values of a row, or of row `last` if that comes before it; the first `left` lanes. Prefetches what follows."""
    ahead = beyond(builder, source, builder.mul(I64(number), ld))
    emit_prefetch(builder, builder.add(ahead, I64(AHEAD_ROW)))
    row = builder.select(builder.icmp_signed("<", I64(number), last), I64(number), last)
    place = vector_at(builder, beyond(builder, source, builder.mul(row, ld)))
    mask = simd.first_lanes(builder, left)
    return simd.call(builder, "llvm.masked.load.v16f32.p0", VECTOR, place, I32(4), mask, ZERO)


def emit_turned(builder, rows, rounds):
    """The values of `rows` with columns outermost, as if they were one long vector."""
    low, high = (
        ir.Constant(simd.BITS, [start + i // 2 + i % 2 * LANES for i in range(LANES)])
        for start in (0, LANES // 2)
    )
    half = len(rows) // 2
    for _ in range(rounds):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [builder.shuffle_vector(a, b, part) for a, b in pairs for part in (low, high)]
    return rows


@intrinsic
def turn16(typingctx, source, ld, last, left, target, ld_target):
    """16 x 16 of `source` transposed; its rows stop at `last`, its columns at `left`."""

    def codegen(context, builder, sig, args):
        source, ld, last, left, target, ld_target = args
        rows = [emit_row(builder, source, ld, r, last, left) for r in range(LANES)]
        for r, value in enumerate(emit_turned(builder, rows, 4)):
            spot = beyond(builder, target, builder.mul(I64(r), ld_target))
            builder.store(value, vector_at(builder, spot), align=64)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def turn_group(typingctx, source, ld, last, left, target):
    """8 x 16 of `source` transposed to 16 x 8 in a row."""

    def codegen(context, builder, sig, args):
        source, ld, last, left, target = args
        rows = [emit_row(builder, source, ld, r, last, left) for r in range(GROUP)]
        for r, value in enumerate(emit_turned(builder, rows, 3)):
            builder.store(value, vector_at(builder, builder.add(target, I64(64 * r))), align=64)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64, i64), codegen


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64))
def pack_b(block, b, tb, ldb, depth, deep, n):
    """Panels (deep, PANEL) of op(b) (depth, n), one behind the other, zeros beyond it."""
    if tb == 0:
        for k in range(depth):
            for j in range(0, n, PANEL):
                for w in range(0, PANEL, LANES):
                    left = max(n - j - w, 0)
                    store(block, j * deep + k * PANEL + w, load_part(b, k * ldb + j + w, left))
    else:
        for j in range(0, n, PANEL):
            for w in range(0, min(n - j, PANEL), LANES):
                last = min(n - j - w, LANES) - 1
                for k in range(0, depth, LANES):
                    source = address(b, (j + w) * ldb + k)
                    turn16(
                        source,
                        ldb,
                        last,
                        depth - k,
                        address(block, j * deep + k * PANEL + w),
                        PANEL,
                    )
    for j in range(0, n, PANEL):
        for k in range(depth, deep):
            for w in range(0, PANEL, LANES):
                store(block, j * deep + k * PANEL + w, splat(0.0))


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64))
def pack_a(block, a, ta, lda, depth, deep, m):
    """Groups (deep, GROUP) of ROWS rows of op(a) (m, depth), one behind the other, zeros beyond it."""
    if ta:
        for k in range(depth):
            for i in range(0, m, ROWS):
                values = load_part(a, k * lda + i, min(m - i, ROWS))
                store_part(block, (i // ROWS * deep + k) * GROUP, values, GROUP)
    else:
        for i in range(0, m, ROWS):
            last = min(m - i, ROWS) - 1
            for k in range(0, depth, LANES):
                target = address(block, (i // ROWS * deep + k) * GROUP)
                turn_group(address(a, i * lda + k), lda, last, depth - k, target)
    for i in range(0, m, ROWS):
        for k in range(depth, deep):
            store_part(block, (i // ROWS * deep + k) * GROUP, splat(0.0), GROUP)


@kernel(types.void(i64, i64, i64, i64, i64, f32, f32, i64, i64))
def block_product(m, n, a, b, deep, alpha, beta, c, ldc):
    """c (m, n) = alpha * a @ b + beta * c, of packed a and b."""
    for i in range(0, m, ROWS):
        group = address(a, i // ROWS * deep * GROUP)
        for j in range(0, n, PANEL):
            panel, left, rows = address(b, j * deep), min(n - j, PANEL), m - i
            ahead = address(group, GROUP * deep + j // PANEL * (deep // UNROLL) * LANES)
            target = address(c, i * ldc + j)
            if left > 2 * LANES:
                tile(3, group, panel, deep, ahead, alpha, beta, target, ldc, rows, left)
            elif left > LANES:
                tile(2, group, panel, deep, ahead, alpha, beta, target, ldc, rows, left)
            else:
                tile(1, group, panel, deep, ahead, alpha, beta, target, ldc, rows, left)


@kernel(i64(i64, i64, i64))
def even(size, most, unit):
    """The length of parts: as equal as multiples of `unit` can be, at most `most`."""
    count = max(-(-size // most), 1)
    return max(-(-size // (count * unit)) * unit, unit)


@kernel(i64(i64))
def unrolled(depth):
    """A depth rounded up to whole turns of the loop over k; what is added are zeros."""
    return -(-max(depth, 1) // UNROLL) * UNROLL


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64, f32, f32, i64, i64))
def times_block(ta, m, n, a, lda, block, depth, alpha, beta, c, ldc):
    """c (m, n) = alpha * op(a) @ block + beta * c; the block was packed by `pack_b`, at most (DEEP, BROAD)."""
    chunk, deep = scratch(A_SIZE), unrolled(depth)
    for i in range(0, m, CHUNK):
        height = min(m - i, CHUNK)
        pack_a(chunk, address(a, i if ta else i * lda), ta, lda, depth, deep, height)
        block_product(height, n, chunk, block, deep, alpha, beta, address(c, i * ldc), ldc)


@kernel(types.void(i64))
def use_stack(number):
    """Touch the stack that products need, so that its memory is in use before it is measured."""
    block = scratch(USED)
    for at in range(0, USED, PAGE):
        poke(block, at, f32(0.0))


@kernel(types.void(i64))
def use_stacks(threads):
    each(use_stack, (), threads)


@kernel(SGEMM)
def own_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Like matmul.sgemm. A block of b and a chunk of a stay in the L2 cache, a group of a in L1; see use_stack."""
    block = scratch(B_SIZE)
    step, across = even(k, DEEP, LANES), even(n, BROAD, PANEL)
    for p in range(0, max(k, 1), step):
        depth = min(k - p, step)
        keep = beta if p == 0 else f32(1.0)
        for j in range(0, n, across):
            width = min(n - j, across)
            source = address(b, j * ldb + p if tb else p * ldb + j)
            pack_b(block, source, tb, ldb, depth, unrolled(depth), width)
            left = address(a, p * lda if ta else p)
            times_block(ta, m, width, left, lda, block, depth, alpha, keep, address(c, j), ldc)
