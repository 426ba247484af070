"""A mixture of experts as one function: routing, the chosen experts' products, and their weighted sum."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from packtrain.engine.ops.activation import geglu, swiglu
from packtrain.engine.ops.elementwise import add, div, mul, scale, sigmoid
from packtrain.engine.ops.experts import matmul_id, weighted_rows
from packtrain.engine.ops.index import get_rows, get_rows_back
from packtrain.engine.ops.matmul import matmul
from packtrain.engine.ops.reduce import sum_rows
from packtrain.engine.ops.routing import group_rows, take, take_back, top_k
from packtrain.engine.ops.shape import cont, narrow, reshape
from packtrain.engine.ops.softmax import soft_max
from packtrain.engine.ops.unary_functions import clamp, gelu_quick
from packtrain.engine.tensor import Tensor

Low = tuple[Tensor, Tensor, float, Callable[[Tensor], Tensor]]
NO_LOW: Mapping[str, Low] = MappingProxyType({})
NO_BIASES: Mapping[str, Tensor] = MappingProxyType({})
LEAST_SUM = 6.103515625e-5  # of weights that are divided by their sum: llama.cpp's
BEST = 2  # experts of a group, by which it is judged
HIDDEN = 1e30
LIMIT = 7.0  # of the clamped activation: gpt-oss's


def experts(
    x: Tensor, gate_inp: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, acc: Tensor | None = None,
    offsets: Tensor | None = None, *, used: int, norm: bool = True, sigmoids: bool = False, by: float = 1.0,
    clamped: bool = False, biases: Mapping[str, Tensor] = NO_BIASES, low: Mapping[str, Low] = NO_LOW,
    groups: tuple[int, int] = (1, 1), first: bool = False, gelu: bool = False, scales: Tensor | None = None,
    read: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mixture of experts: y = sum over the `used` chosen e of p_e * down_e(silu(gate_e x) * up_e x) (+ acc).

    p is the softmax of x @ gate_inp.T over all experts, or with `sigmoids` the sigmoid of each. The `used` experts
    with the largest p + offsets are chosen; with `norm` their p is divided by the sum of theirs, then multiplied by
    `by`. With `clamped` silu(g) * u becomes g * sigmoid(1.702 g) * (u + 1) for g = min(gate_e x, 7) and u = up_e x
    between -7 and 7. With several groups of experts, only those of some are chosen: of (groups, used), those in
    which the two largest p + offsets have the largest sum. With `first` p_e multiplies x, and the sum has no weights.
    With `gelu` that takes the place of silu; with `scales` p_e is multiplied by that of e. p is of `read` instead of x.

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
    source = x if read is None else read
    logits = product(source, gate_inp, low.get("gate_inp"), biases.get("gate_inp"))
    chosen, p = _routes(logits, offsets, used, norm, sigmoids, groups)
    p = _scaled(p, chosen, by, scales)
    row, expert, place = group_rows(chosen, groups=gate_inp.shape[0])
    tokens = math.prod(x.shape[:-1])
    sorted_x = get_rows(reshape(x, shape=(tokens, x.shape[-1])), row)
    if first:
        sorted_x, p = mul(sorted_x, _by_row(p, place)), scale(p, by=0, bias=1)
    gated = _clamped if clamped else geglu if gelu else swiglu
    hidden = gated(*_both(sorted_x, expert, {"gate": gate, "up": up}, biases, low))
    expert_rows = product(hidden, down, low.get("down"), biases.get("down"), expert)
    return weighted_rows(expert_rows, place, p, acc)


def _scaled(p: Tensor, chosen: Tensor, by: float, scales: Tensor | None) -> Tensor:
    """p (..., k) times `by` and the scales (E,) of the chosen experts."""
    p = p if by == 1 else scale(p, by=by)
    if scales is None:
        return p
    chosen_scales = get_rows(reshape(scales, shape=(*scales.shape, 1)), chosen)
    return mul(p, reshape(chosen_scales, shape=p.shape))


def _both(
    x: Tensor, expert: Tensor, w: Mapping[str, Tensor | None], biases: Mapping[str, Tensor],
    low: Mapping[str, Low],
) -> list[Tensor]:  # fmt: skip
    """What gate and up give, of one matrix or of two."""
    products = [
        product(x, m, low.get(n), biases.get(n), expert) for n, m in w.items() if m is not None
    ]
    if len(products) > 1:
        return products
    n = products[0].shape[1] // 2
    return [cont(narrow(products[0], axis=1, start=at, length=n)) for at in (0, n)]


def _by_row(p: Tensor, place: Tensor) -> Tensor:
    """p (..., k) by the sorted rows: (N, 1)."""
    count = p.spec.size
    columns = reshape(p, shape=(count, 1)), reshape(place, shape=(count,))
    return get_rows_back(*columns, shape=(count, 1))


def _routes(
    logits: Tensor, offsets: Tensor | None, used: int, norm: bool, sigmoids: bool, groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The chosen experts of each token, and what theirs are multiplied by."""
    if (
        not sigmoids and norm and offsets is None and groups[0] == 1
    ):  # the same without the sum over all
        chosen = top_k(logits, k=used)
        return chosen, soft_max(take(logits, chosen))
    p = sigmoid(logits) if sigmoids else soft_max(logits)
    better = p if offsets is None else add(p, offsets)
    if groups[0] > 1:
        better = _of_groups(better, *groups)
    elif offsets is None:  # in the same order, and apart where p is 1
        better = logits
    chosen = top_k(better, k=used)
    p = take(p, chosen)
    return chosen, div(p, clamp(sum_rows(p), low=LEAST_SUM)) if norm else p


def _of_groups(p: Tensor, count: int, used: int) -> Tensor:
    """p (..., E) with those of experts far below, whose groups are not among the `used` best ones."""
    by_group = reshape(p, shape=(*p.shape[:-1], count, p.shape[-1] // count))
    sums = reshape(sum_rows(take(by_group, top_k(by_group, k=BEST))), shape=by_group.shape[:-1])
    best = top_k(sums, k=used)
    ones = scale(take(sums, best), by=0, bias=1)
    hidden = scale(take_back(ones, best, width=count), by=HIDDEN, bias=-HIDDEN)
    return reshape(add(by_group, reshape(hidden, shape=(*hidden.shape, 1))), shape=p.shape)


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    return mul(
        gelu_quick(clamp(gate, high=LIMIT)), scale(clamp(up, low=-LIMIT, high=LIMIT), by=1, bias=1)
    )


def product(x: Tensor, w: Tensor, low: Low | None, bias: Tensor | None, *expert: Tensor) -> Tensor:
    """w x, or that of the rows' experts, plus its bias and the LoRA adapter of w."""
    times: Callable[..., Tensor] = matmul_id if expert else matmul
    y = times(x, w, *expert)
    if bias is not None:
        y = add(y, get_rows(bias, *expert) if expert else bias)
    if low is None:
        return y
    a, b, by, drop = low
    return times(scale(times(drop(x), a, *expert), by=by), b, *expert, y)
