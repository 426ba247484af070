"""What a model is: its architecture's traits and its own sizes, and what follows from both for each block.

Plain data and arithmetic on it. `metadata` reads it from GGUF keys, `transformer` makes graphs of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from packtrain.models.lora import Lora

Scaling = Literal["none", "linear", "yarn", "longrope"]
LONGEST_DIVIDED = 1e-3  # least length of YaRN's blend, in pairs: ggml's


@dataclass(frozen=True, slots=True)
class Architecture:
    """What all models of one architecture do unlike a llama.

    halves            rope turns the pairs (i, i + R / 2), not (2i, 2i + 1)
    gelu              the feed-forward's gate is gelu (tanh form), not silu
    scaled_embedding  embeddings are multiplied by sqrt(embedding_length)
    head_norms        queries and keys are normed by head, before rope
    post_norms        what attention and feed-forward give is normed before it is added
    fused             attn_qkv holds queries, keys and values, ffn_up holds gate and up, one below the other
    always_tied       there is never a head of its own
    square            heads are embedding_length / head_count wide, whatever the keys say
    rope_pause        every so many-th block is without rope
    wide_blocks       a model of so many blocks scales scores by the width of the stream over its heads
    """

    halves: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    head_norms: bool = False
    post_norms: bool = False
    fused: bool = False
    always_tied: bool = False
    square: bool = False
    rope_pause: int = 0
    wide_blocks: int = 0


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(),
        "mistral3": Architecture(),
        "qwen2": Architecture(halves=True, square=True),
        "qwen3": Architecture(halves=True, head_norms=True),
        "gemma": Architecture(halves=True, gelu=True, scaled_embedding=True, always_tied=True),
        "gemma2": Architecture(
            halves=True,
            gelu=True,
            scaled_embedding=True,
            post_norms=True,
            always_tied=True,
            wide_blocks=46,
        ),
        "gemma3": Architecture(
            halves=True,
            gelu=True,
            scaled_embedding=True,
            head_norms=True,
            post_norms=True,
            wide_blocks=62,
        ),
        "phi3": Architecture(halves=True, fused=True, square=True),
        "smollm3": Architecture(rope_pause=4),
    }
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope is stretched beyond the context a model was first trained with; the keys `rope.scaling.*`.

    original_context  0 is the model's context_length
    """

    type: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0

    @property
    def divisor(self) -> float:
        """By what frequencies are divided; with yarn only the low ones."""
        return 1.0 if self.type == "none" else self.factor

    def magnitude(self, divisor: float) -> float:
        """By what cosines and sines are multiplied where frequencies are divided by `divisor`: llama-context.cpp."""
        if self.type != "yarn":
            return self.attn_factor
        whole = _growth(self.factor, 1.0)
        if self.log_multiplier:
            whole /= _growth(self.factor, self.log_multiplier)
        return self.attn_factor * whole * _log_growth(divisor) / _log_growth(self.factor)

    def blend(self, dims: int, base: float, context: int) -> tuple[float, float] | None:
        """Pairs up to the first number keep their frequency, those from the second on are divided: YaRN's ramp."""
        if self.type != "yarn":
            return None

        def pair(turns: float) -> float:
            length = context / (2 * math.pi * turns)
            return dims * math.log(length) / (2 * math.log(base))

        low = max(0.0, math.floor(pair(self.beta_fast)))
        high = min(dims - 1.0, math.ceil(pair(self.beta_slow)))
        return low, max(high, low + LONGEST_DIVIDED)


def _log_growth(factor: float) -> float:
    return 1.0 + 0.1 * math.log(factor)


def _growth(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + 0.1 * multiplier * math.log(factor)


@dataclass(frozen=True, slots=True)
class Rope:
    """How a block turns queries and keys: see ops.rope_table."""

    base: float
    divisor: float = 1.0
    blend: tuple[float, float] | None = None
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Config:
    """A model's sizes and settings; names follow the GGUF metadata keys.

    key_length         width of a head; None is embedding_length / head_count
    window             how many tokens, itself included, a token sees in blocks with a window; 0 is all
    window_pattern     every so many-th block has no window; or for each block whether it has one
    temperature_scale  queries grow with the logarithm of their position by this much
    optional           tensors that not every model of the architecture has: "attn_q.bias" of all blocks,
                       "rope_freqs.weight"
    lora               low-rank additions to its matrices
    """

    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    rope_freq_base: float = 10_000.0
    rms_eps: float = 1e-5
    tied: bool = True
    architecture: str = "llama"
    key_length: int | None = None
    rope_dims: int | None = None
    rope_freq_base_swa: float | None = None
    rope_scaling: RopeScaling = RopeScaling()
    window: int = 0
    window_pattern: int | tuple[bool, ...] = 1
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    temperature_scale: float = 0.0
    expert_count: int = 0
    expert_used_count: int = 0
    optional: tuple[str, ...] = ()
    lora: Lora | None = None

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def head_width(self) -> int:
        return self.key_length or self.embedding_length // self.head_count

    @property
    def rope_width(self) -> int:
        """How many elements of a head are turned."""
        return self.rope_dims or self.head_width

    @property
    def original_context(self) -> int:
        """The context the model was first trained with."""
        return self.rope_scaling.original_context or self.context_length

    @property
    def attention_scale(self) -> float:
        wide = self.block_count == self.traits.wide_blocks
        width = self.embedding_length // self.head_count if wide else self.head_width
        return 1.0 / math.sqrt(width)

    def window_of(self, block: int) -> int:
        """How many tokens a token sees in that block; 0 is all."""
        if isinstance(self.window_pattern, tuple):
            return self.window if self.window_pattern[block] else 0
        every = self.window_pattern
        return self.window if not every or block % every < every - 1 else 0

    def rope_of(self, block: int) -> Rope | None:
        """How that block turns queries and keys, if it does."""
        pause, scaling = self.traits.rope_pause, self.rope_scaling
        if pause and (block + 1) % pause == 0:
            return None
        base, divisor = self.rope_freq_base, scaling.divisor
        if self.rope_freq_base_swa and self.window_of(block):
            base, divisor = self.rope_freq_base_swa, 1.0
        blend = scaling.blend(self.rope_width, base, self.original_context)
        return Rope(base, divisor, blend, scaling.magnitude(divisor))

    @property
    def slices(self) -> Mapping[str, tuple[str, int, int]]:
        """Parts of fused tensors: in which tensor they are, from which row on, and how many rows."""
        if not self.traits.fused:
            return {}
        q, kv = self.head_count * self.head_width, self.head_count_kv * self.head_width
        f = self.feed_forward_length
        return {
            "attn_q": ("attn_qkv", 0, q), "attn_k": ("attn_qkv", q, kv), "attn_v": ("attn_qkv", q + kv, kv),
            "ffn_gate": ("ffn_up", 0, f), "ffn_up": ("ffn_up", f, f),
        }  # fmt: skip


PRESETS = {
    "1m": Config(2_048, 256, 128, 4, 384, 4, 2),
    "15m": Config(32_000, 256, 256, 8, 768, 8, 8),
    "110m": Config(32_000, 512, 768, 12, 2_048, 12, 12),
}
