"""Cross-entropy by PyTorch: see `loss`."""

from packtrain.engine.backends import triton
from packtrain.engine.ops import torch_kernels
from packtrain.engine.ops.arrays import check_targets, rows
from packtrain.engine.ops.torch_kernels import CHUNK, LARGE, add_product, to_sum_dtype, torch


def _target_columns(targets):
    """Return the targets as columns (N, 1), 0 for ignored ones, and which are ignored, bool (N,)."""
    return targets.long().clamp(min=0)[:, None], targets < 0


def _write_weighted_sum(loss, losses, weights):
    loss.copy_((to_sum_dtype(losses) * to_sum_dtype(weights)).sum())


def cross_entropy(out, logits, targets, weights):
    check_targets("cross_entropy", targets, logits.shape[-1])
    loss, losses = out
    logits, (target_columns, is_ignored) = rows(logits), _target_columns(targets.view(-1))
    row_losses = _exp_sums(logits.clone())[1] - logits.gather(1, target_columns)
    losses.view(-1).copy_(row_losses[:, 0].masked_fill_(is_ignored, 0))
    _write_weighted_sum(loss, losses, weights)


def cross_entropy_back(dlogits, dloss, logits, targets, weights):
    check_targets("cross_entropy_back", targets, logits.shape[-1])
    p = torch.softmax(rows(logits), -1)
    _logit_grads(p, *_target_columns(targets.view(-1)), weights.view(-1))
    torch.mul(p, dloss, out=rows(dlogits))


def _exp_sums(z):
    """Return sum(exp(z - max)) by row, (N, 1), and log(sum(exp(z))); exp(z - max) is written over z."""
    max_logit = z.amax(-1, keepdim=True)
    sum_exp = z.sub_(max_logit).exp_().sum(-1, keepdim=True)
    return sum_exp, sum_exp.log().add_(max_logit)


def _logit_grads(p, target_columns, is_ignored, weights):
    """Turn probabilities p into gradients of the logits, in place: (p - onehot(target)) * weight."""
    weights = weights.masked_fill(is_ignored, 0)[:, None]
    p.mul_(weights).scatter_add_(1, target_columns, -weights)


def linear_cross_entropy(
    out, x, w, targets, weights, b, *, chunk, softcap, precision, kernel=None, unpack_size=CHUNK
):
    """Run linear_cross_entropy into `out`, by chunks of rows; packed w is unpacked by `unpack_size` values.

    kernel  computes losses of logits and writes gradients over the logits; None: `_torch_losses`
    """
    check_targets("linear_cross_entropy", targets, w.shape[0])
    loss, losses, correct, dx, *weight_grads = out
    db = None if b is None else weight_grads.pop()
    dw = weight_grads[0] if weight_grads else None
    for grads in (dw, db):
        if grads is not None:
            grads.zero_()
    flat_inputs = [None if t is None else t.view(-1) for t in (losses, correct, targets, weights)]
    row_inputs = *flat_inputs[:2], None if dx is None else rows(dx), rows(x), *flat_inputs[2:]
    for row_start, row_end in torch_kernels.chunk_bounds(len(flat_inputs[0]), chunk, x):
        row_slices = (None if t is None else t[row_start:row_end] for t in row_inputs)
        _head(kernel or _torch_losses, unpack_size, *row_slices, dw, db, w, b, softcap, precision)
    _write_weighted_sum(loss, losses, weights)


def triton_linear_cross_entropy(out, *args, **attrs):
    """Run linear_cross_entropy with a loss kernel in Triton."""
    kernel = triton.lazy_kernel("head", "losses_and_gradients")
    linear_cross_entropy(out, *args, **attrs, kernel=kernel, unpack_size=LARGE)


def _head(kernel, size, losses, right, dx, x, targets, weights, dw, db, w, b, softcap, precision):
    """Compute logits of rows x, unpacking `size` values of w at a time; write losses, right and dx by `kernel`, as
    _torch_losses, and add these rows' parts to dw and db. None: not wanted."""
    logits = torch.empty((len(x), w.shape[0]), dtype=x.dtype, device=x.device)
    add_product(logits, x, w, precision, fresh=True, unpack_size=size)
    has_gradients = dx is not None or dw is not None or db is not None
    logit_grads = kernel(logits, losses, right, targets, weights, b, softcap, has_gradients)
    if db is not None:
        db.add_(logit_grads.sum(0))
    if dw is not None:
        torch_kernels.multiply(dw, logit_grads.mT, x, False, precision)
    if dx is not None:  # last, as it may lie over x
        torch_kernels.add_product_back(dx, logit_grads, w, precision, fresh=True, unpack_size=size)


def _torch_losses(logits, losses, right, targets, weights, b, softcap, has_gradients):
    """Write each row's loss, and to `right`, unless None, whether its target has the largest logit; return gradients,
    written over the logits, if `has_gradients`, else None."""
    if b is not None:
        logits.add_(b)
    target_columns, is_ignored = _target_columns(targets)
    if right is not None:
        is_hit = logits.gather(1, target_columns) >= logits.amax(-1, keepdim=True)
        right.copy_(is_hit[:, 0] & ~is_ignored)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    # the slope of the cap needs room of its own; gradients are written over the logits
    slope = 1 - (logits / softcap).square_() if softcap and has_gradients else None
    target_logits = logits.gather(1, target_columns)
    sum_exp, log_sums = _exp_sums(logits)
    losses.copy_((log_sums - target_logits)[:, 0].masked_fill_(is_ignored, 0))
    if not has_gradients:
        return None
    _logit_grads(logits.div_(sum_exp), target_columns, is_ignored, weights)
    return logits if slope is None else logits.mul_(slope)
