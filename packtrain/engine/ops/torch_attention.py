"""Attention by PyTorch, block of queries by block: see `attention` and `attention_cells`.

Arrays are (B, K, G, T, D) here: G query heads read one kv head. Plain causal attention with a kv head for each query
head is PyTorch's own on a CPU.
"""

from packtrain.engine.ops.torch_kernels import real, spans, torch

PAIRS = 1 << 21  # of a query head and a key, at a time


def _by_kv_head(x, kv):
    """(B, T, H, D) as (B, K, G, T, D)."""
    return x.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4)


def _of_keys(x):
    """(B, S, K, D) as (B, K, 1, S, D), in f32."""
    return real(x).permute(0, 2, 1, 3)[:, :, None]


def _fits(q, k, positions, window, softcap):
    """Whether PyTorch's own attention computes this."""
    unmasked = not (window or softcap) and all(ids is None for ids in positions)
    ours = (q.is_cpu or q.is_meta) and q.dtype == k.dtype == torch.float32
    return unmasked and ours and q.shape == k.shape and q.numel() > 0


def _parts(q, keys):
    """Spans of queries."""
    b, t, h, _ = q.shape
    return spans(t, PAIRS // max(b * h * keys, 1), q)


def _hidden(part, keys, t, positions, window, device):
    """Which keys (B or 1, queries, S) the queries of a part do not see; S is as many as any of them can."""
    q_pos, k_pos, q_seq, k_seq, length = positions
    start, end = part
    index = torch.arange(max(t, keys), dtype=torch.int32, device=device)
    at_q = index[None, start:end] if q_pos is None else q_pos[:, start:end]
    at_k = index[None, :keys] if k_pos is None else k_pos
    since = at_q[:, :, None].long() - at_k[:, None, :]
    hidden = since < 0
    if window > 0:
        hidden |= since >= window
    elif window:
        hidden = hidden | (since > (at_q % -window)[:, :, None])
    if q_seq is not None:
        hidden = hidden | (k_seq[:, None, :] != q_seq[:, start:end, None])
    if length is not None:
        hidden |= index[:keys] >= length
    return hidden


def _scores(q, k, hidden, scale, softcap):
    """z with -inf where hidden, (B, K, G, T, S), and its slope by the products where there is a cap."""
    z, slope = torch.matmul(q, k.mT).mul_(scale), None
    if softcap:
        z.div_(softcap).tanh_()
        slope = 1 - z.square()
        z.mul_(softcap)
    return z.masked_fill_(hidden[:, None, None], -torch.inf), slope


def attention(out, q, k, v, *positions, scale, window, softcap):
    y, lse = out
    if _fits(q, k, positions, window, softcap):
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, True, scale=scale
        )
        y.copy_(attended.transpose(1, 2))
        lse.copy_(sums)
        return
    kv = k.shape[2]
    keys, values = _of_keys(k), _of_keys(v)
    queries, y = _by_kv_head(q, kv), _by_kv_head(y, kv)
    lse, (*places, sinks) = lse.unflatten(1, (kv, -1)), positions
    for part in _parts(q, k.shape[1]):
        query_slice = slice(*part)
        hidden = _hidden(part, k.shape[1], q.shape[1], places, window, q.device)
        rule = queries[..., query_slice, :], keys, hidden, scale, softcap
        _attend(y[..., query_slice, :], lse[..., query_slice], values, sinks, *rule)


def _attend(y, lse, values, sinks, *rule):
    """Of some queries; y is 0 for a query without keys, and lse without a sink."""
    z, _ = _scores(*rule)
    top = z.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(z.shape[1], z.shape[2], 1, 1)
        top = torch.maximum(top, sinks)
    top.masked_fill_(top.isinf(), 0)
    e = z.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    total = total if sinks is None else total.add_((sinks - top).exp_())
    total.masked_fill_(total == 0, 1)
    y.copy_(torch.matmul(e, values).div_(total))
    if lse is not None:
        lse.copy_(total.log_().add_(top)[..., 0])


def attention_back(out, dy, y, lse, q, k, v, *positions, scale, window, softcap):
    if _fits(q, k, positions, window, softcap):
        by_head = [x.transpose(1, 2) for x in (dy, q, k, v, y)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *by_head, lse, 0.0, True, scale=scale
        )
        for d, value in zip(out, grads, strict=True):
            d.copy_(value.transpose(1, 2))
        return
    kv = k.shape[2]
    keys, values = _of_keys(k), _of_keys(v)
    dq, dy, y, q_by = (_by_kv_head(x, kv) for x in (out[0], dy, y, q))
    lse = lse.unflatten(1, (kv, -1))[..., None]
    dkv = [_of_keys(x.zero_())[:, :, 0] for x in out[1:]]
    for part in _parts(q, k.shape[1]):
        query_slice = slice(*part)
        hidden = _hidden(part, k.shape[1], q.shape[1], positions, window, q.device)
        query_parts = [x[..., query_slice, :] for x in (dq, dy, y, lse, q_by)]
        _attend_back(*dkv, values, *query_parts, keys, hidden, scale, softcap)


def _attend_back(dk, dv, values, dq, dy, y, lse, q, keys, hidden, scale, softcap):
    """Of some queries: dq, and what is added to dk and dv."""
    z, slope = _scores(q, keys, hidden, scale, softcap)
    p = z.sub_(lse).exp_()
    dv += torch.matmul(p.mT, dy).sum(2)
    dy_dot_y = (dy * y).sum(-1, keepdim=True)
    ds = torch.matmul(dy, values.mT).sub_(dy_dot_y).mul_(p).mul_(scale)
    ds = ds if slope is None else ds.mul_(slope)
    dk += torch.matmul(ds.mT, q).sum(2)
    dq.copy_(torch.matmul(ds, keys))


def attention_cells(
    y, q, k, v, q_pos, q_row, order, counts, k_pos, sinks, *, scale, window, softcap
):
    (t, _, _), (cells, kv, _) = q.shape, k.shape
    keys, values = (_of_keys(real(x)[None]) for x in (k, v))
    listed = torch.arange(cells, device=q.device) < counts[:, None]
    member = torch.zeros((len(order), cells + 1), dtype=torch.bool, device=q.device)
    member.scatter_(1, torch.where(listed, order, cells).long(), True)
    positions = q_pos[None], k_pos[None], None, None, None
    queries, to = _by_kv_head(q[None], kv), _by_kv_head(y[None], kv)
    for part in _parts(q[None], cells):
        query_slice = slice(*part)
        hidden = _hidden(part, cells, t, positions, window, q.device)
        hidden |= ~member[q_row[query_slice].long(), :cells]
        rule = queries[..., query_slice, :], keys, hidden, scale, softcap
        _attend(to[..., query_slice, :], None, values, sinks, *rule)
