"""Both operands of a product as register tiles read them: `pack_b` makes panels of columns, `pack_a` groups of rows.

Registers of 8 f32 (AVX2) transpose slowly: there, rows of `a` are copied as they are, and b is turned 8 by 8.
"""

from llvmlite import ir
from numba import types

from packtrain.kernels import panels, simd
from packtrain.kernels.call import kernel, part
from packtrain.kernels.panels import ALONG, BELOW, FLAT, GROUP, IN_ROWS, NARROW, PANEL, ROWS, beyond
from packtrain.kernels.simd import F32, I32, I64, LANES, address, f32x16, load_part, splat, store

FOUR = GROUP // 2
QUARTET, OCTET = ir.VectorType(F32, FOUR), ir.VectorType(F32, GROUP)
ORDER = ir.VectorType(I32, GROUP)
SINGLES = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
PAIRS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
i64 = types.int64


@simd.instruction(types.void, i64, i64, i64, i64)
def turn8(builder, source, ld, target, ld_target):
    """8 x 8 of `source` transposed, for registers of 8: fewer steps than turn16's. Prefetches what follows."""
    lines = [beyond(builder, source, builder.mul(ld, I64(r))) for r in range(GROUP)]
    for line in lines:
        panels.emit_prefetch(builder, builder.add(line, I64(ALONG)))
    for first in range(0, GROUP, FOUR):
        parts = [quartet_at(builder, beyond(builder, line, I64(first))) for line in lines]
        rows = [
            builder.shuffle_vector(low, high, ir.Constant(ORDER, list(range(GROUP))))
            for low, high in zip(parts[:FOUR], parts[FOUR:], strict=True)
        ]
        for c, value in enumerate(emit_turned_fours(builder, rows)):
            spot = beyond(builder, target, builder.mul(I64(first + c), ld_target))
            builder.store(value, builder.inttoptr(spot, OCTET.as_pointer()), align=4)


def quartet_at(builder, place):
    return builder.load(builder.inttoptr(place, QUARTET.as_pointer()), align=4)


def emit_turned_fours(builder, rows):
    """Four vectors, each half of them 4 x 4 values, with both transposed."""

    def mixed(a, b, order):
        return builder.shuffle_vector(a, b, ir.Constant(ORDER, order))

    mixes = [mixed(*pair, order) for pair in (rows[:2], rows[2:]) for order in SINGLES]
    return [mixed(mixes[n], mixes[n + 2], order) for n in range(2) for order in PAIRS]


@simd.instruction(types.void, i64, i64)
def copy8(builder, *addresses):
    source, target = (builder.inttoptr(a, OCTET.as_pointer()) for a in addresses)
    builder.store(builder.load(source, align=4), target, align=4)


@simd.instruction(types.void, i64, f32x16)
def store_group(builder, target, values):
    """The first 8 of 16 values."""
    low = builder.shuffle_vector(values, values, ir.Constant(ORDER, list(range(GROUP))))
    builder.store(low, builder.inttoptr(target, OCTET.as_pointer()), align=4)


@simd.instruction(types.void, i64, i64, i64, i64)
def deal(builder, source, ld, target, group_stride):
    """16 columns of two rows of `source` to two groups of 8, which are `group_stride` f32 from each other."""
    panels.emit_prefetch(builder, beyond(builder, source, builder.mul(ld, I64(BELOW))))
    panels.emit_prefetch(builder, beyond(builder, source, builder.mul(ld, I64(BELOW + 1))))
    rows = [
        builder.load(panels.vector_at(builder, place), align=4)
        for place in (source, beyond(builder, source, ld))
    ]
    for number in range(2):
        spot = beyond(builder, target, builder.mul(group_stride, I64(number)))
        builder.store(
            panels.halves_of(builder, rows, number), panels.vector_at(builder, spot), align=64
        )


@part(types.void(i64, i64, i64, i64))
def turn_quarters(source, ld, target, ld_target):
    """turn16 where all of it is there."""
    for r in range(0, LANES, GROUP):
        for k in range(0, LANES, GROUP):
            to = address(target, k * ld_target + r)
            turn8(address(source, r * ld + k), ld, to, ld_target)


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64))
def pack_b(block, b, tb, ldb, depth, n, half):
    """Panels (deep, PANEL) of op(b) (depth, n), one behind the other, zeros beyond it."""
    deep, per = panels.places(depth, half), 1 + half
    if tb == 0:
        panel_end = 0 if half else n // PANEL * PANEL
        for k in range(0, depth, per):
            to = k // per * PANEL
            for j in range(0, panel_end, PANEL):
                panels.move_panel(address(b, k * ldb + j), ldb, address(block, j * deep + to))
            for j in range(panel_end, n, PANEL):
                for w in range(0, PANEL, LANES):
                    left = max(n - j - w, 0)
                    values = load_part(b, k * ldb + j + w, left)
                    if half:
                        after = load_part(b, (k + 1) * ldb + j + w, left if k + 1 < depth else 0)
                        values = panels.pair(values, after)
                    store(block, j * deep + to + w, values)
    else:
        for j in range(0, n, PANEL):
            for w in range(0, min(n - j, PANEL), LANES):
                last = min(n - j - w, LANES) - 1
                for k in range(0, depth, LANES):
                    source = address(b, (j + w) * ldb + k)
                    target = address(block, j * deep + k // per * PANEL + w)
                    if half:
                        panels.turn16_pairs(source, ldb, last, depth - k, target, PANEL)
                    elif NARROW and last == LANES - 1 and depth - k >= LANES:
                        turn_quarters(source, ldb, target, PANEL)
                    else:
                        panels.turn16(source, ldb, last, depth - k, target, PANEL)
    for j in range(0, n, PANEL):
        for k in range(-(-depth // per), deep):
            for w in range(0, PANEL, LANES):
                store(block, j * deep + k * PANEL + w, splat(0.0))


@part(i64(i64, i64))
def layout_of(ta, half):
    """How a is packed: IN_GROUPS, PAIRED, or IN_ROWS, which is a copy."""
    return IN_ROWS if NARROW and ta == 0 else half


@part(types.void(i64, i64, i64, i64, i64, i64))
def pack_narrow(block, a, ta, lda, depth, m):
    """pack_a for registers of 8, which transpose slowly."""
    deep = panels.places(depth, 0)
    if ta:
        size, full_extent = panels.apart(deep), max((m - GROUP) // ROWS + 1, 0)
        for k in range(0, depth, 2):
            two = min(depth - k, 2)
            for g in range(full_extent):
                source = address(a, k * lda + g * ROWS)
                target = address(block, g * size + k * GROUP)
                for r in range(two):
                    copy8(address(source, r * lda), address(target, r * GROUP))
            for g in range(full_extent, -(-m // ROWS)):
                for r in range(k, k + two):
                    values = load_part(a, r * lda + g * ROWS, m - g * ROWS)
                    store_group(address(block, g * size + r * GROUP), values)
        for g in range(-(-m // ROWS)):
            for k in range(depth, deep):
                store_group(address(block, g * size + k * GROUP), splat(0.0))
    else:
        full_extent = depth // LANES * LANES
        for i in range(-(-m // ROWS) * ROWS):
            row, target = address(a, min(i, m - 1) * lda), address(block, i * FLAT)
            for k in range(0, full_extent, LANES):
                store(target, k, simd.load(row, k))
            for k in range(full_extent, deep):
                simd.poke(target, k, simd.peek(row, k) if k < depth else types.float32(0.0))


@kernel(types.void(i64, i64, i64, i64, i64, i64, i64))
def pack_a(block, a, ta, lda, depth, m, half):
    """Groups (deep, GROUP) of ROWS rows of op(a) (m, depth), one behind the other, zeros beyond it; see layout_of."""
    deep, per = panels.places(depth, half), 1 + half
    if NARROW:
        pack_narrow(block, a, ta, lda, depth, m)
        return
    if ta:
        pairs = depth // 2 * 2 if half == 0 else 0
        full_rows = m // LANES * LANES
        for k in range(0, pairs, 2):
            for i in range(0, full_rows, LANES):
                target = address(block, i // ROWS * panels.apart(deep) + k * GROUP)
                deal(address(a, k * lda + i), lda, target, panels.apart(deep))
        for k in range(0, depth, per):
            for i in range(full_rows if k < pairs else 0, m, ROWS):
                left = min(m - i, ROWS)
                values = load_part(a, k * lda + i, left)
                if half:
                    after = load_part(a, (k + 1) * lda + i, left if k + 1 < depth else 0)
                    values = panels.pair(values, after)
                simd.store_part(
                    block, i // ROWS * panels.apart(deep) + k // per * GROUP, values, GROUP
                )
    else:
        for i in range(0, m, ROWS):
            last = min(m - i, ROWS) - 1
            for k in range(0, depth, LANES):
                source = address(a, i * lda + k)
                target = address(block, i // ROWS * panels.apart(deep) + k // per * GROUP)
                if half:
                    panels.turn_group_pairs(source, lda, last, depth - k, target)
                else:
                    panels.turn_group(source, lda, last, depth - k, target)
    for i in range(0, m, ROWS):
        for k in range(-(-depth // per), deep):
            simd.store_part(block, i // ROWS * panels.apart(deep) + k * GROUP, splat(0.0), GROUP)
