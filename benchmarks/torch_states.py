"""Peers in PyTorch of short convolutions and scans. Importing this loads PyTorch."""

from typing import Any

from packtrain import kernels

torch: Any = kernels.torch()


def short_conv(x, w, seq):
    before = w.shape[1] - 1
    seen = torch.nn.functional.pad(x.mT, (before, 0)).unfold(2, before + 1, 1)
    if seq is not None:
        ids = torch.nn.functional.pad(seq, (before, 0), value=-1).unfold(1, before + 1, 1)
        seen = seen * (ids == seq[..., None])[:, None]
    return torch.einsum("bctk,ck->btc", seen, w)


def short_conv_cells(x, w, cells):
    return torch.einsum("tkc,ck->tc", x[cells.long()] * (cells >= 0)[..., None], w)


def ssm_scan(x, delta, a, skip, seq, *, groups, width):
    (b, t, heads), wide = delta.shape, x.shape[-1] - 2 * groups * width
    values, *both = x.split((wide, groups * width, groups * width), -1)
    values = values.reshape(b, t, heads, -1)
    of_b, of_c = (
        part.reshape(b, t, groups, width).repeat_interleave(heads // groups, 2) for part in both
    )
    total = (delta * a).cumsum(1)
    since = total[:, :, None] - total[:, None]
    seen = torch.ones(t, t, dtype=torch.bool).tril()[None, :, :, None]
    if seq is not None:
        seen = seen & (seq[:, :, None] == seq[:, None])[..., None]
    since = since.masked_fill(~seen, -1e30).exp()
    pairs = since * torch.einsum("bthn,bshn->btsh", of_c, of_b) * delta[:, None]
    y = torch.einsum("btsh,bshp->bthp", pairs, values) + skip[:, None] * values
    return y.reshape(b, t, wide)


def delta_rule(x, decay, beta, seq, *, groups, width, tiled, eps):
    """All tokens at once: those of a chain of corrections solve a triangular system."""
    (b, t, heads), wide = beta.shape, groups * width
    q, k, v = x.split((wide, wide, x.shape[-1] - 2 * wide), -1)

    def of_heads(part):
        part = part.reshape(b, t, groups, width)
        part = part / (part.square().sum(-1, keepdim=True) + eps).sqrt()
        many = heads // groups
        return part.repeat(1, 1, many, 1) if tiled else part.repeat_interleave(many, 2)

    q, k, v = of_heads(q) / width**0.5, of_heads(k), v.reshape(b, t, heads, -1)
    total = decay.cumsum(1)
    since = total[:, :, None] - total[:, None]
    seen = torch.ones(t, t, dtype=torch.bool).tril()[None, :, :, None]
    if seq is not None:
        seen = seen & (seq[:, :, None] == seq[:, None])[..., None]
    since = since.masked_fill(~seen, -1e30).exp().permute(0, 3, 1, 2)
    between = torch.einsum("bthn,bshn->bhts", k, k) * since
    system = torch.eye(t, dtype=x.dtype) + (between * beta.mT[..., None]).tril(-1)
    right = (v * beta[..., None]).transpose(1, 2)
    added = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    y = torch.einsum("bthn,bshn->bhts", q, k) * since @ added
    return y.transpose(1, 2).reshape(b, t, -1)
