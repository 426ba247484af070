"""The peer in PyTorch of every op that has one, and of functions composed of ops. Importing this loads PyTorch."""

from typing import Any

from benchmarks.torch_states import delta_rule, short_conv, short_conv_cells, ssm_scan
from packtrain import kernels

torch: Any = kernels.torch()


def rms_norm(x, w, *, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)


def soft_max(x, mask, *, scale):
    if mask is None:
        return (scale * x).softmax(-1)
    visible_rows = mask.isfinite().any(-1)
    y = torch.zeros_like(x)
    y[..., visible_rows, :] = (scale * x + mask)[..., visible_rows, :].softmax(-1)
    return y


def attention(q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks, *, scale, window, softcap):
    (b, t), s = q.shape[:2], k.shape[1]
    q_pos = torch.arange(t).expand(b, t) if q_pos is None else q_pos
    k_pos = torch.arange(s).expand(b, s) if k_pos is None else k_pos
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    mask = (distance >= 0) & (distance < _reach(q_pos, window)[..., None])
    if q_seq is not None:
        mask = mask & (k_seq[:, None, :] == q_seq[:, :, None])
    if length is not None:
        mask = mask & (torch.arange(s) < length)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap or sinks is not None:
        cap = softcap or 1e30
        return capped_attention(q, k, v, mask[:, None], scale, cap, sinks).transpose(1, 2)
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return y.transpose(1, 2)


def _reach(q_pos, window):
    return q_pos % -window + 1 if window < 0 else torch.full_like(q_pos, window or 1 << 30)


def attention_cells(q, k, v, q_pos, q_row, order, counts, k_pos, sinks, *, scale, window, softcap):
    used = torch.arange(order.shape[1]) < counts[:, None]
    occupied = (
        torch.zeros(order.shape, dtype=torch.long).scatter_add(1, order.long(), used.long()) > 0
    )
    distance = q_pos[:, None] - k_pos
    mask = (distance >= 0) & (distance < _reach(q_pos, window)[:, None]) & occupied[q_row]
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = capped_attention(*heads, mask[None, None], scale, softcap or 1e30, sinks)
    return y[0].transpose(0, 1)


def capped_attention(q, k, v, mask, scale, softcap, sinks=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = softcap * (scale * q @ k.mT / softcap).tanh()
    z = z.masked_fill(~mask, -1e300)
    if sinks is not None:
        z = torch.cat((z, sinks[:, None, None].expand(*z.shape[:3], 1)), -1)
    return z.softmax(-1)[..., : k.shape[2]] @ v * mask.any(-1, keepdim=True)


def cross_entropy(logits, targets, weights):
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten().long(), reduction="none", ignore_index=-1
    )
    return (losses * weights.flatten()).sum()


def linear_cross_entropy(x, w, targets, weights, b, *, chunk, softcap, precision):
    logits = torch.nn.functional.linear(x, w, b)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    return cross_entropy(logits, targets, weights)


def matmul(x, w, acc, *, precision):
    return x @ w.mT + (0 if acc is None else acc)


def matmul_back(dy, w, acc, *, precision):
    return dy @ w + (0 if acc is None else acc)


def top_k(x, *, k):
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def candidates(x, *, k):
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    return ids[..., :k], values[..., :k]


def take_back(dy, ids, *, width):
    return torch.zeros((*dy.shape[:-1], width), dtype=dy.dtype).scatter_add(-1, ids.long(), dy)


def matmul_id(x, w, ids, acc):
    return torch.einsum("nk,nfk->nf", x, w[ids.long()]) + (0 if acc is None else acc)


def matmul_id_back(dy, w, ids, acc):
    return torch.einsum("nf,nfk->nk", dy, w[ids.long()]) + (0 if acc is None else acc)


def out_prod_id(a, b, ids, acc, *, count):
    start = torch.zeros((count, a.shape[1], b.shape[1]), dtype=a.dtype) if acc is None else acc
    return start.index_add(0, ids.long(), torch.einsum("np,nq->npq", a, b))


def weighted_rows(x, ids, weights, acc):
    return (x[ids.long()] * weights[..., None]).sum(-2) + (0 if acc is None else acc)


def out_prod(a, b, acc, *, precision):
    return torch.einsum("...p,...q->pq", a, b) + (0 if acc is None else acc)


def get_rows(w, ids):
    padded_weight = torch.cat([w, torch.zeros_like(w[:1])])  # index -1 is the row of zeros
    return torch.nn.functional.embedding(
        ids.long() % len(padded_weight), padded_weight.flatten(1)
    ).unflatten(-1, w.shape[1:])


def get_rows_back(dy, ids, acc, *, shape):
    start = torch.zeros(shape, dtype=dy.dtype) if acc is None else acc
    valid_ids = ids.flatten() >= 0
    return start.index_add(0, ids.flatten()[valid_ids], dy.flatten(0, ids.ndim - 1)[valid_ids])


def set_rows(leaf, x, ids):
    valid_ids = ids.flatten() >= 0
    return leaf.index_copy(
        0, ids.flatten()[valid_ids].long(), x.flatten(0, ids.ndim - 1)[valid_ids]
    )


def zero_rows(x, ids):
    return x.index_fill(0, ids.long(), 0)


def rope(x, table, *, neox, inverse):
    half = table.shape[-2]
    rope_part, unrotated = x[..., : 2 * half], x[..., 2 * half :]
    pairs = rope_part.unflatten(-1, (2, half)).mT if neox else rope_part.unflatten(-1, (half, 2))
    turn = torch.view_as_complex(table)[..., None, :]
    rotated = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * (turn.conj() if inverse else turn)
    )
    return torch.cat([(rotated.mT if neox else rotated).flatten(-2), unrotated], -1)


def rope_table(pos, factors, *, dims, base, divisor, blend, magnitude, growth):
    rates = base ** (-torch.arange(0, dims, 2).double() / dims) / (
        1 if factors is None else factors
    )
    if blend:
        ramp = ((torch.arange(dims // 2) - blend[0]) / (blend[1] - blend[0])).clamp(0, 1)
        rates = rates.lerp(rates / divisor, ramp.double())
    else:
        rates = rates / divisor
    angles = pos[..., None] * rates
    by = magnitude * (1 + growth[0] * (1 + (pos + growth[2]) // growth[1]).double().log())
    return torch.view_as_real(torch.polar(by[..., None].expand_as(angles).contiguous(), angles))


def narrow_back(dy, acc=None, *, axis, start, size):
    end_padding = size - start - dy.shape[axis]
    padded = torch.nn.functional.pad(dy.movedim(axis, -1), (start, end_padding)).movedim(-1, axis)
    return padded if acc is None else padded + acc


def clip_gate(squares, *, max_norm):
    """What clip_grad_norm_ makes of a gradient of 1; NaN, as we want it, where the norm is not finite."""
    if not squares.isfinite():
        return torch.full((), torch.nan)
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    parameter.grad = squares.sqrt()
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    return parameter.grad / squares.sqrt()


def opt_step_adamw(w, g, m, v, hyper, gate, key, *, decay, stream):
    """One step of torch.optim.AdamW that had made one step before, as the samples' corrections say."""
    if not gate.isfinite():
        return w, m, v
    lr, beta1, beta2, eps, weight_decay = hyper[:5].tolist()
    parameter = w.detach().clone().requires_grad_()
    parameter.grad = (g * gate).detach()
    betas = beta1, beta2
    optimizer = torch.optim.AdamW([parameter], lr, betas, eps, weight_decay if decay else 0.0)
    step_count = torch.tensor(1.0)
    optimizer.state[parameter] = {"step": step_count, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def opt_step_sgd(w, g, hyper, gate, key, *, decay, stream):
    """One step of torch.optim.SGD; its decay is not decoupled, so that is done before."""
    if not gate.isfinite():
        return (w,)
    lr, weight_decay, *rate = hyper.tolist()
    parameter = (w.detach() * (1 - lr * weight_decay * decay)).requires_grad_()
    parameter.grad = (g * gate).detach()
    torch.optim.SGD([parameter], *(rate or [lr])).step()
    return (parameter.detach(),)


def region(x, start, shape, step):
    axes = zip(start, shape, step or (1,) * x.ndim, strict=True)
    return tuple(slice(s, s + (n - 1) * k + 1, k) for s, n, k in axes)


def acc(part, into, *, size, start, step):
    y = torch.zeros(size, dtype=part.dtype) if into is None else into.clone()
    y[region(y, start, part.shape, step)] += part
    return y


def replaced(x, part, *, start, shape, step):
    y = x.clone()
    y[region(y, start, shape, step)] = 0 if part is None else part
    return y


def im2col(x, *, window, stride, padding, dilation):
    rows = torch.nn.functional.unfold(x, window, dilation, padding, stride)
    n, k, _ = rows.shape
    high = (x.shape[2] + 2 * padding[0] - dilation[0] * (window[0] - 1) - 1) // stride[0] + 1
    return rows.mT.reshape(n, high, -1, k)


def im2col_back(dy, *, shape, window, stride, padding, dilation):
    rows = dy.flatten(1, 2).mT
    return torch.nn.functional.fold(rows, shape[2:], window, dilation, padding, stride)


def pool_2d(x, *, largest, window, stride, padding):
    pool = torch.nn.functional.max_pool2d if largest else torch.nn.functional.avg_pool2d
    return pool(x, window, stride or window, padding)


def opt_moments_adamw(g, m, v, hyper, gate):
    _, beta1, beta2, eps, _, _, c2 = hyper
    if not gate.isfinite():
        return m, v, torch.zeros_like(g)
    m = torch.lerp(g * gate, m, beta1)
    v = torch.lerp((g * gate).square(), v, beta2)
    return m, v, m / ((v / c2).sqrt() + eps)


def reduce_scatter(total, g, fresh, *, share):
    part = -(-len(g) // (share[1] * 16)) * 16  # parts begin at multiples of 16
    local_shard = g.split(part)[share[0]]
    return local_shard if fresh else total + local_shard


PEERS: dict[str, Any] = {
    "accumulate": lambda total, g, fresh: g if fresh else total + g,
    "opt_momentum": lambda b, g, by, gate: by * b + g * gate if gate.isfinite() else b,
    "opt_moments_adamw": opt_moments_adamw,
    "reduce_scatter": reduce_scatter,
    "wait_for_sums": lambda total, g: total,
    "all_reduce": lambda x: x,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "scale": lambda x, by, bias: by * x + bias,
    "neg": lambda x: -x,
    "sqr": lambda x: x.square(),
    "sqrt": lambda x: x.sqrt(),
    "log": lambda x: x.log(),
    "exp": lambda x: x.exp(),
    "step": lambda x: (x > 0).to(x.dtype),
    "relu": lambda x: x.relu(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "silu": lambda x: torch.nn.functional.silu(x),
    "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "geglu": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "take": lambda x, ids: x.gather(-1, ids.long()),
    "sum": lambda x: x.sum(),
    "sum_rows": lambda x: x.sum(-1, keepdim=True),
    "sum_to": lambda x, shape: x.sum_to_size(shape),
    "sum_squares": lambda x, acc: x.square().sum() + (0 if acc is None else acc),
    "broadcast_to": lambda x, shape: x.expand(shape),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, axes: x.permute(axes),
    "narrow": lambda x, axis, start, length: x.narrow(axis, start, length),
    "cont": lambda x: x.clone(),
    "abs": lambda x: x.abs(),
    "sgn": lambda x: x.sign(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "elu": lambda x: torch.nn.functional.elu(x),
    "softplus": lambda x: torch.nn.functional.softplus(x),
    "erf": lambda x: x.erf(),
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "clamp": lambda x, low, high: x.clamp(low, high),
    "leaky_relu": lambda x, slope: torch.nn.functional.leaky_relu(x, slope),
    "cumsum": lambda x, reverse: x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1),
    "argmax": lambda x: x.argmax(-1),
    "argsort": lambda x, descending: x.argsort(dim=-1, descending=descending, stable=True),
    "slice": lambda x, start, shape, step: x[region(x, start, shape, step)],
    "set": replaced,
    "diag": lambda x: x.diag_embed(),
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1),
    "diag_mask_zero": lambda x, past: x.tril(past),
    "diag_mask_inf": lambda x, past: x.masked_fill(x.new_ones(x.shape).tril(past) == 0, -torch.inf),
    "cast": lambda x, dtype: x.clone(),
    "log_soft_max": lambda x: x.log_softmax(-1),
    **{f.__name__: f for f in (
        rms_norm, soft_max, attention, attention_cells, cross_entropy, linear_cross_entropy, matmul, out_prod, get_rows,
        get_rows_back,
        set_rows, zero_rows, rope, rope_table, narrow_back, clip_gate, opt_step_adamw, opt_step_sgd, matmul_back,
        acc, im2col, im2col_back, pool_2d, top_k, candidates, take_back, matmul_id, matmul_id_back, out_prod_id,
        weighted_rows,
    )},
}  # fmt: skip


# ---- functions composed of ops -------------------------------------------------------------------------------


def soft_max_sinks(x, sinks, mask=None, *, scale=1.0):
    x = scale * x + (0 if mask is None else mask)
    column = sinks[None, :, None, None].expand(*x.shape[:3], 1)
    return torch.cat([x, column], -1).softmax(-1)[..., :-1]


def attention_to_all(q, k, v, *, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def repeat(x, *, shape):
    padded_shape = (1,) * (len(shape) - x.ndim) + x.shape
    return x.repeat(*(s // n for n, s in zip(padded_shape, shape, strict=True)))


def pad(x, *, before, after):
    edges = [n for pair in zip(before[::-1], after[::-1], strict=True) for n in pair]
    return torch.nn.functional.pad(x, edges)


def norm(x, w=None, b=None, *, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)


def pool_1d(x, *, largest, window, stride, padding):
    pool = torch.nn.functional.max_pool1d if largest else torch.nn.functional.avg_pool1d
    return pool(x, window, stride, padding)


def conv_2d(x, w, **options):
    return torch.nn.functional.conv2d(x, w, **options)


def conv_2d_back(dy, w, *, size, **options):
    shape = (dy.shape[0], w.shape[1], *size)
    return torch.nn.grad.conv2d_input(shape, w, dy, **options)


def conv_2d_back_w(dy, x, *, window, **options):
    shape = (dy.shape[1], x.shape[1], *window)
    return torch.nn.grad.conv2d_weight(x, shape, dy, **options)


def conv_1d(x, w, **options):
    return torch.nn.functional.conv1d(x, w, **options)


def soft_cross_entropy(x, t, w):
    return (torch.nn.functional.cross_entropy(x, t, reduction="none") * w).sum()


PEERS |= {
    "outer": lambda a, b: a.mT @ b,
    "mean": lambda x: x.mean(),
    "mean_rows": lambda x: x.mean(-1, keepdim=True),
    "mean_squared_error": torch.nn.functional.mse_loss,
    "group_norm": lambda x, groups, eps: torch.nn.functional.group_norm(x, groups, eps=eps),
    "l2_norm": lambda x, eps: torch.nn.functional.normalize(x, dim=-1, eps=eps),
    "upscale": lambda x, factor: torch.nn.functional.interpolate(x, scale_factor=factor, mode="nearest"),
    "gelu_erf": lambda x: torch.nn.functional.gelu(x),
    "add_cast": lambda a, b: a + b,
    "concat": lambda *parts, axis: torch.cat(parts, axis),
    "transpose": lambda x: x.mT,
    "alibi": lambda x, slopes, distance: x + slopes[:, None, None] * distance,
    **{f.__name__: f for f in (
        soft_max_sinks, attention_to_all, repeat, pad, norm, pool_1d, conv_2d, conv_2d_back, conv_2d_back_w, conv_1d,
        soft_cross_entropy, short_conv, short_conv_cells, ssm_scan, delta_rule,
    )},
}  # fmt: skip
