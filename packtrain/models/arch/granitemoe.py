"""Granite 3 with experts: granite's scales, experts as llama's, and in some models another one that all tokens have."""

from packtrain.models.arch import granite
from packtrain.models.arch.architecture import (
    ATTENTION,
    EXPERT_KEYS,
    FFN_NORM,
    Architecture,
    Experts,
    Family,
    Keys,
)
from packtrain.models.arch.given import Given
from packtrain.models.arch.sizes import Sizes

SHARED_WIDTH = "expert_shared_feed_forward_length"
HALVES = {
    f"ffn_{part}_{end}": (f"{module}.{side}_linear", first, every)
    for module, end in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp"))
    for part, side, first, every in (("gate", "input", 0, 2), ("up", "input", 1, 2), ("down", "output", 0, 1))
}  # fmt: skip


def others(given: Given) -> tuple[int, int]:
    return (
        given.size("shared_intermediate_size") if given.get("shared_intermediate_size") else 0
    ), 0


def keys(given: Given, sizes: Sizes) -> Keys:
    wide = sizes.expert_shared_feed_forward_length
    return granite.keys(given, sizes) | ({SHARED_WIDTH: wide} if wide else {})


ARCHITECTURE = Architecture(
    "granitemoe",
    keys={**granite.ARCHITECTURE.keys, **EXPERT_KEYS, SHARED_WIDTH: 0},
    optional=granite.ARCHITECTURE.optional,
    families=(
        Family(
            ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
            ATTENTION | FFN_NORM | {"block_sparse_moe.router.layer": "ffn_gate_inp"},
            keys,
            Experts(
                {},
                ("num_local_experts", 8),
                ("num_experts_per_tok", 2),
                others=others,
                stacked=HALVES,
                together=True,
                rows=True,
            ),
            tied=True,
        ),
    ),
)
