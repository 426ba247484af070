"""Judges keys of config.json that no conversion reads: some have no effect, some one allowed value, all others fail.

A key that a conversion reads is honoured or refused there. A new key may change the computation: it is refused."""

import math
from typing import Any

from packtrain.models.arch.hf_config import FULL, PARTIAL, ROPE_KEYS, SLIDING, WINDOW, HFConfig

WITHOUT_EFFECT = {
    "names and versions": """architectures model_type model_name transformers_version transformers.js_config
        _name_or_path _model_name_or_path name_or_path torch_dtype dtype auto_map custom_pipelines license
        transformers_weights version _commit_hash mistral_version max_sequence_length seq_length model_max_length""",
    "for training": """dropout hidden_dropout_prob attention_probs_dropout_prob layerdrop initializer_range
        initializer_cutoff_factor init_std rescale_prenorm_residual gradient_checkpointing use_gradient_checkpointing
        output_router_logits router_jitter_noise aux_loss_alpha seq_aux moe_use_aux_free moe_use_hard_gate
        z_loss_coefficient fuse_rope fuse_softmax_mask fuse_attn_ffn num_mtp_layers num_nextn_predict_layers
        problem_type label2id id2label num_labels finetuning_task pretraining_tp tensor_parallel_degree
        compression_ratio task_specific_params""",
    "for what is generated": """begin_suppress_tokens suppress_tokens prefix temperature top_k top_p typical_p
        do_sample max_length min_length diversity_penalty early_stopping length_penalty repetition_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty
        remove_invalid_values tokenizer_class keep_special_tokens text_sampling_params""",
    "how the same is computed": """use_cache cache_config chunk_size_feed_forward output_attentions
        output_hidden_states return_dict return_dict_in_generate output_scores torchscript use_bfloat16
        reorder_and_upcast_attn fused_mlp use_kernels num_logits_to_keep is_decoder use_mamba_kernels
        use_associative_scan ep_size max_window_layers quantization_config tie_encoder_decoder tf_legacy_loss
        max_batch_size num_experts_per_tok experts_per_token initial_context_length mlp_expansion_factor time_step_min
        time_step_max time_step_floor time_step_rank block_dim block_norm_eps block_use_xavier_init conv_dim
        conv_dim_out conv_use_xavier_init num_heads use_pos_enc theta enable_lm_head_fp32 init_method org_vocab_size
        attention_head_dim altup_coef_clip""",
    "for images and sound": """text_config boi_token_index eoi_token_index eoa_token_index mm_tokens_per_image
        multimodal_projector_bias projector_hidden_act spatial_merge_size vocab_size_per_layer_input""",
}  # fmt: skip
IGNORED_KEYS = {name for names in WITHOUT_EFFECT.values() for name in names.split()}
# ends of keys of tokens, training, images and sound
IGNORED_ENDS = "_id", "_ids", "_dropout", "_pdrop", "_init_scale", "_loss_coef", "_implementation"
IGNORED_PREFIXES = (
    "mtp_", "vision_", "audio_", "image_", "video_", "anyres_", "summary_", "mamba_", "unsloth_", "use_flash_",
    "num_beam",
)  # fmt: skip
# keys among rope's settings
IGNORED_ROPE_KEYS = {"max_position_embeddings", "mrope_interleaved", "mrope_section"}
ALWAYS_FALSE = """attention_bias mlp_bias use_bias bias qkv_bias use_qkv_bias attention_out_bias conv_bias lm_head_bias
    use_qk_norm qk_layernorm alibi use_alibi add_cross_attention is_encoder_decoder use_bidirectional_attention
    apply_residual_connection_post_layernorm rope_interleaved use_mrope scale_embedding enable_moe_block
    attention_k_eq_v use_double_wide_mlp remove_bias use_sliding_window use_parallel_embedding use_cla use_mla
    add_classification_head position_embedding_xdrope group_limited_greedy use_mixed_mlp_moe"""
ON = """is_causal attn_output_gate  block_use_swiglu use_embedding_sharing use_gated_activation
    use_parallel_block use_rmsnorm"""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ALWAYS_FALSE.split(), (False,)), **dict.fromkeys(ON.split(), (True,)),
    PARTIAL: (1.0,), "rotary_pct": (1.0,), "rotary_scaling_factor": (1.0,), "embedding_multiplier": (1.0,),
    "logits_scaling": (1.0,), "residual_multiplier": (1.0,), "pruned_heads": ({},), "mlp_only_layers": ([],),
    "position_embedding_type": ("rope", "rotary", "rope_gptj"), "order_of_interleaved_layers": ("local_attn_first",),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]), "moe_norm_min": (1e-12,),
    "norm_type": ("rms_norm", "rms", "hf_rms"), "normalization_function": ("rmsnorm",), "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,), "hidden_act": ("silu", "swish"), "full_attn_mod": (1,), "interpolate_factor": (1,),
}  # fmt: skip


def check_unread(hf_config: HFConfig, has_windows: bool) -> int:
    """Raise InputError for a key that may change the computation and that the conversion has not read. Returns the
    window, in tokens, that the file does not store, or 0. `has_windows`: the model's class has windows by default."""
    max_context = 0 if WINDOW in hf_config.read_keys else hf_config.effective_window(has_windows)
    for key, value in hf_config.unread_values():
        is_rope_key = key.startswith(tuple(f"{rope}." for rope in ROPE_KEYS))
        name = key.rsplit(".", 1)[-1] if is_rope_key else key
        is_ignored = key.endswith(IGNORED_ENDS) or key.startswith(IGNORED_PREFIXES)
        is_ignored = name in IGNORED_ROPE_KEYS if is_rope_key else is_ignored or key in IGNORED_KEYS
        if value is None or is_ignored:
            continue
        if name == "layer_types" and isinstance(value, list):
            if {*map(str, value)} - {FULL, SLIDING if max_context else FULL}:
                raise hf_config.wrong(key, value, f"{FULL} alone")
        elif not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in NEUTRAL_VALUES.get(name, ())
        ):
            right = " or ".join(map(repr, NEUTRAL_VALUES.get(name, ()))) or "left out"
            reason = "packtrain does not know what it changes; remove it if that is nothing"
            raise hf_config.wrong(key, value, f"{right}: {reason}")
    return max_context
