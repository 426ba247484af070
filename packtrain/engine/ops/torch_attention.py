"""Attention by PyTorch, block of queries by block: see `attention` and `attention_cells`.

Arrays are (B, K, G, T, D) here: G query heads read one kv head. On a CPU, PyTorch's own attention computes plain
causal attention with a kv head for each query head.
"""

from packtrain.engine.ops.torch_kernels import chunk_bounds, real, torch

MAX_PAIRS = 1 << 21  # most pairs of a query and a key at a time, over all heads


def _group_by_kv_head(x, kv):
    """Return x (B, T, H, D) as (B, K, G, T, D): by kv head, the G query heads that read it."""
    return x.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4)


def _expand_keys(x):
    """Return x (B, S, K, D) as (B, K, 1, S, D), in f32."""
    return real(x).permute(0, 2, 1, 3)[:, :, None]


def _uses_torch_attention(q, k, positions, window, softcap):
    """Whether PyTorch's own attention can compute this: no positions, window or softcap; equal heads, on the CPU."""
    is_unmasked = not (window or softcap) and all(ids is None for ids in positions)
    is_supported = (q.is_cpu or q.is_meta) and q.dtype == k.dtype == torch.float32
    return is_unmasked and is_supported and q.shape == k.shape and q.numel() > 0


def _query_spans(q, keys):
    """Yield (start, end) of spans of queries of at most MAX_PAIRS pairs of query and key each; `keys`: how many."""
    b, t, h, _ = q.shape
    return chunk_bounds(t, MAX_PAIRS // max(b * h * keys, 1), q)


def _hidden_mask(query_span, keys, num_queries, positions, window, device):
    """Return which of `keys` keys the queries of a span (start, end) must not see, bool (B or 1, queries, keys);
    `positions`: the inputs q_pos, k_pos, q_seq, k_seq and length of attention, each perhaps None."""
    q_pos, k_pos, q_seq, k_seq, length = positions
    query_start, query_end = query_span
    index = torch.arange(max(num_queries, keys), dtype=torch.int32, device=device)
    at_q = index[None, query_start:query_end] if q_pos is None else q_pos[:, query_start:query_end]
    k_positions = index[None, :keys] if k_pos is None else k_pos
    distance = at_q[:, :, None].long() - k_positions[:, None, :]
    hidden = distance < 0
    if window > 0:
        hidden |= distance >= window
    elif window:
        hidden = hidden | (distance > (at_q % -window)[:, :, None])
    if q_seq is not None:
        hidden = hidden | (k_seq[:, None, :] != q_seq[:, query_start:query_end, None])
    if length is not None:
        hidden |= index[:keys] >= length
    return hidden


def _scores(q, k, hidden, scale, softcap):
    """Return scores (B, K, G, T, S), -inf where hidden, and the slope of the softcap, None without one."""
    z, slope = torch.matmul(q, k.mT).mul_(scale), None
    if softcap:
        z.div_(softcap).tanh_()
        slope = 1 - z.square()
        z.mul_(softcap)
    return z.masked_fill_(hidden[:, None, None], -torch.inf), slope


def attention(out, q, k, v, *positions, scale, window, softcap):
    y, lse = out
    if _uses_torch_attention(q, k, positions, window, softcap):
        attended, lse_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, True, scale=scale
        )
        y.copy_(attended.transpose(1, 2))
        lse.copy_(lse_values)
        return
    kv = k.shape[2]
    keys, values = _expand_keys(k), _expand_keys(v)
    queries, y = _group_by_kv_head(q, kv), _group_by_kv_head(y, kv)
    lse, (*position_inputs, sinks) = lse.unflatten(1, (kv, -1)), positions
    for query_span in _query_spans(q, k.shape[1]):
        query_slice = slice(*query_span)
        hidden = _hidden_mask(query_span, k.shape[1], q.shape[1], position_inputs, window, q.device)
        score_args = queries[..., query_slice, :], keys, hidden, scale, softcap
        _attend(y[..., query_slice, :], lse[..., query_slice], values, sinks, *score_args)


def _attend(y, lse, values, sinks, *score_args):
    """Write y and lse of a span of queries, by _scores(*score_args), `values`; 0 without keys, but lse with a sink."""
    z, _ = _scores(*score_args)
    max_score = z.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(z.shape[1], z.shape[2], 1, 1)
        max_score = torch.maximum(max_score, sinks)
    max_score.masked_fill_(max_score.isinf(), 0)
    e = z.sub_(max_score).exp_()
    denominator = e.sum(-1, keepdim=True)
    denominator = denominator if sinks is None else denominator.add_((sinks - max_score).exp_())
    denominator.masked_fill_(denominator == 0, 1)
    y.copy_(torch.matmul(e, values).div_(denominator))
    if lse is not None:
        lse.copy_(denominator.log_().add_(max_score)[..., 0])


def attention_back(out, dy, y, lse, q, k, v, *positions, scale, window, softcap):
    if _uses_torch_attention(q, k, positions, window, softcap):
        by_head = [x.transpose(1, 2) for x in (dy, q, k, v, y)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *by_head, lse, 0.0, True, scale=scale
        )
        for d, grad in zip(out, grads, strict=True):
            d.copy_(grad.transpose(1, 2))
        return
    kv = k.shape[2]
    keys, values = _expand_keys(k), _expand_keys(v)
    dq, dy, y, q_by_head = (_group_by_kv_head(x, kv) for x in (out[0], dy, y, q))
    lse = lse.unflatten(1, (kv, -1))[..., None]
    dkv = [_expand_keys(x.zero_())[:, :, 0] for x in out[1:]]
    for query_span in _query_spans(q, k.shape[1]):
        query_slice = slice(*query_span)
        hidden = _hidden_mask(query_span, k.shape[1], q.shape[1], positions, window, q.device)
        query_parts = [x[..., query_slice, :] for x in (dq, dy, y, lse, q_by_head)]
        _attend_back(*dkv, values, *query_parts, keys, hidden, scale, softcap)


def _attend_back(dk, dv, values, dq, dy, y, lse, q, keys, hidden, scale, softcap):
    """Write dq of a span of queries, and add their parts to dk and dv."""
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
    (t, _, _), (num_cells, kv, _) = q.shape, k.shape
    keys, values = (_expand_keys(real(x)[None]) for x in (k, v))
    is_listed = torch.arange(num_cells, device=q.device) < counts[:, None]
    is_member = torch.zeros((len(order), num_cells + 1), dtype=torch.bool, device=q.device)
    is_member.scatter_(1, torch.where(is_listed, order, num_cells).long(), True)
    positions = q_pos[None], k_pos[None], None, None, None
    queries, y_by_head = _group_by_kv_head(q[None], kv), _group_by_kv_head(y[None], kv)
    for query_span in _query_spans(q[None], num_cells):
        query_slice = slice(*query_span)
        hidden = _hidden_mask(query_span, num_cells, t, positions, window, q.device)
        hidden |= ~is_member[q_row[query_slice].long(), :num_cells]
        score_args = queries[..., query_slice, :], keys, hidden, scale, softcap
        _attend(y_by_head[..., query_slice, :], None, values, sinks, *score_args)
