"""Scans of states (Mamba-2): each head's state of P x N values goes through the tokens in the fast cache.

x (N, W) has the heads' values (H P), then B and C of the groups (G N each). S = exp(delta a) S + delta x B^T and
y = S C + skip x, for each head.
"""

import math

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.simd import LANES, address, ids1, in1, in2, load_part, out1, out2, out3, peek
from packtrain.kernels.vectors import add_scaled, begin_lines, begins, copy, dot, fill

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
out4 = simd.rank(4)
SHARES = 8  # tasks among which the heads of a group are divided in the gradient
CHANNELS = 64  # of a task of convolutions


@kernel(void(i64, i64, i64, i64, i64, f32, f32, f32, i64, i64))
def advance(y, s, x, b, c, delta, a, skip, p, n):
    """One head and token: addresses of y and x (p,), of the state s (p, n), of b and c (n,)."""
    decay = simd.splat(f32(math.exp(f64(delta) * f64(a))))
    for i in range(p):
        value = peek(x, i)
        row, by, dot_sums = address(s, i * n), simd.splat(delta * value), simd.splat(0.0)
        for k in range(0, n, LANES):
            left = n - k
            new = simd.fma(load_part(row, k, left), decay, by * load_part(b, k, left))
            simd.store_part(row, k, new, left)
            dot_sums = simd.fma(new, load_part(c, k, left), dot_sums)
        simd.poke(y, i, simd.total(dot_sums) + skip * value)


@kernel(void(out2, out3, in2, in2, in1, in1, ids1, i64, i64, i64))
def head(y, states, x, delta, a, skip, seq, time, groups, number):
    heads, (_, p, n) = len(a), states.shape
    line, h = number // heads, number % heads
    group, state = h // (heads // groups), address(states, number * p * n)
    for t in range(line * time, (line + 1) * time):
        if t == line * time or (seq.size > 0 and seq[t] != seq[t - 1]):
            fill(state, p * n, f32(0.0))
        values = address(x, t * x.shape[1])
        b = address(values, heads * p + group * n)
        c, d = address(b, groups * n), delta[t, h]
        advance(
            address(y, (t * heads + h) * p), state, address(values, h * p), b, c, d, a[h], skip[h], p, n
        )  # fmt: skip


@kernel(void(out2, out3, in2, in2, in1, in1, ids1, i64, i64))
def scan(y, states, x, delta, a, skip, seq, time, groups):
    """All tokens of all lines, each line and sequence from a state of zeros.

    y        (N, H P)  f32, N a multiple of `time`
    states   (lines H, P, N)  f32, scratch
    x        (N, W)    f32
    delta    (N, H)    f32
    a, skip  (H,)      f32
    seq      (N,)      i32, or empty
    """
    each(head, (y, states, x, delta, a, skip, seq, time, groups), len(states))


# ---- the gradient --------------------------------------------------------------------------------------------


@kernel(void(i64, i64, i64, i64, f32, f32, i64, i64))
def forth(state, seen, dy, x, delta, decay, p, n):
    """Advance the state; seen (n,) = sum over p of dy S. `seen` has b, which is replaced."""
    for k in range(0, n, LANES):
        left = n - k
        b, dot_sums = load_part(seen, k, left), simd.splat(0.0)
        for i in range(p):
            at = address(state, i * n)
            new = simd.fma(
                load_part(at, k, left), simd.splat(decay), simd.splat(delta * peek(x, i)) * b
            )
            simd.store_part(at, k, new, left)
            dot_sums = simd.fma(new, simd.splat(peek(dy, i)), dot_sums)
        simd.store_part(seen, k, dot_sums, left)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, f32, i64, i64))
def back(slope, seen, dx, dy, x, b, c, decay, p, n):
    """slope = decay slope + dy c; dx (p,) = slope b, and seen (n,) = sum over p of x slope."""
    fill(seen, n, f32(0.0))
    for i in range(p):
        row, dot_sums = address(slope, i * n), simd.splat(0.0)
        by, value = simd.splat(peek(dy, i)), simd.splat(peek(x, i))
        for k in range(0, n, LANES):
            left = n - k
            new = simd.fma(load_part(row, k, left), simd.splat(decay), by * load_part(c, k, left))
            simd.store_part(row, k, new, left)
            dot_sums = simd.fma(new, load_part(b, k, left), dot_sums)
            simd.store_part(seen, k, simd.fma(new, value, load_part(seen, k, left)), left)
        simd.poke(dx, i, simd.total(dot_sums))


@kernel(void(out2, out2, out2, out3, out4, out2, in2, in2, in2, in1, in1, ids1, i64, i64, i64))
def share(dx, ddelta, sums, states, parts, along, dy, x, delta, a, skip, seq, time, groups, number):
    """The heads of a group that this task has, one after the other."""
    heads, (_, p, n) = len(a), states.shape
    per_group = heads // groups
    shares = min(per_group, SHARES)
    line, group = number // shares // groups, number // shares % groups
    state, of_b = address(states, number * p * n), address(parts, number * 2 * time * n)
    of_c, scores = address(of_b, time * n), address(along, number * (time + n))
    seen, width, first = address(scores, time), x.shape[1], line * time
    fill(of_b, 2 * time * n, f32(0.0))
    for h in range(group * per_group + number % shares, (group + 1) * per_group, shares):
        for t in range(time):
            values, token = address(x, (first + t) * width), first + t
            if begins(seq, token, time):
                fill(state, p * n, f32(0.0))
            d, b = delta[token, h], address(values, heads * p + group * n)
            copy(seen, b, n)
            decay, of_y = f32(math.exp(f64(d) * f64(a[h]))), address(dy, (token * heads + h) * p)
            forth(state, seen, of_y, address(values, h * p), d, decay, p, n)
            add_scaled(address(of_c, t * n), seen, f32(1.0), n)
            simd.poke(scores, t, f32(dot(seen, address(b, groups * n), n)))
        fill(state, p * n, f32(0.0))
        decay, slope, of_a, of_skip = f32(0.0), f64(0.0), f64(0.0), f64(0.0)
        for t in range(time - 1, -1, -1):
            values, token = address(x, (first + t) * width), first + t
            of_x, value = address(dx, token * width + h * p), address(values, h * p)
            b, d = address(values, heads * p + group * n), delta[token, h]
            of_y = address(dy, (token * heads + h) * p)
            back(state, seen, of_x, of_y, value, b, address(b, groups * n), decay, p, n)
            straight = dot(seen, b, n)
            slope = f64(0.0) if begins(seq, token, time) else slope + peek(scores, t) - d * straight
            ddelta[token, h] = f32(straight + f64(a[h]) * slope)
            of_a += d * slope
            of_skip += dot(of_y, value, p)
            add_scaled(address(of_b, t * n), seen, d, n)
            for i in range(p):
                simd.poke(of_x, i, d * peek(of_x, i) + skip[h] * peek(of_y, i))
            decay = f32(0.0) if begins(seq, token, time) else f32(math.exp(f64(d) * f64(a[h])))
        sums[line * heads + h, 0], sums[line * heads + h, 1] = f32(of_a), f32(of_skip)


@kernel(void(out2, out4, i64, i64, i64, i64))
def gather(dx, parts, width, groups, shares, token):
    """B's and C's gradients of a token: the sums of all tasks."""
    _, _, time, n = parts.shape
    line, t = token // time, token % time
    for part in range(2):
        for group in range(groups):
            to = address(dx, token * dx.shape[1] + width + (part * groups + group) * n)
            fill(to, n, f32(0.0))
            for k in range(shares):
                number = (line * groups + group) * shares + k
                source = address(parts, ((number * 2 + part) * time + t) * n)
                add_scaled(to, source, f32(1.0), n)


@kernel(
    void(out2, out2, out1, out1, out3, out4, out2, out2, in2, in2, in2, in1, in1, ids1, i64, i64)
)
def scan_back(
    dx, ddelta, da, dskip, states, parts, along, sums, dy, x, delta, a, skip, seq, time, groups
):
    """The gradients of scan: a pass forward for C's, one back for the others.

    What delta and a have of it is that of the state's decay, u: with S' the gradient of S, S' S = u + delta S' x B^T at
    a token, and also y' y + u of the next token. So u needs no state of the past.

    states  (tasks, P, N), parts (tasks, 2, time, N), along (tasks, time + N), sums (lines H, 2): f32, scratch
    """
    heads = len(a)
    shares = min(heads // groups, SHARES)
    task_args = (dx, ddelta, sums, states, parts, along, dy, x, delta, a, skip, seq, time, groups)
    each(share, task_args, len(states))
    each(gather, (dx, parts, dy.shape[1], groups, shares), len(x))
    for h in range(heads):
        da[h], dskip[h] = f32(0.0), f32(0.0)
        for line in range(len(x) // max(time, 1)):
            da[h] += sums[line * heads + h, 0]
            dskip[h] += sums[line * heads + h, 1]


# ---- with states that are kept -------------------------------------------------------------------------------


@kernel(void(out2, out4, in2, in2, in1, in1, ids1, ids1, ids1, i64, i64))
def head_cells(y, states, x, delta, a, skip, line, source, target, groups, h):
    _, heads, p, n = states.shape
    size, group = p * n, h // (heads // groups)
    begin_lines(states, source, target, h)
    for t in range(len(x)):
        at, of_y = i64(target[line[t]]), address(y, (t * heads + h) * p)
        if at < 0:
            fill(of_y, p, f32(0.0))
            continue
        values = address(x, t * x.shape[1])
        b = address(values, heads * p + group * n)
        state, d = address(states, (at * heads + h) * size), delta[t, h]
        advance(
            of_y, state, address(values, h * p), b, address(b, groups * n), d, a[h], skip[h], p, n
        )


@kernel(void(out2, out4, in2, in2, in1, in1, ids1, ids1, ids1, i64))
def scan_cells(y, states, x, delta, a, skip, line, source, target, groups):
    """As scan, of tokens of several sequences in turn, from states that are kept, which stay as they are.

    states          (S, H, P, N)  f32
    line            (N,)  i32: a token is of the sequence whose state is source[line], negative for zeros, ...
    source, target  (R,)  i32: ... and becomes target[line]; a negative target is padding, whose y is 0
    """
    task_args = (y, states, x, delta, a, skip, line, source, target, groups)
    each(head_cells, task_args, states.shape[1])


@kernel(void(out2, out3, in2, in2, ids1, ids1, ids1, i64))
def channels(y, kept, x, w, line, source, target, number):
    taps, wide = w.shape
    before = taps - 1
    for s in range(number * CHANNELS, min(wide, (number + 1) * CHANNELS), LANES):
        left = wide - s
        for r in range(len(target)):
            for k in range(before if target[r] >= 0 else 0):
                value = simd.splat(0.0)
                if source[r] >= 0:
                    value = load_part(address(kept, (source[r] * before + k) * wide), s, left)
                simd.store_part(address(kept, (target[r] * before + k) * wide), s, value, left)
        for t in range(len(x)):
            at = i64(target[line[t]])
            new, output_sums = load_part(address(x, t * wide), s, left), simd.splat(0.0)
            if at >= 0:
                for k in range(before):
                    row = address(kept, (at * before + k) * wide)
                    old = load_part(row, s, left)
                    output_sums = simd.fma(
                        old, load_part(address(w, k * wide), s, left), output_sums
                    )
                    if k > 0:
                        simd.store_part(address(kept, (at * before + k - 1) * wide), s, old, left)
                if before > 0:
                    simd.store_part(address(kept, (at * before + before - 1) * wide), s, new, left)
                output_sums = simd.fma(
                    new, load_part(address(w, before * wide), s, left), output_sums
                )
            simd.store_part(address(y, t * wide), s, output_sums, left)


@kernel(void(out2, out3, in2, in2, ids1, ids1, ids1))
def conv_states(y, kept, x, w, line, source, target):
    """A short convolution of such tokens.

    kept  (S, K - 1, C)  f32: the last inputs of sequences
    x, y  (N, C)         f32
    w     (K, C)         f32
    """
    each(channels, (y, kept, x, w, line, source, target), -(-w.shape[1] // CHANNELS))
