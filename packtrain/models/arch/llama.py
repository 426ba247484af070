"""Llama, and models that compute like it: Mistral, and Mixtral with experts. arXiv 2302.13971, 2401.04088."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import EXPERT_KEYS, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {"vocab_size": sizes.vocab_size, "rope.dimension_count": sizes.head_width}


MATRICES = {
    "block_sparse_moe.experts.{}.w1": "ffn_gate_exps", "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
}  # fmt: skip
ARCHITECTURE = Architecture(
    "llama",
    keys=EXPERT_KEYS,
    ignored=arch.WINDOW_KEYS,
    optional=(*arch.BIASES, *arch.MORE_BIASES, arch.FACTORS),
    blocks_70b=80,
    grouped_70b=True,
    families=(
        Family(("LlamaForCausalLM", "MistralForCausalLM"), keys=keys),
        Family(
            ("MixtralForCausalLM",),
            arch.ATTENTION | arch.FFN_NORM | {"block_sparse_moe.gate": "ffn_gate_inp"},
            keys,
            Experts(MATRICES, ("num_local_experts", 8), ("num_experts_per_tok", 2)),
            rope_freq_base=1_000_000.0,
        ),
    ),
)
