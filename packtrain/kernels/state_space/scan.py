"""Scan states as Mamba-2 does: each head's state of P x N values goes through the tokens in the fast cache.

x (N, W) has the heads' values (H P), then B and C of the groups (G N each). S = exp(delta a) S + delta x B^T and
y = S C + skip x, for each head.
"""

import math

from packtrain.kernels.runtime.jit import each, each_task, kernel
from packtrain.kernels.runtime.kernel_types import f32, f64, i64
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load_part, peek, poke, splat, store_part, total,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import add_scaled, copy, dot, fill, is_start, load_states

SHARES = 8  # tasks among which the heads of a group are divided in the gradient
CHANNELS = 64  # channels of a task of convolutions


@kernel("i64, i64, i64, i64, i64, f32, f32, f32, i64, i64")
def advance(y, s, x, b, c, delta, a, skip, p, n):
    """Advance a head by a token: s = exp(delta a) s + delta x b^T, y = s c + skip x.

    Its state s (p, n), x and y (p,), and b and c (n,) are f32 at addresses.
    """
    decay = splat(f32(math.exp(f64(delta) * f64(a))))
    for i in range(p):
        value = peek(x, i)
        state_row, by, dot_sums = address(s, i * n), splat(delta * value), splat(0.0)
        for k in range(0, n, LANES):
            left = n - k
            new_state = fma(load_part(state_row, k, left), decay, by * load_part(b, k, left))
            store_part(state_row, k, new_state, left)
            dot_sums = fma(new_state, load_part(c, k, left), dot_sums)
        poke(y, i, total(dot_sums) + skip * value)


@kernel("out2, out3, in2, in2, in1, in1, ints1, i64, i64, i64")
def head_task(y, states, x, delta, a, skip, seq, T, G, task):
    """Run head task % H of batch row task // H through its tokens; other arguments are scan's."""
    H, (_, p, n) = len(a), states.shape
    batch, h = task // H, task % H
    group, state = h // (H // G), address(states, task * p * n)
    for t in range(batch * T, (batch + 1) * T):
        if t == batch * T or (seq.size > 0 and seq[t] != seq[t - 1]):
            fill(state, p * n, f32(0.0))
        x_row = address(x, t * x.shape[1])
        b = address(x_row, H * p + group * n)
        c, d = address(b, G * n), delta[t, h]
        advance(
            address(y, (t * H + h) * p), state, address(x_row, h * p), b, c, d, a[h], skip[h], p, n
        )  # fmt: skip


@kernel("out2, out3, in2, in2, in1, in1, ints1, i64, i64")
def scan(y, states, x, delta, a, skip, seq, T, G):
    """Run all heads through their tokens; each row of the batch, and each sequence in it, starts from a state of zeros.

    y        (N, H P)  f32, N a multiple of `T`
    states   (rows of the batch * H, P, N)  f32, scratch
    x        (N, W)    f32: inputs of the H heads, then B and C of the G groups
    delta    (N, H)    f32
    a, skip  (H,)      f32
    seq      (N,)      i32, or empty
    """
    each(head_task, (y, states, x, delta, a, skip, seq, T, G), len(states))


# ---- the gradient --------------------------------------------------------------------------------------------


@kernel("i64, i64, i64, i64, f32, f32, i64, i64")
def forward_token(state, dc_row, dy, x, delta, decay, p, n):
    """Advance a head's state by a token; dc_row (n,) has B at first, then the sum over p of dy S. f32 addresses."""
    for k in range(0, n, LANES):
        left = n - k
        b, dot_sums = load_part(dc_row, k, left), splat(0.0)
        for i in range(p):
            state_row = address(state, i * n)
            new_state = fma(
                load_part(state_row, k, left), splat(decay), splat(delta * peek(x, i)) * b
            )
            store_part(state_row, k, new_state, left)
            dot_sums = fma(new_state, splat(peek(dy, i)), dot_sums)
        store_part(dc_row, k, dot_sums, left)


@kernel("i64, i64, i64, i64, i64, i64, i64, f32, i64, i64")
def backward(state_grad, db_row, dx, dy, x, b, c, decay, p, n):
    """Step the state's gradient back: decay state_grad + dy c; writes dx = state_grad b and db_row = x state_grad.

    state_grad (p, n), dx, dy and x (p,), db_row, b and c (n,) are f32 at addresses.
    """
    fill(db_row, n, f32(0.0))
    for i in range(p):
        row, dot_sums = address(state_grad, i * n), splat(0.0)
        by, x_lanes = splat(peek(dy, i)), splat(peek(x, i))
        for k in range(0, n, LANES):
            left = n - k
            new = fma(load_part(row, k, left), splat(decay), by * load_part(c, k, left))
            store_part(row, k, new, left)
            dot_sums = fma(new, load_part(b, k, left), dot_sums)
            store_part(db_row, k, fma(new, x_lanes, load_part(db_row, k, left)), left)
        poke(dx, i, total(dot_sums))


@kernel("out2, out2, out2, out3, out4, out2, in2, in2, in2, in1, in1, ints1, i64, i64, i64")
def share_back(dx, ddelta, sums, states, bc_grads, stats, dy, x, delta, a, skip, seq, T, G, task):
    """Compute scan_back's gradients of a share of a group's heads; `task` counts shares, groups, rows of the batch."""
    H, (_, p, n) = len(a), states.shape
    group_heads = H // G
    num_shares = min(group_heads, SHARES)
    batch, group = task // num_shares // G, task // num_shares % G
    state, db_rows = address(states, task * p * n), address(bc_grads, task * 2 * T * n)
    dc_rows, scores = address(db_rows, T * n), address(stats, task * (T + n))
    grad_row, width, first_token = address(scores, T), x.shape[1], batch * T
    fill(db_rows, 2 * T * n, f32(0.0))
    for h in range(group * group_heads + task % num_shares, (group + 1) * group_heads, num_shares):
        for t in range(T):
            x_row, token = address(x, (first_token + t) * width), first_token + t
            if is_start(seq, token, T):
                fill(state, p * n, f32(0.0))
            d, b = delta[token, h], address(x_row, H * p + group * n)
            copy(grad_row, b, n)
            decay, dy_row = f32(math.exp(f64(d) * f64(a[h]))), address(dy, (token * H + h) * p)
            forward_token(state, grad_row, dy_row, address(x_row, h * p), d, decay, p, n)
            add_scaled(address(dc_rows, t * n), grad_row, f32(1.0), n)
            poke(scores, t, f32(dot(grad_row, address(b, G * n), n)))
        fill(state, p * n, f32(0.0))
        decay, slope, a_grad, skip_grad = f32(0.0), f64(0.0), f64(0.0), f64(0.0)
        for t in range(T - 1, -1, -1):
            x_row, token = address(x, (first_token + t) * width), first_token + t
            dx_row, head_x = address(dx, token * width + h * p), address(x_row, h * p)
            b, d = address(x_row, H * p + group * n), delta[token, h]
            dy_row = address(dy, (token * H + h) * p)
            backward(state, grad_row, dx_row, dy_row, head_x, b, address(b, G * n), decay, p, n)
            straight = dot(grad_row, b, n)
            slope = f64(0.0) if is_start(seq, token, T) else slope + peek(scores, t) - d * straight
            ddelta[token, h] = f32(straight + f64(a[h]) * slope)
            a_grad += d * slope
            skip_grad += dot(dy_row, head_x, p)
            add_scaled(address(db_rows, t * n), grad_row, d, n)
            for i in range(p):
                poke(dx_row, i, d * peek(dx_row, i) + skip[h] * peek(dy_row, i))
            decay = f32(0.0) if is_start(seq, token, T) else f32(math.exp(f64(d) * f64(a[h])))
        sums[batch * H + h, 0], sums[batch * H + h, 1] = f32(a_grad), f32(skip_grad)


@kernel("out2, out4, i64, i64, i64, i64")
def sum_group_grads(dx, bc_grads, width, G, num_shares, token):
    """Write gradients of a token's B and C to dx, from column `width` on: of each group the sum of num_shares."""
    _, _, T, n = bc_grads.shape
    batch, t = token // T, token % T
    for is_c in range(2):
        for group in range(G):
            target = address(dx, token * dx.shape[1] + width + (is_c * G + group) * n)
            fill(target, n, f32(0.0))
            for k in range(num_shares):
                task = (batch * G + group) * num_shares + k
                source = address(bc_grads, ((task * 2 + is_c) * T + t) * n)
                add_scaled(target, source, f32(1.0), n)


@kernel("out2, out2, out1, out1, out3, out4, out2, out2, in2, in2, in2, in1, in1, ints1, i64, i64")
def scan_back(
    dx, ddelta, da, dskip, states, bc_grads, stats, sums, dy, x, delta, a, skip, seq, T, G
):
    """Write the gradients of scan: a pass forward for C's, one back for the others.

    delta and a enter through the state's decay. Its gradient u needs no past state, so none is saved: with S' the
    gradient of S, S' S = u + delta S' x B^T at a token, and y' y + u of the next token, too. To save states at chunk
    ends would cost memory and another pass. Scratch, f32:

    states  (tasks, P, N), bc_grads (tasks, 2, T, N), stats (tasks, T + N), sums (rows of the batch * H, 2)
    """
    H = len(a)
    num_shares = min(H // G, SHARES)
    task_args = (dx, ddelta, sums, states, bc_grads, stats, dy, x, delta, a, skip, seq, T, G)
    each(share_back, task_args, len(states))
    each(sum_group_grads, (dx, bc_grads, dy.shape[1], G, num_shares), len(x))
    for h in range(H):
        da[h], dskip[h] = f32(0.0), f32(0.0)
        for batch in range(len(x) // max(T, 1)):
            da[h] += sums[batch * H + h, 0]
            dskip[h] += sums[batch * H + h, 1]


# ---- with states in cells ------------------------------------------------------------------------------------


@each_task(
    "out2, out4, in2, in2, in1, in1, ints1, ints1, ints1, i64", lambda states: states.shape[1]
)
def scan_cells(y, states, x, delta, a, skip, token_seqs, sources, targets, G, h):
    """Compute scan for tokens of several sequences in turn, from states in source cells, which stay, to target cells.

    states            (S, H, P, N)  f32
    token_seqs        (N,)  i32: the entry of sources and targets that a token belongs to
    sources, targets  (R,)  i32: cells; a negative source means zeros, a negative target padding, whose y is 0
    """
    _, H, p, n = states.shape
    state_size, group = p * n, h // (H // G)
    load_states(states, sources, targets, h)
    for t in range(len(x)):
        cell, y_row = i64(targets[token_seqs[t]]), address(y, (t * H + h) * p)
        if cell < 0:
            fill(y_row, p, f32(0.0))
            continue
        x_row = address(x, t * x.shape[1])
        b = address(x_row, H * p + group * n)
        state, d = address(states, (cell * H + h) * state_size), delta[t, h]
        advance(y_row, state, address(x_row, h * p), b, address(b, G * n), d, a[h], skip[h], p, n)


@each_task("out2, out3, in2, in2, ints1, ints1, ints1", lambda w: -(-w.shape[1] // CHANNELS))
def conv_states(y, inputs, x, w, token_seqs, sources, targets, task):
    """Compute a short convolution of tokens of several sequences, with their last inputs in cells; see scan_cells.

    inputs  (S, K - 1, C)  f32: the last inputs of sequences
    x, y    (N, C)         f32
    w       (K, C)         f32
    """
    num_taps, wide = w.shape
    before = num_taps - 1
    for s in range(task * CHANNELS, min(wide, (task + 1) * CHANNELS), LANES):
        left = wide - s
        for r in range(len(targets)):
            for k in range(before if targets[r] >= 0 else 0):
                value = splat(0.0)
                if sources[r] >= 0:
                    value = load_part(address(inputs, (sources[r] * before + k) * wide), s, left)
                store_part(address(inputs, (targets[r] * before + k) * wide), s, value, left)
        for t in range(len(x)):
            at = i64(targets[token_seqs[t]])
            new_input, output_sums = load_part(address(x, t * wide), s, left), splat(0.0)
            if at >= 0:
                for k in range(before):
                    state_row = address(inputs, (at * before + k) * wide)
                    old = load_part(state_row, s, left)
                    output_sums = fma(old, load_part(address(w, k * wide), s, left), output_sums)
                    if k > 0:
                        store_part(address(inputs, (at * before + k - 1) * wide), s, old, left)
                if before > 0:
                    store_part(
                        address(inputs, (at * before + before - 1) * wide), s, new_input, left
                    )
                output_sums = fma(
                    new_input, load_part(address(w, before * wide), s, left), output_sums
                )
            store_part(address(y, t * wide), s, output_sums, left)
