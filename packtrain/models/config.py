"""The configuration of a model: architecture, sizes and settings, and values derived from them for each block.

Plain data and arithmetic. `model_metadata` reads a Config from GGUF keys, `transformer` builds graphs from it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.common.errors import InputError
from packtrain.common.text import long_context_warning
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import CONV_INPUT, CONV_INPUTS, LONG, SCAN_IN, SCAN_INPUT
from packtrain.models.arch.size_fields import ModelSizes
from packtrain.models.lora import Lora

ScalingType = Literal["none", "linear", "yarn", "longrope"]
MIN_BLEND_LENGTH = 1e-3  # least length of YaRN's blend, in pairs: ggml's


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rope scaling, which extends the context beyond that of pretraining; the keys `rope.scaling.*`."""

    type: ScalingType = "none"
    factor: float = 1.0
    original_context: int = 0  # 0: the model's context_length
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0

    @property
    def divisor(self) -> float:
        """Return the divisor of rope's frequencies, 1 without scaling; yarn divides only the low frequencies."""
        return 1.0 if self.type == "none" else self.factor

    def magnitude(self, divisor: float, is_latent: bool = False) -> float:
        """Return the factor of cosines and sines if frequencies are divided by `divisor`: llama-context.cpp. In latent
        attention (`is_latent`) with a log_multiplier, the scale of scores grows instead, see attention_growth."""
        if self.type != "yarn":
            return self.attn_factor
        growth = _yarn_growth(self.factor, 1.0)
        if self.log_multiplier:
            growth = 1.0 if is_latent else growth / _yarn_growth(self.factor, self.log_multiplier)
        return self.attn_factor * growth * _log_growth(divisor) / _log_growth(self.factor)

    @property
    def attention_growth(self) -> float:
        """Return rope scaling's factor of queries, and of keys, in latent attention's (MLA) scores: deepseek2.cpp."""
        log_growth = _log_growth(self.divisor) if self.type != "yarn" else 1.0
        # the key has a tenth of the multiplier
        length_growth = 1.0 + self.log_multiplier * math.log(self.divisor)
        return self.magnitude(self.divisor, True) * log_growth * length_growth

    def blend(
        self, rotated_width: int, base: float, trained_context: int, truncate: bool = True
    ) -> tuple[float, float] | None:
        """Return YaRN's ramp, (start, end) in numbers of rope pairs, else None: pairs before it keep their frequency,
        pairs after it are divided. `base`: rope's frequency base; `truncate`: start and end become whole numbers."""
        if self.type != "yarn":
            return None

        def pair_index(rotations: float) -> float:
            wavelength = trained_context / (2 * math.pi * rotations)
            return rotated_width * math.log(wavelength) / (2 * math.log(base))

        low, ramp_end = pair_index(self.beta_fast), pair_index(self.beta_slow)
        low, ramp_end = (math.floor(low), math.ceil(ramp_end)) if truncate else (low, ramp_end)
        low, ramp_end = max(0.0, low), min(rotated_width - 1.0, ramp_end)
        return low, max(ramp_end, low + MIN_BLEND_LENGTH)


def _log_growth(factor: float) -> float:
    """Compute YaRN's growth of the scale: 1 + 0.1 log(factor)."""
    return 1.0 + 0.1 * math.log(factor)


def _yarn_growth(factor: float, multiplier: float) -> float:
    """Return YaRN's factor on cosines and sines, 1 + 0.1 * multiplier * ln(factor); 1 without stretching."""
    return 1.0 if factor <= 1 else 1.0 + 0.1 * multiplier * math.log(factor)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of a block's queries and keys: see ops.rope_table."""

    base: float
    rotated_width: int
    divisor: float = 1.0
    blend: tuple[float, float] | None = None
    magnitude: float = 1.0
    use_factors: bool = True  # frequencies are divided by the file's rope factors, if there are any


@dataclass(frozen=True, slots=True)
class Config(ModelSizes):
    """A model's sizes and settings; names follow the GGUF metadata keys."""

    rope_freq_base: float = 10_000.0
    rms_eps: float = 1e-5
    tied: bool = True
    architecture: str = "llama"
    rope_freq_base_swa: float | None = None
    rope_scaling: RopeScaling = RopeScaling()
    window: int = 0  # sliding window: tokens, itself included, that a token attends to; 0: all
    # every N-th block has no window; or for each block whether it has a window
    window_pattern: int | tuple[bool, ...] = 1
    key_length_swa: int = 0  # width of heads of blocks with a window; 0: key_length
    head_count_kv_swa: int = 0  # key and value heads of blocks with a window; 0: head_count_kv
    # only the first N blocks have keys and values; later ones use those of the last block that is like them, with or
    # without a window; 0: all blocks have their own
    own_kv: int = 0
    # blocks without a window have no value matrix: values are the keys before their norm
    keys_are_values: bool = False
    # width of the embedding that each block has for itself; 0: there is none
    embedding_length_per_layer: int = 0
    # width of each block's feed-forward; empty: all have feed_forward_length
    feed_forward_lengths: tuple[int, ...] = ()
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    # queries are scaled by this factor times the logarithm of their position
    temperature_scale: float = 0.0
    score_scale: float = 0.0  # factor of attention scores; 0: 1 / sqrt(width)
    embedding_scale: float = 0.0  # factor of embeddings; 0: none
    residual_scale: float = 0.0  # factor of the outputs of attention and feed-forward; 0: none
    logit_scale: float = 0.0  # divisor of logits; 0: none
    expert_weights_scale: float = 0.0  # factor of the chosen experts' output; 0: none
    # experts' weights are divided by their sum, if the architecture leaves that to models
    expert_weights_norm: bool = False
    # 2: an expert's weight is the sigmoid of its logit, if the architecture leaves that to models
    expert_gating_func: int = 0
    expert_group_count: int = 0  # groups of experts; 0: one
    expert_group_used_count: int = 0  # groups in which experts are chosen
    turned: bool = True  # rope rotates queries and keys
    # optional tensors of this model, such as "attn_q.bias" (in all blocks) or "rope_freqs.weight"
    optional: tuple[str, ...] = ()
    lora: Lora | None = None  # LoRA adapters of the model's matrices
    # precision of a training step's products, see ops.matmul; not part of a file
    precision: str = "f32"
    # element type in which activations are saved for the backward pass: f32 or bf16
    saved: str = "f32"
    # f32, or q8: rounded for products with quantized weights; not part of a file
    activations: str = "f32"
    # attention is one op, else written out, see unfused_attention; not part of a file
    flash: bool = True

    @property
    def traits(self) -> arch.Architecture:
        return ARCHITECTURES[self.architecture]

    def has_weight(self, name: str) -> bool:
        """Whether blocks have this weight, which other models of the architecture may lack."""
        return f"{name}.weight" in self.optional

    @property
    def has_fused_qkv(self) -> bool:
        """Whether queries, keys and values are one matrix."""
        return self.traits.fused_qkv or self.has_weight("attn_qkv")

    @property
    def stream_shape(self) -> tuple[int, ...]:
        """Return a token's shape in the residual stream: (C,), or (streams, C) if there are several."""
        num_streams = self.traits.num_streams
        return (num_streams, self.embedding_length) if num_streams else (self.embedding_length,)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and feed-forward read the same input, to which both outputs are added."""
        return self.traits.is_parallel and not self.has_weight(self.traits.ffn_norm)

    @property
    def chosen_sum(self) -> bool:
        """Whether the router's weights of a token's chosen experts are divided by their sum."""
        override = self.traits.normalized_expert_weights
        return self.expert_weights_norm if override is None else override

    @property
    def uses_sigmoid_routing(self) -> bool:
        """Whether an expert's weight is the sigmoid of its logit."""
        override = self.traits.sigmoid_routing
        return self.expert_gating_func == arch.SIGMOID_GATING if override is None else override

    @property
    def has_latent_cache(self) -> bool:
        """Whether a KV cache holds the narrow vectors from which keys and values are made."""
        return self.kv_lora_rank > 0 and not self.has_weight("attn_kv_b")

    @property
    def cached_tensors(self) -> str:
        """Return which tensors a KV cache holds: keys and values ("kv"), or keys that contain the values ("k")."""
        return "k" if self.has_latent_cache else "kv"

    def cached_heads(self, block: int) -> tuple[int, int]:
        """Return (heads, width of a head) of a block's tensors in the KV cache."""
        if self.has_latent_cache:
            return 1, self.rope_width + self.kv_lora_rank
        return self.kv_heads_of(block), self.width_of(block)

    @property
    def rope_width(self) -> int:
        """Return the number of elements of a head that rope rotates."""
        return self.rope_dims or self.head_width

    @property
    def original_context(self) -> int:
        """Return the context length of pretraining, in tokens, before rope scaling extended it."""
        return self.rope_scaling.original_context or self.context_length

    @property
    def short_context(self) -> int:
        """Return the longest context, in tokens, that uses the short rope factors; 0: there are no long factors."""
        return self.original_context if LONG in self.optional else 0

    @property
    def attention_scale(self) -> float:
        if self.kv_lora_rank:
            return self.rope_scaling.attention_growth**2 / math.sqrt(self.head_width)
        score_width = 1.0 if self.traits.unscaled_scores else self.traits.score_width(self)
        return self.score_scale or 1.0 / math.sqrt(score_width)

    def has_window(self, block: int) -> bool:
        """Whether a block has a window if the model has windows; `window_of` is right for every model."""
        if isinstance(self.window_pattern, tuple):
            return self.window_pattern[block]
        window_interval = self.window_pattern
        return not window_interval or block % window_interval < window_interval - 1

    def window_of(self, block: int) -> int:
        """Return how many tokens a token attends to in a block; 0: all."""
        return self.window if self.has_window(block) else 0

    def width_of(self, block: int) -> int:
        """Return the width of a block's heads."""
        return (self.has_window(block) and self.key_length_swa) or self.head_width

    def kv_heads_of(self, block: int) -> int:
        """Return the number of a block's key and value heads."""
        return (self.has_window(block) and self.head_count_kv_swa) or self.head_count_kv

    def feed_forward_of(self, block: int) -> int:
        """Return the width of a block's feed-forward."""
        ffn_widths = self.feed_forward_lengths
        return ffn_widths[block] if ffn_widths else self.feed_forward_length

    def source_of(self, block: int) -> int:
        """Return the number of the block whose keys and values a block uses: its own, or an earlier block's."""
        if not self.own_kv or block < self.own_kv:
            return block
        return max(i for i in range(self.own_kv) if self.has_window(i) == self.has_window(block))

    @property
    def differing(self) -> bool:
        """Whether blocks differ: in widths of heads or feed-forward, own keys and values, or sparse gates."""
        sparse = 0 < self.traits.num_sparse_blocks < self.block_count
        return bool(self.key_length_swa or self.own_kv or self.feed_forward_lengths or sparse)

    def has_scan(self, block: int) -> bool:
        """Return whether a block has a recurrent layer (Mamba or delta rule), beside attention or in its place."""
        return self.scan is not None and (self.traits.parallel_scan or not self.attends(block))

    @property
    def has_windows(self) -> bool:
        """Whether attention has a window in any block."""
        return any(self.attends(i) and self.window_of(i) for i in range(self.block_count))

    def visible_tokens_of(self, block: int) -> int:
        """Return how many tokens a token sees in a block, in attention or a convolution; 0: all."""
        return self.window_of(block) if self.attends(block) else self.conv_width

    def rope_of(self, block: int) -> Rope | None:
        """Return the rotation of a block's queries and keys, or None if there is none."""
        traits, rope_scaling, window = self.traits, self.rope_scaling, self.window_of(block)
        dims = self.key_length_swa if window and self.key_length_swa else self.rope_width
        if not self.attends(block) or not self.turned:
            return None
        is_paused = traits.rope_pause and (block + 1) % traits.rope_pause == 0
        if (
            traits.learned_positions
            or is_paused
            or (traits.rope_only_in_windows and self.window and not window)
        ):
            return None
        if traits.unscaled_window_rope and window:
            return Rope(self.rope_freq_base, dims)
        base, divisor = self.rope_freq_base, rope_scaling.divisor
        if self.rope_freq_base_swa and window:
            base, divisor = self.rope_freq_base_swa, 1.0
        blend = rope_scaling.blend(dims, base, self.original_context)
        magnitude = rope_scaling.magnitude(divisor, self.kv_lora_rank > 0)
        return Rope(base, dims, divisor, blend, magnitude, not (window and traits.far_factors))

    @property
    def still(self) -> "Config":
        """Return the config without what is only for training: dropout, and rounding of saved activations."""
        return replace(self, lora=self.lora and replace(self.lora, dropout=0.0), saved="f32")

    @property
    def fused_slices(self) -> Mapping[str, tuple[str, int, int]]:
        """Return {weight's name: (fused tensor's name, its first row there, number of rows)}, all within a block."""
        traits, f, row_slices = (
            self.traits, self.feed_forward_length, dict[str, tuple[str, int, int]](),
        )  # fmt: skip
        if self.has_fused_qkv:
            q, kv = self.head_count * self.head_width, self.head_count_kv * self.head_width
            row_slices |= {"attn_q": ("attn_qkv", 0, q), "attn_k": ("attn_qkv", q, kv)}
            row_slices["attn_v"] = "attn_qkv", q + kv, kv
        if self.conv_width:
            c = self.embedding_length
            row_slices |= {name: (CONV_INPUT, n * c, c) for n, name in enumerate(CONV_INPUTS)}
        if self.scan is not None and not traits.delta:
            scan_rows = self.scan.input_rows
            for index, name in enumerate(SCAN_IN):
                row_slices[name] = (SCAN_INPUT, sum(scan_rows[:index]), scan_rows[index])
        if traits.fused_ffn:
            row_slices |= {"ffn_gate": ("ffn_up", 0, f), "ffn_up": ("ffn_up", f, f)}
        return row_slices


def linear_scaling(freq_scale: float) -> RopeScaling:
    """Return the rope scaling that multiplies all frequencies by `freq_scale`."""
    return RopeScaling() if freq_scale == 1 else RopeScaling("linear", 1 / freq_scale)


def check_context(config: Config, ctx: int, report: Callable[[str], None]) -> None:
    """Call `report` with a warning if `ctx` tokens of context are more than trained, or need long rope factors. Raises
    InputError if they are more than the learned positions."""
    trained_context, short = config.context_length, config.short_context
    if ctx > trained_context and config.traits.learned_positions:
        raise InputError(
            f"--ctx {ctx:,}: a {config.architecture} has learned its positions, and this one only {trained_context:,};"
            " give at most that"
        )
    if ctx > trained_context:
        report(long_context_warning(ctx, trained_context))
    if 0 < short < ctx:
        report(
            f"--ctx {ctx:,} is more than {short:,}: positions are rotated by the model's long factors, in short texts,"
            f" too, as llama.cpp does with -c {ctx}; up to --ctx {short} by its short ones"
        )


PRESETS = {
    "1m": Config(2_048, 256, 128, 4, 384, 4, 2),
    "15m": Config(32_000, 256, 256, 8, 768, 8, 8),
    "110m": Config(32_000, 512, 768, 12, 2_048, 12, 12),
}
