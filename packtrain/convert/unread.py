"""Keys of config.json that no conversion asks for: those without effect, those of one value, and all others, refused.

A key that a conversion asks for is honoured or refused there. A new key may change the computation: it is refused.
"""

from typing import Any

from packtrain.models.arch.given import FULL, PARTIAL, WINDOW, Given

WITHOUT_EFFECT = {
    "names and versions": """architectures model_type model_name transformers_version transformers.js_config
        _name_or_path name_or_path torch_dtype dtype auto_map custom_pipelines license unsloth_version unsloth_fixed
        transformers_weights version _commit_hash mistral_version max_sequence_length seq_length
        model_max_length""",
    "for training": """attention_dropout attn_dropout attn_pdrop dropout hidden_dropout embedding_dropout
        residual_dropout resid_dropout resid_pdrop embd_pdrop hidden_dropout_prob attention_probs_dropout_prob
        layerdrop initializer_range initializer_cutoff_factor init_std rescale_prenorm_residual gradient_checkpointing
        use_gradient_checkpointing output_router_logits router_aux_loss_coef router_z_loss_coef router_jitter_noise
        aux_loss_alpha seq_aux aux_loss_coef moe_use_aux_free moe_use_hard_gate z_loss_coefficient fuse_rope
        fuse_softmax_mask fuse_attn_ffn num_mtp_layers num_nextn_predict_layers mtp_loss_scaling_factor
        mtp_num_hidden_layers mtp_use_dedicated_embeddings mtp_lambda_weight mtp_share_embeddings problem_type
        label2id id2label num_labels finetuning_task pretraining_tp tensor_parallel_degree sequence_parallel
        recompute recompute_granularity moe_capacity moe_gate moe_group moe_use_size_all2all compression_ratio
        dpo_config summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
        task_specific_params""",
    "for what is generated": """bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id eod_token_id
        im_start_id im_end_id decoder_start_token_id forced_bos_token_id forced_eos_token_id cls_token_id mask_token_id
        begin_suppress_tokens suppress_tokens bad_words_ids prefix temperature top_k top_p typical_p do_sample
        max_length min_length num_beams num_beam_groups diversity_penalty early_stopping length_penalty
        repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
        exponential_decay_length_penalty remove_invalid_values tokenizer_class keep_special_tokens
        text_sampling_params""",
    "how the same is computed": """use_cache cache_implementation cache_config attn_implementation _attn_implementation
        _attn_implementation_autoset experts_implementation use_flash_attn use_flash_attention
        use_flash_attention_2 chunk_size_feed_forward output_attentions output_hidden_states return_dict
        return_dict_in_generate output_scores torchscript use_bfloat16 reorder_and_upcast_attn fused_mlp
        use_kernels num_logits_to_keep is_decoder mamba_chunk_size mamba_ssm_dtype use_mamba_kernels
        use_associative_scan ep_size moe_implementation hybrid_layer_ids use_fused_rms_norm use_rmsnorm_kernel
        max_window_layers mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_d_ssm
        mamba_expand mamba_conv_bias mamba_proj_bias quantization_config tie_encoder_decoder tf_legacy_loss
        max_batch_size num_experts_per_tok""",
    "for images and sound": """text_config vision_config audio_config image_token_id image_token_index
        video_token_id video_token_index audio_token_id audio_token_index boi_token_id boi_token_index eoi_token_id
        eoi_token_index boa_token_id eoa_token_id eoa_token_index vision_start_token_id vision_end_token_id
        mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer
        vision_soft_tokens_per_image audio_soft_tokens_per_image image_seq_length vocab_size_per_layer_input
        vision_token_id""",
}  # fmt: skip
IGNORED = {name for names in WITHOUT_EFFECT.values() for name in names.split()}
# of rope's settings
IGNORED_ROPE = {"max_position_embeddings", "mrope_interleaved", "mrope_section"}
SWITCHES = """attention_bias mlp_bias use_bias bias qkv_bias use_qkv_bias attention_out_bias conv_bias use_qk_norm
        qk_layernorm alibi use_alibi add_cross_attention is_encoder_decoder use_bidirectional_attention
        apply_residual_connection_post_layernorm parallel_attn rope_interleaved use_mrope scale_embedding
        enable_moe_block attention_k_eq_v use_double_wide_mlp remove_bias use_sliding_window"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHES.split(), (False,)),
    PARTIAL: (1.0,), "rotary_pct": (1.0,), "rope_pct": (1.0,), "rotary_scaling_factor": (1.0,),
    "position_embedding_type": ("rope", "rotary"), "embedding_multiplier": (1.0,), "logits_scaling": (1.0,),
    "residual_multiplier": (1.0,), "is_causal": (True,), "pruned_heads": ({},),
    "time_step_limit": ([0.0, float("inf")],), "norm_type": ("rms_norm",), "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],), "moe_layer_freq": (1,), "hidden_act": ("silu", "swish"),
}  # fmt: skip


def check_unread(given: Given, windows: bool) -> None:
    """Raise InputError for a key that may change the computation, and that the conversion has not asked for.

    windows  the class has windows unless `use_sliding_window` says otherwise
    """
    for key, value in given.unread():
        inside, name = "." in key, key.rsplit(".", 1)[-1]
        if value is None or name in (IGNORED_ROPE if inside else IGNORED):
            continue
        if key in (WINDOW, "use_sliding_window"):
            given.no_window(windows)
        elif name == "layer_types" and isinstance(value, list):
            if {*map(str, value)} - {FULL}:
                raise given.wrong(key, value, f"{FULL} alone")
        elif not any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in NEUTRAL.get(name, ())
        ):
            right = " or ".join(map(repr, NEUTRAL.get(name, ()))) or "left out"
            raise given.wrong(
                key,
                value,
                f"{right}: packtrain does not know what it changes; remove it if that is nothing",
            )
