"""Products of rows with the matrix of their expert by PyTorch: see `experts`."""

from itertools import pairwise

from packtrain.engine.ops.torch_kernels import (
    add_product,
    add_product_back,
    check_ids,
    multiply,
    on_host,
    rows,
    start_with,
    torch,
)


def _groups(name, ids, count):
    """(expert, first row, one past the last), for experts with rows; without values, as if one had all."""
    check_ids(name, ids, count, least=0)
    falls = (ids[1:] < ids[:-1]).any()
    expert_ids = torch.arange(count + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, expert_ids)
    if not on_host(ids):
        yield 0, 0, len(ids)
        return
    if bool(falls):
        raise IndexError(f"{name}: ids must ascend, as group_rows returns them")
    for expert, (first, end) in enumerate(pairwise(bounds.tolist())):
        if first < end:
            yield expert, first, end


def _begin(y, acc):
    """Copy acc to y; whether there is none, and products are first."""
    if acc is not None:
        start_with(y, acc)
    return acc is None


def matmul_id(y, x, w, ids, acc):
    fresh = _begin(y, acc)
    for e, a, b in _groups("matmul_id", ids, w.shape[0]):
        add_product(y[a:b], x[a:b], w[e], fresh=fresh)


def matmul_id_back(dx, dy, w, ids, acc):
    fresh = _begin(dx, acc)
    for e, a, b in _groups("matmul_id_back", ids, w.shape[0]):
        add_product_back(dx[a:b], dy[a:b], w[e], fresh=fresh)


def out_prod_id(y, a, b, ids, acc, *, count):
    start_with(y, acc)
    for e, first, end in _groups("out_prod_id", ids, count):
        multiply(y[e], a[first:end].mT, b[first:end], False)


def weighted_rows(y, x, ids, weights, acc):
    check_ids("weighted_rows", ids, len(x), least=0)
    chosen = x.index_select(0, ids.view(-1)).unflatten(0, rows(ids).shape)
    sums = torch.bmm(rows(weights)[:, None], chosen)[:, 0]
    to = rows(y)
    to.copy_(sums if acc is None else sums.add_(rows(acc)))


def weighted_rows_back(out, dy, x, ids, weights):
    check_ids("weighted_rows_back", ids, len(x), least=0)
    dx, dweights = out
    dy, ids, weights = rows(dy), rows(ids), rows(weights)
    if dweights is not None:
        chosen = x.index_select(0, ids.view(-1)).unflatten(0, ids.shape)
        rows(dweights).copy_(torch.bmm(chosen, dy[:, :, None])[:, :, 0])
    if dx is not None:
        row_grads = weights[:, :, None] * dy[:, None]
        dx.index_copy_(0, ids.view(-1).long(), row_grads.flatten(0, 1))
