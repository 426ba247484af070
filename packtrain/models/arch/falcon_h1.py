"""Falcon-H1: every block has attention and a Mamba-2 scan, in parallel. arXiv 2507.22448.

Conversion multiplies the matrices by the config's multipliers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.granitehybrid import CONV_BIAS, SCAN_NORM, read_scan, scan_metadata

FEED_FORWARD = {"pre_ff_layernorm": "ffn_norm"} | arch.feed_forward("feed_forward")


def mixer_fields(hf_config: arch.HFConfig) -> dict[str, Any]:
    default_inner = hf_config.size("mamba_expand", 2) * hf_config.size("hidden_size")
    return {"scan": read_scan(hf_config, hf_config.size("mamba_d_ssm", default_inner))}


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    # llama.cpp gates first
    if hf_config.get("mamba_norm_before_gate", True) and hf_config.flag("mamba_rms_norm"):
        hf_config.require_one_of("mamba_norm_before_gate", True, False)
    if hf_config.flag("tie_word_embeddings"):  # one matrix has one multiplier
        embedding_multiplier = hf_config.real("embedding_multiplier", 1.0)
        hf_config.require_one_of("lm_head_multiplier", 1.0, embedding_multiplier)
    return scan_metadata(sizes)


def times(*factors: float | np.ndarray) -> arch.Changed:
    """Return a function (rows, first row's number) -> rows times all factors, numbers or arrays with one per row."""

    def change_rows(rows: np.ndarray, first: int) -> np.ndarray:
        for factor in factors:
            row_factors = (
                factor[first : first + len(rows), None] if isinstance(factor, np.ndarray) else None
            )
            rows = rows * (np.float32(factor) if row_factors is None else row_factors)
        return rows

    return change_rows


def changes(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> Mapping[str, arch.Changed]:
    def by(name: str) -> float:
        return hf_config.real(name, 1.0)

    def read_multipliers(name: str, count: int) -> list[float]:
        factors = hf_config.get(name, [1.0] * count)
        if not isinstance(factors, list) or len(factors) != count:
            raise hf_config.wrong(name, factors, f"{count} numbers")
        return [hf_config.number(name, factor) for factor in factors]

    assert sizes.scan is not None
    inner_width, state, num_heads, num_groups, _ = sizes.scan
    counts = inner_width, inner_width, num_groups * state, num_groups * state, num_heads
    rows = np.repeat(read_multipliers("ssm_multipliers", 5), counts)
    gate_multiplier, down = read_multipliers("mlp_multipliers", 2)
    attn_in, attn_out = by("attention_in_multiplier"), by("attention_out_multiplier")
    return {
        "token_embd": times(by("embedding_multiplier")), "output": times(by("lm_head_multiplier")),
        "attn_q": times(attn_in), "attn_k": times(by("key_multiplier"), attn_in), "attn_v": times(attn_in),
        "attn_output": times(attn_out), "ffn_gate": times(gate_multiplier), "ffn_down": times(down),
        "ssm_in": times(by("ssm_in_multiplier"), rows.astype(np.float32)), "ssm_out": times(by("ssm_out_multiplier")),
        "ssm_a": arch.decays_from_logs,
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "falcon-h1", halves=True, parallel_scan=True, unsuffixed_ffn_norm=True, key_defaults=arch.SCAN_KEYS,
    optional_tensors=(CONV_BIAS, SCAN_NORM),
    families=(
        arch.Family(
            ("FalconH1ForCausalLM",), arch.ATTENTION | arch.SCAN_MODULES | FEED_FORWARD, extra_metadata,
            names=arch.CheckpointNames(norm="final_layernorm"),
            optional_tensors=arch.with_tensors(
                true_flags=("mamba_conv_bias",), mamba_conv_bias=(CONV_BIAS,), mamba_rms_norm=(SCAN_NORM,),
            ),
            required_values=arch.fixed(attention_bias=False, mlp_bias=False, projectors_bias=False),
            size_keys=(*arch.HEAD_WIDTHS, "vocab_size"), suffix_renames=arch.SCAN_SUFFIX_RENAMES,
            mixer_fields=mixer_fields, changes=changes, has_scaled_matrices=True,
        ),
    ),
)  # fmt: skip
