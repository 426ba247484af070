"""StableLM 2: layer norms, partial rope; the 12B has attention and feed-forward in parallel, and norms of each head.

arXiv 2402.17834."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.hf_config import PARTIAL, HFConfig

HEAD_NORM_MODULES = {
    "self_attn.q_layernorm.norms.{}": "attn_q_norm", "self_attn.k_layernorm.norms.{}": "attn_k_norm",
}  # fmt: skip


def extra_metadata(hf_config: HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    return {"use_parallel_residual": hf_config.flag("use_parallel_residual")}


def normalize_config(hf_config: HFConfig) -> HFConfig:
    return hf_config.with_aliases({PARTIAL: ("rope_pct",)})


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    is_parallel = hf_config.flag("use_parallel_residual")
    optional_names = [n for n in arch.NORM_BIASES if n != "ffn_norm.bias" or not is_parallel]
    optional_names += [] if is_parallel else ["ffn_norm.weight"]
    optional_names += arch.BIASES if hf_config.flag("use_qkv_bias") else ()
    return (*optional_names, *(arch.QK_NORMS if hf_config.flag("qk_layernorm") else ()))


ARCHITECTURE = arch.Architecture(
    "stablelm", halves=True, layer_norms=True, is_parallel=True, fixed_head_width=True, partial_rope=True,
    always_untied=True, ignored_keys=("use_parallel_residual",),
    optional_tensors=(*arch.BIASES, *arch.FUSED_QKV, *arch.NORM_BIASES, *arch.QK_NORMS, "ffn_norm.weight"),
    families=(
        arch.Family(
            ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
            arch.ATTENTION | HEAD_NORM_MODULES | arch.FFN_NORM | arch.FEED_FORWARD, optional_tensors=optional_tensors,
            omitted_keys=("rope.freq_base",), extra_metadata=extra_metadata, rotated_share=0.25,
            normalize_config=normalize_config,
        ),
    ),
)  # fmt: skip
