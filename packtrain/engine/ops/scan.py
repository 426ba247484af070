"""Scans of states: Mamba-2's recurrence over tokens, in training and with states that are saved between runs."""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops.arrays import ABSENT_IDS, flatten_or_absent, gradient_samples, rows
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state


def head_sizes(x, by_head, groups, width):
    """Return (H, P), heads and values of each, of by_head (..., H) and x (..., H P + 2 G N); N is `width`."""
    heads = by_head.shape[-1]
    return heads, (x.shape[-1] - 2 * groups * width) // max(heads, 1)


def check_scan(x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, groups: int, width: int) -> int:
    """Check the inputs of ssm_scan for a shape rule; return H P, the width of y."""
    y_width = check_heads(x, groups, width, delta=delta)
    Spec(delta.shape[-1:]).require(a=a, skip=skip)
    return y_width


def check_heads(x: Tensor, groups: int, width: int, **by_head: Tensor) -> int:
    """Check x (..., H P + 2 G N) and the inputs with a number for each head; return H P, the width of y."""
    heads, p = head_sizes(x, next(iter(by_head.values())), groups, width)
    Spec(x.shape).require(x=x)
    Spec((*x.shape[:-1], heads)).require(**by_head)
    is_valid = groups > 0 < heads and heads % groups == 0
    require(is_valid, f"{groups} groups must divide {heads} heads")
    is_valid = p > 0 < width and x.shape[-1] == heads * p + 2 * groups * width
    require(is_valid, f"x is {x.spec}; its width must be {heads} P + 2 * {groups} * {width}")
    return heads * p


def scan_cost(num_products, result_index=0):
    """Return a cost rule: num_products * N for each value of the rule's argument `result_index` (0: the result)."""
    return lambda *args, width, **attrs: Cost(
        {"attend": num_products * math.prod(args[result_index].shape) * width}
    )


def cells_cost(num_products):
    """Return the cost rule of an op on states of a leaf: `num_products` for each token and value of a state."""

    def cost_rule(out, leaf, x, *other_inputs, **attrs):
        state_size = math.prod(leaf.shape[1:])
        return Cost({"attend": num_products * x.shape[0] * state_size}, nbytes=4 * state_size)

    return cost_rule


def state_workspace(x, by_head, *other_inputs, groups, width, **attrs):
    """Return the workspace of a forward scan: the states of all heads (B H, P, N)."""
    heads, p = head_sizes(x, by_head, groups, width)
    return (Spec((x.shape[0] * heads, p, width)),)


def write_gradients_by_autograd(out, dy, forward, inputs):
    """Write the gradients of y = forward(*inputs) to `out`, given dy, by PyTorch's autograd."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = forward(*leaves)
        grads = torch.autograd.grad(y, leaves, dy.reshape(y.shape))
    for grad_out, grad in zip(out, grads, strict=True):
        grad_out.copy_(grad)


def split_scan_inputs(x, delta, groups, width):
    """Split x (..., H P + 2 G N) into values (..., H, P), and B and C of each head's group, (..., H, N) each."""
    heads, p = head_sizes(x, delta, groups, width)
    leading_shape, xp = x.shape[:-1], np if isinstance(x, np.ndarray) else torch
    head_values = x[..., : heads * p].reshape(*leading_shape, heads, p)
    b_and_c = x[..., heads * p :].reshape(*leading_shape, 2, groups, 1, width)
    b_and_c = xp.broadcast_to(b_and_c, (*leading_shape, 2, groups, heads // groups, width))
    b, c = (b_and_c[..., i, :, :, :].reshape(*leading_shape, heads, width) for i in (0, 1))
    return head_values, b, c


def _steps(head_values, b, c, delta, a, seq, initial_state):
    """Yield, token by token from `initial_state` on, the state (B, H, P, N) and what it gives for y (B, H, P)."""
    s, xp = initial_state, np if isinstance(delta, np.ndarray) else torch
    for t in range(delta.shape[1]):
        if t and seq is not None:
            s = s * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        d = delta[:, t, :, None, None]
        s = s * xp.exp(d * a[:, None, None]) + d * head_values[:, t, ..., None] * b[:, t, :, None]
        yield s, (s * c[:, t, :, None]).sum(-1)


def _sample_inputs():
    random = np.random.default_rng(1)
    sizes = (1, 1, 1, 1, 1, 1), (2, 7, 4, 3, 2, 5), (1, 70, 12, 8, 1, 16), (2, 40, 2, 5, 1, 20)
    for b, t, heads, p, groups, n in sizes:
        seq = constant("seq", np.sort(random.integers(0, 4, (b, t)), axis=1), i32)
        x = input("x", (b, t, heads * p + 2 * groups * n))
        delta = constant("delta", random.uniform(0, 0.5, (b, t, heads)).astype(np.float32))
        a = constant("a", -random.uniform(0.1, 2, heads).astype(np.float32))
        for ids in (None, seq):
            yield (x, delta, a, input("skip", (heads,)), ids), {"groups": groups, "width": n}
    by_head = input("delta", (b, t, heads)), input("a", (heads,)), input("skip", (heads,))
    yield (x, *by_head, None), {"groups": 1, "width": n}


@op()
def ssm_scan(
    x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int,
) -> Spec:  # fmt: skip
    """Keep a state of P x N values for each head: S = exp(delta a) S + delta x B^T; y = S C + skip x.

    Each sequence begins with S = 0.

    x        (B, T, H P + 2 G N)  f32: values of the heads, B and C of the groups, of H / G heads each; N is `width`
    delta    (B, T, H)            f32
    a, skip  (H,)                 f32
    seq      (B, T)               i32
    y        (B, T, H P)          f32
    Dao & Gu 2024, arXiv 2405.21060; ggml_ssm_scan.
    """
    y_width = check_scan(x, delta, a, skip, groups, width)
    require(len(x.shape) == 3, f"x is {x.spec}; it must have three axes")
    Spec(x.shape[:2], i32).require(seq=seq)
    return Spec((*x.shape[:2], y_width))


@ssm_scan.vjp
def ssm_scan_vjp(dy, y, x, delta, a, skip, seq, **attrs):
    return *ssm_scan_back(dy, x, delta, a, skip, seq, **attrs), None


@ssm_scan.kernel("torch")
@ssm_scan.kernel("numpy")
def ssm_scan_numpy(y, x, delta, a, skip, seq, *, groups, width):
    if 0 in y.shape:
        return
    head_values, b, c = split_scan_inputs(x, delta, groups, width)
    initial_state = head_values[:, 0, ..., None] * b[:, 0, :, None] * 0
    for t, (_, step_output) in enumerate(_steps(head_values, b, c, delta, a, seq, initial_state)):
        y[:, t] = (step_output + skip[:, None] * head_values[:, t]).reshape(y[:, t].shape)


ssm_scan.workspace("cpu")(state_workspace)


@ssm_scan.kernel("cpu")
def ssm_scan_cpu(y, x, delta, a, skip, seq, *, groups, width, work):
    args = rows(y), *work, rows(x), rows(delta), a, skip, flatten_or_absent(seq, ABSENT_IDS)
    kernels.scan.scan(*args, x.shape[1], groups)


ssm_scan.cost(scan_cost(2))
ssm_scan.samples(lambda: (ssm_scan(*inputs, **attrs) for inputs, attrs in _sample_inputs()))


@op()
def ssm_scan_back(
    dy: Tensor, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int,
) -> tuple[Spec, ...]:  # fmt: skip
    """Gradients of ssm_scan for x, delta, a and skip; the states are recomputed, and none is saved."""
    y = Spec((*x.shape[:-1], check_scan(x, delta, a, skip, groups, width)))
    require(dy.spec == y and len(x.shape) == 3, f"dy is {dy.spec}; for x {x.spec} it must be {y}")
    return x.spec, delta.spec, a.spec, skip.spec


@ssm_scan_back.workspace("cpu")
def ssm_scan_back_workspace(dy, x, delta, *other_inputs, groups, width):
    (heads, p), (lines, time) = head_sizes(x, delta, groups, width), x.shape[:2]
    tasks = lines * groups * min(heads // groups, kernels.scan.SHARES)
    parts = (tasks, p, width), (tasks, 2, time, width), (tasks, time + width), (lines * heads, 2)
    return tuple(map(Spec, parts))


@ssm_scan_back.kernel("numpy")
def ssm_scan_back_numpy(out, dy, x, delta, a, skip, seq, *, groups, width):
    dx, ddelta, da, dskip = out
    head_values, b, c = split_scan_inputs(x, delta, groups, width)
    dy, num_steps = dy.reshape(head_values.shape), delta.shape[1]
    initial_state = head_values[:, 0, ..., None] * b[:, 0, :, None] * 0
    states = [s for s, _ in _steps(head_values, b, c, delta, a, seq, initial_state)]
    da[...], dskip[...] = 0, (dy * head_values).sum((0, 1, 3))
    b_grad, c_grad, state_grad = np.zeros_like(b), np.zeros_like(c), np.zeros_like(initial_state)
    value_grads = skip[:, None] * dy
    for t in reversed(range(num_steps)):
        s, d = states[t], delta[:, t, :, None, None]
        previous_state = states[t - 1] if t else initial_state
        if t and seq is not None:
            previous_state = previous_state * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        state_grad = state_grad + dy[:, t, ..., None] * c[:, t, :, None]
        c_grad[:, t] = (dy[:, t, ..., None] * s).sum(2)
        state_input = head_values[:, t, ..., None] * b[:, t, :, None]
        decay = np.exp(d * a[:, None, None])
        decay_grad = (state_grad * decay * previous_state).sum((2, 3))
        ddelta[:, t] = (state_grad * state_input).sum((2, 3)) + a * decay_grad
        da += (delta[:, t] * decay_grad).sum(0)
        b_grad[:, t] = (d * state_grad * head_values[:, t, ..., None]).sum(2)
        value_grads[:, t] += (d * state_grad * b[:, t, :, None]).sum(-1)
        state_grad = state_grad * decay
        if t and seq is not None:
            state_grad = state_grad * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
    group_grads = (g.reshape(*x.shape[:2], groups, -1, width).sum(3) for g in (b_grad, c_grad))
    input_grads = (g.reshape(*x.shape[:2], -1) for g in (value_grads, *group_grads))
    dx[...] = np.concatenate([*input_grads], -1)


@ssm_scan_back.kernel("cpu")
def ssm_scan_back_cpu(out, dy, x, delta, a, skip, seq, *, groups, width, work):
    dx, ddelta, *other_grads = out
    args = rows(dy), rows(x), rows(delta), a, skip, flatten_or_absent(seq, ABSENT_IDS)
    kernels.scan.scan_back(rows(dx), rows(ddelta), *other_grads, *work, *args, x.shape[1], groups)


@ssm_scan_back.kernel("torch")
def ssm_scan_back_torch(out, dy, x, delta, a, skip, seq, *, groups, width):
    def forward(x, delta, a, skip):
        head_values, b, c = split_scan_inputs(x, delta, groups, width)
        first = torch.zeros_like(head_values[:, 0, ..., None] * b[:, 0, :, None])
        step_outputs = [y for _, y in _steps(head_values, b, c, delta, a, seq, first)]
        return torch.stack(step_outputs, 1) + skip[:, None] * head_values

    write_gradients_by_autograd(out, dy, forward, (x, delta, a, skip))


ssm_scan_back.cost(scan_cost(5, 1))
ssm_scan_back.samples(gradient_samples(ssm_scan, ssm_scan_back))


# ---- with states saved between runs ---------------------------------------------------------------------------
#
# A run reads one cell of a sequence and writes another, so that a failed run changes nothing and copied sequences share
# a cell. A state cannot be cut: going back starts from the last checkpoint.


def check_lines(x: Tensor, line: Tensor, source: Tensor, target: Tensor) -> None:
    """Check the inputs that say which line, with source and target cell, each token's sequence has."""
    Spec(x.shape[:1], i32).require(line=line)
    Spec(source.shape[:1], i32).require(source=source, target=target)


def check_states(leaf: Tensor) -> None:
    is_valid = len(leaf.shape) == 4 and leaf.dtype == f32
    require(is_valid, f"leaf is {leaf.spec}; it must be f32[S, H, P, N]")


def load_states(leaf, source, target):
    """Copy states between cells of the leaf before a run: leaf[target] = leaf[source], zeros for a negative source."""
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        if t >= 0:
            leaf[t] = leaf[s] if s >= 0 else 0


def sample_lines(t):
    """Return sample line, source and target for t tokens of two sequences, one of them new, and padding; six states."""
    line = constant("line", [(0, 1, 1)[i % 3] if i < t - 1 or t < 3 else 2 for i in range(t)], i32)
    return line, constant("source", [4, -1, -1], i32), constant("target", [0, 3, -1], i32)


@op(writes=(0,), repeatable=True)
def ssm_scan_cells(
    leaf: Tensor, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, line: Tensor, source: Tensor,
    target: Tensor, *, groups: int,
) -> tuple[Spec, ...]:  # fmt: skip
    """Apply ssm_scan to tokens of several sequences, each from one state of the leaf to another.

    leaf            (S, H, P, N)  f32
    x, delta, y     (T, ...)      f32, as in ssm_scan
    line            (T,)          i32: number of the token's sequence
    source, target  (R,)          i32: sequence r begins with leaf[source[r]], or with zeros if source[r] < 0, and its
                                  last state becomes leaf[target[r]]; a negative target is padding, whose y is 0
    Returns the leaf's new handle, and y.
    """
    check_states(leaf)
    _, heads, p, n = leaf.shape
    y_width = check_scan(x, delta, a, skip, groups, n)
    is_valid = delta.shape == (*x.shape[:1], heads) and y_width == heads * p
    require(is_valid, f"x is {x.spec}, leaf {leaf.spec}")
    check_lines(x, line, source, target)
    return leaf.spec, Spec((x.shape[0], y_width))


@ssm_scan_cells.kernel("torch")
@ssm_scan_cells.kernel("numpy")
def ssm_scan_cells_numpy(out, leaf, x, delta, a, skip, line, source, target, *, groups):
    y, xp = out[1], np if isinstance(x, np.ndarray) else torch
    head_values, b, c = split_scan_inputs(x, delta, groups, leaf.shape[-1])
    load_states(leaf, source, target)
    for t in range(len(x)):
        at = int(target[line[t]])
        if at < 0:
            y[t] = 0
            continue
        d = delta[t][:, None, None]
        s = leaf[at] * xp.exp(d * a[:, None, None]) + d * head_values[t][..., None] * b[t][:, None]
        leaf[at] = s
        y[t] = ((s * c[t][:, None]).sum(-1) + skip[:, None] * head_values[t]).reshape(-1)


@ssm_scan_cells.kernel("cpu")
def ssm_scan_cells_cpu(out, leaf, x, delta, a, skip, line, source, target, *, groups):
    kernels.scan.scan_cells(out[1], leaf, x, delta, a, skip, line, source, target, groups)


ssm_scan_cells.cost(cells_cost(2))


@ssm_scan_cells.samples
def ssm_scan_cells_samples():
    random = np.random.default_rng(1)
    for t, heads, p, groups, n in ((1, 1, 1, 1, 1), (7, 4, 3, 2, 5), (20, 3, 8, 1, 16)):
        x = input("x", (t, heads * p + 2 * groups * n))
        delta = constant("delta", random.uniform(0, 0.5, (t, heads)).astype(np.float32))
        a = constant("a", -random.uniform(0.1, 2, heads).astype(np.float32))
        leaf = state("states", (6, heads, p, n))
        lines = sample_lines(t)
        yield ssm_scan_cells(leaf, x, delta, a, input("skip", (heads,)), *lines, groups=groups)[1]


@op(writes=(0,), repeatable=True)
def short_conv_states(
    leaf: Tensor, x: Tensor, w: Tensor, line: Tensor, source: Tensor, target: Tensor
) -> tuple[Spec, ...]:
    """Apply short_conv to tokens of several sequences, whose last inputs are saved; inputs as in ssm_scan_cells.

    leaf  (S, K - 1, C)  f32
    x, y  (T, C)         f32
    w     (C, K)         f32
    Returns the leaf's new handle, and y.
    """
    (num_tokens, num_channels), num_taps = x.shape, w.shape[-1]
    is_valid = x.dtype == f32 and w.spec == Spec((num_channels, num_taps))
    require(is_valid, f"x is {x.spec} and w is {w.spec}; they must be f32[T, C] and f32[C, K]")
    Spec((*leaf.shape[:1], num_taps - 1, num_channels)).require(leaf=leaf)
    check_lines(x, line, source, target)
    return leaf.spec, Spec((num_tokens, num_channels))


@short_conv_states.kernel("torch")
@short_conv_states.kernel("numpy")
def short_conv_states_numpy(out, leaf, x, w, line, source, target):
    y = out[1]
    load_states(leaf, source, target)
    for t in range(len(x)):
        state_index, last_tap = int(target[line[t]]), w.shape[1] - 1
        y[t] = x[t] * w[:, -1] if state_index >= 0 else 0
        for k in range(last_tap if state_index >= 0 else 0):
            y[t] += leaf[state_index, k] * w[:, k]
            leaf[state_index, k] = leaf[state_index, k + 1] if k + 1 < last_tap else x[t]


short_conv_states.workspace("cpu")(lambda leaf, x, w, *inputs: (Spec((w.shape[1], w.shape[0])),))


@short_conv_states.kernel("cpu")
def short_conv_states_cpu(out, leaf, x, w, line, source, target, work):
    work[0][...] = w.T
    kernels.scan.conv_states(out[1], leaf, x, work[0], line, source, target)


@short_conv_states.samples
def short_conv_states_samples():
    for t, c, k in ((1, 1, 2), (5, 20, 4), (30, 70, 4)):
        leaf, lines = state("kept", (6, k - 1, c)), sample_lines(t)
        yield short_conv_states(leaf, input("x", (t, c)), input("w", (c, k)), *lines)[1]
