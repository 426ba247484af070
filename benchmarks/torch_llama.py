"""The same llama in PyTorch, a peer for speed, memory and loss; shapes as our Config. Importing this loads PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from packtrain import kernels
from packtrain.models.config import Config

torch: Any = kernels.torch()
F = torch.nn.functional
Batch = Mapping[str, np.ndarray]
Array: TypeAlias = Any  # PyTorch's tensor
Update: TypeAlias = Any  # and its optimizer


class Llama(torch.nn.Module):
    """Tied head, grouped-query attention, RoPE on neighbouring pairs; parameters bear GGUF names.

    real  RoPE without complex numbers, which torch.compile does not compile
    """

    def __init__(
        self, config: Config, values: Mapping[str, np.ndarray], real: bool = False
    ) -> None:
        super().__init__()
        self.config, self.real = config, real
        self.w = torch.nn.ParameterDict(
            {
                name.replace(".", "/"): torch.nn.Parameter(torch.from_numpy(v.copy()))
                for name, v in values.items()
            }
        )
        d = config.head_width
        angles = torch.outer(
            torch.arange(config.context_length, dtype=torch.float64),
            config.rope_freq_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d),
        )
        turns = torch.stack((angles.cos(), angles.sin()), -1)  # as complex numbers, or as pairs
        self.register_buffer("turns", turns.float())

    def part(self, name: str) -> Array:
        return self.w[f"{name}.weight".replace(".", "/")]

    def linear(self, x: Array, name: str) -> Array:
        return F.linear(x, self.part(name))

    def norm(self, x: Array, name: str) -> Array:
        return F.rms_norm(x, x.shape[-1:], self.part(name), self.config.rms_eps)

    def rope(self, x: Array, pos: Array | None) -> Array:
        pairs = x.float().unflatten(-1, (-1, 2))
        turns = self.turns if self.real else torch.view_as_complex(self.turns)
        turns = turns[: x.shape[1]] if pos is None else turns[pos]
        if not self.real:
            rotated = torch.view_as_complex(pairs) * turns.unsqueeze(-2)
            return torch.view_as_real(rotated).flatten(-2).type_as(x)
        (a, b), (c, s) = pairs.unbind(-1), turns.unsqueeze(-3).unbind(-1)
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).type_as(x)

    def forward(
        self,
        tokens: Array,
        targets: Array,
        weights: Array | None = None,
        pos: Array | None = None,
        seq: Array | None = None,
    ) -> Array:
        """Mean loss; with `weights` their sum of losses. `pos` and `seq` tell documents of a row apart."""
        c = self.config
        mask = None if seq is None else (seq[:, None, :, None] == seq[:, None, None, :]).tril()
        h = F.embedding(tokens, self.part("token_embd"))
        for i in range(c.block_count):
            x = self.norm(h, f"blk.{i}.attn_norm")
            q, k, v = (
                self.linear(x, f"blk.{i}.attn_{name}").unflatten(-1, (-1, c.head_width))
                for name in "qkv"
            )
            y = F.scaled_dot_product_attention(
                self.rope(q, pos).transpose(1, 2),
                self.rope(k, pos).transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=c.head_count != c.head_count_kv,
            )
            h = h + self.linear(y.transpose(1, 2).flatten(-2), f"blk.{i}.attn_output")
            x = self.norm(h, f"blk.{i}.ffn_norm")
            gate, up = self.linear(x, f"blk.{i}.ffn_gate"), self.linear(x, f"blk.{i}.ffn_up")
            h = h + self.linear(F.silu(gate) * up, f"blk.{i}.ffn_down")
        logits = F.linear(self.norm(h, "output_norm"), self.part("token_embd"))
        if weights is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses @ weights.flatten()


class Tuned(Llama):
    """The model frozen, with low-rank additions to the matrices of its blocks, as PEFT computes them."""

    def __init__(
        self,
        config: Config,
        values: Mapping[str, np.ndarray],
        rank: int,
        scale: float,
        real: bool = False,
    ) -> None:
        super().__init__(config, values, real)
        self.scale = scale
        self.w.requires_grad_(False)
        matrices = {
            name: w for name, w in self.w.items() if name.startswith("blk") and w.dim() == 2
        }
        halves = {
            half: {
                name: torch.nn.Parameter(1e-3 * torch.randn(shape(w)))
                for name, w in matrices.items()
            }
            for half, shape in (
                ("a", lambda w: (rank, w.shape[1])),
                ("b", lambda w: (w.shape[0], rank)),
            )
        }
        self.a, self.b = (torch.nn.ParameterDict(halves[half]) for half in "ab")

    def linear(self, x: Array, name: str) -> Array:
        key = f"{name}.weight".replace(".", "/")
        low = F.linear(F.linear(x, self.a[key]), self.b[key])
        return super().linear(x, name) + self.scale * low


def optimizer(
    model: Llama, lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1
) -> Update:
    """AdamW in one fused kernel, with decay for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


class Trained:
    """A model in training on packtrain's batches, with clipping by global norm unless `max_norm` is 0.

    forward  the model itself, or what has been made of it, such as torch.compile's
    """

    def __init__(self, model: Llama, update: Update, max_norm: float, forward: Any = None) -> None:
        self.model, self.update, self.max_norm = model, update, max_norm
        self.forward = model if forward is None else forward

    def step(self, batches: Sequence[Batch], rate: float) -> float:
        """Mean loss of a step over micro-batches, before its update."""
        self.update.zero_grad()
        tokens, total = counted(batches), 0.0
        for batch in batches:
            loss = self._sum(batch) / tokens
            loss.backward()
            total += loss.item()
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        for group in self.update.param_groups:
            group["lr"] = rate
        self.update.step()
        return total

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss over batches."""
        with torch.no_grad():
            return sum(self._sum(batch).item() for batch in batches) / counted(batches)

    def _sum(self, batch: Batch) -> Array:
        device = next(self.model.parameters()).device
        arrays = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
        weights, seq = arrays["weights"], arrays["seq"]
        ids = arrays["tokens"].long(), arrays["targets"].long()
        if not seq.any():  # one document in each row: without a mask it is faster
            return self.forward(*ids, weights)
        return self.forward(*ids, weights, arrays["pos"].long(), seq)


def counted(batches: Sequence[Batch]) -> float:
    """Targets that count."""
    return float(sum(batch["weights"].sum() for batch in batches))
