"""Description of an architecture: how it differs from llama, its GGUF keys, and the checkpoints that convert to it.

Plain data; each of the other modules of this folder defines one architecture, and nothing here knows any of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

Spans = tuple[tuple[int, int], ...]
Keys = dict[str, int | float | bool | str | list[bool] | list[int] | list[float]]
# keys of GGUF files that several architectures have
EXPERT_KEYS = {"expert_count": 0, "expert_used_count": None}
ONLY_EXPERTS = dict.fromkeys((*EXPERT_KEYS, "expert_feed_forward_length"))
BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
# optional tensors
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
NORM_BIASES = ("attn_norm.bias", "ffn_norm.bias", "output_norm.bias")
FUSED = ("attn_qkv.weight", "attn_qkv.bias")
UNGATED_BIASES = ("attn_output.bias", "ffn_up.bias", "ffn_down.bias")
MORE_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
CHOICE = "exp_probs_b.bias"  # added to the weights of experts to choose some
# of a short convolution: what its input and its output are multiplied by, and its input; what they are rows of
CONV_IN = ("shortconv.before", "shortconv.after", "shortconv.x")
CONV_ROWS, CONV_OUT, FILTERS = "shortconv.in_proj", "shortconv.out_proj", "shortconv.conv.weight"
# of a scan: rows of its input matrix are gates, what is convolved, and steps; names without an ending
SCAN_IN = ("ssm_gate", "ssm_x", "ssm_step")
SCAN_KEYS = dict.fromkeys(
    ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
)
SCAN_ROWS, SCAN_OUT, SCAN_FILTERS = "ssm_in", "ssm_out", "ssm_conv1d.weight"
BARE = ("ssm_a", "ssm_d")
# of a gated delta net: what is convolved, the gate of what it gives, and betas and decays of heads, joined or apart
DELTA_IN, DELTA_HEADS, DELTA_EACH = ("attn_qkv", "attn_gate"), "ssm_ba", ("ssm_beta", "ssm_alpha")
# weights of several axes that are no matrices: they are always f32, and have no LoRA adapters
PLAIN = (
    "_norm.weight", ".bias", FILTERS, SCAN_FILTERS, *(f".{name}" for name in BARE), "altup_router.weight",
    "altup_correct_coef.weight", "altup_predict_coef.weight",
)  # fmt: skip
# modules of a block in checkpoints
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
}  # fmt: skip
FFN_NORM = {"post_attention_layernorm": "ffn_norm"}
FEED_FORWARD = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
BLOCK = ATTENTION | FFN_NORM | FEED_FORWARD
SCAN_MODULES = {
    "mamba.in_proj": SCAN_ROWS, "mamba.conv1d": "ssm_conv1d", "mamba.dt": "ssm_dt", "mamba.A": "ssm_a",
    "mamba.D": "ssm_d", "mamba.norm": "ssm_norm", "mamba.out_proj": SCAN_OUT,
}  # fmt: skip
SCAN_ENDS = {".A_log": ".A.weight", ".D": ".D.weight", ".dt_bias": ".dt.bias"}
EXPERT_MATRICES = {
    "mlp.experts.{}.gate_proj": "ffn_gate_exps", "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}  # fmt: skip
# of the embeddings that blocks have for themselves: rows, a projection, its norm; and what blocks are multiplied by
LAYER_INPUTS = "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"
# of several residual streams: matrices that make all but the first of it, and that bring them back; and of one block
STREAMS_IN, STREAMS_OUT = "altup_proj", "altup_unembd_proj"
EXPERT_SCALES = "ffn_gate_inp.scale", "ffn_down_exps.scale"
LAYER_SCALE = "layer_output_scale.weight"
SHARED = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix, or a stack of them."""
    return len(shape) > 1 and not name.endswith(PLAIN)


def no_keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {}


Changed = Callable[[np.ndarray, int], np.ndarray]  # rows of a tensor, and the number of the first


def decays(rows: np.ndarray, first: int) -> np.ndarray:
    """Those of a scan from their logarithms."""
    changed: np.ndarray = -np.exp(rows)
    return changed


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a checkpoint's blocks. A size is a key of its config and a default.

    matrices  of one expert, with {} for its number; and the tensor that stacks those of all
    width     None: the feed-forward's
    stacked   matrices of all experts that are one tensor (E, inputs, outputs) already: the tensor that they become, the
              module, and which of its outputs: the first, and one of how many
    together  the outputs of each stand together in such a tensor, not in turn
    rows      such tensors are (E, outputs, inputs)
    others    width of that expert, and how many of the first blocks have no experts
    """

    matrices: Mapping[str, str]
    count: tuple[str, int]
    used: tuple[str, int]
    width: tuple[str, int] | None = None
    others: Callable[[Given], tuple[int, int]] = lambda given: (0, 0)
    stacked: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    together: bool = False
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Where a checkpoint has the tensors outside its blocks, and its blocks; `prefix` may be missing.

    outside  modules of other tensors, and what they become
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    blocks: str = "layers"
    norm: str = "norm"
    outside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """Hugging Face checkpoints of some model classes, and how to convert them to a file of the architecture.

    block         modules of a block and the tensors they become, in the order of the file; {} is the number of a head
    names         where the other tensors are
    usual         the config with the keys that most have
    same          modules of a block that some checkpoints call otherwise, by that name
    optional      biases, and other tensors that only some models have, by the config; None: by its usual keys
    unused        ends of names of tensors that are computed
    transposed    matrices of blocks are stored as (inputs, outputs)
    spans         rows of the tensors of checkpoints, each (from, to), in the order of the file, by part; and ...
    columns       ... columns
    joined        modules whose rows several parts share out
    scalings      types of rope scaling that `keys` describes
    left_out      keys that llama.cpp's converter leaves out; here, too, if they have their default
    keys          additional metadata; refuses configs that would compute something else
    mixing        which blocks attend, and sizes of what the others have; nothing: all attend
    kinds         other fields of a Config, by which blocks differ
    factors       divisors of rope's frequencies that only the config knows
    changes       of values, by the names of tensors within their block
    scaled        by factors that only the config knows: PEFT's adapters do not fit the matrices of a file
    tied          default of whether the embedding is also the output head
    norm_shift    added to the weights of norms
    head_width    default; 0: hidden_size / num_attention_heads
    qkv_bias      queries, keys and values have biases, whatever the config says
    pairs         rope rotates the pairs (2i, 2i + 1) of a head, as in files of the architecture
    space_prefix  whether to add a space before texts; None: as the tokenizer's config says
    merged        kind of a vocabulary that spells bytes as <0x0A> and has merges; none: scores stand for them
    latent        the module of keys and values of all heads that are made from a narrow vector
    ends          ends of names of tensors, and how they would usually end
    more_blocks   checkpoints may have blocks after the last, which only guess more tokens
    other         the class whose family fits a config instead; nothing: this one does
    blank         what pieces begin with that stand for nothing yet
    special       tokens that have a meaning where the vocabulary has them and the folder says no other: by GGUF's names
    """

    classes: tuple[str, ...]
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    keys: Callable[[Given, Sizes], Keys] = no_keys
    experts: Experts | None = None
    names: Names = Names()
    usual: Callable[[Given], Given] = lambda given: given
    same: Mapping[str, str] = field(default_factory=dict)
    optional: Callable[[Given], tuple[str, ...]] | None = None
    unused: tuple[str, ...] = ()
    transposed: bool = False
    spans: Callable[[Sizes], Mapping[str, Spans]] = lambda sizes: {}
    columns: Callable[[Sizes], Mapping[str, Spans]] = lambda sizes: {}
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scalings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    mixing: Callable[[Given], Mapping[str, Any]] = lambda given: {}
    kinds: Callable[[Given], Mapping[str, Any]] = lambda given: {}
    factors: Callable[[Given], np.ndarray] | None = None
    changes: Callable[[Given, Sizes], Mapping[str, Changed]] = lambda given, sizes: {}
    scaled: bool = False
    tied: bool = False
    norm_shift: float = 0.0
    rope_freq_base: float = 10_000.0
    head_width: int = 0
    qkv_bias: bool = False
    pairs: bool = False
    space_prefix: bool | None = None
    merged: str = ""
    ends: Mapping[str, str] = field(default_factory=dict)
    more_blocks: bool = False
    other: Callable[[Given], str] = lambda given: ""
    special: Mapping[str, str] = field(default_factory=dict)
    latent: str = ""
    blank: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the models of one architecture differ from llama, and its keys in files and checkpoints.

    halves            rope rotates the pairs (i, i + R / 2), not (2i, 2i + 1)
    gelu              the feed-forward's activation is gelu (tanh form), not silu
    gated             the feed-forward has a gate; else its activation is gelu or the square of relu
    layer_norms       norms take the mean away, and may have biases
    parallel          attention and feed-forward read the same norm's output, if there is no second norm
    learned_positions positions have embeddings, which are added to those of tokens; there is no rope
    logits_times      logits are multiplied by the key logit_scale, not divided
    scaled_embedding  embeddings are multiplied by sqrt(embedding_length)
    head_norms        queries and keys are normalized per head, before rope
    late_norms        that is done after rope
    plain_norms       that is done without weights, where rope turns them and there are fewer experts than 128
    whole_norms       queries and keys are normalized before rope, too, but all heads together
    pre_norms         what attention and feed-forward read is normalized
    ffn_norm          the norm of what the feed-forward reads
    last_norm         the norm of what the head reads
    post_norms        the outputs of attention and feed-forward are normalized before they are added
    fused             attn_qkv stacks queries, keys and values
    fused_ffn         ffn_up stacks gate and up
    always_tied       there is never a separate output head
    always_apart      there always is one
    square            heads are embedding_length / head_count wide, whatever the keys say
    partial_rope      rope may rotate only a part of each head
    rope_pause        every N-th block has no rope
    chunk             blocks with a window see the tokens of their own so many, whatever the key says
    warmth            blocks without rope multiply queries by 1 plus this times the logarithm of their chunk's number
    windows_turn      in a model with windows, blocks without one have no rope
    windows_plain     blocks with a window have rope without scaling
    wide_blocks       a model with this many blocks scales scores by embedding_length / head_count
    sigmoids          an expert's weight is the sigmoid of its logit, not its part of the softmax; None: as the key says
    weighed_first     what experts read is multiplied by their weights, not what they give
    shared_alike      there is a shared expert, as wide as the others
    chosen_sum        the weights of the chosen experts are divided by their sum; None: as the key says
    sinks             each head has a logit that every query sees beside those of keys, without a value
    clamped           the activation of experts is the clamped one of gpt-oss
    shared_gate       what the shared expert gives is multiplied by the sigmoid of a logit
    scan_beside       blocks with attention have a scan, too, which reads the same; both are added
    value_norms       values are normalized per head, without weights
    plain_scores      attention scores are not divided
    far_factors       factors of rope are for blocks without a window only
    dense_beside      blocks with experts have a dense feed-forward, too; both are normalized, then added
    bare_ffn_norm     the name of the feed-forward's norm has no ending
    streams           the residual stream is so many, of which a block computes with the first; 0: there is one
    laurel            width of a product of two matrices beside attention, which reads the same; both are added and
                      divided by sqrt(2); 0: there is none
    sparse_blocks     in so many first blocks only gates beyond their mean and 1.64 deviations are not 0
    owning_blocks     later blocks have the keys and values of earlier ones, whatever keys say; 0: as they say
    delta             scans are gated delta nets: heads of a group stand together, or "tiled", that many groups apart
    gated_heads       what a head gives is multiplied by the sigmoid of a gate, whose rows follow those of its query

    keys              additional GGUF keys with their defaults; None: required
    ignored           keys without effect, as in llama.cpp
    neutral           values that keys must have if they are there
    zero              keys that may be 0 although that is not their default
    optional          tensors that a model may have: those of blocks by their name within one
    merged_only       matrices of a block whose adapters llama.cpp leaves out beside the base
    window_blocks     only a model with this many blocks has windows
    blocks_70b        a model with this many blocks is a 70B, to which llama-quantize gives more bits,
    grouped_70b       or only if it has fewer value heads than query heads
    """

    name: str
    halves: bool = False
    gelu: bool = False
    gated: bool = True
    layer_norms: bool = False
    parallel: bool = False
    learned_positions: bool = False
    logits_times: bool = False
    scaled_embedding: bool = False
    head_norms: bool = False
    late_norms: bool = False
    plain_norms: bool = False
    whole_norms: bool = False
    pre_norms: bool = True
    ffn_norm: str = "ffn_norm"
    last_norm: str = "output_norm"
    post_norms: bool = False
    fused: bool = False
    fused_ffn: bool = False
    always_tied: bool = False
    always_apart: bool = False
    square: bool = False
    partial_rope: bool = False
    rope_pause: int = 0
    chunk: int = 0
    warmth: float = 0.0
    windows_turn: bool = False
    windows_plain: bool = False
    wide_blocks: int = 0
    sigmoids: bool | None = False
    weighed_first: bool = False
    shared_alike: bool = False
    chosen_sum: bool | None = True
    sinks: bool = False
    clamped: bool = False
    shared_gate: bool = False
    scan_beside: bool = False
    value_norms: bool = False
    plain_scores: bool = False
    far_factors: bool = False
    dense_beside: bool = False
    bare_ffn_norm: bool = False
    streams: int = 0
    laurel: int = 0
    sparse_blocks: int = 0
    owning_blocks: int = 0
    delta: str = ""
    gated_heads: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    zero: tuple[str, ...] = ()
    optional: tuple[str, ...] = BIASES
    merged_only: tuple[str, ...] = ()
    window_blocks: int = 0
    blocks_70b: int = 0
    grouped_70b: bool = False
    families: tuple[Family, ...] = ()

    def windowed(self, blocks: int) -> bool:
        """Whether a model with so many blocks can have windows."""
        has_pattern = "attention.sliding_window_pattern" in self.keys
        return has_pattern and self.window_blocks in (0, blocks)

    @property
    def uneven(self) -> bool:
        """Whether sizes may differ from block to block, and later ones have keys and values of earlier ones."""
        return self.owning_blocks > 0 or "attention.shared_kv_layers" in self.keys

    def scored_width(self, sizes: Sizes) -> int:
        """Attention scores are divided by the square root of this width."""
        is_wide = sizes.block_count == self.wide_blocks
        return sizes.embedding_length // sizes.head_count if is_wide else sizes.head_width
