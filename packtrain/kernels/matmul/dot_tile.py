"""Emit tiles of dot products: rows of quantized weights times rows of activations that were rounded to integers.

A chunk of a row of weights is four blocks of 32 or one of 256: groups of codes, each with a scale. `codes` of a type
returns vectors of 64 codes, each with equally many codes of every group; `scales` returns the scales. A line has the
integers for a chunk in the order of the codes, then steps and corrections. With several planes an integer is a sum of
signed bytes, one of each plane, and the first counts the largest power of 256.

Worked example, with vectors of 4 codes, sums of pairs, one plane, and weights scale * (code - 8):

                group A, in lane 0              group B, in lane 1
    codes       9 7 10 8, scale 0.5             8 9 6 8, scale 2                vectors [9 7 | 8 9], [10 8 | 6 8]
    integers    3 1 2 4, step 0.1               5 3 1 0, step 0.2               vectors [3 1 | 5 3], [2 4 | 1 0]
    sums        9 3 + 7 1 + 10 2 + 8 4 = 86     8 5 + 9 3 + 6 1 + 8 0 = 73
    corrected   86 - 8 (3 + 1 + 2 + 4) = 6      73 - 8 (5 + 3 + 1 + 0) = 1      the line has -80 and -72
    scaled      6 (0.5 0.1) = 0.3               1 (2 0.2) = 0.4                 added to f32 sums, here y = 0.7

For weights scale * code + offset, lines have step * (sum of integers) by the lane of each offset that `scales` returns.
As a vector has codes of all groups, a block of 256 is converted and scaled once: scaling each 128 took 1.25 (24 bits)
or 1.5 times as long (8 bits). 256 Q4_K products of a row take 20 or 10 cycles, multiply-adds alone 17 or 7.
"""

import gc
from functools import partial
from itertools import product

from llvmlite import ir
from numba.core import cgutils

from packtrain.kernels.matmul.panels import emit_prefetch
from packtrain.kernels.runtime.jit import call as call_kernel
from packtrain.kernels.runtime.jit import emit_part, kernel
from packtrain.kernels.runtime.kernel_types import i64, void
from packtrain.kernels.simd.lane_reduction import fold_vectors
from packtrain.kernels.simd.simd_f32 import (
    BITS, F32, I64, LANES, VECTOR, call, emit_switch, f32x16, intrinsic_of,
)  # fmt: skip
from packtrain.kernels.simd.simd_u8 import (
    BY_SIGN, CODES, codes64, dot_fours, dot_fours_signed, put, read, shuffle,
)  # fmt: skip

VALUES = 128  # least integers of a line
LANES_NBYTES = 64  # bytes of 16 lanes
PLANE_COUNTS, MAX_PLANES, MAX_TYPES = (1, 3), 4, 64
ROWS = {1: 4, 2: 4, 4: 3, 8: 2}  # rows of weights by rows of activations: as registers hold
MAX_INTEGER = 8355000  # largest integer of three planes: a little less than fits
PREFETCH_NBYTES = 4096  # bytes after the rows that follow, where weights are prefetched
CACHE_LINE = 64
CODES_FORM, SCALES_FORM = codes64(i64, i64), f32x16(i64)


def width_of(dtype):
    """Return how many codes of a Dtype tiles unpack at once, a chunk: a block's, or 128 of smaller blocks."""
    return max(VALUES, dtype.block)


def codes_per_group(dtype):
    """Return how many of 64 codes of a Dtype, unpacked at once, belong to a group: those that share a scale."""
    group_size = 16 if dtype.layout is not None and dtype.layout.group_size == 16 else 32
    return group_size * CODES.count // width_of(dtype)


def needs_split_sums(dtype, planes):
    """Return whether 32 bits cannot hold sums of products of a type's codes and integers of `planes` bytes."""
    num_products = width_of(dtype) // LANES
    return planes > 1 and num_products * dtype.code["codes"].max_code * MAX_INTEGER >= 1 << 31


def line(width, planes):
    """Return the bytes of a line of `width` activations: integers by plane, steps, and two vectors of corrections."""
    return width * planes + 3 * LANES_NBYTES


class DotTile:
    """Emits an LLVM function for a type, m rows of activations of some planes, ROWS[m] of weights: see emit_code."""

    def __init__(self, context, module, dtype, code, m, planes):
        self.context, self.code, self.num_x_rows, self.r = context, code, m, ROWS[m]
        self.chunk_width, self.planes = width_of(dtype), range(planes)
        self.steps_offset, self.line = self.chunk_width * planes, line(self.chunk_width, planes)
        self.code_bias = dtype.code["codes"].code_offset
        self.is_signed = dtype.code["codes"].is_signed
        self.is_split, self.lanes = needs_split_sums(dtype, planes), codes_per_group(dtype) // 4
        self.is_single_block = dtype.block == self.chunk_width
        self.chunk_nbytes = dtype.block_nbytes * max(1, VALUES // dtype.block)
        function_name = module.get_unique_name(f"tile_{dtype.name}_{m}_{planes}")
        function_type = ir.FunctionType(ir.VoidType(), [I64] * 10)
        self.function = ir.Function(module, function_type, function_name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.emit_code(*self.function.args)

    def emit_code(self, x, row_stride, w, w_stride, count, rest_nbytes, y, down, num_rows, add):
        """Emit y[i, j] = x[i] w[j], plus y if `add`, for m rows of x and the first num_rows of ROWS[m] rows of w.

        x, w, y                     addresses of rows by round_row, of packed rows, and of f32
        row_stride, w_stride, down  bytes between rows of x, w and y
        count, rest_nbytes          chunks of a row of w, and bytes after them
        """
        b = self.builder
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = [cgutils.alloca_once_value(b, zero) for _ in range(self.num_x_rows * self.r)]
        last_row = b.sub(num_rows, I64(1))
        w_rows = [self.signed_min(b, I64(j), last_row) for j in range(self.r)]
        w_rows = [b.add(w, b.mul(w_stride, j)) for j in w_rows]
        ahead = b.add(b.add(w, b.mul(w_stride, I64(self.r))), I64(PREFETCH_NBYTES))
        self.chunks(x, row_stride, w_rows, ahead, count)
        if not self.is_single_block:
            with b.if_then(b.icmp_signed(">", rest_nbytes, I64(0)), likely=False):
                rest = self.pad_rest_rows(w_rows, count, rest_nbytes)
                self.chunks(b.add(x, b.mul(count, I64(self.line))), row_stride, rest, ahead, I64(1))
        totals = fold_vectors(b, [b.load(s) for s in self.sums], lambda b, v, w: b.fadd(v, w))
        totals_ptr = b.ptrtoint(cgutils.alloca_once_value(b, totals), I64)
        for j in range(self.r):
            with b.if_then(b.icmp_signed("<", I64(j), num_rows)):
                for i in range(self.num_x_rows):
                    to = b.add(y, b.add(b.mul(down, I64(i)), I64(4 * j)))
                    self.store_sum(read(b, F32, totals_ptr, 4 * (i * self.r + j)), to, add)
        b.ret_void()

    def prefetch_rows(self, prefetch_ptr):
        """Emit prefetches of the next rows in the order of their bytes: rows side by side halve the rate of memory."""
        for byte_offset in range(0, self.chunk_nbytes * self.r, CACHE_LINE):
            emit_prefetch(self.builder, self.builder.add(prefetch_ptr, I64(byte_offset)), level=2)

    def store_sum(self, sum_value, target_ptr, add):
        """Emit a store of sum_value at address target_ptr, plus the f32 there if `add`."""
        b = self.builder
        added_total = b.fadd(read(b, F32, target_ptr), sum_value)
        put(b, b.select(b.icmp_signed("!=", add, I64(0)), added_total, sum_value), target_ptr)

    def pad_rest_rows(self, w_rows, count, rest_nbytes):
        """Emit copies of the bytes behind `count` chunks of each of w_rows, then zeros; returns their addresses."""
        b = self.builder
        with b.goto_entry_block():
            room = b.alloca(ir.ArrayType(ir.ArrayType(CODES.element, self.chunk_nbytes), self.r))
        buffer_ptr = b.ptrtoint(room, I64)
        rest_rows = [b.add(buffer_ptr, I64(j * self.chunk_nbytes)) for j in range(self.r)]
        full_nbytes = b.mul(count, I64(self.chunk_nbytes))
        put(b, ir.Constant(room.type.pointee, None), buffer_ptr)
        for source_row, rest_row in zip(w_rows, rest_rows, strict=True):
            with cgutils.for_range(b, rest_nbytes, intp=I64) as loop:
                byte = read(b, CODES.element, b.add(source_row, full_nbytes), loop.index)
                put(b, byte, b.add(rest_row, loop.index))
        return rest_rows

    def chunks(self, x, row_stride, w_rows, ahead, count):
        """Emit the loop that adds `count` chunks of rows to the sums; x, w_rows, ahead (to prefetch) are addresses."""
        b = self.builder
        with cgutils.for_range(b, count, intp=I64) as loop:
            chunk_offset = b.mul(loop.index, I64(self.chunk_nbytes))
            self.prefetch_rows(b.add(ahead, b.mul(loop.index, I64(self.chunk_nbytes * self.r))))
            x_line = b.add(x, b.mul(loop.index, I64(self.line)))
            chunk_rows = [b.add(x_line, b.mul(row_stride, I64(i))) for i in range(self.num_x_rows)]
            self.add_chunk(chunk_rows, [b.add(j, chunk_offset) for j in w_rows])

    def add_chunk(self, x, w):
        """Emit the addition of a chunk's products to the sums: each row of x with each of w, two lists of addresses."""
        b = self.builder
        scales = [self.call_code("scales", SCALES_FORM, j) for j in w]
        by = [shuffle(b, s, [lane // self.lanes for lane in range(LANES)]) for s in scales]
        code_vectors = range(self.chunk_width // CODES.count)
        codes = [[self.call_code("codes", CODES_FORM, j, I64(i)) for j in w] for i in code_vectors]
        for i, x_line in enumerate(x):
            row_slots = self.sums[i * self.r : (i + 1) * self.r]
            step_vector = read(b, VECTOR, x_line, self.steps_offset)
            scaled_steps = [b.fmul(d, step_vector) for d in by]
            row_sums = map(b.load, row_slots)
            row_sums = map(self.fma, self.scaled_products(codes, x_line), scaled_steps, row_sums)
            if not self.code_bias:
                integer_totals = read(b, VECTOR, x_line, self.steps_offset + LANES_NBYTES)
                row_sums = map(self.fma, scales, [integer_totals] * self.r, row_sums)
            for sum_slot, sum_value in zip(row_slots, list(row_sums), strict=True):
                b.store(sum_value, sum_slot)

    def scaled_products(self, codes, x_line):
        """Emit, for each row of w, sums by fours of its codes (codes[i][row]) times the integers at x_line, as f32."""
        rest = self.steps_offset + LANES_NBYTES
        if not self.is_split:
            return [*map(self.to_floats, self.integer_sums(codes, x_line, self.planes, rest))]
        high_sums = self.integer_sums(codes, x_line, self.planes[:-1], rest)
        low_sums = self.integer_sums(codes, x_line, self.planes[-1:], rest + LANES_NBYTES)
        by_256 = ir.Constant(VECTOR, [256.0] * LANES)
        sum_pairs = zip(map(self.to_floats, high_sums), map(self.to_floats, low_sums), strict=True)
        return [self.fma(v, by_256, w) for v, w in sum_pairs]

    def integer_sums(self, codes, x_line, plane_range, rest_offset):
        """Emit, for each row of w, sums by fours of its codes times some planes of the integers at x_line, as i32.

        The correction at rest_offset is added, if any. Rows go side by side: each sum waits for the one before.
        """
        b = self.builder
        # integers of more planes may be -128
        use_signed_dot = BY_SIGN and self.is_signed and len(self.planes) == 1
        plane_sums = [ir.Constant(BITS, [0] * LANES)] * self.r
        for p in plane_range:
            if p != plane_range[0]:
                plane_sums = [b.shl(v, ir.Constant(BITS, [8] * LANES)) for v in plane_sums]
            if p == plane_range[-1] and self.code_bias and not use_signed_dot:
                correction = read(b, BITS, x_line, rest_offset)
                plane_sums = [b.add(v, correction) for v in plane_sums]
            for i, row_codes in enumerate(codes):
                integers = read(b, CODES, x_line, self.chunk_width * p + CODES.count * i)
                for j, code in enumerate(row_codes):
                    if use_signed_dot:
                        plane_sums[j] = dot_fours_signed(b, code, integers, plane_sums[j])
                    else:
                        plane_sums[j] = dot_fours(b, code, integers, plane_sums[j], self.is_signed)
        return plane_sums

    def to_floats(self, v):
        return self.builder.sitofp(v, VECTOR)

    def fma(self, a, b, c):
        return call(self.builder, "llvm.fma.v16f32", VECTOR, a, b, c)

    def signed_min(self, b, v, w):
        return b.select(b.icmp_signed("<", v, w), v, w)

    def call_code(self, role, signature, *call_args):
        return emit_part(self.context, self.builder, self.code[role], signature, call_args)


def dot_tiles(codes, scale_functions):
    """Return an intrinsic (qtype, m, planes, x, w, w_stride, k, y, down, num_rows, add) of a tile: see emit_code.

    codes, scale_functions: by element type, from compile_role. LLVM compiles the tiles of a type, a kernel, at a time.
    """
    kernels = {
        dtype: type_kernel(dtype, {"codes": codes[dtype], "scales": scale_functions[dtype]})
        for dtype in codes
    }

    def codegen(context, builder, sig, args):
        cases = {
            dtype.number: partial(call_kernel, context, builder, kernels[dtype], args[1:])
            for dtype in kernels
        }
        emit_switch(builder, args[0], cases)
        return context.get_dummy_value()

    return intrinsic_of(11, lambda typingctx, *_: (void(*[i64] * 11), codegen))


def type_kernel(dtype, code):
    """Return a kernel with all tiles of a type, by rows and planes; `code` has the type's functions by role."""

    def codegen(context, builder, sig, args):
        m, planes, x, w, w_stride, k, y, down, rows, add = args
        num_lines = builder.udiv(builder.add(k, I64(VALUES - 1)), I64(VALUES))

        def emit_case(planes, m):
            tile = DotTile(context, builder.module, dtype, code, m, planes)
            size, block_nbytes = I64(width_of(dtype)), I64(dtype.block_nbytes)
            left = builder.mul(builder.udiv(builder.urem(k, size), I64(dtype.block)), block_nbytes)
            row_stride = builder.mul(num_lines, I64(line(VALUES, planes)))
            tile_args = x, row_stride, w, w_stride, builder.udiv(k, size), left, y, down, rows, add
            builder.call(tile.function, tile_args)

        cases = {
            planes + MAX_PLANES * m: partial(emit_case, planes, m)
            for planes, m in product(PLANE_COUNTS, ROWS)
        }
        emit_switch(builder, builder.add(planes, builder.mul(m, I64(MAX_PLANES))), cases)
        return context.get_dummy_value()

    signature, name = void(*[i64] * 10), f"tile_{dtype.name}"
    parameters = ", ".join(f"arg{index}" for index in range(10))
    names = {"__name__": __name__, "emit_tile": intrinsic_of(10, lambda *_: (signature, codegen))}
    source = f"def {name}({parameters}):\n    emit_tile({parameters})"
    exec(compile(source, __file__, "exec"), names)
    tile_kernel = kernel(signature)(names[name])
    gc.collect()  # 30 MiB of LLVM's instructions, in cycles: collection is paused while modules are imported
    return tile_kernel
