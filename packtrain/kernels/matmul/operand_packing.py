"""Pack both operands of a product as register tiles read them: `pack_b` panels of columns, `pack_a` groups of rows.

AVX2's registers of 8 f32 transpose with three times the instructions of AVX-512, and a masked store takes a dozen
cycles: rows of a are copied as they are (0.9 of the time on Zen 3), b is transposed 8 by 8. Row distances known only at
run time would cost a third of the tile's rate, smaller blocks for 512 KB of L2 gained nothing. On Intel with 2 MiB of
L2, copying takes as long as transposing, which L2 bounds, and tiles get slower: cores do not see the panel coming.
"""

from llvmlite import ir

from packtrain.kernels.matmul import panels
from packtrain.kernels.matmul.panels import (
    BELOW, GROUP, HAS_NARROW_VECTORS, IN_ROWS, PANEL, ROWS, beyond,
)  # fmt: skip
from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import f32, i64, void
from packtrain.kernels.simd.simd_f32 import (
    F32, I32, I64, LANES, address, f32x16, instruction, load, load_part, peek, poke, splat, store, store_part,
)  # fmt: skip

HALF_GROUP = GROUP // 2
QUARTET_VECTOR, OCTET_VECTOR = ir.VectorType(F32, HALF_GROUP), ir.VectorType(F32, GROUP)
ORDER = ir.VectorType(I32, GROUP)
SINGLE_ORDERS = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
PAIR_ORDERS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]


@instruction(void, i64, i64, i64, i64)
def transpose8(builder, source, ld, target, ld_target):
    """Transpose 8 x 8 f32 from `source` to `target`, rows `ld` and ld_target f32 apart, in registers; prefetches."""
    row_ptrs = [beyond(builder, source, builder.mul(ld, I64(r))) for r in range(GROUP)]
    for row_ptr in row_ptrs:
        panels.emit_prefetch(builder, builder.add(row_ptr, I64(panels.PREFETCH_NBYTES)))
    for first in range(0, GROUP, HALF_GROUP):
        parts = [quartet_at(builder, beyond(builder, row_ptr, I64(first))) for row_ptr in row_ptrs]
        row_vectors = [
            builder.shuffle_vector(low_quartet, high, ir.Constant(ORDER, list(range(GROUP))))
            for low_quartet, high in zip(parts[:HALF_GROUP], parts[HALF_GROUP:], strict=True)
        ]
        for c, value in enumerate(emit_turned_fours(builder, row_vectors)):
            target_row = beyond(builder, target, builder.mul(I64(first + c), ld_target))
            builder.store(value, builder.inttoptr(target_row, OCTET_VECTOR.as_pointer()), align=4)


def quartet_at(builder, quartet_ptr):
    return builder.load(builder.inttoptr(quartet_ptr, QUARTET_VECTOR.as_pointer()), align=4)


def emit_turned_fours(builder, rows):
    """Emit four vectors, each of two halves of 4 x 4 values, with both halves transposed."""

    def shuffle_pair(a, b, order):
        return builder.shuffle_vector(a, b, ir.Constant(ORDER, order))

    mixes = [shuffle_pair(*pair, order) for pair in (rows[:2], rows[2:]) for order in SINGLE_ORDERS]
    return [shuffle_pair(mixes[n], mixes[n + 2], order) for n in range(2) for order in PAIR_ORDERS]


@instruction(void, i64, i64)
def copy_eight_floats(builder, *pointers):
    source, target = (builder.inttoptr(a, OCTET_VECTOR.as_pointer()) for a in pointers)
    builder.store(builder.load(source, align=4), target, align=4)


@instruction(void, i64, f32x16)
def store_group(builder, target, lane_values):
    """Write the first 8 of 16 values to `target`."""
    low = builder.shuffle_vector(lane_values, lane_values, ir.Constant(ORDER, list(range(GROUP))))
    builder.store(low, builder.inttoptr(target, OCTET_VECTOR.as_pointer()), align=4)


@instruction(void, i64, i64, i64, i64)
def split_rows(builder, source, ld, target, group_stride):
    """Copy 16 columns of two rows at `source`, `ld` f32 apart, to two groups of 8, which are group_stride f32 apart."""
    panels.emit_prefetch(builder, beyond(builder, source, builder.mul(ld, I64(BELOW))))
    panels.emit_prefetch(builder, beyond(builder, source, builder.mul(ld, I64(BELOW + 1))))
    rows = [
        builder.load(panels.vector_at(builder, row_ptr), align=4)
        for row_ptr in (source, beyond(builder, source, ld))
    ]
    for group_index in range(2):
        spot = beyond(builder, target, builder.mul(group_stride, I64(group_index)))
        builder.store(
            panels.halves_of(builder, rows, group_index), panels.vector_at(builder, spot), align=64
        )


@part("i64, i64, i64, i64")
def transpose16_quarters(source, ld, target, ld_target):
    """Transpose 16 x 16 of `source`, all of which is there, by four transpose8."""
    for r in range(0, LANES, GROUP):
        for k in range(0, LANES, GROUP):
            target_block = address(target, k * ld_target + r)
            transpose8(address(source, r * ld + k), ld, target_block, ld_target)


@kernel("i64, i64, i64, i64, i64, i64, i64")
def pack_b(block, b, tb, ldb, depth, n, bf16):
    """Pack b (depth, n), or b.T if tb = 1, to address block: panels (places(depth), PANEL) in turn, zeros beyond b."""
    packed_k, k_per = panels.places(depth, bf16), 1 + bf16
    if tb == 0:
        panel_end = 0 if bf16 else n // PANEL * PANEL
        for k in range(0, depth, k_per):
            to = k // k_per * PANEL
            for j in range(0, panel_end, PANEL):
                panels.move_panel(address(b, k * ldb + j), ldb, address(block, j * packed_k + to))
            for j in range(panel_end, n, PANEL):
                for w in range(0, PANEL, LANES):
                    left = max(n - j - w, 0)
                    row_lanes = load_part(b, k * ldb + j + w, left)
                    if bf16:
                        after = load_part(b, (k + 1) * ldb + j + w, left if k + 1 < depth else 0)
                        row_lanes = panels.pair(row_lanes, after)
                    store(block, j * packed_k + to + w, row_lanes)
    else:
        for j in range(0, n, PANEL):
            for w in range(0, min(n - j, PANEL), LANES):
                last_row = min(n - j - w, LANES) - 1
                for k in range(0, depth, LANES):
                    source = address(b, (j + w) * ldb + k)
                    target = address(block, j * packed_k + k // k_per * PANEL + w)
                    if bf16:
                        panels.transpose16_bf16(source, ldb, last_row, depth - k, target, PANEL)
                    elif HAS_NARROW_VECTORS and last_row == LANES - 1 and depth - k >= LANES:
                        transpose16_quarters(source, ldb, target, PANEL)
                    else:
                        panels.transpose16(source, ldb, last_row, depth - k, target, PANEL)
    for j in range(0, n, PANEL):
        for k in range(-(-depth // k_per), packed_k):
            for w in range(0, PANEL, LANES):
                store(block, j * packed_k + k * PANEL + w, splat(0.0))


@part("i64(i64, i64)")
def a_layout(ta, bf16):
    """Return how pack_a packs a for these arguments of sgemm: IN_GROUPS, PAIRED, or IN_ROWS, which is a copy."""
    return IN_ROWS if HAS_NARROW_VECTORS and ta == 0 else bf16


@part("i64, i64, i64, i64, i64, i64")
def pack_narrow(block, a, ta, lda, depth, m):
    """Pack a (m, depth), or a.T if ta = 1, in f32 as `pack_a` does, in registers of 8, which transpose slowly."""
    packed_k = panels.places(depth, 0)
    if ta:
        group_size, full_extent = panels.group_stride(packed_k), max((m - GROUP) // ROWS + 1, 0)
        for k in range(0, depth, 2):
            num_steps = min(depth - k, 2)
            for g in range(full_extent):
                source = address(a, k * lda + g * ROWS)
                target = address(block, g * group_size + k * GROUP)
                for r in range(num_steps):
                    copy_eight_floats(address(source, r * lda), address(target, r * GROUP))
            for g in range(full_extent, -(-m // ROWS)):
                for r in range(k, k + num_steps):
                    row_lanes = load_part(a, r * lda + g * ROWS, m - g * ROWS)
                    store_group(address(block, g * group_size + r * GROUP), row_lanes)
        for g in range(-(-m // ROWS)):
            for k in range(depth, packed_k):
                store_group(address(block, g * group_size + k * GROUP), splat(0.0))
    else:
        full_extent = depth // LANES * LANES
        for i in range(-(-m // ROWS) * ROWS):
            a_row, target = address(a, min(i, m - 1) * lda), address(block, i * panels.FLAT_STRIDE)
            for k in range(0, full_extent, LANES):
                store(target, k, load(a_row, k))
            for k in range(full_extent, packed_k):
                poke(target, k, peek(a_row, k) if k < depth else f32(0.0))


@kernel("i64, i64, i64, i64, i64, i64, i64")
def pack_a(block, a, ta, lda, depth, m, bf16):
    """Pack a (m, depth), or a.T if ta = 1, to address block: groups (places(depth), GROUP), then 0; see a_layout."""
    deep, per = panels.places(depth, bf16), 1 + bf16
    if HAS_NARROW_VECTORS:
        pack_narrow(block, a, ta, lda, depth, m)
        return
    if ta:
        paired_depth = depth // 2 * 2 if bf16 == 0 else 0
        full_rows = m // LANES * LANES
        for k in range(0, paired_depth, 2):
            for i in range(0, full_rows, LANES):
                target = address(block, i // ROWS * panels.group_stride(deep) + k * GROUP)
                split_rows(address(a, k * lda + i), lda, target, panels.group_stride(deep))
        for k in range(0, depth, per):
            for i in range(full_rows if k < paired_depth else 0, m, ROWS):
                num_left = min(m - i, ROWS)
                values = load_part(a, k * lda + i, num_left)
                if bf16:
                    next_lanes = load_part(a, (k + 1) * lda + i, num_left if k + 1 < depth else 0)
                    values = panels.pair(values, next_lanes)
                store_part(
                    block, i // ROWS * panels.group_stride(deep) + k // per * GROUP, values, GROUP
                )
    else:
        for i in range(0, m, ROWS):
            last_row = min(m - i, ROWS) - 1
            for k in range(0, depth, LANES):
                source = address(a, i * lda + k)
                target = address(block, i // ROWS * panels.group_stride(deep) + k // per * GROUP)
                if bf16:
                    panels.transpose_group_bf16(source, lda, last_row, depth - k, target, LANES)
                else:
                    panels.transpose_group(source, lda, last_row, depth - k, target, LANES)
    for i in range(0, m, ROWS):
        for k in range(-(-depth // per), deep):
            store_part(block, i // ROWS * panels.group_stride(deep) + k * GROUP, splat(0.0), GROUP)
