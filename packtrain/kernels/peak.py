"""What the processor can do at most, for `packtrain bench`: fused multiply-adds in registers, and copying."""

from llvmlite import ir
from numba import types

from packtrain.kernels import runtime, simd
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.simd import F32, I64, LANES, VECTOR, f32x16, in1, out1

CHAINS = 12 if runtime.has("avx512f") else 6  # independent sums: enough to hide the latency
i64, f32, void = types.int64, types.float32, types.void


@simd.instruction(f32x16, i64, f32)
def chains(builder, count, factor):
    """The sum of CHAINS vectors after `count` rounds of v = v * factor + factor, all at once."""
    before, factor_lanes = builder.block, simd.spread(builder, factor, VECTOR)
    loop, after = (builder.append_basic_block(name) for name in ("round", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    turn, vectors = builder.phi(I64), [builder.phi(VECTOR) for _ in range(CHAINS)]
    now = [
        simd.call(builder, "llvm.fma.v16f32", VECTOR, v, factor_lanes, factor_lanes)
        for v in vectors
    ]
    following = builder.add(turn, I64(1))
    turn.add_incoming(I64(0), before)
    turn.add_incoming(following, loop)
    for i, (vector, value) in enumerate(zip(vectors, now, strict=True)):
        vector.add_incoming(ir.Constant(VECTOR, [ir.Constant(F32, float(i))] * LANES), before)
        vector.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    total = now[0]
    for value in now[1:]:
        total = builder.fadd(total, value)
    return total


@kernel(void(out1, f32, i64, i64))
def multiply(y, factor, count, number):
    simd.store(y, number * LANES, chains(count, factor))


@kernel(void(out1, f32, i64))
def multiply_adds(y, factor, count):
    """`count` rounds of CHAINS vectors for each vector of y, one task each; y keeps what comes of it."""
    each(multiply, (y, factor, count), y.size // LANES)


@kernel(void(out1, in1, i64, i64))
def copy(y, x, start, stop):
    for i in range(start, stop, LANES):
        simd.store(y, i, simd.load(x, i))


@kernel(void(out1, in1, i64))
def copied(y, x, tasks):
    """y = x, of whole vectors, in equal parts on the threads."""
    spans(copy, (y, x), y.size, -(-y.size // (tasks * LANES)) * LANES)
