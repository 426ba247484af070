"""Fill, copy, add and multiply ranges of f32 at addresses; starts of sequences, for kernels that carry states."""

from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import f32, f64, i64
from packtrain.kernels.simd.simd_f32 import LANES, address, fma, load_part, splat, store_part, total


@part("i64, i64, f32")
def fill(target, num_values, value):
    for s in range(0, num_values, LANES):
        store_part(target, s, splat(value), num_values - s)


@part("i64, i64, i64")
def copy(to, source, num_values):
    for s in range(0, num_values, LANES):
        store_part(to, s, load_part(source, s, num_values - s), num_values - s)


@part("i64, i64, i64")
def add(to, source, num_values):
    for s in range(0, num_values, LANES):
        left = num_values - s
        store_part(to, s, load_part(to, s, left) + load_part(source, s, left), left)


@kernel("i64, i64, i64, i64, i64, i64")
def sum_rows(y, x, num_rows, width, start, stop):
    """y[start:stop] = the sums over rows of these columns of x (num_rows, width), in order; x and y are addresses."""
    for i in range(start, stop, LANES):
        lane_sums = splat(0.0)
        for row in range(num_rows):
            lane_sums += load_part(x, row * width + i, stop - i)
        store_part(y, i, lane_sums, stop - i)


@part("i64, i64, f32, i64")
def add_scaled(to, source, by, num_values):
    for s in range(0, num_values, LANES):
        left = num_values - s
        store_part(to, s, fma(load_part(source, s, left), splat(by), load_part(to, s, left)), left)


@part("f64(i64, i64, i64)")
def dot(a, b, num_values):
    dot_sums = splat(0.0)
    for s in range(0, num_values, LANES):
        dot_sums = fma(load_part(a, s, num_values - s), load_part(b, s, num_values - s), dot_sums)
    return f64(total(dot_sums))


@part("i64(ints1, i64, i64)")
def is_start(seq, t, T):
    """Return 1 if token t begins a row of the batch, T tokens long, or a sequence (seq may be empty), else 0."""
    return i64(1) if t % T == 0 or (seq.size > 0 and seq[t] != seq[t - 1]) else i64(0)


@part("out4, ints1, ints1, i64")
def load_states(states, sources, targets, h):
    """Copy head h of states (S, H, P, N) from cells sources[r] to targets[r]; a source below 0 gives zeros."""
    _, H, p, n = states.shape
    for r in range(len(targets)):
        if targets[r] >= 0:
            state_ptr = address(states, (targets[r] * H + h) * p * n)
            if sources[r] >= 0:
                copy(state_ptr, address(states, (sources[r] * H + h) * p * n), p * n)
            else:
                fill(state_ptr, p * n, f32(0.0))
