"""The gated delta rule over tokens, in training and with states that are saved between runs."""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import i32
from packtrain.engine.ops import scan
from packtrain.engine.ops.arrays import ABSENT_IDS, flatten_or_absent, gradient_samples, rows
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state


def _parts(x, heads, groups, width, tiled, eps):
    """Return q of length 1 / sqrt(N) and k of length 1, by head from its group, (..., H, N), and values (..., H, P)."""
    leading_shape, xp = x.shape[:-1], np if isinstance(x, np.ndarray) else torch
    q_and_k = x[..., : 2 * groups * width].reshape(*leading_shape, 2, groups, width)
    q_and_k = q_and_k / xp.sqrt((q_and_k * q_and_k).sum(-1)[..., None] + eps)
    head_index = np.arange(heads)
    group = head_index % groups if tiled else head_index // (heads // groups)
    q_and_k = q_and_k[..., group if xp is np else torch.as_tensor(group, device=x.device), :]
    head_values = x[..., 2 * groups * width :].reshape(*leading_shape, heads, -1)
    return q_and_k[..., 0, :, :] / math.sqrt(width), q_and_k[..., 1, :, :], head_values


def _steps(k, v, decay, beta, seq, initial_state):
    """Yield, token by token, what the memory lacked (B, H, P) and the state after it (B, H, P, N); see delta_rule."""
    s, xp = initial_state, np if isinstance(v, np.ndarray) else torch
    for t in range(v.shape[1]):
        if t and seq is not None:
            s = s * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        s = s * xp.exp(decay[:, t])[..., None, None]
        residual = v[:, t] - (s * k[:, t, :, None]).sum(-1)
        s = s + (beta[:, t, :, None] * residual)[..., None] * k[:, t, :, None]
        yield residual, s


def _state_times_query(s, q):
    return (s * q[..., None, :]).sum(-1)


def _sample_inputs():
    random = np.random.default_rng(1)
    for b, t, heads, p, groups, n in (
        (1, 1, 1, 1, 1, 1), (2, 7, 4, 3, 2, 5), (1, 70, 6, 8, 2, 16), (2, 40, 2, 5, 1, 20),
    ):  # fmt: skip
        seq = constant("seq", np.sort(random.integers(0, 4, (b, t)), axis=1), i32)
        x = input("x", (b, t, heads * p + 2 * groups * n))
        decay, beta = (
            constant(name, random.uniform(*bounds, (b, t, heads)).astype(np.float32))
            for name, bounds in (("decay", (-1, 0)), ("beta", (0, 1)))
        )
        attrs = {"groups": groups, "width": n, "eps": 0.01}
        yield (x, decay, beta, None), attrs
        yield (x, decay, beta, seq), attrs | {"tiled": True}
    yield (x, input("decay", (b, t, heads)), input("beta", (b, t, heads)), None), attrs


@op()
def delta_rule(
    x: Tensor, decay: Tensor, beta: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int, tiled: bool = False, eps: float = 1e-6,
) -> Spec:  # fmt: skip
    """Keep a memory for each head that tokens correct: S = exp(decay) S; S += beta (v - S k) k^T; y = S q / sqrt(N).

    Queries and keys are divided by their lengths, sqrt(sum of squares + eps). Each sequence begins with S = 0.

    x            (B, T, 2 G N + H P)  f32: queries and keys of the groups, then values of the heads; N is `width`
    decay, beta  (B, T, H)            f32
    seq          (B, T)               i32
    y            (B, T, H P)          f32
    tiled        heads of a group are G apart (h % G), not together
    Yang et al. 2024, arXiv 2412.06464; ggml_gated_delta_net.
    """
    y_width = scan.check_heads(x, groups, width, decay=decay, beta=beta)
    require(len(x.shape) == 3, f"x is {x.spec}; it must have three axes")
    Spec(x.shape[:2], i32).require(seq=seq)
    return Spec((*x.shape[:2], y_width))


@delta_rule.vjp
def delta_rule_vjp(dy, y, x, decay, beta, seq, **attrs):
    return *delta_rule_back(dy, x, decay, beta, seq, **attrs), None


@delta_rule.kernel("torch")
@delta_rule.kernel("numpy")
def delta_rule_numpy(y, x, decay, beta, seq, *, groups, width, tiled, eps):
    if 0 in y.shape:
        return
    q, k, v = _parts(x, beta.shape[-1], groups, width, tiled, eps)
    initial_state = v[:, 0, ..., None] * k[:, 0, :, None] * 0
    for t, (_, s) in enumerate(_steps(k, v, decay, beta, seq, initial_state)):
        y[:, t] = _state_times_query(s, q[:, t]).reshape(y[:, t].shape)


delta_rule.workspace("cpu")(scan.state_workspace)


@delta_rule.kernel("cpu")
def delta_rule_cpu(y, x, decay, beta, seq, *, groups, width, tiled, eps, work):
    args = rows(y), *work, rows(x), rows(decay), rows(beta), flatten_or_absent(seq, ABSENT_IDS)
    kernels.delta.delta_rule(*args, x.shape[1], groups, int(tiled), eps)


delta_rule.cost(scan.scan_cost(3))
delta_rule.samples(lambda: (delta_rule(*inputs, **attrs) for inputs, attrs in _sample_inputs()))


@op()
def delta_rule_back(
    dy: Tensor, x: Tensor, decay: Tensor, beta: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int, tiled: bool = False, eps: float = 1e-6,
) -> tuple[Spec, ...]:  # fmt: skip
    """Gradients of delta_rule for x, decay and beta; states are recomputed, and saved only at the start of chunks."""
    y = Spec((*x.shape[:-1], scan.check_heads(x, groups, width, decay=decay, beta=beta)))
    require(dy.spec == y and len(x.shape) == 3, f"dy is {dy.spec}; for x {x.spec} it must be {y}")
    return x.spec, decay.spec, beta.spec


@delta_rule_back.workspace("cpu")
def delta_rule_back_workspace(dy, x, decay, beta, *other_inputs, groups, width, **attrs):
    (_, p), (num_lines, time) = scan.head_sizes(x, beta, groups, width), x.shape[:2]
    tasks, num_slots = num_lines * groups, -(-time // kernels.delta.CHUNK) + 1
    return tuple(map(Spec, ((tasks, num_slots, p, width), (tasks, time + 1, p), (tasks, 3, time))))


@delta_rule_back.kernel("numpy")
def delta_rule_back_numpy(out, dy, x, decay, beta, seq, *, groups, width, tiled, eps):
    dx, ddecay, dbeta = out
    heads, num_steps = beta.shape[-1], beta.shape[1]
    q, k, v = _parts(x, heads, groups, width, tiled, eps)
    dy, initial_state = dy.reshape(v.shape), v[:, 0, ..., None] * k[:, 0, :, None] * 0
    state_steps = [*_steps(k, v, decay, beta, seq, initial_state)]
    q_grad, of_k, v_grad, slope = (np.zeros_like(a) for a in (q, k, v, initial_state))
    for t in reversed(range(num_steps)):
        (residual, s), by = state_steps[t], beta[:, t, :, None]
        decay_factor = np.exp(decay[:, t])[..., None, None]
        if t and seq is not None:
            decay_factor = decay_factor * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        before = decay_factor * state_steps[t - 1][1] if t else initial_state
        q_grad[:, t] = (dy[:, t, ..., None] * s).sum(2)
        slope = slope + dy[:, t, ..., None] * q[:, t, :, None]
        missing = _state_times_query(slope, k[:, t])
        dbeta[:, t], v_grad[:, t] = (missing * residual).sum(-1), by * missing
        k_grad = (by * residual)[..., None] * slope - (by * missing)[..., None] * before
        of_k[:, t] = k_grad.sum(2)
        slope = slope - (by * missing)[..., None] * k[:, t, :, None]
        ddecay[:, t] = (slope * before).sum((2, 3))
        slope = slope * decay_factor
    at = np.arange(heads)
    is_in_group = (at % groups if tiled else at // (heads // groups))[:, None] == np.arange(groups)
    part_width, lead = groups * width, x.shape[:2]
    for part_index, (d, by) in enumerate(((q_grad, 1 / math.sqrt(width)), (of_k, 1))):
        columns = slice(part_index * part_width, (part_index + 1) * part_width)
        d = np.einsum("bthn,hg->btgn", d, is_in_group) * by
        unnormalized = x[..., columns].reshape(d.shape)
        inverse = 1 / np.sqrt((unnormalized * unnormalized).sum(-1, keepdims=True) + eps)
        projection = (d * unnormalized).sum(-1, keepdims=True) * inverse**3
        dx[..., columns] = (d * inverse - unnormalized * projection).reshape(*lead, part_width)
    dx[..., 2 * part_width :] = v_grad.reshape(*lead, -1)


@delta_rule_back.kernel("cpu")
def delta_rule_back_cpu(out, dy, x, decay, beta, seq, *, groups, width, tiled, eps, work):
    args = *map(rows, (*out,)), *work, *map(rows, (dy, x, decay, beta))
    ids = flatten_or_absent(seq, ABSENT_IDS)
    kernels.delta.delta_rule_back(*args, ids, x.shape[1], groups, int(tiled), eps)


@delta_rule_back.kernel("torch")
def delta_rule_back_torch(out, dy, x, decay, beta, seq, *, groups, width, tiled, eps):
    def forward(x, decay, beta):
        q, k, v = _parts(x, beta.shape[-1], groups, width, tiled, eps)
        initial_state = torch.zeros_like(v[:, 0, ..., None] * k[:, 0, :, None])
        state_steps = enumerate(_steps(k, v, decay, beta, seq, initial_state))
        return torch.stack([_state_times_query(s, q[:, t]) for t, (_, s) in state_steps], 1)

    scan.write_gradients_by_autograd(out, dy, forward, (x, decay, beta))


delta_rule_back.cost(scan.scan_cost(10, 1))
delta_rule_back.samples(gradient_samples(delta_rule, delta_rule_back))


@op(writes=(0,), repeatable=True)
def delta_rule_cells(
    leaf: Tensor, x: Tensor, decay: Tensor, beta: Tensor, line: Tensor, source: Tensor, target: Tensor, *,
    groups: int, tiled: bool = False, eps: float = 1e-6,
) -> tuple[Spec, ...]:  # fmt: skip
    """Apply delta_rule to tokens of several sequences, each from a state of the leaf; inputs as in ssm_scan_cells.

    leaf               (S, H, P, N)  f32
    x, decay, beta, y  (T, ...)      f32, as in delta_rule
    Returns the leaf's new handle, and y.
    """
    scan.check_states(leaf)
    _, heads, p, n = leaf.shape
    y_width = scan.check_heads(x, groups, n, decay=decay, beta=beta)
    is_valid = beta.shape == (*x.shape[:1], heads) and y_width == heads * p
    require(is_valid, f"x is {x.spec}, beta {beta.spec}, leaf {leaf.spec}")
    scan.check_lines(x, line, source, target)
    return leaf.spec, Spec((x.shape[0], y_width))


@delta_rule_cells.kernel("torch")
@delta_rule_cells.kernel("numpy")
def delta_rule_cells_numpy(out, leaf, x, decay, beta, line, source, target, *, groups, tiled, eps):
    y = out[1]
    q, k, v = (
        array[:, None] for array in _parts(x, beta.shape[-1], groups, leaf.shape[-1], tiled, eps)
    )
    scan.load_states(leaf, source, target)
    for t in range(len(x)):
        state_index = int(target[line[t]])
        y[t] = 0
        if state_index >= 0:
            token_inputs = k[t : t + 1], v[t : t + 1], decay[t : t + 1, None], beta[t : t + 1, None]
            ((_, s),) = _steps(*token_inputs, None, leaf[state_index][None])
            leaf[state_index] = s[0]
            y[t] = _state_times_query(s, q[t]).reshape(-1)


@delta_rule_cells.kernel("cpu")
def delta_rule_cells_cpu(out, leaf, x, decay, beta, line, source, target, *, groups, tiled, eps):
    cell_lines = line, source, target
    kernels.delta.delta_cells(out[1], leaf, x, decay, beta, *cell_lines, groups, int(tiled), eps)


delta_rule_cells.cost(scan.cells_cost(3))


@delta_rule_cells.samples
def delta_rule_cells_samples():
    random = np.random.default_rng(1)
    for t, heads, p, groups, n in ((1, 1, 1, 1, 1), (7, 4, 3, 2, 5), (20, 4, 8, 2, 16)):
        x = input("x", (t, heads * p + 2 * groups * n))
        decay = constant("decay", random.uniform(-1, 0, (t, heads)).astype(np.float32))
        beta = constant("beta", random.uniform(0, 1, (t, heads)).astype(np.float32))
        inputs = state("states", (6, heads, p, n)), x, decay, beta, *scan.sample_lines(t)
        yield delta_rule_cells(*inputs, groups=groups, tiled=t == 7, eps=0.01)[1]
