"""The same llama in PyTorch, eager and plain, as a peer for speed and memory. Shapes as packtrain's Config."""

import torch
import torch.nn.functional as F

from packtrain.models.llama import Config


class Llama(torch.nn.Module):
    """Tied head, grouped-query attention, RoPE on neighbouring pairs; parameters bear GGUF names."""

    def __init__(self, config: Config, values: dict) -> None:
        super().__init__()
        self.config = config
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
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        )

    def part(self, name: str) -> torch.Tensor:
        return self.w[f"{name}.weight".replace(".", "/")]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.part(name), self.config.rms_eps)

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(-2)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        c = self.config
        h = F.embedding(tokens, self.part("token_embd"))
        for i in range(c.block_count):
            x = self.norm(h, f"blk.{i}.attn_norm")
            q, k, v = (
                F.linear(x, self.part(f"blk.{i}.attn_{name}")).unflatten(-1, (-1, c.head_width))
                for name in "qkv"
            )
            y = F.scaled_dot_product_attention(
                self.rope(q).transpose(1, 2),
                self.rope(k).transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=c.head_count != c.head_count_kv,
            )
            h = h + F.linear(y.transpose(1, 2).flatten(-2), self.part(f"blk.{i}.attn_output"))
            x = self.norm(h, f"blk.{i}.ffn_norm")
            gated = F.silu(F.linear(x, self.part(f"blk.{i}.ffn_gate"))) * F.linear(
                x, self.part(f"blk.{i}.ffn_up")
            )
            h = h + F.linear(gated, self.part(f"blk.{i}.ffn_down"))
        logits = F.linear(self.norm(h, "output_norm"), self.part("token_embd"))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(model: Llama, lr: float) -> torch.optim.AdamW:
    """AdamW in one fused kernel, with decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
