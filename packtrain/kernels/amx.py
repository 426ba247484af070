"""Products of bf16 by AMX: tiles of 16 x 16 32-bit places, two steps of k in each, multiplied into 16 x 16 sums.

Both operands are packed alike: lines of 16 rows of a, or columns of b, each a tile for every 32 steps of k. With
half = 2 a tile of what rounding left out, rounded too, is behind each. TDPBF16PS takes denormals for 0.
"""

import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels import panels, simd
from packtrain.kernels.call import kernel
from packtrain.kernels.panels import AMX, HALVES, beyond, emit_pair, emit_prefetch, vector_at
from packtrain.kernels.simd import I64, LANES, VECTOR, address, load_part, scratch, store_part

STEPS = 2 * LANES  # of k in a tile
TILE = LANES * LANES  # f32 of a tile
EDGE = 4 * TILE
I8 = ir.IntType(8)
i64, void = types.int64, types.void


def tile_call(builder, name, *args):
    """One of LLVM's intrinsics of tiles; an int is the number of a tile."""
    if not AMX:
        return
    call_args = [I8(arg) if isinstance(arg, int) else arg for arg in args]
    simd.call(builder, f"llvm.x86.{name}", ir.VoidType(), *call_args)


def read_tile(builder, number, base, distance=None):
    place = builder.inttoptr(base, I8.as_pointer())
    tile_call(builder, "tileloadd64", number, place, distance or I64(4 * LANES))


@simd.instruction(void)
def configure(builder):
    """Begin with tiles: eight of 16 rows of 64 bytes."""
    shape = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[LANES] * 8, *[0] * 8]
    kind = ir.ArrayType(I8, len(shape))
    room = cgutils.alloca_once_value(builder, ir.Constant(kind, shape))
    tile_call(builder, "ldtilecfg", builder.bitcast(room, I8.as_pointer()))


@simd.instruction(void)
def release(builder):
    """End with tiles, so that switching threads saves none."""
    tile_call(builder, "tilerelease")


# ---- packing ---------------------------------------------------------------------------------------------------


def emit_load(builder, place, left):
    """16 values, or the first `left` of them."""
    mask = None if left is None else simd.first_lanes(builder, left)
    return simd.read(builder, vector_at(builder, place), mask)


def emit_two(builder, by_line, source, ld, number, limits):
    """What becomes one row of pairs: 32 values of line `number`, or 16 values of two steps.

    limits  lines and steps there are, if not all
    """
    lines, left = limits or (None, None)
    if by_line:
        line = I64(number)
        if limits:
            last = builder.sub(lines, I64(1))
            line = builder.select(builder.icmp_signed("<", line, last), line, last)
        place = beyond(builder, source, builder.mul(line, ld))
        after = builder.sub(left, I64(LANES)) if limits else None
        high = emit_load(builder, builder.add(place, I64(4 * LANES)), after)
        return emit_load(builder, place, left), high
    values = []
    for step in (2 * number, 2 * number + 1):
        place = beyond(builder, source, builder.mul(I64(step), ld))
        if limits:
            inside = builder.icmp_signed("<", I64(step), left)
            values.append(emit_load(builder, place, builder.select(inside, lines, I64(0))))
        else:
            values.append(emit_load(builder, place, None))
    return values


def emit_rounded(builder, by_line, low, high):
    """A row of pairs of bf16."""
    if not by_line:
        return emit_pair(builder, low, high)
    both = simd.call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", HALVES, high, low)
    return builder.bitcast(both, VECTOR)


def emit_lost(builder, by_line, pairs, low, high):
    """What rounding took from `low` and `high`."""
    bits = builder.bitcast(pairs, simd.BITS)
    sixteen = ir.Constant(simd.BITS, [16] * LANES)
    if by_line:
        words = builder.bitcast(pairs, ir.VectorType(ir.IntType(16), 2 * LANES))
        parts = (
            builder.shuffle_vector(
                words, words, ir.Constant(simd.BITS, [first + i for i in range(LANES)])
            )
            for first in (0, LANES)
        )
        sides = [builder.shl(builder.zext(part, simd.BITS), sixteen) for part in parts]
    else:
        upper = ir.Constant(simd.BITS, [0xFFFF0000] * LANES)
        sides = [builder.shl(bits, sixteen), builder.and_(bits, upper)]
    return [
        builder.fsub(value, builder.bitcast(side, VECTOR))
        for value, side in zip((low, high), sides, strict=True)
    ]


def emit_pack(builder, by_line, turn, source, ld, target, count, limits):
    """See packer; with a count of 2 what rounding lost comes behind."""
    tiles = [[] for _ in range(count)]

    def store(number, r, row):
        place = builder.add(target, I64(64 * r + 4 * TILE * number))
        builder.store(row, vector_at(builder, place), align=64)

    for r in range(LANES):
        two = emit_two(builder, by_line, source, ld, r, limits)
        for number, tile in enumerate(tiles):
            row = emit_rounded(builder, by_line, *two)
            two = emit_lost(builder, by_line, row, *two) if count > 1 else two
            tile.append(row)
            if not turn:
                store(number, r, row)
    for number, tile in enumerate(tiles if turn else ()):
        for r, row in enumerate(panels.emit_turned(builder, tile, 4)):
            store(number, r, row)


def packer(by_line, turn):
    """An intrinsic that packs 16 lines x 32 steps of `source`, which end at `lines` and `left`, with zeros behind.

    by_line  steps lie side by side in `source`, not lines
    turn   pairs of the tile lie line by line if they did not in the source
    """

    def emit(builder, source, ld, lines, left, target, half):
        if not AMX:
            return
        is_full = builder.and_(
            builder.icmp_signed(">=", lines, I64(LANES)),
            builder.icmp_signed(">=", left, I64(STEPS)),
        )
        is_half = builder.icmp_signed("==", half, I64(1))
        for count, right in ((1, is_half), (2, builder.not_(is_half))):
            for limits, condition in ((None, is_full), ((lines, left), builder.not_(is_full))):
                with builder.if_then(builder.and_(right, condition), likely=limits is None):
                    emit_pack(builder, by_line, turn, source, ld, target, count, limits)

    return simd.instruction(void, i64, i64, i64, i64, i64, i64)(emit)


rows_of_a, columns_of_a = packer(True, False), packer(False, True)
rows_of_b, columns_of_b = packer(False, False), packer(True, True)


@kernel(void(*[i64] * 8))
def pack_columns(block, across, b, tb, ldb, depth, n, half):
    """Lines of 16 columns of op(b) (depth, n), `across` f32 from each other."""
    if tb:
        for j in range(0, n, LANES):
            for k in range(0, depth, STEPS):
                target = address(block, j // LANES * across + k // STEPS * TILE * half)
                columns_of_b(address(b, j * ldb + k), ldb, n - j, depth - k, target, half)
    else:
        for k in range(0, depth, STEPS):
            for j in range(0, n, LANES):
                target = address(block, j // LANES * across + k // STEPS * TILE * half)
                rows_of_b(address(b, k * ldb + j), ldb, n - j, depth - k, target, half)


@kernel(void(*[i64] * 8))
def pack_rows(block, across, a, ta, lda, depth, m, half):
    """Lines of 16 rows of op(a) (m, depth), `across` f32 from each other."""
    if ta:
        for k in range(0, depth, STEPS):
            for i in range(0, m, LANES):
                target = address(block, i // LANES * across + k // STEPS * TILE * half)
                columns_of_a(address(a, k * lda + i), lda, m - i, depth - k, target, half)
    else:
        for i in range(0, m, LANES):
            for k in range(0, depth, STEPS):
                target = address(block, i // LANES * across + k // STEPS * TILE * half)
                rows_of_a(address(a, i * lda + k), lda, m - i, depth - k, target, half)


# ---- products --------------------------------------------------------------------------------------------------


def emit_step(builder, half, high, wide, left, right, across):
    """One more tile of k: sums 0 … 3 += the tiles at left times those at right, and by their second tiles."""
    a, b = range(4, 4 + high), range(6, 6 + wide)
    pair = {"a": (a, left), "b": (b, right)}

    def read(side, second):
        numbers, base = pair[side]
        for i, number in enumerate(numbers):
            line = builder.add(base, builder.mul(I64(4 * i), across))
            read_tile(builder, number, builder.add(line, I64(4 * TILE * second)))

    def multiply():
        for i, j in itertools.product(range(high), range(wide)):
            tile_call(builder, "tdpbf16ps", 2 * i + j, a[i], b[j])

    read("a", half - 1), read("b", 0)
    multiply()
    if half == 2:
        read("a", 0)
        multiply()
        read("b", 1)
        multiply()


def emit_sums(builder, half, high, wide, a, b, across):
    """Multiply lines of packed tiles, `across` f32 long."""
    step = I64(4 * TILE * half)
    with cgutils.for_range_slice(builder, I64(0), builder.mul(across, I64(4)), step, inc=True) as (
        at,
        _,
    ):
        left, right = builder.add(a, at), builder.add(b, at)
        emit_step(builder, half, high, wide, left, right, across)


@intrinsic(prefer_literal=True)
def tiles(typingctx, high, wide, half, a, b, across, c, ldc, add):
    """c (16 high, 16 wide) = a @ b, + c if `add`; high and wide are literals, lines are `across` f32 long."""

    def codegen(context, builder, sig, args):
        _, _, half, a, b, across, c, ldc, add = args
        high, wide = (kind.literal_value for kind in sig.args[:2])
        distance = builder.mul(ldc, I64(4))
        spots = {
            2 * i + j: builder.add(beyond(builder, c, builder.mul(I64(16 * i), ldc)), I64(64 * j))
            for i, j in itertools.product(range(high), range(wide))
        }
        for i, j in itertools.product(range(STEPS if high > 1 else LANES), range(wide)):
            place = beyond(builder, c, builder.mul(I64(i), ldc))
            emit_prefetch(builder, builder.add(place, I64(64 * j)), write=1)
        with builder.if_else(builder.icmp_signed("==", add, I64(0))) as (new, old):
            with new:
                for number in spots:
                    tile_call(builder, "tilezero", number)
            with old:
                for number, spot in spots.items():
                    read_tile(builder, number, spot, distance)
        with builder.if_else(builder.icmp_signed("==", half, I64(1))) as (one, three):
            for branch, count in ((one, 1), (three, 2)):
                with branch:
                    emit_sums(builder, count, high, wide, a, b, across)
        for number, spot in spots.items():
            place = builder.inttoptr(spot, I8.as_pointer())
            tile_call(builder, "tilestored64", number, place, distance)
        return context.get_dummy_value()

    return void(high, wide, i64, i64, i64, i64, i64, i64, i64), codegen


@kernel(void(i64, i64, i64, i64, i64, i64, i64, i64, i64))
def of_shape(high, wide, half, a, b, across, c, ldc, add):
    """Up to 2 x 2 tiles of sums."""
    if high == 2 and wide == 2:
        tiles(2, 2, half, a, b, across, c, ldc, add)
    elif high == 2:
        tiles(2, 1, half, a, b, across, c, ldc, add)
    elif wide == 2:
        tiles(1, 2, half, a, b, across, c, ldc, add)
    else:
        tiles(1, 1, half, a, b, across, c, ldc, add)


@kernel(void(i64, i64, i64, i64, i64, i64))
def move(m, n, y, ldy, x, ldx):
    """y (m, n) = x."""
    for i in range(m):
        for j in range(0, n, LANES):
            store_part(y, i * ldy + j, load_part(x, i * ldx + j, n - j), n - j)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, i64, i64))
def by_tiles(m, n, a, b, across, add, c, ldc, half):
    """c (m, n) = a @ b, + c if `add`, of packed a and b. Sums are the same wherever in c they are."""
    edge = scratch(EDGE)
    configure()
    for i in range(0, m, STEPS):
        rows, left = min(m - i, STEPS), address(a, i // LANES * across)
        for j in range(0, n, STEPS):
            columns, right = min(n - j, STEPS), address(b, j // LANES * across)
            high, wide, at = -(-rows // LANES), -(-columns // LANES), address(c, i * ldc + j)
            if rows % LANES == 0 and columns % LANES == 0:
                of_shape(high, wide, half, left, right, across, at, ldc, add)
                continue
            if add:
                move(rows, columns, edge, STEPS, at, ldc)
            of_shape(high, wide, half, left, right, across, edge, STEPS, add)
            move(rows, columns, at, ldc, edge, STEPS)
    release()
