"""Routing tokens to experts: the largest of a token's logits, and sorting rows by expert; a mixture as one function.

The number of rows of an expert depends on data; all shapes are static. Ids have no gradient, the chosen logits do.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops import arrays
from packtrain.engine.ops.activation import geglu, swiglu
from packtrain.engine.ops.arrays import assigned, check_ids, f32_rows, flatten, rows
from packtrain.engine.ops.elementwise import add, div, mul, scale, sigmoid
from packtrain.engine.ops.experts import matmul_id, weighted_rows
from packtrain.engine.ops.index import get_rows, get_rows_back
from packtrain.engine.ops.matmul import matmul
from packtrain.engine.ops.reduce import sum_rows
from packtrain.engine.ops.shape import cont, narrow, reshape
from packtrain.engine.ops.softmax import soft_max
from packtrain.engine.ops.torch_kernels import top_k_indices, torch
from packtrain.engine.ops.unary_functions import clamp, gelu_quick
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op()
def top_k(x: Tensor, *, k: int) -> Spec:
    """Find the indices of the k largest along the last axis, largest first; the lower index on ties. ggml_top_k.

    x    (..., E)  f32
    ids  (..., k)  i32
    """
    f32_rows(x)
    require(0 < k <= x.shape[-1], f"k is {k}; it must be 1 to {x.shape[-1]}, the last axis of x")
    return Spec((*x.shape[:-1], k), i32)


top_k.kernel("numpy")(assigned(lambda x, *, k: np.argsort(-x, axis=-1, kind="stable")[..., :k]))
top_k.kernel("cpu")(arrays.compiled("experts.top_k", rows, rows))


@top_k.kernel("torch")
def top_k_torch(ids, x, *, k):
    rows(ids).copy_(top_k_indices(rows(x), k))


@top_k.samples
def top_k_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (17, 64, 8), (300, 65, 5)):
        yield top_k(input("x", (n, e)), k=k)
    yield top_k(input("x", (2, 3, 4)), k=4)
    yield top_k(constant("x", np.array([[1.0, 3, 3, 1, 3], [0, 0, 0, 0, 0]])), k=4)


@op()
def take(x: Tensor, ids: Tensor) -> Spec:
    """Take elements of each row by index: y[..., j] = x[..., ids[..., j]].

    x    (..., E)  f32
    ids  (..., k)  i32
    y    (..., k)  f32
    """
    is_valid = x.shape[:-1] == ids.shape[:-1] and len(x.shape) == len(ids.shape) > 0
    fact = f"x is {x.spec} and ids is {ids.spec}; f32[..., E] and i32[..., k] are needed"
    require(is_valid and x.dtype == f32 and ids.dtype == i32, fact)
    return Spec(ids.shape)


@take.vjp
def take_vjp(dy, y, x, ids):
    return take_back(dy, ids, width=x.shape[-1]), None


@take.kernel("numpy")
def take_numpy(y, x, ids):
    check_ids("take", ids, x.shape[-1], min_id=0)
    y[...] = np.take_along_axis(x, ids, -1)


@take.kernel("cpu")
def take_cpu(y, x, ids):
    check_ids("take", ids, x.shape[-1], min_id=0)
    kernels.experts.take_columns(rows(y), rows(x), rows(ids))


@take.kernel("torch")
def take_torch(y, x, ids):
    check_ids("take", ids, x.shape[-1], min_id=0)
    torch.gather(x, -1, ids.long(), out=y)


@take.samples
def take_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (17, 64, 8)):
        yield take(input("x", (n, e)), _sample_choices(n, e, k))
    yield take(input("x", (2, 3, 4)), reshape(_sample_choices(6, 4, 3), shape=(2, 3, 3)))


@op()
def take_back(dy: Tensor, ids: Tensor, *, width: int) -> Spec:
    """Add dy into zeros by index: dx[..., ids[..., j]] += dy[..., j]."""
    fact = f"dy is {dy.spec} and ids is {ids.spec}; f32[..., k] and i32[..., k] are needed"
    require(dy.spec == Spec(ids.shape) and ids.dtype == i32, fact)
    return Spec((*dy.shape[:-1], width))


take_back.vjp(lambda ddx, dx, dy, ids, *, width: (take(ddx, ids), None))


@take_back.kernel("numpy")
def take_back_numpy(dx, dy, ids, *, width):
    check_ids("take_back", ids, width, min_id=0)
    dx[...] = 0
    np.add.at(rows(dx), (np.arange(len(rows(ids)))[:, None], rows(ids)), rows(dy))


@take_back.kernel("cpu")
def take_back_cpu(dx, dy, ids, *, width):
    check_ids("take_back", ids, width, min_id=0)
    kernels.experts.take_columns_back(rows(dx), rows(dy), rows(ids))


@take_back.kernel("torch")
def take_back_torch(dx, dy, ids, *, width):
    check_ids("take_back", ids, width, min_id=0)
    dx.zero_().scatter_add_(-1, ids.long(), dy)


@take_back.samples
def take_back_samples():
    yield from arrays.gradient_samples(take, take_back)()
    repeated_ids = constant("ids", np.array([[1, 1, 0]]), i32)
    yield take_back(input("dy", (1, 3)), repeated_ids, width=2)


@op()
def group_rows(ids: Tensor, *, groups: int) -> tuple[Spec, ...]:
    """Sort the choices of all rows by group, stably.

    Rows are sorted and gathered once, and gradients are runs of a group, too; ggml's mul_mat_id sorts in each product.

    ids        (..., k)  i32, from 0 to groups - 1
    row_ids    (N,)      i32, N = ids.size: the row that a choice came from
    group_ids  (N,)      i32, ascending: the chosen groups
    positions  (..., k)  i32: the new position of each choice, so group_ids[positions] = ids
    """
    require(ids.dtype == i32 and len(ids.shape) > 0, f"ids is {ids.spec}; it must be i32[..., k]")
    return Spec((ids.spec.size,), i32), Spec((ids.spec.size,), i32), ids.spec


group_rows.workspace("cpu")(lambda ids, *, groups: (Spec((groups,), i32),))


@group_rows.kernel("numpy")
def group_rows_numpy(out, ids, *, groups):
    check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    order = np.argsort(flatten(ids), kind="stable")
    row_ids[...], group_ids[...] = order // ids.shape[-1], flatten(ids)[order]
    positions.flat[order] = np.arange(ids.size)


@group_rows.kernel("cpu")
def group_rows_cpu(out, ids, *, groups, work):
    check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    kernels.experts.group_rows(row_ids, group_ids, rows(positions), rows(ids), work[0])


@group_rows.kernel("torch")
def group_rows_torch(out, ids, *, groups):
    check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    sorted_ids, order = ids.view(-1).sort(stable=True)
    row_ids.copy_(order // ids.shape[-1])
    group_ids.copy_(sorted_ids)
    new_positions = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    positions.view(-1).scatter_(0, order, new_positions)


@group_rows.samples
def group_rows_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (170, 64, 8)):
        yield from group_rows(_sample_choices(n, e, k), groups=e)


def _sample_choices(n: int, e: int, k: int) -> Tensor:
    """Return sample ids: for each of n rows k distinct numbers below e."""
    ids = (np.arange(n)[:, None] * 5 + np.arange(k) * 3) % e
    return constant("ids", ids, i32)


Low = tuple[Tensor, Tensor, float, Callable[[Tensor], Tensor]]
NO_LORA: Mapping[str, Low] = MappingProxyType({})
NO_BIASES: Mapping[str, Tensor] = MappingProxyType({})
MIN_WEIGHT_SUM = 6.103515625e-5  # least sum by which weights are divided: llama.cpp's
BEST = 2  # best experts of a group, whose sum ranks the group
HIDDEN_OFFSET = 1e30
LIMIT = 7.0  # of the clamped activation: gpt-oss's


def experts(
    x: Tensor, gate_inp: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, acc: Tensor | None = None,
    offsets: Tensor | None = None, *, used: int, norm: bool = True, sigmoids: bool = False, by: float = 1.0,
    clamped: bool = False, biases: Mapping[str, Tensor] = NO_BIASES, low: Mapping[str, Low] = NO_LORA,
    groups: tuple[int, int] = (1, 1), first: bool = False, gelu: bool = False, scales: Tensor | None = None,
    read: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mixture of experts: y = sum over the `used` chosen e of p_e * down_e(silu(gate_e x) * up_e x) (+ acc).

    p is the softmax of x @ gate_inp.T over all experts, or with `sigmoids` the sigmoid of each; `read` replaces x here.
    The `used` experts with the largest p + offsets are chosen; with `norm` their p is divided by its sum over them.
    Then `by` and the `scales` of the experts multiply p. With several groups of experts, (groups, used), only experts
    of those groups are chosen whose two largest p + offsets have the largest sum. With `gelu`, gelu replaces silu. With
    `clamped`, silu(g) * u becomes g * sigmoid(1.702 g) * (u + 1) for g = min(gate_e x, 7) and u = up_e x between -7 and
    7. With `first`, p_e multiplies x, and the sum has no weights.

        x         (..., C)   f32
        gate_inp  (E, C)     f32
        gate, up  (E, F, C)  any readable type; without up, gate has its rows below its own, (E, 2 F, C)
        down      (E, C, F)  any readable type
        acc, y    (..., C)   f32
        offsets, scales  (E,)  f32; offsets have no gradient
        biases    by matrix name: (E,) of gate_inp, (E, F) of gate and up, (E, C) of down, f32
        low       LoRA adapters by matrix name: A (R, in), B (out, R), with an axis E if the matrix has one, scale s
                  and dropout d: w x becomes w x + s B A d(x)
    Mixtral (Jiang et al. 2024, arXiv 2401.04088); DeepSeek-V3 (arXiv 2412.19437); llama.cpp's build_moe_ffn.
    """
    router_input = x if read is None else read
    logits = product(router_input, gate_inp, low.get("gate_inp"), biases.get("gate_inp"))
    expert_ids, p = _route_tokens(logits, offsets, used, norm, sigmoids, groups)
    p = _scale_probabilities(p, expert_ids, by, scales)
    token_rows, row_experts, row_positions = group_rows(expert_ids, groups=gate_inp.shape[0])
    num_tokens = math.prod(x.shape[:-1])
    sorted_x = get_rows(reshape(x, shape=(num_tokens, x.shape[-1])), token_rows)
    if first:
        sorted_x, p = mul(sorted_x, _sort_probabilities(p, row_positions)), scale(p, by=0, bias=1)
    activation = _gpt_oss_swiglu if clamped else geglu if gelu else swiglu
    hidden = activation(*_gate_and_up(sorted_x, row_experts, {"gate": gate, "up": up}, biases, low))
    expert_rows = product(hidden, down, low.get("down"), biases.get("down"), row_experts)
    return weighted_rows(expert_rows, row_positions, p, acc)


def _scale_probabilities(p: Tensor, expert_ids: Tensor, by: float, scales: Tensor | None) -> Tensor:
    """Return p (..., k) times `by` and times the chosen experts' own scales (of E), if there are some."""
    p = p if by == 1 else scale(p, by=by)
    if scales is None:
        return p
    chosen_scales = get_rows(reshape(scales, shape=(*scales.shape, 1)), expert_ids)
    return mul(p, reshape(chosen_scales, shape=p.shape))


def _gate_and_up(
    x: Tensor, expert: Tensor, w: Mapping[str, Tensor | None], biases: Mapping[str, Tensor],
    low: Mapping[str, Low],
) -> list[Tensor]:  # fmt: skip
    """Return the products (N, F) of rows x (N, C) with the gate and up matrices of their experts, `expert` (N,) i32; w,
    biases and low have tensors by matrix name; without up, w's gate holds its rows, too."""
    products = [
        product(x, m, low.get(n), biases.get(n), expert) for n, m in w.items() if m is not None
    ]
    if len(products) > 1:
        return products
    n = products[0].shape[1] // 2
    return [cont(narrow(products[0], axis=1, start=at, length=n)) for at in (0, n)]


def _sort_probabilities(p: Tensor, row_positions: Tensor) -> Tensor:
    """Return the chosen experts' probabilities p (..., k) as (N, 1), each at its row of `row_positions` (..., k)."""
    num_rows = p.spec.size
    columns = reshape(p, shape=(num_rows, 1)), reshape(row_positions, shape=(num_rows,))
    return get_rows_back(*columns, shape=(num_rows, 1))


def _route_tokens(
    logits: Tensor, offsets: Tensor | None, num_used: int, use_norm: bool, use_sigmoid: bool, groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the chosen experts of each token, i32 (..., k), and the factors p of their results, f32 (..., k);
    `groups`: (groups of experts, how many of these are used)."""
    if not use_sigmoid and use_norm and offsets is None and groups[0] == 1:
        # equal to what follows, without the sum over all experts
        expert_ids = top_k(logits, k=num_used)
        return expert_ids, soft_max(take(logits, expert_ids))
    p = sigmoid(logits) if use_sigmoid else soft_max(logits)
    ranking_scores = p if offsets is None else add(p, offsets)
    if groups[0] > 1:
        ranking_scores = _mask_groups(ranking_scores, *groups)
    elif offsets is None:  # in the order of p, and distinct where p rounds to 1
        ranking_scores = logits
    expert_ids = top_k(ranking_scores, k=num_used)
    p = take(p, expert_ids)
    return expert_ids, div(p, clamp(sum_rows(p), low=MIN_WEIGHT_SUM)) if use_norm else p


def _mask_groups(p: Tensor, num_groups: int, num_used: int) -> Tensor:
    """Lower the scores p (..., E) of experts outside the `num_used` best groups by 1e30, so that none is chosen."""
    by_group = reshape(p, shape=(*p.shape[:-1], num_groups, p.shape[-1] // num_groups))
    sums = reshape(sum_rows(take(by_group, top_k(by_group, k=BEST))), shape=by_group.shape[:-1])
    best = top_k(sums, k=num_used)
    ones = scale(take(sums, best), by=0, bias=1)
    hidden = scale(take_back(ones, best, width=num_groups), by=HIDDEN_OFFSET, bias=-HIDDEN_OFFSET)
    return reshape(add(by_group, reshape(hidden, shape=(*hidden.shape, 1))), shape=p.shape)


def _gpt_oss_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return mul(
        gelu_quick(clamp(gate, high=LIMIT)), scale(clamp(up, low=-LIMIT, high=LIMIT), by=1, bias=1)
    )


def product(x: Tensor, w: Tensor, low: Low | None, bias: Tensor | None, *expert: Tensor) -> Tensor:
    """Return x @ w.T, or rows times their `expert`'s matrix, plus bias and adapter `low` (A, B, scale, dropout)."""
    multiply: Callable[..., Tensor] = matmul_id if expert else matmul
    y = multiply(x, w, *expert)
    if bias is not None:
        y = add(y, get_rows(bias, *expert) if expert else bias)
    if low is None:
        return y
    a, b, factor, dropout = low
    return multiply(scale(multiply(dropout(x), a, *expert), by=factor), b, *expert, y)
