"""Scans of states: Mamba-2's recurrence over the tokens of a line, in training and with states that are kept."""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops.arrays import ABSENT_IDS, flat_or_absent, rows
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, want


def _sizes(x, delta, groups, width):
    """Heads and their values."""
    heads = delta.shape[-1]
    return heads, (x.shape[-1] - 2 * groups * width) // max(heads, 1)


def check_scan(x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, groups: int, width: int) -> int:
    """H P, the width of y."""
    heads, p = _sizes(x, delta, groups, width)
    fits = x.dtype == f32 and delta.spec == Spec((*x.shape[:-1], heads))
    want(fits, f"x is {x.spec} and delta is {delta.spec}; they must be f32[..., W] and f32[..., H]")
    want(groups > 0 < heads and heads % groups == 0, f"{groups} groups must divide {heads} heads")
    wide = heads * p + 2 * groups * width
    fits = p > 0 < width and x.shape[-1] == wide
    want(fits, f"x is {x.spec}; its width must be {heads} P + 2 * {groups} * {width}")
    for name, t in (("a", a), ("skip", skip)):
        want(t.spec == Spec((heads,)), f"{name} is {t.spec}; it must be f32[{heads}]")
    return heads * p


def parts_of(x, delta, groups, width):
    """Values (..., H, P), and B and C (..., H, N) of each head's group."""
    heads, p = _sizes(x, delta, groups, width)
    lead, xp = x.shape[:-1], np if isinstance(x, np.ndarray) else torch
    values = x[..., : heads * p].reshape(*lead, heads, p)
    b_and_c = x[..., heads * p :].reshape(*lead, 2, groups, 1, width)
    b_and_c = xp.broadcast_to(b_and_c, (*lead, 2, groups, heads // groups, width))
    b, c = (b_and_c[..., i, :, :, :].reshape(*lead, heads, width) for i in (0, 1))
    return values, b, c


def _steps(values, b, c, delta, a, seq, first):
    """The states of all tokens in turn, from `first` (B, H, P, N), and what they give (B, H, P)."""
    s, xp = first, np if isinstance(delta, np.ndarray) else torch
    for t in range(delta.shape[1]):
        if t and seq is not None:
            s = s * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        d = delta[:, t, :, None, None]
        s = s * xp.exp(d * a[:, None, None]) + d * values[:, t, ..., None] * b[:, t, :, None]
        yield s, (s * c[:, t, :, None]).sum(-1)


def _samples():
    random = np.random.default_rng(1)
    for b, t, heads, p, groups, n in (
        (1, 1, 1, 1, 1, 1),
        (2, 7, 4, 3, 2, 5),
        (1, 70, 12, 8, 1, 16),
        (2, 40, 2, 5, 1, 20),
    ):
        seq = constant("seq", np.sort(random.integers(0, 4, (b, t)), axis=1), i32)
        x = input("x", (b, t, heads * p + 2 * groups * n))
        delta = constant("delta", random.uniform(0, 0.5, (b, t, heads)).astype(np.float32))
        a = constant("a", -random.uniform(0.1, 2, heads).astype(np.float32))
        for ids in (None, seq):
            yield (x, delta, a, input("skip", (heads,)), ids), {"groups": groups, "width": n}
    yield (
        (x, input("delta", (b, t, heads)), input("a", (heads,)), *_tail(heads)),
        {"groups": 1, "width": n},
    )


def _tail(heads):
    return input("skip", (heads,)), None


@op()
def ssm_scan(
    x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int,
) -> Spec:  # fmt: skip
    """A state of P x N values for each head: S = exp(delta a) S + delta x B^T; y = S C + skip x.

    Each sequence of a line begins with zeros.

    x        (B, T, H P + 2 G N)  f32: values of the heads, B and C of the groups, of H / G heads each; N is `width`
    delta    (B, T, H)            f32
    a, skip  (H,)                 f32
    seq      (B, T)               i32
    y        (B, T, H P)          f32
    Dao & Gu 2024, arXiv 2405.21060; ggml_ssm_scan.
    """
    wide = check_scan(x, delta, a, skip, groups, width)
    want(len(x.shape) == 3, f"x is {x.spec}; it must have three axes")
    ids = Spec(x.shape[:2], i32)
    want(seq is None or seq.spec == ids, f"seq is {seq and seq.spec}; it must be {ids}")
    return Spec((*x.shape[:2], wide))


@ssm_scan.vjp
def ssm_scan_vjp(dy, y, x, delta, a, skip, seq, **how):
    return *ssm_scan_back(dy, x, delta, a, skip, seq, **how), None


@ssm_scan.kernel("torch")
@ssm_scan.kernel("numpy")
def ssm_scan_numpy(y, x, delta, a, skip, seq, *, groups, width):
    if 0 in y.shape:
        return
    values, b, c = parts_of(x, delta, groups, width)
    first = values[:, 0, ..., None] * b[:, 0, :, None] * 0
    for t, (_, step_output) in enumerate(_steps(values, b, c, delta, a, seq, first)):
        y[:, t] = (step_output + skip[:, None] * values[:, t]).reshape(y[:, t].shape)


@ssm_scan.workspace("cpu")
def ssm_scan_work(x, delta, *others, groups, width):
    heads, p = _sizes(x, delta, groups, width)
    return (Spec((x.shape[0] * heads, p, width)),)


@ssm_scan.kernel("cpu")
def ssm_scan_cpu(y, x, delta, a, skip, seq, *, groups, width, work):
    args = rows(y), *work, rows(x), rows(delta), a, skip, flat_or_absent(seq, ABSENT_IDS)
    kernels.scan.scan(*args, x.shape[1], groups)


@ssm_scan.cost
def ssm_scan_cost(y, x, delta, *others, groups, width):
    return Cost({"attend": 2 * math.prod(y.shape) * width})


ssm_scan.samples(lambda: (ssm_scan(*given, **how) for given, how in _samples()))


@op()
def ssm_scan_back(
    dy: Tensor, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor, seq: Tensor | None = None, *,
    groups: int, width: int,
) -> tuple[Spec, ...]:  # fmt: skip
    """Gradients of ssm_scan for x, delta, a and skip; the states are computed again, and none is kept."""
    y = Spec((*x.shape[:-1], check_scan(x, delta, a, skip, groups, width)))
    want(dy.spec == y and len(x.shape) == 3, f"dy is {dy.spec}; for x {x.spec} it must be {y}")
    return x.spec, delta.spec, a.spec, skip.spec


@ssm_scan_back.workspace("cpu")
def ssm_scan_back_work(dy, x, delta, *others, groups, width):
    (heads, p), (lines, time) = _sizes(x, delta, groups, width), x.shape[:2]
    tasks = lines * groups * min(heads // groups, kernels.scan.SHARES)
    parts = (tasks, p, width), (tasks, 2, time, width), (tasks, time + width), (lines * heads, 2)
    return tuple(map(Spec, parts))


@ssm_scan_back.kernel("numpy")
def ssm_scan_back_numpy(out, dy, x, delta, a, skip, seq, *, groups, width):
    dx, ddelta, da, dskip = out
    values, b, c = parts_of(x, delta, groups, width)
    dy, count = dy.reshape(values.shape), delta.shape[1]
    first = values[:, 0, ..., None] * b[:, 0, :, None] * 0
    states = [s for s, _ in _steps(values, b, c, delta, a, seq, first)]
    da[...], dskip[...] = 0, (dy * values).sum((0, 1, 3))
    of_b, of_c, slope = np.zeros_like(b), np.zeros_like(c), np.zeros_like(first)
    of_values = skip[:, None] * dy
    for t in reversed(range(count)):
        s, d = states[t], delta[:, t, :, None, None]
        before = states[t - 1] if t else first
        if t and seq is not None:
            before = before * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
        slope = slope + dy[:, t, ..., None] * c[:, t, :, None]
        of_c[:, t] = (dy[:, t, ..., None] * s).sum(2)
        outer = values[:, t, ..., None] * b[:, t, :, None]
        decay = np.exp(d * a[:, None, None])
        decay_grad = (slope * decay * before).sum((2, 3))
        ddelta[:, t] = (slope * outer).sum((2, 3)) + a * decay_grad
        da += (delta[:, t] * decay_grad).sum(0)
        of_b[:, t] = (d * slope * values[:, t, ..., None]).sum(2)
        of_values[:, t] += (d * slope * b[:, t, :, None]).sum(-1)
        slope = slope * decay
        if t and seq is not None:
            slope = slope * (seq[:, t] == seq[:, t - 1])[:, None, None, None]
    group_grads = (g.reshape(*x.shape[:2], groups, -1, width).sum(3) for g in (of_b, of_c))
    joined = (g.reshape(*x.shape[:2], -1) for g in (of_values, *group_grads))
    dx[...] = np.concatenate([*joined], -1)


@ssm_scan_back.kernel("cpu")
def ssm_scan_back_cpu(out, dy, x, delta, a, skip, seq, *, groups, width, work):
    dx, ddelta, *other_grads = out
    args = rows(dy), rows(x), rows(delta), a, skip, flat_or_absent(seq, ABSENT_IDS)
    kernels.scan.scan_back(rows(dx), rows(ddelta), *other_grads, *work, *args, x.shape[1], groups)


@ssm_scan_back.kernel("torch")
def ssm_scan_back_torch(out, dy, x, delta, a, skip, seq, *, groups, width):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, delta, a, skip)]
        values, b, c = parts_of(leaves[0], leaves[1], groups, width)
        first = torch.zeros_like(values[:, 0, ..., None] * b[:, 0, :, None])
        step_outputs = [y for _, y in _steps(values, b, c, leaves[1], leaves[2], seq, first)]
        y = torch.stack(step_outputs, 1) + leaves[3][:, None] * values
        grads = torch.autograd.grad(y, leaves, dy.reshape(y.shape))
    for to, d in zip(out, grads, strict=True):
        to.copy_(d)


@ssm_scan_back.cost
def ssm_scan_back_cost(out, dy, x, *others, groups, width):
    return Cost({"attend": 5 * math.prod(dy.shape) * width})


@ssm_scan_back.samples
def ssm_scan_back_samples():
    for inputs, attrs in _samples():
        y = ssm_scan(*inputs, **attrs)
        yield from ssm_scan_back(input("dy", y.shape), *inputs, **attrs)
