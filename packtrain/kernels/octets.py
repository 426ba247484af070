"""Vectors of 64 codes of a byte: words for dot products in integers.

Codes are unsigned, unless a word says otherwise; `c >> 4`, `c & 15`, `c | d` work by code. Products of 64 codes are
summed by fours, to 16 sums.
"""

import operator

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_cast, models, register_model

from packtrain.kernels import runtime, simd
from packtrain.kernels.bits import i32x16
from packtrain.kernels.simd import BITS, F32, I32, I64, LANES, call, f32x16, instruction

llvmlite.binding.initialize_native_asmparser()
VNNI = runtime.has("avx512vnni")
AVX2 = runtime.has("avx2")
BY_SIGN = AVX2 and not VNNI  # whether there is by_fours_signed
I8, I16 = ir.IntType(8), ir.IntType(16)
COUNT = 64
CODES, HALF, SHORTS = ir.VectorType(I8, COUNT), ir.HalfType(), ir.VectorType(I16, COUNT // 2)
i64 = types.int64


class Codes(types.Type):
    """The numba type of 64 bytes in one LLVM vector."""

    def __init__(self):
        super().__init__(name="codes64")


codes64 = Codes()


@register_model(Codes)
class CodesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, CODES)


def shuffled(builder, value, order, other=None):
    places = ir.Constant(ir.VectorType(I32, len(order)), order)
    return builder.shuffle_vector(value, value if other is None else other, places)


def spread(builder, value):
    first = builder.insert_element(ir.Constant(CODES, ir.Undefined), value, I32(0))
    return shuffled(builder, first, [0] * COUNT)


@lower_cast(types.Integer, Codes)
def integer_to_codes(context, builder, fromty, toty, value):
    return spread(builder, context.cast(builder, value, fromty, types.int8))


for name, emitted in {
    "and_": "and_", "or_": "or_", "xor": "xor", "lshift": "shl", "rshift": "lshr"
}.items():  # fmt: skip
    simd.binary_operator(codes64, types.Integer, getattr(operator, name), emitted)


def read(builder, kind, address, nbytes=0):
    nbytes = I64(nbytes) if isinstance(nbytes, int) else nbytes
    at = builder.inttoptr(builder.add(address, nbytes), kind.as_pointer())
    return builder.load(at, align=1)


def put(builder, value, address, nbytes=0):
    at = builder.inttoptr(builder.add(address, I64(nbytes)), value.type.as_pointer())
    builder.store(value, at, align=1)


def places(builder, kind, order, address, *nbytes):
    """Words of 4 or 8 bytes, in this order, of 64 bytes at the address and so many bytes after it."""
    chunks = [read(builder, kind, address, n) for n in (0, *nbytes)]
    return builder.bitcast(shuffled(builder, chunks[0], order, chunks[-1]), CODES)


def moved_right(builder, codes, counts):
    """Shift words of 4 or 8 bytes right, or left, each by its own count; what comes in means nothing."""
    size = 8 * COUNT // len(counts)
    kind = ir.VectorType(ir.IntType(size), len(counts))
    by = ir.Constant(kind, [n % size for n in counts])
    words = builder.bitcast(codes, kind)
    if min(counts) >= 0:
        return builder.bitcast(builder.lshr(words, by), CODES)
    name = f"llvm.fshr.v{len(counts)}i{size}"
    return builder.bitcast(call(builder, name, kind, words, words, by), CODES)


EIGHTS, QUARTERS = ir.VectorType(I64, 8), ir.VectorType(I32, LANES)


@instruction(codes64, i64)
def twice_of_four(builder, address):
    """Eight bytes from each of four places, 32 bytes apart, twice; nothing beyond is read."""
    return places(builder, EIGHTS, [0, 0, 4, 4, 11, 11, 15, 15], address, 40)


@instruction(codes64, i64)
def eight_times(builder, address):
    """Eight bytes, eight times."""
    first = builder.insert_element(ir.Constant(EIGHTS, ir.Undefined), read(builder, I64, address), I32(0))  # fmt: skip
    return builder.bitcast(shuffled(builder, first, [0] * 8), CODES)


@instruction(codes64, codes64)
def low_and_high(builder, codes):
    """Of words of eight bytes, in turn as they are and shifted right by 4."""
    return moved_right(builder, codes, [0, 4] * 4)


@instruction(codes64, codes64)
def bit_by_eight(builder, codes):
    """Bit i of the bytes of the i-th eight, moved to bit 4; what is around it means nothing."""
    return moved_right(builder, codes, [*range(-4, 4)])


@instruction(codes64, i64)
def low_of_sixteen(builder, address):
    """Four bytes of each group of a q6_K block, whose low bits are codes' low four."""
    half = [0, 4, 8, 12] * 2
    code_bytes = places(builder, QUARTERS, [*half, *(16 + n for n in half)], address, 64)
    return moved_right(builder, code_bytes, [0, 0, 0, 0, 4, 4, 4, 4] * 2)


@instruction(codes64, i64)
def high_of_sixteen(builder, address):
    """Four bytes of each group of a q6_K block, whose bits 4 and 5 are codes' upper ones."""
    half = [0, 4] * 4
    code_bytes = places(builder, QUARTERS, [*half, *(8 + n for n in half)], address)
    return moved_right(builder, code_bytes, [-4, -4, -2, -2, 0, 0, 2, 2] * 2)


def apart(builder, address, kind, orders):
    """Words at an address, in other orders: each of 64 bytes that come one after the other."""
    old = [read(builder, kind, address, COUNT * i) for i in range(len(orders))]
    while len(old) > 1:
        pairs = zip(old[::2], old[1::2], strict=True)
        old = [shuffled(builder, v, [*range(2 * v.type.count)], w) for v, w in pairs]
    for i, order in enumerate(orders):
        put(builder, shuffled(builder, old[0], order), address, COUNT * i)


def arranged(kind, together, count):
    """An intrinsic of an address: groups of `count` pieces become all first pieces, all second ones, and so on."""

    def emit(builder, address):
        groups = kind.count // together
        orders = [
            [(group * count + piece) * together + word for group in range(groups) for word in range(together)]
            for piece in range(count)
        ]  # fmt: skip
        apart(builder, address, kind, orders)

    return instruction(types.void, i64)(emit)


arranged_by_16 = arranged(EIGHTS, 2, 2)
arranged_by_8 = arranged(EIGHTS, 1, 4)
arranged_by_4 = arranged(QUARTERS, 1, 4)


@instruction(codes64, i64, i64)
def codes_where(builder, bits, code):
    """A code where a bit is set, elsewhere 0."""
    mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), COUNT))
    code_lanes = spread(builder, builder.trunc(code, I8))
    return builder.select(mask, code_lanes, ir.Constant(CODES, [0] * COUNT))


@instruction(codes64, codes64, i64, i64)
def look_up(builder, codes, low, high):
    """Codes below 16 become the bytes of two words."""
    table = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for place, half in enumerate((low, high)):
        table = builder.insert_element(table, half, I32(place))
    table = builder.bitcast(table, ir.VectorType(I8, 16))
    if AVX2:
        both, half = shuffled(builder, table, [*range(16)] * 2), ir.VectorType(I8, 32)
        return by_halves(
            builder, lambda c: call(builder, "llvm.x86.avx2.pshuf.b", half, both, c), codes
        )
    looked_up = ir.Constant(CODES, ir.Undefined)
    for lane in map(I32, range(COUNT)):
        place = builder.zext(builder.extract_element(codes, lane), I32)
        looked_up = builder.insert_element(looked_up, builder.extract_element(table, place), lane)
    return looked_up


def of_blocks(result):
    """An intrinsic (address, first, nbytes), of literal numbers: what four blocks of `nbytes` have from `first` on."""

    def named(emit):
        def typed(typingctx, address, first, nbytes):
            def codegen(context, builder, sig, args):
                return emit(builder, args[0], *(kind.literal_value for kind in sig.args[1:]))

            return result(i64, first, nbytes), codegen

        return intrinsic(prefer_literal=True)(typed)

    return named


def words_of_blocks(builder, address, first, nbytes, count):
    """Some words of 2 bytes from each of four blocks, out of their first 64 bytes and the last: one permutation."""
    after = min(COUNT, 4 * nbytes - COUNT)
    block_words = [read(builder, SHORTS, address, at) for at in (0, after)]
    at = [first // 2 + nbytes // 2 * block + i for block in range(4) for i in range(count)]
    last = SHORTS.count
    return shuffled(
        builder,
        block_words[0],
        [n if n < last else n - after // 2 + last for n in at],
        block_words[1],
    )


@of_blocks(codes64)
def sixteens(builder, address, first, nbytes):
    """Sixteen bytes from each block; nothing beyond them is read."""
    if VNNI and nbytes <= COUNT // 2:
        block_words = words_of_blocks(builder, address, first, nbytes, 8)
        return builder.bitcast(block_words, CODES)
    kind = ir.VectorType(I8, 16)
    a, b, c, d = (read(builder, kind, address, first + nbytes * i) for i in range(4))
    low, high = (shuffled(builder, p, [*range(32)], q) for p, q in ((a, b), (c, d)))
    return shuffled(builder, low, [*range(64)], high)


@of_blocks(f32x16)
def halves(builder, address, first, nbytes):
    """An f16 of each block in the first lanes; zeros in the others."""
    if VNNI:
        block_words = words_of_blocks(builder, address, first, nbytes, 1)
        values = builder.bitcast(block_words, ir.VectorType(HALF, 4))
    else:
        # through one word: LLVM inserts halves one by one, each waiting for the last use of a register
        four = I64(0)
        for i in range(4):
            half_word = read(builder, I16, address, first + nbytes * i)
            four = builder.or_(four, builder.shl(builder.zext(half_word, I64), I64(16 * i)))
        values = builder.bitcast(four, ir.VectorType(HALF, 4))
    values = builder.fpext(values, ir.VectorType(F32, 4))
    zeros = ir.Constant(values.type, [0.0] * 4)
    return shuffled(builder, values, [*range(4), *[4] * 12], zeros)


@instruction(f32x16, f32x16, f32x16)
def fours(builder, v, w):
    """The first four lanes of v, those of w, and zeros."""
    return shuffled(builder, v, [*range(4), *range(16, 20), *[20] * 8], w)


# ---- sums ------------------------------------------------------------------------------------------------------


def by_halves(builder, emit, *vectors):
    """emit(*halves) for both halves of 64 bytes."""
    count = [v.type.count // 2 for v in vectors]
    low = emit(*(shuffled(builder, v, [*range(n)]) for v, n in zip(vectors, count, strict=True)))
    high = emit(
        *(shuffled(builder, v, [*range(n, 2 * n)]) for v, n in zip(vectors, count, strict=True))
    )
    return shuffled(builder, low, [*range(2 * low.type.count)], high)


def by_fours(builder, codes, values, start, full=False):
    """start + sums of four products each: codes are unsigned, above 127 only if `full`; `values` signed."""
    if VNNI:
        words = (builder.bitcast(v, BITS) for v in (codes, values))
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", BITS, start, *words)
    if AVX2:
        for code_part in every_other(builder, codes) if full else [codes]:
            sums = by_halves(builder, lambda *v: pairs(builder, *v), code_part, values)
            start = builder.add(start, sums)
        return start
    wide = ir.VectorType(I32, COUNT)
    all_products = builder.mul(builder.zext(codes, wide), builder.sext(values, wide))
    for first in range(4):
        start = builder.add(start, shuffled(builder, all_products, [*range(first, COUNT, 4)]))
    return start


def pairs(builder, codes, values):
    """by_fours of 32 codes with AVX2: sums of two products must fit into 16 bits."""
    two, four = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    sums = call(builder, "llvm.x86.avx2.pmadd.ub.sw", two, codes, values)
    return call(builder, "llvm.x86.avx2.pmadd.wd", four, sums, ir.Constant(two, [1] * 16))


def every_other(builder, codes):
    """The codes with even and those with odd places, zeros in the others."""
    return [
        builder.and_(codes, ir.Constant(CODES, byte_mask * (COUNT // 2)))
        for byte_mask in ([255, 0], [0, 255])
    ]


def by_fours_signed(builder, codes, values, start):
    """The same with signed codes, to which 128 is added, and others above -128; see BY_SIGN."""
    codes = builder.xor(codes, ir.Constant(CODES, [128] * COUNT))
    sizes = call(builder, "llvm.abs.v64i8", CODES, codes, ir.Constant(ir.IntType(1), 0))
    half = ir.VectorType(I8, COUNT // 2)

    def signed(*operands):
        return call(builder, "llvm.x86.avx2.psign.b", half, *operands)

    return by_fours(builder, sizes, by_halves(builder, signed, values, codes), start)


@instruction(i32x16, i64)
def sums_at(builder, address):
    """Sums of four of 64 signed codes."""
    ones, none = ir.Constant(CODES, [1] * COUNT), ir.Constant(BITS, [0] * LANES)
    return by_fours(builder, ones, read(builder, CODES, address), none)
