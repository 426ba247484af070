"""Cross-entropy by PyTorch: see `loss`."""

from packtrain.engine.backends import triton
from packtrain.engine.ops.torch_kernels import (
    CHUNK,
    LARGE,
    add_product,
    add_product_back,
    check_ids,
    multiply,
    rows,
    spans,
    torch,
    wide,
)


def _check(name, targets, classes):
    check_ids(name, targets, classes, what=f"the {classes} classes")


def _at(targets):
    """Where the targets are, with 0 for those that are ignored, and which are."""
    return targets.long().clamp(min=0)[:, None], targets < 0


def _whole(loss, losses, weights):
    loss.copy_((wide(losses) * wide(weights)).sum())


def cross_entropy(out, logits, targets, weights):
    _check("cross_entropy", targets, logits.shape[-1])
    loss, losses = out
    logits, (at, ignored) = rows(logits), _at(targets.view(-1))
    row_losses = _exponentials(logits.clone())[1] - logits.gather(1, at)
    losses.view(-1).copy_(row_losses[:, 0].masked_fill_(ignored, 0))
    _whole(loss, losses, weights)


def cross_entropy_back(dlogits, dloss, logits, targets, weights):
    _check("cross_entropy_back", targets, logits.shape[-1])
    p = torch.softmax(rows(logits), -1)
    _turn(p, *_at(targets.view(-1)), weights.view(-1))
    torch.mul(p, dloss, out=rows(dlogits))


def _exponentials(z):
    """Sums (N, 1) of exp(z - max) of rows, written over z, and log(sum exp z): `logsumexp` makes a copy unseen."""
    highest = z.amax(-1, keepdim=True)
    total = z.sub_(highest).exp_().sum(-1, keepdim=True)
    return total, total.log().add_(highest)


def _turn(p, at, ignored, weights):
    """Probabilities become gradients of the logits."""
    weights = weights.masked_fill(ignored, 0)[:, None]
    p.mul_(weights).scatter_add_(1, at, -weights)


def linear_cross_entropy(
    out, x, w, targets, weights, b, *, chunk, softcap, precision, rated=None, part=CHUNK
):
    """rated  what makes losses of logits, and of these their gradients; None: `_rated`
    part   values of a packed w that are unpacked at a time"""
    _check("linear_cross_entropy", targets, w.shape[0])
    loss, losses, right, dx, *of_w = out
    db = None if b is None else of_w.pop()
    dw = of_w[0] if of_w else None
    for d in (dw, db):
        if d is not None:
            d.zero_()
    flat = [None if t is None else t.view(-1) for t in (losses, right, targets, weights)]
    by_row = *flat[:2], None if dx is None else rows(dx), rows(x), *flat[2:]
    for start, end in spans(len(flat[0]), chunk, x):
        row_slices = (None if t is None else t[start:end] for t in by_row)
        _head(rated or _rated, part, *row_slices, dw, db, w, b, softcap, precision)
    _whole(loss, losses, weights)


def fused(out, *args, **attrs):
    """The same with a kernel in Triton."""
    linear_cross_entropy(out, *args, **attrs, rated=triton.late("head", "rated"), part=LARGE)


def _head(rated, part, losses, right, dx, x, targets, weights, dw, db, w, b, softcap, precision):
    """Some rows of it."""
    logits = torch.empty((len(x), w.shape[0]), dtype=x.dtype, device=x.device)
    add_product(logits, x, w, precision, fresh=True, part=part)
    back = dx is not None or dw is not None or db is not None
    d = rated(logits, losses, right, targets, weights, b, softcap, back)
    if db is not None:
        db.add_(d.sum(0))
    if dx is not None:
        add_product_back(dx, d, w, precision, fresh=True, part=part)
    if dw is not None:
        multiply(dw, d.mT, x, False, precision)


def _rated(logits, losses, right, targets, weights, b, softcap, back):
    """Losses of rows of logits, which of them are right, and with `back` the gradients of the products."""
    if b is not None:
        logits.add_(b)
    at, ignored = _at(targets)
    if right is not None:
        hits = logits.gather(1, at) >= logits.amax(-1, keepdim=True)
        right.copy_(hits[:, 0] & ~ignored)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    # the slope of the cap needs room of its own; gradients are written over the logits
    slope = 1 - (logits / softcap).square_() if softcap and back else None
    chosen = logits.gather(1, at)
    total, logs = _exponentials(logits)
    losses.copy_((logs - chosen)[:, 0].masked_fill_(ignored, 0))
    if not back:
        return None
    _turn(logits.div_(total), at, ignored, weights)
    return logits if slope is None else logits.mul_(slope)
