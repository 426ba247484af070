"""The llama of packtrain.models.transformer written once more, in PyTorch: what the goldens are recorded from.

Weights and a batch go in as NumPy arrays; losses, gradients and training losses come out. It shares no code with
packtrain but the Config.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from packtrain.engine.optim import AdamW
from packtrain.models.config import Config

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * w


def rope(x: Tensor, pos: Tensor, base: float) -> Tensor:
    """Turn neighbouring pairs of x (B, T, H, D) as complex numbers; angles in float64."""
    width = x.shape[-1]
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = pos[..., None, None].double() * base**-powers
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex(x, x).dtype)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], width // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q (B, T, H, D), k and v (B, T, K, D), seen (B, T, T) -> (B, T, H, D)."""
    b, t, h, d = q.shape
    group = q.reshape(b, t, k.shape[2], h // k.shape[2], d)
    scores = torch.einsum("btkgd,bskd->bkgts", group, k) * d**-0.5
    shares = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bkgts,bskd->btkgd", shares, v).reshape(b, t, h, d)


def block(config: Config, w: Weights, i: int, h: Tensor, pos: Tensor, seen: Tensor) -> Tensor:
    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, w[f"blk.{i}.{name}.weight"])

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, config.head_width))

    x = rms_norm(h, w[f"blk.{i}.attn_norm.weight"], config.rms_eps)
    q = rope(heads(linear(x, "attn_q")), pos, config.rope_freq_base)
    k = rope(heads(linear(x, "attn_k")), pos, config.rope_freq_base)
    y = attention(q, k, heads(linear(x, "attn_v")), seen)
    h = h + linear(y.flatten(-2), "attn_output")
    x = rms_norm(h, w[f"blk.{i}.ffn_norm.weight"], config.rms_eps)
    gated = functional.silu(linear(x, "ffn_gate")) * linear(x, "ffn_up")
    return h + linear(gated, "ffn_down")


def loss(config: Config, w: Weights, batch: Mapping[str, np.ndarray]) -> Tensor:
    """The sum of weights * cross-entropy over the tokens that have a target."""
    tokens, targets, weights, pos, seq = (
        torch.from_numpy(batch[name]) for name in ("tokens", "targets", "weights", "pos", "seq")
    )
    seen = (seq[:, :, None] == seq[:, None, :]) & (pos[:, :, None] >= pos[:, None, :])
    h = w["token_embd.weight"][tokens.long()]
    for i in range(config.block_count):
        h = block(config, w, i, h, pos, seen)
    x = rms_norm(h, w["output_norm.weight"], config.rms_eps)
    logits = functional.linear(x, w.get("output.weight", w["token_embd.weight"]))
    flat = logits.flatten(0, 1), targets.flatten().long()
    losses = functional.cross_entropy(*flat, ignore_index=-1, reduction="none")
    return (losses * weights.flatten()).sum()


def parameters(values: Mapping[str, np.ndarray], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in values.items()}


def gradients(
    config: Config,
    values: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    dtype: torch.dtype,
) -> dict[str, np.ndarray]:
    """`loss` and `d/<name>` of every weight."""
    w = parameters(values, dtype)
    total = loss(config, w, batch)
    total.backward()
    grads = {f"d/{name}": p.grad for name, p in w.items()}
    return {"loss": total.detach().numpy()} | {k: d.numpy() for k, d in grads.items()}


def training(
    config: Config,
    values: Mapping[str, np.ndarray],
    batches: list[dict[str, np.ndarray]],
    optimizer: AdamW,
    rates: list[float],
    max_norm: float | None,
    dtype: torch.dtype,
) -> dict[str, np.ndarray]:
    """`losses` and gradient `norms` of AdamW steps, one for each batch and learning rate."""
    w = parameters(values, dtype)
    groups = [
        {"params": [p for p in w.values() if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in w.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = optimizer.beta1, optimizer.beta2
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)
    losses, norms = [], []
    for batch, rate in zip(batches, rates, strict=True):
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad()
        total = loss(config, w, batch)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), float("inf"))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(w.values(), max_norm)
        adamw.step()
        losses.append(total.item())
        norms.append(norm.item())
    return {"losses": np.array(losses), "norms": np.array(norms)}
