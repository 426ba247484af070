"""Scans and short convolutions of tokens of several sequences, whose states are saved between runs.

A run reads one cell of a sequence and writes another, so that a failed run changes nothing and copied sequences share
a cell. A state cannot be cut: going back starts from the last checkpoint.
"""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.scan import check_scan, split_scan_inputs
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state


def check_lines(x: Tensor, line: Tensor, source: Tensor, target: Tensor) -> None:
    line_spec, id_spec = Spec(x.shape[:1], i32), Spec(source.shape[:1], i32)
    require(line.spec == line_spec, f"line is {line.spec}; it must be {line_spec}")
    fits = source.spec == target.spec == id_spec
    require(fits, f"source is {source.spec} and target {target.spec}; they must be equal: i32[R]")


def load_states(leaf, source, target):
    """Copy the states of source cells to their target cells, zeros for a negative source."""
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        if t >= 0:
            leaf[t] = leaf[s] if s >= 0 else 0


def sample_lines(t):
    """Return line, source and target of tokens: two sequences in turn, one of them new, and padding; six states."""
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
    require(
        len(leaf.shape) == 4 and leaf.dtype == f32,
        f"leaf is {leaf.spec}; it must be f32[S, H, P, N]",
    )
    _, heads, p, n = leaf.shape
    y_width = check_scan(x, delta, a, skip, groups, n)
    require(
        delta.shape == (*x.shape[:1], heads) and y_width == heads * p,
        f"x is {x.spec}, leaf {leaf.spec}",
    )
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


@ssm_scan_cells.cost
def ssm_scan_cells_cost(out, leaf, x, *other_inputs, groups):
    _, heads, p, n = leaf.shape
    return Cost({"attend": 2 * len(x.shape) * heads * p * n}, nbytes=4 * math.prod(leaf.shape[1:]))


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
    required_spec = Spec((*leaf.shape[:1], num_taps - 1, num_channels))
    is_valid = x.dtype == f32 and w.spec == Spec((num_channels, num_taps))
    require(is_valid, f"x is {x.spec} and w is {w.spec}; they must be f32[T, C] and f32[C, K]")
    require(leaf.spec == required_spec, f"leaf is {leaf.spec}; it must be {required_spec}")
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
