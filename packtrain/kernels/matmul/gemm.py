"""Multiply f32 matrices on one thread: pack both operands, then run generated register tiles of multiply-adds.

An element of c is a sum of sums over blocks of k, each in ascending k; how k is cut into blocks depends on k alone.

Worked example, with tiles of 2 rows and 1 vector of 2 lanes: a = [[1, 2], [3, 4], [5, 6]], b = [[1, 0], [2, 1]].

    packed a   groups of 2 rows, k by k: [1 3 | 2 4] and [5 - | 6 -]; the place of a missing row may hold any value
    packed b   panels of 2 columns, k by k: [1 0 | 2 1]
    tile 0     two sums in registers, s0 = s1 = [0 0]
      k = 0    load [1 0]; s0 += 1 [1 0] = [1 0]; s1 += 3 [1 0] = [3 0]
      k = 1    load [2 1]; s0 += 2 [2 1] = [5 2]; s1 += 4 [2 1] = [11 4]
    tile 1     s0 = 5 [1 0] + 6 [2 1] = [17 6]; its second row is not written
    c          [[5, 2], [11, 4], [17, 6]]

Python loops over the rows and vectors of a tile unroll its code: `emit_k_step` emits one k, `emit_sums` the loop over k
with a prefetch, `emit_write` a masked store. ROWS x WIDE sums, WIDE vectors of b and a value of a fit in registers.
"""

from functools import partial
from itertools import product

from llvmlite import ir

from packtrain.kernels.matmul import panels
from packtrain.kernels.matmul.amx import STEPS, by_tiles, pack_columns, pack_rows
from packtrain.kernels.matmul.operand_packing import a_layout, pack_a, pack_b
from packtrain.kernels.matmul.panels import (
    AMX, AVX512, DEEP, GROUP, IN_ROWS, PAIRED, PANEL, ROWS, UNROLL,
)  # fmt: skip
from packtrain.kernels.runtime.environment import has_large_l2
from packtrain.kernels.runtime.jit import each_task, kernel
from packtrain.kernels.runtime.kernel_types import f32, i64, void
from packtrain.kernels.simd import simd_f32
from packtrain.kernels.simd.simd_f32 import (
    F32, I64, LANES, VECTOR, ZERO, address, branch_on_full, call, emit_switch, first_lanes, instruction, poke,
    read_masked, scratch, spread,
)  # fmt: skip

# With AVX-512 and 2 MiB of L2, which are Intel's, cores prefetch panels and sums themselves. a is packed for each block
# of b: in bf16, twice as wide blocks take 0.97 of the time on one thread; in f32, 576 columns were 3 to 5 % slower than
# 384 on two threads with neighbours in the cache. Deeper blocks gained nothing.
HAS_LARGE_L2 = AVX512 and has_large_l2()
BROAD = 288 if AVX512 and not HAS_LARGE_L2 else 384  # most columns in a block of b
BROAD_BF16 = 576 if HAS_LARGE_L2 else BROAD  # most columns in bf16; the buffer has room for them
GROUPS_PER_CHUNK = 8  # groups of a packed at once
CHUNK = GROUPS_PER_CHUNK * ROWS
B_SIZE, A_SIZE = DEEP * BROAD_BF16, (DEEP * GROUP + panels.GROUP_SHIFT) * GROUPS_PER_CHUNK
USED = B_SIZE + A_SIZE + DEEP * PANEL  # most f32 of stack of a product: with packed weights
PAGE_FLOATS = 1024  # f32 of a page of memory
PREFETCH_NBYTES = 768 if AVX512 else 512  # bytes of a panel prefetched ahead
# bytes between rows, and between places of k, of packed a, by layout
ROW_STRIDES, K_STRIDES = (4, 4, 4 * panels.FLAT_STRIDE), (4 * GROUP, 4 * GROUP, 4)
OTHER = IN_ROWS if panels.HAS_NARROW_VECTORS else PAIRED if panels.HALF and not AMX else None
SGEMM_SIGNATURE = void(i64, i64, i64, i64, i64, i64, i64, i64, i64, f32, i64, i64, i64)


def emit_add(builder, is_bf16, a, b, sum_vector):
    """Emit sum_vector + a * b in each lane, of f32 or of two bf16."""
    if not is_bf16:
        return call(builder, "llvm.fma.v16f32", VECTOR, a, b, sum_vector)
    a, b = (builder.bitcast(x, panels.BF16_VECTOR) for x in (a, b))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, sum_vector, a, b)


def emit_k_step(builder, layout, width, a_ptr, b_ptr, sums):
    """Emit a step of k: ROWS values at `a_ptr` times `width` vectors at `b_ptr`, plus the sums; returns the sums."""
    column_ptrs = [builder.add(b_ptr, I64(64 * w)) for w in range(width)]
    for column_ptr in column_ptrs if layout == PAIRED or not HAS_LARGE_L2 else ():
        panels.emit_prefetch(builder, builder.add(column_ptr, I64(PREFETCH_NBYTES)))
    columns = [builder.load(panels.vector_at(builder, place), align=64) for place in column_ptrs]
    now = []
    for r in range(ROWS):
        a_value_ptr = builder.add(a_ptr, I64(ROW_STRIDES[layout] * r))
        a_value_ptr = builder.inttoptr(a_value_ptr, F32.as_pointer())
        a_lanes = spread(builder, builder.load(a_value_ptr), VECTOR)
        for w, column in enumerate(columns):
            now.append(emit_add(builder, layout == PAIRED, a_lanes, column, sums[r * width + w]))
    return now


def emit_sums(builder, layout, width, a, panel_start, depth, next_group):
    """Emit the loop over k of a tile, `depth` places; returns ROWS x width sums. Prefetches address next_group."""
    entry_block = builder.block
    loop, exit_block = (builder.append_basic_block(name) for name in ("k", "sums"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, a_ptr, b_ptr, prefetch_ptr = (builder.phi(I64) for _ in range(4))
    sums = [builder.phi(VECTOR) for _ in range(ROWS * width)]
    now = sums
    for u in range(UNROLL):
        row = builder.add(a_ptr, I64(K_STRIDES[layout] * u))
        now = emit_k_step(builder, layout, width, row, builder.add(b_ptr, I64(4 * PANEL * u)), now)
    panels.emit_prefetch(builder, prefetch_ptr)
    loop_phis = (
        (k, I64(UNROLL), I64(0)), (a_ptr, I64(K_STRIDES[layout] * UNROLL), a),
        (b_ptr, I64(4 * PANEL * UNROLL), panel_start), (prefetch_ptr, I64(64), next_group),
    )  # fmt: skip
    for phi, increment, initial_value in loop_phis:
        phi.add_incoming(initial_value, entry_block)
        phi.add_incoming(builder.add(phi, increment), loop)
    for phi, value in zip(sums, now, strict=True):
        phi.add_incoming(ZERO, entry_block)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", builder.add(k, I64(UNROLL)), depth), loop, exit_block)
    builder.position_at_end(exit_block)
    return now


def emit_write(builder, value, beta, c, left):
    """Emit c = value + beta * c for the first `left` f32 at address c; c is not read if beta = 0."""
    pointer = panels.vector_at(builder, c)

    def write_masked(mask):
        with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (new, old):
            with new:
                store_block = builder.block
            with old:
                was = read_masked(builder, pointer, mask)
                beta_lanes = spread(builder, beta, VECTOR)
                new_value = call(builder, "llvm.fma.v16f32", VECTOR, was, beta_lanes, value)
                add_block = builder.block
        result_value = builder.phi(VECTOR)
        result_value.add_incoming(value, store_block)
        result_value.add_incoming(new_value, add_block)
        return simd_f32.write_masked(builder, result_value, pointer, mask)

    if panels.HAS_NARROW_VECTORS:  # masks are slow there
        branch_on_full(builder, left, write_masked)
    else:
        write_masked(first_lanes(builder, left))


def emit_tile(builder, layout, width, tile_args):
    """Emit the code of `tile` for one layout and width."""
    a, panel, depth, next_group, beta, c, ldc, num_rows, num_left = tile_args
    tile_cells = [(r, w) for r in range(ROWS) for w in range(width)]

    def cell_ptr(r, w):
        return panels.beyond(builder, c, builder.add(builder.mul(I64(r), ldc), I64(w * LANES)))

    for tile_cell in tile_cells if layout == PAIRED or not HAS_LARGE_L2 else ():
        panels.emit_prefetch(builder, cell_ptr(*tile_cell), write=1)
    sums = emit_sums(builder, layout, width, a, panel, depth, next_group)
    for r in range(ROWS):
        with builder.if_then(builder.icmp_signed("<", I64(r), num_rows), likely=True):
            for w in range(width):
                lanes_left = builder.sub(num_left, I64(w * LANES))
                emit_write(builder, sums[r * width + w], beta, cell_ptr(r, w), lanes_left)


@instruction(void, i64, i64, i64, i64, i64, i64, f32, i64, i64, i64, i64)
def tile(builder, width, layout, *tile_args):
    """c = a @ panel + beta * c for `num_rows` <= ROWS rows and `left` <= 16 width columns.

    layout     of packed a: IN_GROUPS, or OTHER, if this CPU uses a second layout
    tile_args  a, panel, depth (places), next_group (address to prefetch), beta, c, ldc, num_rows, left
    """
    layouts = [panels.IN_GROUPS] if OTHER is None else [panels.IN_GROUPS, OTHER]
    cases = {
        2 * columns + i: partial(emit_tile, builder, layouts[i], columns, tile_args)
        for columns, i in product(range(1, panels.WIDE + 1), range(len(layouts)))
    }
    is_other = builder.icmp_signed("==", layout, I64(-1 if OTHER is None else OTHER))
    number = builder.add(builder.mul(width, I64(2)), builder.zext(is_other, I64))
    emit_switch(builder, number, cases)


@kernel("i64, i64, i64, i64, i64, f32, i64, i64, i64, UniTuple(i64, 4)")
def block_product(m, n, a, b, depth, beta, c, ldc, layout, next_source):
    """c (m, n) = a @ b + beta * c at addresses; a packed in `layout`, b packed in panels, both of `depth` places.

    next_source  rows of a that are packed next, prefetched tile by tile: address, number, distance, length; to prefetch
                 the next block of b gained nothing in a step
    """
    next_ptr, num_lines, line_stride, line_length = next_source
    tiles, tile_index = -(-m // ROWS) * -(-n // PANEL), 0
    group_size = ROWS * panels.FLAT_STRIDE if layout == IN_ROWS else panels.group_stride(depth)
    for i in range(0, m, ROWS):
        a_ptr = address(a, i // ROWS * group_size)
        for j in range(0, n, PANEL):
            for r in range(tile_index * num_lines // tiles, (tile_index + 1) * num_lines // tiles):
                for k in range(0, line_length, LANES):
                    panels.prefetch_line(address(next_ptr, r * line_stride + k))
            tile_index += 1
            b_ptr, n_left, m_left = address(b, j * depth), min(n - j, PANEL), m - i
            next_a = address(a_ptr, group_size + j // PANEL * (depth // UNROLL) * LANES)
            target = address(c, i * ldc + j)
            wide = -(-n_left // LANES)
            tile(wide, layout, a_ptr, b_ptr, depth, next_a, beta, target, ldc, m_left, n_left)


@kernel("i64(i64, i64, i64)")
def even_parts(total_size, max_length, unit):
    """Return the length of equal parts of `total_size`: a multiple of `unit`, at most `max_length`, at least `unit`."""
    num_parts = max(-(-total_size // (max_length // unit * unit)), 1)
    return max(-(-total_size // (num_parts * unit)) * unit, unit)


@kernel("i64, i64, i64, i64, i64, i64, i64")
def pack(block, b, tb, ldb, depth, n, bf16):
    """Pack b (depth, n), or b.T if tb = 1, from address b to `block`, as `multiply_block` reads it; see sgemm."""
    if AMX and bf16:
        pack_columns(block, panels.places(depth, bf16) * LANES, b, tb, ldb, depth, n, bf16)
    else:
        pack_b(block, b, tb, ldb, depth, n, bf16)


@kernel("i64, i64, i64, i64, i64, i64, i64, f32, i64, i64, i64")
def multiply_block(ta, m, n, a, lda, block, depth, beta, c, ldc, bf16):
    """c (m, n) = a @ block + beta * c, beta 0 or 1, a.T if ta = 1; `block` by `pack`, at most `broad` columns."""
    chunk, packed_k = scratch(A_SIZE), panels.places(depth, bf16)
    if AMX and bf16:
        max_rows = A_SIZE // max(packed_k, LANES) // STEPS * STEPS
        for i in range(0, m, max_rows):
            height, target, across = min(m - i, max_rows), address(c, i * ldc), packed_k * LANES
            pack_rows(chunk, across, address(a, i if ta else i * lda), ta, lda, depth, height, bf16)
            by_tiles(height, n, chunk, block, across, beta != 0, target, ldc, bf16)
        return
    for i in range(0, m, CHUNK):
        height, target = min(m - i, CHUNK), address(c, i * ldc)
        pack_a(chunk, address(a, i if ta else i * lda), ta, lda, depth, height, bf16)
        after = i + CHUNK
        next_ptr, left = address(a, after if ta else after * lda), max(min(m - after, CHUNK), 0)
        next_source = (next_ptr, depth, lda, left) if ta else (next_ptr, left, lda, depth)
        layout = a_layout(ta, bf16)
        block_product(height, n, chunk, block, packed_k, beta, target, ldc, layout, next_source)


@kernel("i64(i64, i64)")
def broad(depth, bf16):
    """Return the most columns of a packed block of b, `depth` rows of f32 (bf16 = 0) or bf16, that fits the cache."""
    return DEEP * (BROAD_BF16 if bf16 else BROAD) // panels.places(depth, bf16)


@each_task("i64", lambda num_threads: num_threads)
def use_stacks(num_threads, thread_index):
    """Touch the stack that products need, on all threads, so that its memory is in use before it is measured.

    Blocks lie on each thread's stack, so that no op needs a workspace that depends on the number of threads.
    """
    stack_ptr = scratch(USED)
    for float_index in range(0, USED, PAGE_FLOATS):
        poke(stack_ptr, float_index, f32(0.0))


@kernel(SGEMM_SIGNATURE)
def sgemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc, bf16):
    """c (m, n) = op(a) @ op(b) + beta * c on one thread; a, b, c are addresses, row-major.

    op(a) (m, k) is a, or a transposed if ta = 1 (then a is stored (k, m)); op(b) (k, n) likewise;
    lda, ldb, ldc are the row strides in elements. c is not read if beta = 0.
    With bf16 = 1, a and b are rounded to bf16 and their products summed in f32; see amx.py for bf16 = 2.
    A block of b and a chunk of a stay in the L2 cache, a group of a in L1; see use_stacks.
    """
    block_ptr = scratch(B_SIZE)
    depth_step = even_parts(k, 2 * DEEP if bf16 == 1 else DEEP, LANES)
    columns_step = even_parts(n, broad(depth_step, bf16), PANEL)
    for p in range(0, max(k, 1), depth_step):
        depth = min(k - p, depth_step)
        keep = beta if p == 0 else f32(1.0)
        for j in range(0, n, columns_step):
            width, target = min(n - j, columns_step), address(c, j)
            source = address(b, j * ldb + p if tb else p * ldb + j)
            pack(block_ptr, source, tb, ldb, depth, width, bf16)
            a_ptr = address(a, p * lda if ta else p)
            multiply_block(ta, m, width, a_ptr, lda, block_ptr, depth, keep, target, ldc, bf16)
