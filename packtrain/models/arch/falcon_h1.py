"""Falcon-H1: every block has attention and a Mamba-2 scan, side by side. arXiv 2507.22448.

Its multipliers are in the matrices of files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, Architecture, Changed, Family, Keys, Names
from packtrain.models.arch.granitehybrid import CONV_BIAS, NORM, scan, scan_keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

FEED_FORWARD = {
    "pre_ff_layernorm": "ffn_norm", "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}  # fmt: skip


def mixing(hf_config: Given) -> dict[str, Any]:
    expanded = hf_config.size("mamba_expand", 2) * hf_config.size("hidden_size")
    return {"scan": scan(hf_config, hf_config.size("mamba_d_ssm", expanded))}


def optional(hf_config: Given) -> tuple[str, ...]:
    names = (CONV_BIAS,) if hf_config.flag("mamba_conv_bias", True) else ()
    return (*names, NORM) if hf_config.flag("mamba_rms_norm") else names


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    for name in ("attention_bias", "mlp_bias", "projectors_bias"):
        hf_config.one_of(name, False, False)
    if hf_config.get("mamba_norm_before_gate", True) and hf_config.flag(
        "mamba_rms_norm"
    ):  # llama.cpp gates first
        hf_config.one_of("mamba_norm_before_gate", True, False)
    if hf_config.flag("tie_word_embeddings"):  # one matrix has one multiplier
        by = hf_config.real("embedding_multiplier", 1.0)
        hf_config.one_of("lm_head_multiplier", 1.0, by)
    head_lengths = dict.fromkeys(
        ("attention.key_length", "attention.value_length"), sizes.head_width
    )
    return {**scan_keys(sizes), **head_lengths, "vocab_size": sizes.vocab_size}


def times(*factors: float | np.ndarray) -> Changed:
    """Rows times numbers, one after another as llama.cpp's converter rounds, or each row times its own."""

    def changed(rows: np.ndarray, first: int) -> np.ndarray:
        for by in factors:
            row_factors = (
                by[first : first + len(rows), None] if isinstance(by, np.ndarray) else None
            )
            rows = rows * (np.float32(by) if row_factors is None else row_factors)
        return rows

    return changed


def changes(hf_config: Given, sizes: Sizes) -> Mapping[str, Changed]:
    def by(name: str) -> float:
        return hf_config.real(name, 1.0)

    def several(name: str, count: int) -> list[float]:
        factors = hf_config.get(name, [1.0] * count)
        if not isinstance(factors, list) or len(factors) != count:
            raise hf_config.wrong(name, factors, f"{count} numbers")
        return [hf_config.number(name, factor) for factor in factors]

    assert sizes.scan is not None
    inner, state, heads, groups, _ = sizes.scan
    rows = np.repeat(
        several("ssm_multipliers", 5), (inner, inner, groups * state, groups * state, heads)
    )
    gate, down = several("mlp_multipliers", 2)
    attn_in, attn_out = by("attention_in_multiplier"), by("attention_out_multiplier")
    return {
        "token_embd": times(by("embedding_multiplier")), "output": times(by("lm_head_multiplier")),
        "attn_q": times(attn_in), "attn_k": times(by("key_multiplier"), attn_in), "attn_v": times(attn_in),
        "attn_output": times(attn_out), "ffn_gate": times(gate), "ffn_down": times(down),
        "ssm_in": times(by("ssm_in_multiplier"), rows.astype(np.float32)), "ssm_out": times(by("ssm_out_multiplier")),
        "ssm_a": arch.decays,
    }  # fmt: skip


ARCHITECTURE = Architecture(
    "falcon-h1",
    halves=True,
    scan_beside=True,
    bare_ffn_norm=True,
    keys=arch.SCAN_KEYS,
    optional=(CONV_BIAS, NORM),
    families=(
        Family(
            ("FalconH1ForCausalLM",),
            ATTENTION | arch.SCAN_MODULES | FEED_FORWARD,
            keys,
            names=Names(norm="final_layernorm"),
            optional=optional,
            ends=arch.SCAN_ENDS,
            mixing=mixing,
            changes=changes,
            scaled=True,
        ),
    ),
)
