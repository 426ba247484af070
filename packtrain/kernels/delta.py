"""The gated delta rule: each head's state of P x N values goes through the tokens in the fast cache.

x (N, W) has queries and keys of the groups (G N each), which are divided by their lengths, then the heads' values
(H P). For each head S = exp(decay) S; S += beta (v - S k) k^T; y = S q / sqrt(N).
"""

import math

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.simd import LANES, address, ids1, in2, load_part, out2, out3, peek, splat
from packtrain.kernels.vectors import add_scaled, begin_lines, begins, copy, dot, fill

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
out4 = simd.rank(4)
CHUNK = 32  # tokens between states that are kept for the gradient


@part(i64(i64, i64, i64, i64))
def group_of(h, heads, groups, tiled):
    return h % groups if tiled else h // (heads // groups)


@part(f32(i64, i64, f32))
def inverse(at, n, eps):
    """1 over the length of a vector."""
    return f32(1.0 / math.sqrt(dot(at, at, n) + f64(eps)))


@part(f32(f32))
def factor(decay):
    return f32(math.exp(f64(decay)))


@part(f32(i64, i64, f32, f32, f32, f32, i64))
def error(row, k, of_k, value, decay, beta, n):
    """What a row of the state is not right by at k: beta's part of it is added there."""
    seen = splat(0.0)
    for j in range(0, n, LANES):
        seen = simd.fma(load_part(row, j, n - j), load_part(k, j, n - j), seen)
    return value - decay * of_k * simd.total(seen)


@kernel(void(i64, i64, i64, i64, i64, f32, f32, f32, i64, i64))
def advance(y, s, v, q, k, decay, beta, eps, p, n):
    """One head and token: addresses of y and v (p,), of the state s (p, n), of q and k (n,)."""
    of_q, of_k = inverse(q, n, eps) / f32(math.sqrt(f64(n))), inverse(k, n, eps)
    for i in range(p):
        row, dot_sums = address(s, i * n), splat(0.0)
        by = splat(beta * of_k * error(row, k, of_k, peek(v, i), decay, beta, n))
        for j in range(0, n, LANES):
            left = n - j
            new = simd.fma(load_part(row, j, left), splat(decay), by * load_part(k, j, left))
            simd.store_part(row, j, new, left)
            dot_sums = simd.fma(new, load_part(q, j, left), dot_sums)
        simd.poke(y, i, of_q * simd.total(dot_sums))


@kernel(void(out2, out3, in2, in2, in2, ids1, i64, i64, i64, f32, i64))
def head(y, states, x, decay, beta, seq, time, groups, tiled, eps, number):
    heads, (_, p, n) = beta.shape[1], states.shape
    line, h = number // heads, number % heads
    group, state = group_of(h, heads, groups, tiled), address(states, number * p * n)
    for t in range(line * time, (line + 1) * time):
        if begins(seq, t, time):
            fill(state, p * n, f32(0.0))
        row = address(x, t * x.shape[1])
        q, v = address(row, group * n), address(row, 2 * groups * n + h * p)
        to, by = address(y, (t * heads + h) * p), factor(decay[t, h])
        advance(to, state, v, q, address(q, groups * n), by, beta[t, h], eps, p, n)


@kernel(void(out2, out3, in2, in2, in2, ids1, i64, i64, i64, f32))
def delta(y, states, x, decay, beta, seq, time, groups, tiled, eps):
    """All tokens of all lines, each line and sequence from a state of zeros.

    y            (N, H P)  f32, N a multiple of `time`
    states       (lines H, P, N)  f32, scratch
    x            (N, W)    f32
    decay, beta  (N, H)    f32
    seq          (N,)      i32, or empty
    tiled        heads of a group are G apart, not together
    """
    each(head, (y, states, x, decay, beta, seq, time, groups, tiled, eps), len(states))


# ---- the gradient --------------------------------------------------------------------------------------------


@kernel(f64(i64, i64, i64, i64, i64, i64, i64, f32, f32, f32, f32, i64, i64))
def forth(state, errors, dq, dy, v, q, k, of_q, of_k, decay, beta, p, n):
    """Advance the state; errors (p,), dq (n,) += of the query's direction. Returns dy y."""
    score, scale = f64(0.0), f32(1.0 / math.sqrt(f64(n)))
    for i in range(p):
        row, dot_sums, slope = address(state, i * n), splat(0.0), splat(scale * peek(dy, i))
        wrong = error(row, k, of_k, peek(v, i), decay, beta, n)
        simd.poke(errors, i, wrong)
        by = splat(beta * of_k * wrong)
        for j in range(0, n, LANES):
            left = n - j
            new = simd.fma(load_part(row, j, left), splat(decay), by * load_part(k, j, left))
            simd.store_part(row, j, new, left)
            simd.store_part(dq, j, simd.fma(new, slope, load_part(dq, j, left)), left)
            dot_sums = simd.fma(new, load_part(q, j, left), dot_sums)
        score += f64(scale * of_q * simd.total(dot_sums)) * f64(peek(dy, i))
    return score


@kernel(void(i64, i64, i64, i64, i64, i64, i64, f32, f32, f32, f32, i64, i64))
def back(slope, missing, dk, errors, dy, q, k, of_q, of_k, decay, beta, p, n):
    """slope (p, n), of the state after a token, becomes that of the state before it; missing (p,) of what was added.

    dk (n,) += what the key has of it as the direction of what was added.
    """
    scale = of_q / f32(math.sqrt(f64(n)))
    for i in range(p):
        row, dot_sums, by = address(slope, i * n), splat(0.0), splat(scale * peek(dy, i))
        for j in range(0, n, LANES):
            left = n - j
            new = simd.fma(load_part(q, j, left), by, load_part(row, j, left))
            simd.store_part(row, j, new, left)
            dot_sums = simd.fma(new, load_part(k, j, left), dot_sums)
        of_sum = of_k * simd.total(dot_sums)
        simd.poke(missing, i, of_sum)
        added, key_factor = splat(beta * peek(errors, i)), splat(-beta * of_sum * of_k)
        for j in range(0, n, LANES):
            left = n - j
            new = load_part(row, j, left)
            simd.store_part(dk, j, simd.fma(new, added, load_part(dk, j, left)), left)
            new = simd.fma(key_factor, load_part(k, j, left), new)
            simd.store_part(row, j, new * splat(decay), left)


@kernel(void(i64, i64, i64, in2, in2, in2, ids1, i64, i64, i64, i64, i64, i64, i64, i64))
def earlier(dk, missing, state, x, decay, beta, seq, t, time, key, of_k, errors, h, p, n):
    """dk (n,) -= beta missing^T S of the state before token t, from what its chunk has added to the one before it.

    key, of_k, errors  where in a row of x the key is, and addresses of those of the line
    """
    first, by = t // time * time, -beta[t, h] * factor(decay[t, h])
    s = t
    while (s - first) % CHUNK != 0 and not begins(seq, s, time):
        s -= 1
        added = f32(dot(address(errors, (s - first) * p), missing, p)) * beta[s, h]
        scale = by * added * peek(of_k, s - first)
        add_scaled(dk, address(x, s * x.shape[1] + key), scale, n)
        by *= factor(decay[s, h])
    if not begins(seq, s, time):
        for i in range(p):
            add_scaled(dk, address(state, i * n), by * peek(missing, i), n)


@part(void(i64, i64, f32, i64))
def through_length(dx, x, by, n):
    """dx (n,), of x times `by`, 1 over its length, becomes that of x."""
    projection = f32(dot(dx, x, n) * f64(by) * f64(by))
    add_scaled(dx, x, -projection, n)
    for j in range(0, n, LANES):
        simd.store_part(dx, j, load_part(dx, j, n - j) * splat(by), n - j)


@kernel(void(out2, i64, i64, i64, in2, in2, in2, in2, ids1, i64, i64, i64, i64, i64, i64, i64, i64))
def forward(
    dx, states, errors, along, dy, x, decay, beta, seq, time, line, query, key, value, h, p, n
):
    """A head's tokens: `errors` (time, p), the states before chunks, and dx of queries; along[2] gets dy y."""
    heads, wide, size, first = beta.shape[1], x.shape[1], p * n, line * time
    state = address(states, -(-time // CHUNK) * size)
    for t in range(time):
        token, at = first + t, address(x, (first + t) * wide)
        if begins(seq, token, time):
            fill(state, size, f32(0.0))
        if t % CHUNK == 0:
            copy(address(states, t // CHUNK * size), state, size)
        score = forth(
            state, address(errors, t * p), address(dx, token * wide + query), address(dy, (token * heads + h) * p),
            address(at, value), address(at, query), address(at, key), peek(along, t), peek(along, time + t),
            factor(decay[token, h]), beta[token, h], p, n,
        )  # fmt: skip
        simd.poke(along, 2 * time + t, f32(score))


@kernel(
    void(
        out2,
        out2,
        out2,
        i64,
        i64,
        i64,
        in2,
        in2,
        in2,
        in2,
        ids1,
        i64,
        i64,
        i64,
        i64,
        i64,
        i64,
        i64,
        i64,
    )
)
def backward(
    dx, ddecay, dbeta, states, errors, along, dy, x, decay, beta, seq, time, line, query, key, value, h, p, n
):  # fmt: skip
    """The gradients of keys, values, decays and betas; of the decay it is that of the state times the state."""
    heads, wide, size, first, decay_slope = beta.shape[1], x.shape[1], p * n, line * time, f64(0.0)
    slope, missing = address(states, -(-time // CHUNK) * size), address(errors, time * p)
    fill(slope, size, f32(0.0))
    for t in range(time - 1, -1, -1):
        token, at = first + t, address(x, (first + t) * wide)
        dk, token_errors, by = (
            address(dx, token * wide + key),
            address(errors, t * p),
            beta[token, h],
        )
        fresh, before = begins(seq, token, time), address(states, t // CHUNK * size)
        back(
            slope, missing, dk, token_errors, address(dy, (token * heads + h) * p), address(at, query),
            address(at, key),
            peek(along, t), peek(along, time + t), f32(0.0) if fresh else factor(decay[token, h]), by, p, n,
        )  # fmt: skip
        if not fresh:
            of_k = address(along, time)
            earlier(
                dk, missing, before, x, decay, beta, seq, token, time, key, of_k, errors, h, p, n
            )
        decay_slope += peek(along, 2 * time + t) - by * dot(missing, address(at, value), p)
        if t % CHUNK == 0:
            decay_slope = dot(slope, before, size)
        decay_slope = f64(0.0) if fresh else decay_slope
        ddecay[token, h], dbeta[token, h] = f32(decay_slope), f32(dot(missing, token_errors, p))
        to = address(dx, token * wide + value)
        for i in range(p):
            simd.poke(to, i, by * peek(missing, i))


@kernel(void(out2, out2, out2, out4, out3, out3, in2, in2, in2, in2, ids1, i64, i64, i64, f32, i64))
def of_group(
    dx, ddecay, dbeta, states, errors, along, dy, x, decay, beta, seq, time, groups, tiled, eps, number
):  # fmt: skip
    """The heads of a group, one after the other: they have its queries and keys together."""
    heads, (_, slots, p, n) = beta.shape[1], states.shape
    line, group = number // groups, number % groups
    query, key, wide = group * n, (groups + group) * n, x.shape[1]
    state, wrong = address(states, number * slots * p * n), address(errors, number * (time + 1) * p)
    rest = address(along, number * 3 * time)
    for t in range(time):
        for slot, at in enumerate((query, key)):
            simd.poke(
                rest, slot * time + t, inverse(address(x, (line * time + t) * wide + at), n, eps)
            )
            fill(address(dx, (line * time + t) * wide + at), n, f32(0.0))
    for h in range(heads):
        if group_of(h, heads, groups, tiled) == group:
            v = 2 * groups * n + h * p
            forward(
                dx, state, wrong, rest, dy, x, decay, beta, seq, time, line, query, key, v, h, p, n
            )
            backward(
                dx, ddecay, dbeta, state, wrong, rest, dy, x, decay, beta, seq, time, line, query, key, v, h, p, n
            )  # fmt: skip
    for t in range(time):
        for slot, at in enumerate((query, key)):
            place = (line * time + t) * wide + at
            through_length(address(dx, place), address(x, place), peek(rest, slot * time + t), n)


@kernel(void(out2, out2, out2, out4, out3, out3, in2, in2, in2, in2, ids1, i64, i64, i64, f32))
def delta_back(
    dx, ddecay, dbeta, states, errors, along, dy, x, decay, beta, seq, time, groups, tiled, eps
):
    """The gradients of delta: a pass forward for the queries', one back for the others.

    What a key has of the state before its token comes from the state before the chunk and from what the chunk's tokens
    added. No state is computed backwards, which would divide by decays.

    states  (lines G, chunks + 1, P, N), errors (lines G, time + 1, P), along (lines G, 3, time): f32, scratch
    """
    outputs = dx, ddecay, dbeta, states, errors, along
    inputs = dy, x, decay, beta, seq, time, groups, tiled, eps
    each(of_group, outputs + inputs, len(states))


# ---- with states that are kept -------------------------------------------------------------------------------


@kernel(void(out2, out4, in2, in2, in2, ids1, ids1, ids1, i64, i64, f32, i64))
def head_cells(y, states, x, decay, beta, line, source, target, groups, tiled, eps, h):
    _, heads, p, n = states.shape
    group = group_of(h, heads, groups, tiled)
    begin_lines(states, source, target, h)
    for t in range(len(x)):
        at, to = i64(target[line[t]]), address(y, (t * heads + h) * p)
        if at < 0:
            fill(to, p, f32(0.0))
            continue
        row, state = address(x, t * x.shape[1]), address(states, (at * heads + h) * p * n)
        q, v = address(row, group * n), address(row, 2 * groups * n + h * p)
        key = address(q, groups * n)
        advance(to, state, v, q, key, factor(decay[t, h]), beta[t, h], eps, p, n)


@kernel(void(out2, out4, in2, in2, in2, ids1, ids1, ids1, i64, i64, f32))
def delta_cells(y, states, x, decay, beta, line, source, target, groups, tiled, eps):
    """As delta, of tokens of several sequences in turn, from states that are kept; see scan_cells."""
    task_args = (y, states, x, decay, beta, line, source, target, groups, tiled, eps)
    each(head_cells, task_args, states.shape[1])
