"""Peers in PyTorch of short convolutions and scans. Importing this loads PyTorch."""

from typing import Any

from packtrain import kernels

torch: Any = kernels.torch()


def short_conv(x, w, seq):
    num_past = w.shape[1] - 1
    windows = torch.nn.functional.pad(x.mT, (num_past, 0)).unfold(2, num_past + 1, 1)
    if seq is not None:
        ids = torch.nn.functional.pad(seq, (num_past, 0), value=-1).unfold(1, num_past + 1, 1)
        windows = windows * (ids == seq[..., None])[:, None]
    return torch.einsum("bctk,ck->btc", windows, w)


def short_conv_cells(x, w, cells):
    return torch.einsum("tkc,ck->tc", x[cells.long()] * (cells >= 0)[..., None], w)


def ssm_scan(x, delta, a, skip, seq, *, groups, width):
    (b, t, heads), inner_width = delta.shape, x.shape[-1] - 2 * groups * width
    values, *state_parts = x.split((inner_width, groups * width, groups * width), -1)
    values = values.reshape(b, t, heads, -1)
    of_b, of_c = (
        part.reshape(b, t, groups, width).repeat_interleave(heads // groups, 2)
        for part in state_parts
    )
    total = (delta * a).cumsum(1)
    segment_decay = total[:, :, None] - total[:, None]
    mask = torch.ones(t, t, dtype=torch.bool).tril()[None, :, :, None]
    if seq is not None:
        mask = mask & (seq[:, :, None] == seq[:, None])[..., None]
    segment_decay = segment_decay.masked_fill(~mask, -1e30).exp()
    pairs = segment_decay * torch.einsum("bthn,bshn->btsh", of_c, of_b) * delta[:, None]
    y = torch.einsum("btsh,bshp->bthp", pairs, values) + skip[:, None] * values
    return y.reshape(b, t, inner_width)


def delta_rule(x, decay, beta, seq, *, groups, width, tiled, eps):
    """All tokens at once: those of a chain of corrections solve a triangular system."""
    (b, t, heads), key_width = beta.shape, groups * width
    q, k, v = x.split((key_width, key_width, x.shape[-1] - 2 * key_width), -1)

    def of_heads(part):
        part = part.reshape(b, t, groups, width)
        part = part / (part.square().sum(-1, keepdim=True) + eps).sqrt()
        heads_per_group = heads // groups
        return (
            part.repeat(1, 1, heads_per_group, 1)
            if tiled
            else part.repeat_interleave(heads_per_group, 2)
        )

    q, k, v = of_heads(q) / width**0.5, of_heads(k), v.reshape(b, t, heads, -1)
    total = decay.cumsum(1)
    segment_decay = total[:, :, None] - total[:, None]
    mask = torch.ones(t, t, dtype=torch.bool).tril()[None, :, :, None]
    if seq is not None:
        mask = mask & (seq[:, :, None] == seq[:, None])[..., None]
    segment_decay = segment_decay.masked_fill(~mask, -1e30).exp().permute(0, 3, 1, 2)
    between = torch.einsum("bthn,bshn->bhts", k, k) * segment_decay
    system = torch.eye(t, dtype=x.dtype) + (between * beta.mT[..., None]).tril(-1)
    rhs = (v * beta[..., None]).transpose(1, 2)
    added = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    y = torch.einsum("bthn,bshn->bhts", q, k) * segment_decay @ added
    return y.transpose(1, 2).reshape(b, t, -1)
