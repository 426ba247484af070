"""Products of rows with the matrix of their expert by PyTorch: see `experts`."""

from itertools import pairwise

from packtrain.engine.ops.torch_kernels import (
    add_product,
    add_product_back,
    check_ids,
    copy_acc_or_zero,
    multiply,
    on_host,
    rows,
    torch,
)


def _expert_spans(name, ids, num_experts):
    """Yield (expert, first row, one past the last) for experts with rows; on `meta`, as if one expert had all rows."""
    check_ids(name, ids, num_experts, min_id=0)
    is_descending = (ids[1:] < ids[:-1]).any()
    expert_ids = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, expert_ids)
    if not on_host(ids):
        yield 0, 0, len(ids)
        return
    if bool(is_descending):
        raise IndexError(f"{name}: ids must ascend, as group_rows returns them")
    for expert, (row_start, row_end) in enumerate(pairwise(bounds.tolist())):
        if row_start < row_end:
            yield expert, row_start, row_end


def _start_product(y, acc):
    """Copy acc to y; return True without an acc: products then overwrite y."""
    if acc is not None:
        copy_acc_or_zero(y, acc)
    return acc is None


def matmul_id(y, x, w, ids, acc):
    overwrite = _start_product(y, acc)
    for e, row_start, row_end in _expert_spans("matmul_id", ids, w.shape[0]):
        add_product(y[row_start:row_end], x[row_start:row_end], w[e], fresh=overwrite)


def matmul_id_back(dx, dy, w, ids, acc):
    overwrite = _start_product(dx, acc)
    for e, row_start, row_end in _expert_spans("matmul_id_back", ids, w.shape[0]):
        add_product_back(dx[row_start:row_end], dy[row_start:row_end], w[e], fresh=overwrite)


def out_prod_id(y, a, b, ids, acc, *, count):
    copy_acc_or_zero(y, acc)
    for e, row_start, row_end in _expert_spans("out_prod_id", ids, count):
        multiply(y[e], a[row_start:row_end].mT, b[row_start:row_end], False)


def weighted_rows(y, x, ids, weights, acc):
    check_ids("weighted_rows", ids, len(x), min_id=0)
    expert_rows = x.index_select(0, ids.view(-1)).unflatten(0, rows(ids).shape)
    sums = torch.bmm(rows(weights)[:, None], expert_rows)[:, 0]
    y_rows = rows(y)
    y_rows.copy_(sums if acc is None else sums.add_(rows(acc)))


def weighted_rows_back(out, dy, x, ids, weights):
    check_ids("weighted_rows_back", ids, len(x), min_id=0)
    dx, dweights = out
    dy, ids, weights = rows(dy), rows(ids), rows(weights)
    if dweights is not None:
        expert_rows = x.index_select(0, ids.view(-1)).unflatten(0, ids.shape)
        rows(dweights).copy_(torch.bmm(expert_rows, dy[:, :, None])[:, :, 0])
    if dx is not None:
        row_grads = weights[:, :, None] * dy[:, None]
        dx.index_copy_(0, ids.view(-1).long(), row_grads.flatten(0, 1))
