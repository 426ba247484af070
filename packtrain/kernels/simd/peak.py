"""Measure the processor's peak for `packtrain bench`: fused multiply-adds in registers, and copies."""

from llvmlite import ir

from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.jit import each_task, kernel, spans
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    F32, I64, LANES, VECTOR, call, f32x16, instruction, load, spread, store,
)  # fmt: skip

# independent sums: enough to hide the latency
CHAINS = 12 if environment.has_cpu_feature("avx512f") else 6


@instruction(f32x16, i64, f32)
def fma_chains(builder, num_rounds, factor):
    """Return the sum of CHAINS vectors after `num_rounds` rounds of v = v * factor + factor."""
    entry_block, factor_lanes = builder.block, spread(builder, factor, VECTOR)
    loop_block, exit_block = (builder.append_basic_block(name) for name in ("round", "after"))
    builder.branch(loop_block)
    builder.position_at_end(loop_block)
    round_index, vectors = builder.phi(I64), [builder.phi(VECTOR) for _ in range(CHAINS)]
    new_vectors = [
        call(builder, "llvm.fma.v16f32", VECTOR, v, factor_lanes, factor_lanes) for v in vectors
    ]
    next_round = builder.add(round_index, I64(1))
    round_index.add_incoming(I64(0), entry_block)
    round_index.add_incoming(next_round, loop_block)
    for i, (vector, value) in enumerate(zip(vectors, new_vectors, strict=True)):
        vector.add_incoming(ir.Constant(VECTOR, [ir.Constant(F32, float(i))] * LANES), entry_block)
        vector.add_incoming(value, loop_block)
    builder.cbranch(builder.icmp_signed("<", next_round, num_rounds), loop_block, exit_block)
    builder.position_at_end(exit_block)
    vector_sum = new_vectors[0]
    for value in new_vectors[1:]:
        vector_sum = builder.fadd(vector_sum, value)
    return vector_sum


@each_task("out1, f32, i64", lambda y: y.size // LANES)
def multiply_adds(y, factor, num_rounds, vector_index):
    """Run `num_rounds` rounds of fma_chains for each vector of y, one task each, and write the sums to y."""
    store(y, vector_index * LANES, fma_chains(num_rounds, factor))


@kernel("out1, in1, i64, i64")
def copy_span(y, x, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        store(y, i, load(x, i))


@kernel("out1, in1, i64")
def copy_on_threads(y, x, num_tasks):
    """y = x, whole vectors, in `num_tasks` equal spans on the threads."""
    spans(copy_span, (y, x), y.size, -(-y.size // (num_tasks * LANES)) * LANES)
