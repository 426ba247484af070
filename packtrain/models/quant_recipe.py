"""Quantization mixes by llama-quantize's names (Q4_K_M …), and the element type of each tensor in a mix.

tensor_dtypes(gguf, mix) returns what llama-quantize chooses for the same file: llama-quant.cpp, without the rules for
unsupported architectures. Nothing is converted here."""

import re
from collections import Counter
from importlib import import_module

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import PACKABLE, Dtype, f16
from packtrain.dtypes.element_type import QuantMix
from packtrain.dtypes.k import q3_K, q4_K, q5_K, q6_K
from packtrain.dtypes.legacy import q8_0
from packtrain.gguf import GGUF

OUTPUT, EMBEDDING_NAMES = "output.weight", ("token_embd.weight", "per_layer_token_embd.weight")
VALUE_NAMES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
NUM_RICH_EXPERTS = 8  # models with this many experts get more bits for shared tensors
# first tensors that some mixes treat differently: their number, and their divisor of the blocks; and fewer of them
NUM_FIRST_VALUES, FIRST_SHARE = 4, 8
NUM_FEW_VALUES, FEW_BLOCK_DIVISOR = 2, 16
MIN_SHARING_HEADS = 4  # query heads per value head from which some mixes give values more bits
# tensors of two or more axes that keep their type: norms, routers, small or special matrices
UNCHANGED_NAMES = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", "position_embd", "token_types.weight", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos",
    ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip


MIXES = {mix.name: mix for dtype in PACKABLE for mix in dtype.mixes}
MIXES |= {d.name.upper(): d.mixes[-1] for d in PACKABLE if d.name.upper() not in MIXES}


def tensor_dtypes(
    gguf: GGUF, mix: QuantMix, *, pure: bool = False, output: Dtype | None = None, embedding: Dtype | None = None,
    weighed: bool = False,
) -> dict[str, Dtype]:  # fmt: skip
    """Return the element type of each tensor in a mix. Raises InputError for invalid sizes in the metadata.

    pure       use the mix's main type for all
    output     element type of output.weight, and of tied embeddings
    embedding  element type of token embeddings
    weighed    whether there is an importance matrix, which changes two mixes
    """
    is_falcon = gguf.metadata.get("general.architecture") == "falcon"
    kind = _SmallDtypeRules if mix.is_smallest else _FalconDtypeRules if is_falcon else _DtypeRules
    dtype_rules, dtypes = kind(gguf, mix, output, weighed), {}
    for name in sorted(gguf.entries, key=_tensor_order):
        tensor_info = gguf.entries[name]
        if not is_quantizable(name, tensor_info.shape):
            dtypes[name] = tensor_info.dtype
        elif embedding and name in EMBEDDING_NAMES:
            dtypes[name] = embedding
        elif output and name == OUTPUT:
            dtypes[name] = output
        elif mix.dtype.quantized:
            chosen_dtype = mix.dtype if pure else dtype_rules.choose(name, tensor_info.shape[-1])
            dtypes[name] = fit_block_width(chosen_dtype, tensor_info.shape[-1])
        else:
            dtypes[name] = mix.dtype
    return {name: dtypes[name] for name in gguf.entries}


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether quantizing a model changes the type of this tensor."""
    rows = any(size != 1 for size in shape[:-1])
    return rows and name.endswith("weight") and not any(part in name for part in UNCHANGED_NAMES)


def fit_block_width(dtype: Dtype, row_width: int) -> Dtype:
    """Return `dtype`, or if its blocks do not divide rows of `row_width` values, dtype.smaller, or if not that, f16."""
    if row_width % dtype.block:
        dtype = dtype.smaller or dtype
    return f16 if row_width % dtype.block else dtype


def _tensor_order(name: str) -> tuple[int, bytes]:
    """Return the sort key of llama-quantize's order of tensors: by block, then by name."""
    block_index = _block_index(name)
    return -1 if block_index is None else block_index, name.encode()


def _block_index(name: str) -> int | None:
    match = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(match[1]) if match else None


# ffn_down of a falcon: in the first 1/16 of the blocks; in other blocks that get more bits; in the rest
FALCON_DOWN_DTYPES = {
    "Q3_K_M": (q5_K, q4_K, q3_K), "Q3_K_L": (q4_K, q4_K, q4_K), "Q4_K_S": (q4_K, q4_K, q4_K),
    "Q4_K_M": (q6_K, q5_K, q4_K),
}  # fmt: skip


class _DtypeRules:
    """Rules of a mix that choose a tensor's element type; counts tensors, which must come in _tensor_order."""

    key_dtype = q8_0  # type of attn_k with eight experts

    def __init__(self, gguf: GGUF, mix: QuantMix, output: Dtype | None, weighed: bool) -> None:
        self.gguf, self.mix, self.output, self.weighed = gguf, mix, output, weighed
        self.architecture = gguf.metadata.get("general.architecture")
        self.blocks = self._metadata_number("block_count")
        self.experts = self._metadata_number("expert_count")
        self.values = sum(any(pattern in name for pattern in VALUE_NAMES) for name in gguf.entries)
        self.is_tied = OUTPUT not in gguf.entries
        self.tensor_counts: Counter[str] = Counter()

    def _metadata_number(self, key: str, default: int = 0) -> int:
        key = f"{self.architecture}.{key}"
        value = self.gguf.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size:  # the first block's, as in llama-quantize
            value = value.item(0)
        if not isinstance(value, int):
            raise InputError(f"{self.gguf.path}: {key} is {value!r}; it must be a whole number")
        return value

    def choose(self, name: str, width: int) -> Dtype:
        """Return the type of the tensor `name`, whose rows have `width` values."""
        if name == OUTPUT or (self.is_tied and name in EMBEDDING_NAMES):
            return self._output(width)
        if name in EMBEDDING_NAMES:
            return self.mix.token_embd or self.mix.dtype
        if any(pattern in name for pattern in VALUE_NAMES):
            return self._attn_v_dtype()
        if "attn_k.weight" in name and self.experts == NUM_RICH_EXPERTS:
            return self.key_dtype
        if "attn_k.weight" in name or "attn_q.weight" in name:
            return self.mix.attn_qk or self.mix.dtype
        if "attn_output.weight" in name:
            return self._attention_output_dtype()
        for pattern in ("ffn_up", "ffn_gate"):
            if pattern in name:
                return self._feed_forward_dtype(pattern, name)
        if "ffn_down" in name:
            return self._ffn_down_dtype(name)
        return self.mix.dtype

    def _output(self, width: int) -> Dtype:
        """Return the type of the output matrix, whose rows have `width` values."""
        if self.output:
            return self.output
        is_narrow = width % self.mix.dtype.block or self.mix.dtype is q8_0
        return q8_0 if is_narrow else self.mix.output_head or q6_K

    def _attn_v_dtype(self) -> Dtype:
        index = self.tensor_counts["values"]
        self.tensor_counts["values"] += 1
        if self.experts == NUM_RICH_EXPERTS:
            return q8_0
        num_first = NUM_FEW_VALUES if self.mix.has_few_first else NUM_FIRST_VALUES
        default_dtype = self.mix.attn_v
        if self.mix.attn_v_grouped and self._shares_values():
            default_dtype = self.mix.attn_v_grouped
        dtype = self._instead(index, num_first, self.values, default_dtype)
        return q5_K if dtype in (q3_K, q4_K) and self._is_70b() else dtype

    def _is_70b(self) -> bool:
        """Whether the model is a 70B with few value heads, which get more bits."""
        # loading all architectures takes long beside quantizing, and few types need them
        architectures = import_module("packtrain.models.arch").ARCHITECTURES
        architecture = architectures.get(str(self.architecture))
        if architecture is None or not self.blocks or self.blocks != architecture.blocks_70b:
            return False
        heads = self._metadata_number("attention.head_count")
        any_heads = not architecture.grouped_70b
        return any_heads or self._metadata_number("attention.head_count_kv", heads) != heads

    def _next_index(self, pattern: str, name: str) -> int:
        """Count a tensor of the kind `pattern`; return how many came before, or if the model has experts its block."""
        index = self.tensor_counts[pattern]
        self.tensor_counts[pattern] += 1
        return (_block_index(name) or 0) if self.experts > 1 else index  # a block has several

    def _feed_forward_dtype(self, pattern: str, name: str) -> Dtype:
        index, eighth_of_blocks = self._next_index(pattern, name), self.blocks // FIRST_SHARE
        is_inner = eighth_of_blocks <= index < 7 * self.blocks // FIRST_SHARE
        return (self.mix.ffn_gate_up_middle if is_inner else None) or self.mix.dtype

    def _ffn_down_dtype(self, name: str) -> Dtype:
        index = self._next_index("ffn_down", name)
        first_dtype = (
            self.mix.first_ffn_down_weighted if self.weighed else self.mix.first_ffn_down_unweighted
        )
        if first_dtype and index < self.blocks // FIRST_SHARE:
            return first_dtype
        if (
            self.mix.ffn_down_8_experts
            and self.experts == NUM_RICH_EXPERTS
            and _gets_more_bits(index, self.blocks)
        ):
            return self.mix.ffn_down_8_experts
        block_divisor = FEW_BLOCK_DIVISOR if self.mix.has_few_first else FIRST_SHARE
        return self._instead(index, self.blocks // block_divisor, self.blocks, self.mix.ffn_down)

    def _attention_output_dtype(self) -> Dtype:
        richer, attended_dtype = self.mix.dtype.richer, self.mix.attn_output
        if self.experts == NUM_RICH_EXPERTS:  # not if the mix uses `richer` anyway
            return richer if richer and richer is not attended_dtype else self.mix.dtype
        return attended_dtype or self.mix.dtype

    def _shares_values(self) -> bool:
        """Whether so many query heads share a value head that values get more bits."""
        num_heads = self._metadata_number("attention.head_count")
        num_kv_heads = self._metadata_number("attention.head_count_kv", num_heads)
        return num_kv_heads > 0 and num_heads // num_kv_heads >= MIN_SHARING_HEADS

    def _instead(self, i: int, num_first: int, count: int, default_dtype: Dtype | None) -> Dtype:
        """Return the mix's type for the i-th of `count` tensors of a kind: that for the first `num_first`, else that
        for outer ones, else `default_dtype`, else the main type."""
        if self.mix.first_layers and i < num_first:
            return self.mix.first_layers
        spread_dtype = self.mix.outer_layers if _gets_more_bits(i, count) else None
        return spread_dtype or default_dtype or self.mix.dtype


class _FalconDtypeRules(_DtypeRules):
    """Rules for a falcon: more bits for the head, fewer for the feed-forward and attention's output."""

    def _output(self, width: int) -> Dtype:
        return self.output or q8_0

    def _ffn_down_dtype(self, name: str) -> Dtype:
        default_dtype = super()._ffn_down_dtype(name)
        index = self.tensor_counts["ffn_down"] - 1
        first, spread, other = FALCON_DOWN_DTYPES.get(self.mix.name, (default_dtype,) * 3)
        if index < self.blocks // FEW_BLOCK_DIVISOR:
            return first
        return spread if _gets_more_bits(index, self.blocks) else other

    def _attention_output_dtype(self) -> Dtype:
        return q4_K if self.mix.name == "Q3_K_L" else self.mix.dtype


class _SmallDtypeRules(_DtypeRules):
    """Rules of types of about two bits, for any architecture: see llama_tensor_get_type_impl."""

    key_dtype = q4_K

    def _output(self, width: int) -> Dtype:
        return q8_0 if self.architecture == "falcon" and not self.output else super()._output(width)

    def _attn_v_dtype(self) -> Dtype:
        gets_more_bits = self._shares_values() or self.experts >= MIN_SHARING_HEADS
        return q4_K if gets_more_bits else self.mix.attn_v or self.mix.dtype

    def _ffn_down_dtype(self, name: str) -> Dtype:
        index = self.tensor_counts["ffn_down"]
        self.tensor_counts["ffn_down"] += 1
        return (
            self.mix.first_ffn_down_weighted if index < self.blocks // FIRST_SHARE else None
        ) or self.mix.dtype

    def _attention_output_dtype(self) -> Dtype:
        return q5_K if self.experts == NUM_RICH_EXPERTS else self.mix.attn_output or self.mix.dtype


def _gets_more_bits(i: int, count: int) -> bool:
    """Whether the i-th of `count` blocks gets more bits: the first and last eighth, and every third between."""
    return i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2
