"""A single-threaded sgemm: both operands packed, register tiles of fused multiply-adds, or of bf16 dot products.

Every element of c is a sum over blocks of k, each of them in order; the blocks depend on k alone.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from packtrain.kernels import panels, simd
from packtrain.kernels.amx import STEPS, by_tiles, pack_columns, pack_rows
from packtrain.kernels.call import each, kernel
from packtrain.kernels.operands import layout_of, pack_a, pack_b
from packtrain.kernels.panels import AMX, AVX512, DEEP, GROUP, IN_ROWS, PAIRED, PANEL, ROWS, UNROLL
from packtrain.kernels.runtime import roomy
from packtrain.kernels.simd import F32, I64, LANES, VECTOR, ZERO, address, poke, scratch

# With AVX-512 and 2 MiB of L2, which are Intel's, cores prefetch panels and sums themselves. In f32, wider blocks of b
# lose a part of their cache to others.
ROOMY = AVX512 and roomy()
BROAD = 288 if AVX512 and not ROOMY else 384  # most columns in a block of b
BROADEST = 576 if ROOMY else BROAD  # the same in bf16; the buffer has room for it
GROUPS = 8  # packed at once
CHUNK = GROUPS * ROWS
B_SIZE, A_SIZE = DEEP * BROADEST, (DEEP * GROUP + panels.SHIFT) * GROUPS
USED = B_SIZE + A_SIZE + DEEP * PANEL  # f32 of stack that products take, those with packed weights
PAGE = 1024  # f32 of a page of memory
AHEAD = 768 if AVX512 else 512  # bytes of a panel prefetched ahead
# of packed a, by layout: bytes between its rows, and between its places of k
ALONG, DOWN = (4, 4, 4 * panels.FLAT), (4 * GROUP, 4 * GROUP, 4)
OTHER = IN_ROWS if panels.NARROW else PAIRED if panels.HALF and not AMX else None
i64, f32, void = types.int64, types.float32, types.void
SGEMM = types.void(i64, i64, i64, i64, i64, i64, i64, i64, i64, f32, i64, i64, i64)


def emit_add(builder, half, a, b, sum_):
    """sum_ + a * b in each lane, of f32 or of two bf16."""
    if not half:
        return simd.call(builder, "llvm.fma.v16f32", VECTOR, a, b, sum_)
    a, b = (builder.bitcast(x, panels.HALVES) for x in (a, b))
    return simd.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, sum_, a, b)


def emit_turn(builder, layout, width, left, right, sums):
    """The sums after one more place: ROWS values at `left` times `width` vectors at `right`."""
    places = [builder.add(right, I64(64 * w)) for w in range(width)]
    for place in places if layout == PAIRED or not ROOMY else ():
        panels.emit_prefetch(builder, builder.add(place, I64(AHEAD)))
    columns = [builder.load(panels.vector_at(builder, place), align=64) for place in places]
    now = []
    for r in range(ROWS):
        spot = builder.add(left, I64(ALONG[layout] * r))
        spot = builder.inttoptr(spot, F32.as_pointer())
        a_lanes = simd.spread(builder, builder.load(spot), VECTOR)
        for w, column in enumerate(columns):
            now.append(emit_add(builder, layout == PAIRED, a_lanes, column, sums[r * width + w]))
    return now


def emit_sums(builder, layout, width, a, panel, depth, ahead):
    """ROWS x width sums over the places of packed a and panel; depth is a multiple of UNROLL and above 0."""
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("k", "sums"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, left, right, next_a = (builder.phi(I64) for _ in range(4))
    sums = [builder.phi(VECTOR) for _ in range(ROWS * width)]
    now = sums
    for u in range(UNROLL):
        row = builder.add(left, I64(DOWN[layout] * u))
        now = emit_turn(builder, layout, width, row, builder.add(right, I64(4 * PANEL * u)), now)
    panels.emit_prefetch(builder, next_a)
    steps = (
        (k, I64(UNROLL), I64(0)),
        (left, I64(DOWN[layout] * UNROLL), a),
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


def emit_write(builder, value, beta, c, left):
    """c = value + beta * c on the first `left` lanes; c is not read if beta = 0."""
    pointer = panels.vector_at(builder, c)

    def written(mask):
        with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (new, old):
            with new:
                start = builder.block
            with old:
                was = simd.read(builder, pointer, mask)
                beta_lanes = simd.spread(builder, beta, VECTOR)
                mixed = simd.call(builder, "llvm.fma.v16f32", VECTOR, was, beta_lanes, value)
                end = builder.block
        result = builder.phi(VECTOR)
        result.add_incoming(value, start)
        result.add_incoming(mixed, end)
        return simd.write(builder, result, pointer, mask)

    if panels.NARROW:  # masks are slow there
        simd.where_full(builder, left, written)
    else:
        written(simd.first_lanes(builder, left))


def emit_tile(builder, layout, width, tile_args):
    """See tile; here layout and width are constants."""
    a, panel, depth, ahead, beta, c, ldc, rows, left = tile_args
    cells = [(r, w) for r in range(ROWS) for w in range(width)]

    def place(r, w):
        return panels.beyond(builder, c, builder.add(builder.mul(I64(r), ldc), I64(w * LANES)))

    for cell in cells if layout == PAIRED or not ROOMY else ():
        panels.emit_prefetch(builder, place(*cell), write=1)
    sums = emit_sums(builder, layout, width, a, panel, depth, ahead)
    for r in range(ROWS):
        with builder.if_then(builder.icmp_signed("<", I64(r), rows), likely=True):
            for w in range(width):
                room = builder.sub(left, I64(w * LANES))
                emit_write(builder, sums[r * width + w], beta, place(r, w), room)


@intrinsic(prefer_literal=True)
def tile(typingctx, width, layout, a, panel, depth, ahead, beta, c, ldc, rows, left):
    """c = a @ panel + beta * c for `rows` <= ROWS rows and `left` <= 16 `width` (a literal) columns.

    layout  of packed a; only those are compiled that this CPU uses: OTHER
    """
    if not isinstance(width, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        _, layout, *tile_args = args
        if OTHER is None:
            emit_tile(builder, panels.IN_GROUPS, width.literal_value, tile_args)
            return context.get_dummy_value()
        with builder.if_else(builder.icmp_signed("==", layout, I64(OTHER))) as branches:
            for branch, branch_layout in zip(branches, (OTHER, panels.IN_GROUPS), strict=True):
                with branch:
                    emit_tile(builder, branch_layout, width.literal_value, tile_args)
        return context.get_dummy_value()

    sig = types.void(width, i64, i64, i64, i64, i64, f32, i64, i64, i64, i64)
    return sig, codegen


@kernel(types.void(i64, i64, i64, i64, i64, f32, i64, i64, i64, types.UniTuple(i64, 4)))
def block_product(m, n, a, b, deep, beta, c, ldc, layout, following):
    """c (m, n) = a @ b + beta * c, of packed a and b.

    following  what is packed next, prefetched tile by tile: address, number, distance and length of its rows
    """
    source, lines, distance, length = following
    tiles, number = -(-m // ROWS) * -(-n // PANEL), 0
    size = ROWS * panels.FLAT if layout == IN_ROWS else panels.apart(deep)
    for i in range(0, m, ROWS):
        group = address(a, i // ROWS * size)
        for j in range(0, n, PANEL):
            for r in range(number * lines // tiles, (number + 1) * lines // tiles):
                for k in range(0, length, LANES):
                    panels.fetch(address(source, r * distance + k))
            number += 1
            panel, left, rows = address(b, j * deep), min(n - j, PANEL), m - i
            ahead = address(group, size + j // PANEL * (deep // UNROLL) * LANES)
            target = address(c, i * ldc + j)
            if left > 2 * LANES:
                tile(3, layout, group, panel, deep, ahead, beta, target, ldc, rows, left)
            elif left > LANES:
                tile(2, layout, group, panel, deep, ahead, beta, target, ldc, rows, left)
            else:
                tile(1, layout, group, panel, deep, ahead, beta, target, ldc, rows, left)


@kernel(i64(i64, i64, i64))
def even(size, most, unit):
    """The length of parts: as equal as multiples of `unit` can be, at most `most`, which is at least one `unit`."""
    count = max(-(-size // (most // unit * unit)), 1)
    return max(-(-size // (count * unit)) * unit, unit)


@kernel(void(i64, i64, i64, i64, i64, i64, i64))
def pack(block, b, tb, ldb, depth, n, half):
    """op(b) (depth, n) as products take it."""
    if AMX and half:
        pack_columns(block, panels.places(depth, half) * LANES, b, tb, ldb, depth, n, half)
    else:
        pack_b(block, b, tb, ldb, depth, n, half)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, f32, i64, i64, i64))
def times_block(ta, m, n, a, lda, block, depth, beta, c, ldc, half):
    """c (m, n) = op(a) @ block + beta * c, which is 0 or 1; `pack` has packed the block, at most `broad` columns."""
    chunk, deep = scratch(A_SIZE), panels.places(depth, half)
    if AMX and half:
        high = A_SIZE // max(deep, LANES) // STEPS * STEPS
        for i in range(0, m, high):
            height, target, across = min(m - i, high), address(c, i * ldc), deep * LANES
            pack_rows(chunk, across, address(a, i if ta else i * lda), ta, lda, depth, height, half)
            by_tiles(height, n, chunk, block, across, beta != 0, target, ldc, half)
        return
    for i in range(0, m, CHUNK):
        height, target = min(m - i, CHUNK), address(c, i * ldc)
        pack_a(chunk, address(a, i if ta else i * lda), ta, lda, depth, height, half)
        after = i + CHUNK
        source, left = address(a, after if ta else after * lda), max(min(m - after, CHUNK), 0)
        following = (source, depth, lda, left) if ta else (source, left, lda, depth)
        layout = layout_of(ta, half)
        block_product(height, n, chunk, block, deep, beta, target, ldc, layout, following)


@kernel(types.void(i64))
def use_stack(number):
    """Touch the stack that products need, so that its memory is in use before it is measured."""
    block = scratch(USED)
    for at in range(0, USED, PAGE):
        poke(block, at, f32(0.0))


@kernel(i64(i64, i64))
def broad(depth, half):
    """The most columns of a block of b."""
    return DEEP * (BROADEST if half else BROAD) // panels.places(depth, half)


@kernel(types.void(i64))
def use_stacks(threads):
    each(use_stack, (), threads)


@kernel(SGEMM)
def sgemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc, half):
    """c (m, n) = op(a) @ op(b) + beta * c on one thread; a, b, c are addresses, row-major.

    op(a) (m, k) is a, or a transposed if ta = 1 (then a is stored (k, m)); op(b) (k, n) likewise;
    lda, ldb, ldc are the row strides in elements. c is not read if beta = 0.
    With half = 1, a and b are rounded to bf16 and their products summed in f32; see amx.py for half = 2.
    A block of b and a chunk of a stay in the L2 cache, a group of a in L1; see use_stack.
    """
    block = scratch(B_SIZE)
    step = even(k, 2 * DEEP if half == 1 else DEEP, LANES)
    across = even(n, broad(step, half), PANEL)
    for p in range(0, max(k, 1), step):
        depth = min(k - p, step)
        keep = beta if p == 0 else f32(1.0)
        for j in range(0, n, across):
            width, target = min(n - j, across), address(c, j)
            source = address(b, j * ldb + p if tb else p * ldb + j)
            pack(block, source, tb, ldb, depth, width, half)
            left = address(a, p * lda if ta else p)
            times_block(ta, m, width, left, lda, block, depth, keep, target, ldc, half)
