"""The gated delta rule: each head's state of P x N values goes through the tokens in the fast cache.

x (N, W) has queries and keys of the groups (G N each), which are divided by their lengths, then the heads' values
(H P). For each head S = exp(decay) S; S += beta (v - S k) k^T; y = S q / sqrt(N).
"""

import math

from packtrain.kernels.runtime.jit import each_task, kernel, part
from packtrain.kernels.runtime.kernel_types import UniTuple, f32, f64, i64
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load_part, peek, poke, splat, store_part, total,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import add_scaled, copy, dot, fill, is_start, load_states

# T, batch row, places of query, key and value in a row of x, head, P, N
head_type = UniTuple(i64, 8)
CHUNK = 32  # tokens between states that are saved for the gradient


@part("i64(i64, i64, i64, i64)")
def group_of_head(head, num_heads, num_groups, tiled):
    """Return the group of a head: its heads are num_groups apart if `tiled`, else together."""
    return head % num_groups if tiled else head // (num_heads // num_groups)


@part("f32(i64, i64, f32)")
def inverse(x_ptr, n, eps):
    """Return 1 / sqrt(sum of squares + eps) of n f32 at address x_ptr."""
    return f32(1.0 / math.sqrt(dot(x_ptr, x_ptr, n) + f64(eps)))


@part("f32(f32)")
def decay_factor(decay):
    return f32(math.exp(f64(decay)))


@part("f32(i64, i64, f32, f32, f32, f32, i64)")
def error(state_row, k, k_scale, value, decay, beta, n):
    """Return value - decay * k_scale * (state_row k), n f32 at addresses: what the decayed state lacks at the key."""
    lane_sums = splat(0.0)
    for j in range(0, n, LANES):
        lane_sums = fma(load_part(state_row, j, n - j), load_part(k, j, n - j), lane_sums)
    return value - decay * k_scale * total(lane_sums)


@kernel("i64, i64, i64, i64, i64, f32, f32, f32, i64, i64")
def advance(y, s, v, q, k, decay, beta, eps, p, n):
    """Advance a head by a token: s = decay s, s += beta (v - s k) k^T, y = s q / sqrt(n); q and k made unit vectors.

    Its state s (p, n), y and v (p,), and q and k (n,) are f32 at addresses; eps is added to the squared lengths.
    """
    q_scale, k_scale = inverse(q, n, eps) / f32(math.sqrt(f64(n))), inverse(k, n, eps)
    for i in range(p):
        state_row, dot_sums = address(s, i * n), splat(0.0)
        by = splat(beta * k_scale * error(state_row, k, k_scale, peek(v, i), decay, beta, n))
        for j in range(0, n, LANES):
            left = n - j
            new = fma(load_part(state_row, j, left), splat(decay), by * load_part(k, j, left))
            store_part(state_row, j, new, left)
            dot_sums = fma(new, load_part(q, j, left), dot_sums)
        poke(y, i, q_scale * total(dot_sums))


@each_task("out2, out3, in2, in2, in2, ints1, i64, i64, i64, f32", lambda states: len(states))
def delta_rule(y, states, x, decay, beta, seq, T, G, tiled, eps, task):
    """Run all heads through their tokens; each row of the batch, and each sequence in it, starts from a state of zeros.

    y            (N, H P)  f32, N a multiple of `T`
    states       (rows of the batch * H, P, N)  f32, scratch
    x            (N, W)    f32: queries and keys of the G groups, values of the H heads
    decay, beta  (N, H)    f32; the state decays by exp(decay)
    seq          (N,)      i32, or empty
    tiled        whether heads of a group are G apart, not together
    """
    H, (_, p, n) = beta.shape[1], states.shape
    batch, h = task // H, task % H
    group, state = group_of_head(h, H, G, tiled), address(states, task * p * n)
    for t in range(batch * T, (batch + 1) * T):
        if is_start(seq, t, T):
            fill(state, p * n, f32(0.0))
        x_row = address(x, t * x.shape[1])
        q, v = address(x_row, group * n), address(x_row, 2 * G * n + h * p)
        target, token_decay = address(y, (t * H + h) * p), decay_factor(decay[t, h])
        advance(target, state, v, q, address(q, G * n), token_decay, beta[t, h], eps, p, n)


# ---- the gradient --------------------------------------------------------------------------------------------


@kernel("f64(i64, i64, i64, i64, i64, i64, i64, f32, f32, f32, f32, i64, i64)")
def forward_token(state, errors, dq, dy, v, q, k, q_scale, k_scale, decay, beta, p, n):
    """Advance the state (p, n) by a token, write errors (p,), add to dq (n,) q's gradient; returns dy · y.

    Arrays are f32 at addresses, dy and v (p,), q and k (n,); q_scale and k_scale are 1 over the lengths of q and k.
    """
    score, scale = f64(0.0), f32(1.0 / math.sqrt(f64(n)))
    for i in range(p):
        row, dot_sums, dy_lanes = address(state, i * n), splat(0.0), splat(scale * peek(dy, i))
        row_error = error(row, k, k_scale, peek(v, i), decay, beta, n)
        poke(errors, i, row_error)
        by = splat(beta * k_scale * row_error)
        for j in range(0, n, LANES):
            left = n - j
            new_state = fma(load_part(row, j, left), splat(decay), by * load_part(k, j, left))
            store_part(row, j, new_state, left)
            store_part(dq, j, fma(new_state, dy_lanes, load_part(dq, j, left)), left)
            dot_sums = fma(new_state, load_part(q, j, left), dot_sums)
        score += f64(scale * q_scale * total(dot_sums)) * f64(peek(dy, i))
    return score


@kernel("i64, i64, i64, i64, i64, i64, i64, f32, f32, f32, f32, i64, i64")
def state_back(state_grad, row_grads, dk, errors, dy, q, k, q_scale, k_scale, decay, beta, p, n):
    """Turn the gradient (p, n) of the state after a token into that of the state before the token.

    row_grads (p,) gets the gradient of what the token added along k; dk (n,) += the gradient of k's direction. Arrays
    are f32 at addresses, errors (p,) from forward_token; q_scale and k_scale are 1 over the lengths of q and k.
    """
    scale = q_scale / f32(math.sqrt(f64(n)))
    for i in range(p):
        grad_row, dot_sums, by = address(state_grad, i * n), splat(0.0), splat(scale * peek(dy, i))
        for j in range(0, n, LANES):
            left = n - j
            new_grad = fma(load_part(q, j, left), by, load_part(grad_row, j, left))
            store_part(grad_row, j, new_grad, left)
            dot_sums = fma(new_grad, load_part(k, j, left), dot_sums)
        scaled_sum = k_scale * total(dot_sums)
        poke(row_grads, i, scaled_sum)
        error_lanes, key_factor = splat(beta * peek(errors, i)), splat(-beta * scaled_sum * k_scale)
        for j in range(0, n, LANES):
            left = n - j
            new_grad = load_part(grad_row, j, left)
            store_part(dk, j, fma(new_grad, error_lanes, load_part(dk, j, left)), left)
            new_grad = fma(key_factor, load_part(k, j, left), new_grad)
            store_part(grad_row, j, new_grad * splat(decay), left)


@kernel("i64, i64, i64, in2, in2, in2, ints1, i64, UniTuple(i64, 7)")
def subtract_earlier_keys(dk, row_grads, state, x, decay, beta, seq, t, place):
    """dk (n,) -= beta row_grads^T S; the state S before token t is the chunk's first one plus what the chunk has added.

    place = T, k_at (where in a row of x the key is), addresses of k_scales and errors of the row of the batch, h, p, n
    """
    T, k_at, k_scales, errors, h, p, n = place
    first_token, decay_scale = t // T * T, -beta[t, h] * decay_factor(decay[t, h])
    s = t
    while (s - first_token) % CHUNK != 0 and not is_start(seq, s, T):
        s -= 1
        error_dot = f32(dot(address(errors, (s - first_token) * p), row_grads, p)) * beta[s, h]
        scale = decay_scale * error_dot * peek(k_scales, s - first_token)
        add_scaled(dk, address(x, s * x.shape[1] + k_at), scale, n)
        decay_scale *= decay_factor(decay[s, h])
    if not is_start(seq, s, T):
        for i in range(p):
            add_scaled(dk, address(state, i * n), decay_scale * peek(row_grads, i), n)


@part("i64, i64, f32, i64")
def normalize_back(dx, x, inverse_norm, n):
    """Turn dx (n,), at an address, from the gradient of x / |x| into that of x; inverse_norm is 1 / |x|."""
    projection = f32(dot(dx, x, n) * f64(inverse_norm) * f64(inverse_norm))
    add_scaled(dx, x, -projection, n)
    for j in range(0, n, LANES):
        store_part(dx, j, load_part(dx, j, n - j) * splat(inverse_norm), n - j)


@kernel("out2, i64, i64, i64, in2, in2, in2, in2, ints1, head_type")
def forward_head(dx, states, errors, stats, dy, x, decay, beta, seq, head):
    """Run a head (see head_type) forward: write errors, states before chunks, add to queries' dx; stats[2] = dy y."""
    T, batch, q_at, k_at, v_at, h, p, n = head
    H, width, state_size, first_token = beta.shape[1], x.shape[1], p * n, batch * T
    state = address(states, -(-T // CHUNK) * state_size)
    for t in range(T):
        token, x_row = first_token + t, address(x, (first_token + t) * width)
        if is_start(seq, token, T):
            fill(state, state_size, f32(0.0))
        if t % CHUNK == 0:
            copy(address(states, t // CHUNK * state_size), state, state_size)
        score = forward_token(
            state, address(errors, t * p), address(dx, token * width + q_at), address(dy, (token * H + h) * p),
            address(x_row, v_at), address(x_row, q_at), address(x_row, k_at), peek(stats, t), peek(stats, T + t),
            decay_factor(decay[token, h]), beta[token, h], p, n,
        )  # fmt: skip
        poke(stats, 2 * T + t, f32(score))


@kernel("out2, out2, out2, i64, i64, i64, in2, in2, in2, in2, ints1, head_type")
def backward_head(dx, ddecay, dbeta, states, errors, stats, dy, x, decay, beta, seq, head):
    """Write the gradients of keys, values, betas and decays of a head (see head_type), from what forward_head wrote."""
    T, batch, q_at, k_at, v_at, h, p, n = head
    H, width, state_size, first, decay_slope = beta.shape[1], x.shape[1], p * n, batch * T, f64(0.0)
    slope, missing = address(states, -(-T // CHUNK) * state_size), address(errors, T * p)
    fill(slope, state_size, f32(0.0))
    for t in range(T - 1, -1, -1):
        token, at = first + t, address(x, (first + t) * width)
        dk, token_errors = address(dx, token * width + k_at), address(errors, t * p)
        by, k_scales = beta[token, h], address(stats, T)
        is_first, before = is_start(seq, token, T), address(states, t // CHUNK * state_size)
        state_back(
            slope, missing, dk, token_errors, address(dy, (token * H + h) * p), address(at, q_at),
            address(at, k_at),
            peek(stats, t), peek(stats, T + t), f32(0.0) if is_first else decay_factor(decay[token, h]), by, p, n,
        )  # fmt: skip
        if not is_first:
            place = T, k_at, k_scales, errors, h, p, n
            subtract_earlier_keys(dk, missing, before, x, decay, beta, seq, token, place)
        decay_slope += peek(stats, 2 * T + t) - by * dot(missing, address(at, v_at), p)
        if t % CHUNK == 0:
            decay_slope = dot(slope, before, state_size)
        decay_slope = f64(0.0) if is_first else decay_slope
        ddecay[token, h], dbeta[token, h] = f32(decay_slope), f32(dot(missing, token_errors, p))
        target = address(dx, token * width + v_at)
        for i in range(p):
            poke(target, i, by * peek(missing, i))


@each_task(
    "out2, out2, out2, out4, out3, out3, in2, in2, in2, in2, ints1, i64, i64, i64, f32",
    lambda states: len(states),
)
def delta_rule_back(
    dx, ddecay, dbeta, states, errors, stats, dy, x, decay, beta, seq, T, G, tiled, eps, task
):
    """Write the gradients of delta_rule: a pass forward for the queries', one back for the others.

    The state before a token, which keys' gradients need, is the state before the chunk plus what the chunk's tokens
    added. No state is computed backwards, which would divide by decays. Scratch, f32, with L rows of the batch:

    states  (L G, chunks + 1, P, N), errors (L G, T + 1, P), stats (L G, 3, T)
    """
    H, (_, num_slots, p, n) = beta.shape[1], states.shape
    batch, group = task // G, task % G
    q_at, k_at, width = group * n, (G + group) * n, x.shape[1]
    state, err_ptr = address(states, task * num_slots * p * n), address(errors, task * (T + 1) * p)
    rest = address(stats, task * 3 * T)
    for t in range(T):
        for stat_row, at in enumerate((q_at, k_at)):
            poke(rest, stat_row * T + t, inverse(address(x, (batch * T + t) * width + at), n, eps))
            fill(address(dx, (batch * T + t) * width + at), n, f32(0.0))
    for h in range(H):  # one after the other: they share the group's queries and keys
        if group_of_head(h, H, G, tiled) == group:
            head = T, batch, q_at, k_at, 2 * G * n + h * p, h, p, n
            forward_head(dx, state, err_ptr, rest, dy, x, decay, beta, seq, head)
            outputs = dx, ddecay, dbeta
            backward_head(*outputs, state, err_ptr, rest, dy, x, decay, beta, seq, head)
    for t in range(T):
        for stat_row, at in enumerate((q_at, k_at)):
            offset = (batch * T + t) * width + at
            normalize_back(address(dx, offset), address(x, offset), peek(rest, stat_row * T + t), n)


# ---- with states in cells ------------------------------------------------------------------------------------


@each_task(
    "out2, out4, in2, in2, in2, ints1, ints1, ints1, i64, i64, f32", lambda states: states.shape[1]
)
def delta_cells(y, states, x, decay, beta, token_seqs, sources, targets, G, tiled, eps, h):
    """Run head h of delta_rule (G, tiled, eps) for tokens of several sequences in turn; cells: see scan.scan_cells."""
    _, H, p, n = states.shape
    group = group_of_head(h, H, G, tiled)
    load_states(states, sources, targets, h)
    for t in range(len(x)):
        cell, y_row = i64(targets[token_seqs[t]]), address(y, (t * H + h) * p)
        if cell < 0:
            fill(y_row, p, f32(0.0))
            continue
        x_row, state = address(x, t * x.shape[1]), address(states, (cell * H + h) * p * n)
        q, v = address(x_row, group * n), address(x_row, 2 * G * n + h * p)
        key = address(q, G * n)
        advance(y_row, state, v, q, key, decay_factor(decay[t, h]), beta[t, h], eps, p, n)
