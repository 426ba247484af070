"""Describes an architecture: its differences from llama, its GGUF keys, and the checkpoints that convert to it.

Plain data; each of the other modules of this folder defines one architecture, and nothing here knows any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

# architectures take both from here
from packtrain.models.arch.hf_config import HFConfig as HFConfig
from packtrain.models.arch.size_fields import ModelSizes as ModelSizes

RowSpans = tuple[tuple[int, int], ...]
Keys = dict[str, int | float | bool | str | list[bool] | list[int] | list[float]]
# keys of GGUF files that several architectures have
EXPERT_KEYS = {"expert_count": 0, "expert_used_count": None}
SOFTMAX_GATING, SIGMOID_GATING = 1, 2  # values of expert_gating_func
ONLY_EXPERTS = dict.fromkeys((*EXPERT_KEYS, "expert_feed_forward_length"))
YARN_BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
# optional tensors
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
NORM_BIASES = ("attn_norm.bias", "ffn_norm.bias", "output_norm.bias")
FUSED_QKV = ("attn_qkv.weight", "attn_qkv.bias")
UNGATED_BIASES = ("attn_output.bias", "ffn_up.bias", "ffn_down.bias")
MORE_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
FACTORS = "rope_freqs.weight"
LONG, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CHOICE = "exp_probs_b.bias"  # added to experts' weights only to choose experts
# of a short convolution: gates of its input and output, and its input, which are rows of one matrix
CONV_INPUTS = ("shortconv.before", "shortconv.after", "shortconv.x")
CONV_INPUT, CONV_OUT, FILTERS = "shortconv.in_proj", "shortconv.out_proj", "shortconv.conv.weight"
# of a scan: the gate, the convolution's input and the steps, which are rows of one matrix; names without an ending
SCAN_IN = ("ssm_gate", "ssm_x", "ssm_step")
SCAN_KEYS = dict.fromkeys(
    ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
)
SCAN_INPUT, SCAN_OUT, SCAN_FILTERS = "ssm_in", "ssm_out", "ssm_conv1d.weight"
UNSUFFIXED_SCAN_WEIGHTS = ("ssm_a", "ssm_d")
# of a gated delta net: the convolution's input, the output's gate, and betas and decays of heads, fused or separate
DELTA_IN, DELTA_HEADS, DELTA_EACH = ("attn_qkv", "attn_gate"), "ssm_ba", ("ssm_beta", "ssm_alpha")
# weights with several axes that are not matrices: always f32, without LoRA adapters
NON_MATRIX_SUFFIXES = (
    "_norm.weight", ".bias", FILTERS, SCAN_FILTERS, *(f".{name}" for name in UNSUFFIXED_SCAN_WEIGHTS),
    "altup_router.weight", "altup_correct_coef.weight", "altup_predict_coef.weight",
)  # fmt: skip
# modules of a block in checkpoints
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
}  # fmt: skip
FFN_NORM = {"post_attention_layernorm": "ffn_norm"}
POST_ATTENTION_NORM = {"post_attention_layernorm": "post_attention_norm"}
NUMBERED = ("w1", "w3", "w2")


def feed_forward(
    module: str, suffix: str = "", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Return {f"{module}.{name}": GGUF name} for `names`: ffn_gate, ffn_up and ffn_down, each followed by `suffix`."""
    parts = zip(names, ("gate", "up", "down"), strict=True)
    return {f"{module}.{name}": f"ffn_{part}{suffix}" for name, part in parts}


FEED_FORWARD = feed_forward("mlp")
BLOCK = ATTENTION | FFN_NORM | FEED_FORWARD
SCAN_MODULES = {
    "mamba.in_proj": SCAN_INPUT, "mamba.conv1d": "ssm_conv1d", "mamba.dt": "ssm_dt", "mamba.A": "ssm_a",
    "mamba.D": "ssm_d", "mamba.norm": "ssm_norm", "mamba.out_proj": SCAN_OUT,
}  # fmt: skip
SCAN_SUFFIX_RENAMES = {".A_log": ".A.weight", ".D": ".D.weight", ".dt_bias": ".dt.bias"}
EXPERT_MODULES = feed_forward("mlp.experts.{}", "_exps")
SCORED_ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b"}
SCORE_RENAMES = {"e_score_correction_bias": "e_score_correction.bias"}
# of the embeddings that each block has for itself: table, projection, and the projection's norm
LAYER_INPUTS = "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"
# of several residual streams: matrices that make all but the first from the embedding, and that merge them
STREAMS_IN, STREAMS_OUT = "altup_proj", "altup_unembd_proj"
EXPERT_SCALES = "ffn_gate_inp.scale", "ffn_down_exps.scale"
LAYER_SCALE = "layer_output_scale.weight"
SHARED = feed_forward("mlp.shared_experts", "_shexp")
QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix, or a stack of matrices, by its name and shape."""
    return len(shape) > 1 and not name.endswith(NON_MATRIX_SUFFIXES)


# metadata keys that follow from the sizes of a model
SIZE_KEYS: Mapping[str, Callable[[ModelSizes], int]] = {
    "vocab_size": lambda sizes: sizes.vocab_size, "rope.dimension_count": lambda sizes: sizes.head_width,
    "attention.key_length": lambda sizes: sizes.head_width, "attention.value_length": lambda sizes: sizes.head_width,
    "leading_dense_block_count": lambda sizes: sizes.leading_dense_block_count,
    "expert_shared_feed_forward_length": lambda sizes: sizes.expert_shared_feed_forward_length,
    "expert_shared_count": lambda s: s.expert_shared_feed_forward_length // s.expert_width,
}  # fmt: skip
HEAD_WIDTHS = ("attention.key_length", "attention.value_length")
SHARED_AND_DENSE = ("expert_shared_count", "leading_dense_block_count")


def fixed(**values: Any) -> dict[str, tuple[Any, ...]]:
    """Return Family.required_values, {key: (default, allowed value)}, where `values` are both: key=value."""
    return {key: (value, value) for key, value in values.items()}


OptionalNames = Callable[[HFConfig], tuple[str, ...]]


def with_tensors(
    *names: str, true_flags: tuple[str, ...] = (), **names_by_flag: tuple[str, ...]
) -> OptionalNames:
    """Return a function config -> names of optional tensors, for Family.optional_tensors: always `names`, and for each
    flag, flag=names, that config.json sets, its names. Flags in `true_flags` count as set if config.json lacks them."""

    def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
        flagged = (n for key, n in names_by_flag.items() if hf_config.flag(key, key in true_flags))
        return (*names, *chain(*flagged))

    return optional_tensors


def grouped_heads(sizes: ModelSizes) -> tuple[RowSpans, RowSpans, RowSpans]:
    """Return spans, each (first row, end), of the rows of q, of k and of v in a fused QKV matrix, whose rows are stored
    in groups, one for each K/V head: its queries, its key, its value."""
    d, num_groups = sizes.head_width, sizes.head_count_kv
    each = sizes.head_count // num_groups + 2
    q, k, v = (
        tuple(((g * each + first) * d, (g * each + end) * d) for g in range(num_groups))
        for first, end in ((0, each - 2), (each - 2, each - 1), (each - 1, each))
    )
    return q, k, v


Changed = Callable[[np.ndarray, int], np.ndarray]  # (rows, number of the first) -> rows


def decays_from_logs(rows: np.ndarray, first: int) -> np.ndarray:
    """Compute a scan's decays from their logarithms: -exp(rows). `first`, a row number, is unused; see Changed."""
    decay_rows: np.ndarray = -np.exp(rows)
    return decay_rows


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The experts of a checkpoint's blocks. A size is a key of the config and a default."""

    # modules of one expert, with {} for its number, and the tensors that stack them for all experts
    matrix_modules: Mapping[str, str]
    count_key: tuple[str, int]
    used_count_key: tuple[str, int]
    width: tuple[str, int] | None = None  # width of an expert; None: the feed-forward's
    # width of the shared expert, and number of first blocks without experts
    shared_and_dense: Callable[[HFConfig], tuple[int, int]] = lambda hf_config: (0, 0)
    # by tensor, for modules that stack experts (E, inputs, outputs) already: the module, which of its matrices the
    # tensor is, and how many matrices share the module's outputs
    stacked_matrices: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    is_contiguous: bool = False  # outputs of each matrix stand together in the module, not in turn
    rows: bool = False  # stacked modules are (E, outputs, inputs)


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of a checkpoint's modules outside its blocks, and of its list of blocks; `prefix` may be missing.

    outside  other modules outside blocks, and the tensors they become
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    blocks: str = "layers"
    norm: str = "norm"
    outside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """Hugging Face checkpoints of some model classes, and how to convert them to a file of the architecture."""

    model_classes: tuple[str, ...]
    # modules of a block and the tensors they become, in the file's order; {} is the number of a head
    block_modules: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    # additional metadata that no field below states; refuses configs that would compute something else
    extra_metadata: Callable[[HFConfig, ModelSizes], Keys] = lambda hf_config, sizes: {}
    experts: ExpertLayout | None = None
    names: CheckpointNames = CheckpointNames()  # names of modules outside blocks
    # returns the config with the keys that most families have
    normalize_config: Callable[[HFConfig], HFConfig] = lambda hf_config: hf_config
    # other names of modules of a block, which some checkpoints use, and their usual names
    module_aliases: Mapping[str, str] = field(default_factory=dict)
    # biases and other tensors that only some models have, by the config; None: by its usual keys
    optional_tensors: OptionalNames | None = None
    # by key of the config: its default, then the values without which llama.cpp would compute something else
    required_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    size_keys: tuple[str, ...] = ()  # additional metadata keys, of those in SIZE_KEYS
    # share of a head that rope rotates unless the config says so; 0: no metadata says how much it rotates
    rotated_share: float = 0.0
    # endings of tensors that are left out, because they are computed
    computed_suffixes: tuple[str, ...] = ()
    is_transposed: bool = False  # matrices of blocks are stored as (inputs, outputs)
    # by tensor: rows of the checkpoint's tensor, each (from, to), in the file's order
    row_spans: Callable[[ModelSizes], Mapping[str, RowSpans]] = lambda sizes: {}
    # by tensor: columns of the checkpoint's tensor, each (from, to), in the file's order
    column_spans: Callable[[ModelSizes], Mapping[str, RowSpans]] = lambda sizes: {}
    # modules whose rows belong to several tensors
    fused_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # types of rope scaling that `extra_metadata` describes
    rope_scaling_types: tuple[str, ...] = ()
    # keys that llama.cpp's converter leaves out; here, too, if they have their default
    omitted_keys: tuple[str, ...] = ()
    # Config fields: which blocks attend, and sizes of convolutions or scans; empty: all attend
    mixer_fields: Callable[[HFConfig], Mapping[str, Any]] = lambda hf_config: {}
    # Config fields by which blocks differ otherwise
    per_block_fields: Callable[[HFConfig], Mapping[str, Any]] = lambda hf_config: {}
    # divisors of rope's frequencies that only the config knows
    factors: Callable[[HFConfig], np.ndarray] | None = None
    # functions that change values, by the names of tensors within their block
    changes: Callable[[HFConfig, ModelSizes], Mapping[str, Changed]] = lambda hf_config, sizes: {}
    # conversion scales matrices by factors of the config, so that PEFT's adapters do not fit files
    has_scaled_matrices: bool = False
    tied_by_default: bool = False  # default of whether the embedding is also the output head
    norm_shift: float = 0.0  # added to the weights of norms
    rope_freq_base: float = 10_000.0
    # width of a head if the config has none; 0: hidden_size / num_attention_heads
    default_head_width: int = 0
    has_qkv_bias: bool = False  # queries, keys and values have biases, whatever the config says
    # rope rotates the pairs (2i, 2i + 1) of a head, as in files of the architecture
    interleaved_rope: bool = False
    # whether to add a space before texts; None: as the tokenizer's config says
    space_prefix: bool | None = None
    # GGUF's tokenizer model for vocabularies that spell bytes as <0x0A> and have merges; "": scores replace the merges
    merged: str = ""
    # endings of tensors' names, and the usual endings
    suffix_renames: Mapping[str, str] = field(default_factory=dict)
    # checkpoints may have blocks after the last, which only guess more tokens
    more_blocks: bool = False
    # model class whose family fits a config instead; "": this family fits
    other_class: Callable[[HFConfig], str] = lambda hf_config: ""
    # special tokens by GGUF's names, for vocabularies that have them if the folder names no others
    special: Mapping[str, str] = field(default_factory=dict)
    latent_module: str = ""  # module that makes keys and values of all heads from a narrow vector
    blank: str = ""  # prefix of placeholder pieces, which stand for nothing

    def check_values(self, hf_config: HFConfig) -> None:
        """Raise InputError for a config key whose value, or default, is none of those in required_values."""
        for key, (default, *allowed) in self.required_values.items():
            hf_config.require_one_of(key, default, *allowed)

    def metadata(self, hf_config: HFConfig, sizes: ModelSizes) -> Keys:
        """Return GGUF keys, without the architecture's prefix, that only this family has. Raises InputError."""
        keys: Keys = {key: SIZE_KEYS[key](sizes) for key in self.size_keys}
        if self.rotated_share:
            keys["rope.dimension_count"] = hf_config.rotated_width(
                sizes.head_width, self.rotated_share
            )
        return keys | self.extra_metadata(hf_config, sizes)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Differences between the models of one architecture and llama, and its keys in files and checkpoints."""

    name: str
    halves: bool = False  # rope rotates the pairs (i, i + R / 2), not (2i, 2i + 1)
    use_gelu: bool = False  # the feed-forward's activation is gelu (tanh form), not silu
    # the feed-forward has a gate; else its activation is gelu or the square of relu
    gated: bool = True
    layer_norms: bool = False  # norms subtract the mean, and may have biases
    # attention and feed-forward read the output of one norm, if there is no second norm
    is_parallel: bool = False
    # positions have embeddings, which are added to those of tokens; there is no rope
    learned_positions: bool = False
    multiplies_logits: bool = False  # logits are multiplied by the key logit_scale, not divided
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(embedding_length)
    head_norms: bool = False  # queries and keys are normalized per head, before rope
    qk_norms_after_rope: bool = False  # queries and keys are normalized per head, after rope
    # rotated queries and keys are normalized without weights, unless there are 128 experts
    unweighted_qk_norms: bool = False
    joint_qk_norms: bool = False  # queries and keys are normalized before rope, all heads together
    pre_norms: bool = True  # inputs of attention and feed-forward are normalized
    ffn_norm: str = "ffn_norm"  # name of the norm before the feed-forward
    last_norm: str = "output_norm"  # name of the norm before the head
    # outputs of attention and feed-forward are normalized before they are added
    post_norms: bool = False
    fused_qkv: bool = False  # attn_qkv stacks queries, keys and values
    fused_ffn: bool = False  # ffn_up stacks gate and up
    always_tied: bool = False  # there is never a separate output head
    always_untied: bool = False  # there is always a separate output head
    # heads are embedding_length / head_count wide, whatever the keys say
    fixed_head_width: bool = False
    partial_rope: bool = False  # rope may rotate only a part of each head
    rope_pause: int = 0  # every N-th block has no rope
    # in blocks with a window, tokens see only their chunk of N tokens, whatever the key says
    attention_chunk: int = 0
    # blocks without rope multiply queries by 1 + this factor * log(number of the chunk)
    chunk_temperature: float = 0.0
    # in a model with windows, blocks without a window have no rope
    rope_only_in_windows: bool = False
    unscaled_window_rope: bool = False  # blocks with a window have rope without scaling
    # a model with this many blocks scales scores by embedding_length / head_count
    wide_score_blocks: int = 0
    # an expert's weight is the sigmoid of its logit, not a softmax; None: as the key says
    sigmoid_routing: bool | None = False
    # inputs of experts are multiplied by the experts' weights, not their outputs
    weigh_expert_inputs: bool = False
    shared_expert_alike: bool = False  # there is a shared expert, as wide as the others
    # weights of the chosen experts are divided by their sum; None: as the key says
    normalized_expert_weights: bool | None = True
    # each head has a logit without a value, which every query sees beside those of keys
    attention_sinks: bool = False
    clamped: bool = False  # experts have gpt-oss's clamped activation
    # the shared expert's output is multiplied by the sigmoid of a logit
    gated_shared_expert: bool = False
    # blocks with attention also have a scan of the same input; both outputs are added
    parallel_scan: bool = False
    value_norms: bool = False  # values are normalized per head, without weights
    unscaled_scores: bool = False  # attention scores are not divided
    far_factors: bool = False  # factors of rope are for blocks without a window only
    # blocks with experts also have a dense feed-forward; outputs are normalized, then added
    parallel_dense_ffn: bool = False
    unsuffixed_ffn_norm: bool = False  # the name of the feed-forward's norm has no ending
    # residual streams, of which a block computes with the first; 0: the usual one
    num_streams: int = 0
    # rank of a product beside attention with the same input; both are added and divided by sqrt(2); 0: there is none
    laurel_rank: int = 0
    # in the first N blocks, gates below their mean + 1.64 deviations are 0
    num_sparse_blocks: int = 0
    # blocks after the first N use earlier keys and values, whatever keys say; 0: as keys say
    num_kv_blocks: int = 0
    # scans are gated delta nets with heads "grouped" (by group) or "tiled" (groups in turn)
    delta: str = ""
    # a head's output is multiplied by the sigmoid of a gate, whose rows follow the query's
    gated_heads: bool = False
    # additional GGUF keys with their defaults; None: required
    key_defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()  # keys without effect, as in llama.cpp
    # the only values that these keys may have
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    zero_keys: tuple[str, ...] = ()  # keys that may be 0 although that is not their default
    # tensors that a model may have: those of blocks by their name within one
    optional_tensors: tuple[str, ...] = BIASES
    # matrices of a block whose adapters llama.cpp applies only when merged
    merge_only_weights: tuple[str, ...] = ()
    window_blocks: int = 0  # only a model with this many blocks has windows; 0: every model
    # a model with this many blocks is a 70B, to which llama-quantize gives more bits
    blocks_70b: int = 0
    # a 70B gets more bits only if it has fewer value heads than query heads
    grouped_70b: bool = False
    families: tuple[Family, ...] = ()

    def has_windows(self, blocks: int) -> bool:
        """Whether a model with this many blocks can have windows."""
        has_pattern = "attention.sliding_window_pattern" in self.key_defaults
        return has_pattern and self.window_blocks in (0, blocks)

    @property
    def has_uneven_blocks(self) -> bool:
        """Whether sizes may differ from block to block, and later blocks use earlier keys and values."""
        return self.num_kv_blocks > 0 or "attention.shared_kv_layers" in self.key_defaults

    def score_width(self, sizes: ModelSizes) -> int:
        """Return the width by whose root scores are divided: a head's, or embedding_length / head_count."""
        is_wide = sizes.block_count == self.wide_score_blocks
        return sizes.embedding_length // sizes.head_count if is_wide else sizes.head_width
