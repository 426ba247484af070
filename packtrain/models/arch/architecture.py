"""What an architecture is: how its models differ from llamas, what their files say, which checkpoints become them.

Plain data, which the other modules of this folder give, one for each architecture; nothing here knows any of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.models.arch.given import Given

Keys = dict[str, int | float | bool | str]
# keys of GGUF files that several architectures have
EXPERT_KEYS = {"expert_count": 0, "expert_used_count": None}
BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
# tensors that a model may have or not
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
MORE_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# modules of a block in checkpoints
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
}  # fmt: skip
FFN_NORM = {"post_attention_layernorm": "ffn_norm"}
FEED_FORWARD = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
BLOCK = ATTENTION | FFN_NORM | FEED_FORWARD
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's sizes; names follow the GGUF metadata keys.

    key_length                  width of a head; None is embedding_length / head_count
    expert_feed_forward_length  width of an expert; None is feed_forward_length
    """

    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    key_length: int | None = None
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int | None = None

    @property
    def head_width(self) -> int:
        return self.key_length or self.embedding_length // self.head_count

    @property
    def expert_width(self) -> int:
        return self.expert_feed_forward_length or self.feed_forward_length


def no_keys(given: Given, sizes: Sizes) -> Keys:
    return {}


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a checkpoint's blocks. Sizes are a key of its config, and the value where that does not say.

    matrices  of one expert, whose number stands for {}; and the tensor that holds those of all
    width     None is the feed-forward's
    """

    matrices: Mapping[str, str]
    count: tuple[str, int]
    used: tuple[str, int]
    width: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Checkpoints of some classes in Hugging Face's layout, and how one becomes a file of the architecture.

    block         modules of a block and the tensors they become, in the order of the file
    keys          metadata beside what all have; refuses configs that would compute something else
    tied          whether the embedding is the head where the config does not say
    norm_shift    what is added to the weights of norms
    head_width    where the config does not say; 0 is hidden_size / num_attention_heads
    qkv_bias      queries, keys and values have biases, whatever the config says
    space_prefix  whether texts get a space before them; None is as the tokenizer's config says
    """

    classes: tuple[str, ...]
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    keys: Callable[[Given, Sizes], Keys] = no_keys
    experts: Experts | None = None
    tied: bool = False
    norm_shift: float = 0.0
    rope_freq_base: float = 10_000.0
    head_width: int = 0
    qkv_bias: bool = False
    space_prefix: bool | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What all models of one architecture do unlike a llama, and what belongs to it in files and checkpoints.

    halves            rope turns the pairs (i, i + R / 2), not (2i, 2i + 1)
    gelu              the feed-forward's gate is gelu (tanh form), not silu
    scaled_embedding  embeddings are multiplied by sqrt(embedding_length)
    head_norms        queries and keys are normed by head, before rope
    post_norms        what attention and feed-forward give is normed before it is added
    fused             attn_qkv holds queries, keys and values, ffn_up holds gate and up, one below the other
    always_tied       there is never a head of its own
    square            heads are embedding_length / head_count wide, whatever the keys say
    partial_rope      rope may turn a part of each head only
    rope_pause        every so many-th block is without rope
    wide_blocks       a model of so many blocks scales scores by the width of the stream over its heads

    keys              of GGUF files, beside the shared ones, and what holds where a file does not say; None is a must
    ignored           keys that change nothing, as in llama.cpp
    optional          tensors that a model may have or not: those of blocks by their name within one
    blocks_70b        a model of so many blocks is a 70B, to which llama-quantize gives more bits,
    grouped_70b       or only if it has fewer heads of values than of queries
    """

    name: str
    halves: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    head_norms: bool = False
    post_norms: bool = False
    fused: bool = False
    always_tied: bool = False
    square: bool = False
    partial_rope: bool = False
    rope_pause: int = 0
    wide_blocks: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = BIASES
    blocks_70b: int = 0
    grouped_70b: bool = False
    families: tuple[Family, ...] = ()

    def scored_width(self, sizes: Sizes) -> int:
        """Scores are divided by the root of this width."""
        wide = sizes.block_count == self.wide_blocks
        return sizes.embedding_length // sizes.head_count if wide else sizes.head_width
