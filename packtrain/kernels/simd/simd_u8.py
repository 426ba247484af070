"""Vectors of 64 one-byte codes: instructions for dot products in integers.

Codes are unsigned, unless a function says otherwise; `c >> 4`, `c & 15`, `c | d` work by code. Products of 64 codes are
summed by fours, to 16 sums.
"""

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.kernel_types import i64, void
from packtrain.kernels.simd import simd_f32
from packtrain.kernels.simd.simd_f32 import (
    BITS, F32, I32, I64, LANES, call, f32x16, instruction, spread,
)  # fmt: skip
from packtrain.kernels.simd.simd_i32 import INT_OPERATORS, i32x16

llvmlite.binding.initialize_native_asmparser()
VNNI = environment.has_cpu_feature("avx512vnni")
AVX2 = environment.has_cpu_feature("avx2")
BY_SIGN = AVX2 and not VNNI  # whether dot_fours_signed serves signed codes
I8, I16 = ir.IntType(8), ir.IntType(16)
COUNT = 64
CODES, HALF, SHORT_VECTOR = ir.VectorType(I8, COUNT), ir.HalfType(), ir.VectorType(I16, COUNT // 2)


codes64 = simd_f32.computing_type(
    "codes64", CODES, types.Integer, types.int8, INT_OPERATORS | {"xor": "xor"}
)


def shuffle(builder, value, order, second_value=None):
    places = ir.Constant(ir.VectorType(I32, len(order)), order)
    return builder.shuffle_vector(value, value if second_value is None else second_value, places)


def read(builder, llvm_type, address, nbytes=0):
    nbytes = I64(nbytes) if isinstance(nbytes, int) else nbytes
    pointer = builder.inttoptr(builder.add(address, nbytes), llvm_type.as_pointer())
    return builder.load(pointer, align=1)


def put(builder, value, address, nbytes=0):
    pointer = builder.inttoptr(builder.add(address, I64(nbytes)), value.type.as_pointer())
    builder.store(value, pointer, align=1)


def gather_words(builder, llvm_type, order, address, *nbytes):
    """Read 64 bytes at `address` and at each distance in `nbytes`, and pick words of 4 or 8 bytes in this order."""
    chunks = [read(builder, llvm_type, address, n) for n in (0, *nbytes)]
    return builder.bitcast(shuffle(builder, chunks[0], order, chunks[-1]), CODES)


def shift_words(builder, codes, shift_counts):
    """Shift words of 4 or 8 bytes right, or left, each by its own count; the bits that come in mean nothing."""
    word_bits = 8 * COUNT // len(shift_counts)
    vector_type = ir.VectorType(ir.IntType(word_bits), len(shift_counts))
    by = ir.Constant(vector_type, [n % word_bits for n in shift_counts])
    word_vectors = builder.bitcast(codes, vector_type)
    if min(shift_counts) >= 0:
        return builder.bitcast(builder.lshr(word_vectors, by), CODES)
    name = f"llvm.fshr.v{len(shift_counts)}i{word_bits}"
    return builder.bitcast(call(builder, name, vector_type, word_vectors, word_vectors, by), CODES)


EIGHTS, WORD_VECTOR = ir.VectorType(I64, 8), ir.VectorType(I32, LANES)


@instruction(codes64, i64)
def twice_of_four(builder, address):
    """Read eight bytes, each eight twice, from `address` and 32, 64, 96 bytes behind it; nothing beyond is read."""
    return gather_words(builder, EIGHTS, [0, 0, 4, 4, 11, 11, 15, 15], address, 40)


@instruction(codes64, i64)
def eight_times(builder, address):
    """Read eight bytes at an address and repeat them eight times."""
    return builder.bitcast(spread(builder, read(builder, I64, address), EIGHTS), CODES)


@instruction(codes64, codes64)
def low_and_high(builder, codes):
    """Shift every second word of eight bytes right by 4."""
    return shift_words(builder, codes, [0, 4] * 4)


@instruction(codes64, codes64)
def bit_by_eight(builder, codes):
    """Move bit i of the bytes of the i-th eight to bit 4; the bits around it mean nothing."""
    return shift_words(builder, codes, [*range(-4, 4)])


@instruction(codes64, i64)
def low_of_sixteen(builder, address):
    """Read four bytes of each group of a q6_K block, at `address`, whose low four bits become the codes' low bits."""
    half = [0, 4, 8, 12] * 2
    code_bytes = gather_words(builder, WORD_VECTOR, [*half, *(16 + n for n in half)], address, 64)
    return shift_words(builder, code_bytes, [0, 0, 0, 0, 4, 4, 4, 4] * 2)


@instruction(codes64, i64)
def high_of_sixteen(builder, address):
    """Read four bytes of each group of a q6_K block, at `address`, whose bits 4 and 5 become the codes' upper bits."""
    half = [0, 4] * 4
    code_bytes = gather_words(builder, WORD_VECTOR, [*half, *(8 + n for n in half)], address)
    return shift_words(builder, code_bytes, [-4, -4, -2, -2, 0, 0, 2, 2] * 2)


def emit_reorder(builder, address, vector_type, orders):
    """Rewrite 64-byte vectors at `address`: vector i gets the words numbered orders[i], counted on through all."""
    word_vectors = [read(builder, vector_type, address, COUNT * i) for i in range(len(orders))]
    while len(word_vectors) > 1:
        pairs = zip(word_vectors[::2], word_vectors[1::2], strict=True)
        word_vectors = [shuffle(builder, v, [*range(2 * v.type.count)], w) for v, w in pairs]
    for i, order in enumerate(orders):
        put(builder, shuffle(builder, word_vectors[0], order), address, COUNT * i)


def reorder_intrinsic(vector_type, together, num_pieces):
    """Return an intrinsic (address): groups of `num_pieces` pieces become all first pieces, then all second ones, …."""

    def emit(builder, address):
        num_groups = vector_type.count // together
        orders = [
            [(group * num_pieces + piece) * together + word for group in range(num_groups) for word in range(together)]
            for piece in range(num_pieces)
        ]  # fmt: skip
        emit_reorder(builder, address, vector_type, orders)

    return instruction(void, i64)(emit)


reorder_by_16 = reorder_intrinsic(EIGHTS, 2, 2)
reorder_by_8 = reorder_intrinsic(EIGHTS, 1, 4)
reorder_by_4 = reorder_intrinsic(WORD_VECTOR, 1, 4)


@instruction(codes64, i64, i64)
def codes_where(builder, bits, code):
    """Return 64 codes: `code` where a bit of `bits` is set, elsewhere 0."""
    mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), COUNT))
    code_lanes = spread(builder, builder.trunc(code, I8), CODES)
    return builder.select(mask, code_lanes, ir.Constant(CODES, [0] * COUNT))


@instruction(codes64, codes64, i64, i64)
def look_up(builder, codes, low_word, high_word):
    """Replace each code below 16 by that byte of a table: bytes 0 to 7 are in low_word, 8 to 15 in high_word."""
    table = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for place, table_word in enumerate((low_word, high_word)):
        table = builder.insert_element(table, table_word, I32(place))
    table = builder.bitcast(table, ir.VectorType(I8, 16))
    if AVX2:
        both, table_word = shuffle(builder, table, [*range(16)] * 2), ir.VectorType(I8, 32)
        return map_halves(
            builder, lambda c: call(builder, "llvm.x86.avx2.pshuf.b", table_word, both, c), codes
        )
    looked_up = ir.Constant(CODES, ir.Undefined)
    for lane in map(I32, range(COUNT)):
        place = builder.zext(builder.extract_element(codes, lane), I32)
        looked_up = builder.insert_element(looked_up, builder.extract_element(table, place), lane)
    return looked_up


def blocks_intrinsic(result_type):
    """Return a decorator for intrinsics (address, first_byte, nbytes), of literals, on four blocks of `nbytes`."""

    def define_intrinsic(emit):
        def typed(typingctx, address, first_byte, nbytes):
            def codegen(context, builder, sig, args):
                return emit(builder, args[0], *(kind.literal_value for kind in sig.args[1:]))

            return result_type(i64, first_byte, nbytes), codegen

        return intrinsic(prefer_literal=True)(typed)

    return define_intrinsic


def words_of_blocks(builder, address, first_byte, nbytes, num_words):
    """Read some words of 2 bytes from each of four blocks, out of their first and last 64 bytes, by one permutation."""
    second_offset = min(COUNT, 4 * nbytes - COUNT)
    block_words = [read(builder, SHORT_VECTOR, address, at) for at in (0, second_offset)]
    at = [first_byte // 2 + nbytes // 2 * block + i for block in range(4) for i in range(num_words)]
    num_shorts = SHORT_VECTOR.count
    return shuffle(
        builder,
        block_words[0],
        [n if n < num_shorts else n - second_offset // 2 + num_shorts for n in at],
        block_words[1],
    )


@blocks_intrinsic(codes64)
def sixteens(builder, address, first_byte, nbytes):
    """Read sixteen bytes from first_byte on of each of four blocks of `nbytes` bytes; nothing beyond them is read."""
    if VNNI and nbytes <= COUNT // 2:
        block_words = words_of_blocks(builder, address, first_byte, nbytes, 8)
        return builder.bitcast(block_words, CODES)
    bytes_type = ir.VectorType(I8, 16)
    a, b, c, d = (read(builder, bytes_type, address, first_byte + nbytes * i) for i in range(4))
    low_half, high_half = (shuffle(builder, p, [*range(32)], q) for p, q in ((a, b), (c, d)))
    return shuffle(builder, low_half, [*range(64)], high_half)


@blocks_intrinsic(f32x16)
def halves(builder, address, first_byte, nbytes):
    """Read the f16 at first_byte of each of four blocks of `nbytes` bytes into the first lanes; others are 0."""
    if VNNI:
        block_words = words_of_blocks(builder, address, first_byte, nbytes, 1)
        values = builder.bitcast(block_words, ir.VectorType(HALF, 4))
    else:
        # through one word: LLVM inserts halves one by one, each waiting for the last use of a register
        four = I64(0)
        for i in range(4):
            half_word = read(builder, I16, address, first_byte + nbytes * i)
            four = builder.or_(four, builder.shl(builder.zext(half_word, I64), I64(16 * i)))
        values = builder.bitcast(four, ir.VectorType(HALF, 4))
    values = builder.fpext(values, ir.VectorType(F32, 4))
    zeros = ir.Constant(values.type, [0.0] * 4)
    return shuffle(builder, values, [*range(4), *[4] * 12], zeros)


@instruction(f32x16, f32x16, f32x16)
def fours(builder, v, w):
    """Join the first four lanes of v, those of w, and zeros."""
    return shuffle(builder, v, [*range(4), *range(16, 20), *[20] * 8], w)


# ---- sums ------------------------------------------------------------------------------------------------------


def map_halves(builder, emit, *vectors):
    """Apply emit to the first halves of the vectors, then to the second halves, and join both results."""
    count = [v.type.count // 2 for v in vectors]
    low = emit(*(shuffle(builder, v, [*range(n)]) for v, n in zip(vectors, count, strict=True)))
    high_result = emit(
        *(shuffle(builder, v, [*range(n, 2 * n)]) for v, n in zip(vectors, count, strict=True))
    )
    return shuffle(builder, low, [*range(2 * low.type.count)], high_result)


def dot_fours(builder, codes, values, start, full_range=False):
    """Return start + sums of four products each: `codes` unsigned, above 127 only if `full_range`; `values` signed."""
    if VNNI:
        int_vectors = (builder.bitcast(v, BITS) for v in (codes, values))
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", BITS, start, *int_vectors)
    if AVX2:
        for code_part in split_even_odd(builder, codes) if full_range else [codes]:
            sums = map_halves(builder, lambda *v: dot_fours_avx2(builder, *v), code_part, values)
            start = builder.add(start, sums)
        return start
    wide_type = ir.VectorType(I32, COUNT)
    all_products = builder.mul(builder.zext(codes, wide_type), builder.sext(values, wide_type))
    for first_code in range(4):
        start = builder.add(start, shuffle(builder, all_products, [*range(first_code, COUNT, 4)]))
    return start


def dot_fours_avx2(builder, codes, values):
    """Compute dot_fours of 32 codes with AVX2, where sums of two products must fit into 16 bits."""
    two, ints_type = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    pair_sums = call(builder, "llvm.x86.avx2.pmadd.ub.sw", two, codes, values)
    return call(builder, "llvm.x86.avx2.pmadd.wd", ints_type, pair_sums, ir.Constant(two, [1] * 16))


def split_even_odd(builder, codes):
    """Return the codes at even places and those at odd places, with zeros in the others."""
    return [
        builder.and_(codes, ir.Constant(CODES, byte_mask * (COUNT // 2)))
        for byte_mask in ([255, 0], [0, 255])
    ]


def dot_fours_signed(builder, codes, values, start):
    """Compute dot_fours of signed codes, to which 128 is added, and values above -128; see BY_SIGN."""
    codes = builder.xor(codes, ir.Constant(CODES, [128] * COUNT))
    magnitudes = call(builder, "llvm.abs.v64i8", CODES, codes, ir.Constant(ir.IntType(1), 0))
    half_type = ir.VectorType(I8, COUNT // 2)

    def apply_sign(*operands):
        return call(builder, "llvm.x86.avx2.psign.b", half_type, *operands)

    return dot_fours(builder, magnitudes, map_halves(builder, apply_sign, values, codes), start)


@instruction(i32x16, i64)
def sum_fours_at(builder, address):
    """Return the sums of four each of the 64 signed codes at an address."""
    ones, zero_sums = ir.Constant(CODES, [1] * COUNT), ir.Constant(BITS, [0] * LANES)
    return dot_fours(builder, ones, read(builder, CODES, address), zero_sums)
