"""Quantization mixes by llama-quantize's names (Q4_K_M …), and which type each tensor gets in a mix.

types_of(gguf, mix) returns what llama-quantize chooses for the same file: llama-quant.cpp, without the rules for
unsupported architectures. Nothing is converted here.
"""

import re
from collections import Counter
from importlib import import_module

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import PACKED, Dtype, f16
from packtrain.dtypes.element_type import Mix
from packtrain.dtypes.k import q3_K, q4_K, q5_K, q6_K
from packtrain.dtypes.legacy import q8_0
from packtrain.gguf import GGUF

OUTPUT, EMBEDDING = "output.weight", ("token_embd.weight", "per_layer_token_embd.weight")
VALUES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
EXPERTS = 8  # models with this many experts get more bits for shared tensors
# tensors at the beginning that some mixes treat differently, and which share of the blocks; `few` of them
FIRST_VALUES, FIRST_SHARE = 4, 8
FEW_VALUES, FEW_SHARE = 2, 16
SHARING = 4  # heads that share values, from which on some mixes give them more bits
# tensors of two or more axes that keep their type: norms, routers, small or special matrices
KEPT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", "position_embd", "token_types.weight", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos",
    ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip


MIXES = {mix.name: mix for dtype in PACKED for mix in dtype.mixes}
MIXES |= {
    dtype.name.upper(): dtype.mixes[-1] for dtype in PACKED if dtype.name.upper() not in MIXES
}


def types_of(
    gguf: GGUF,
    mix: Mix,
    *,
    pure: bool = False,
    output: Dtype | None = None,
    embedding: Dtype | None = None,
    weighed: bool = False,
) -> dict[str, Dtype]:
    """The type of each tensor. Raises InputError for invalid sizes in the metadata.

    pure       the mix's own type for all
    output     type of output.weight, and of tied embeddings
    embedding  type of token embeddings
    weighed    whether there is an importance matrix, which changes two mixes
    """
    falcon = gguf.metadata.get("general.architecture") == "falcon"
    kind = _SmallRules if mix.small else _FalconRules if falcon else _Rules
    rules, types = kind(gguf, mix, output, weighed), {}
    for name in sorted(gguf.entries, key=_place):
        entry = gguf.entries[name]
        if not quantizable(name, entry.shape):
            types[name] = entry.dtype
        elif embedding and name in EMBEDDING:
            types[name] = embedding
        elif output and name == OUTPUT:
            types[name] = output
        elif mix.dtype.quantized:
            chosen = mix.dtype if pure else rules.choose(name, entry.shape[-1])
            types[name] = fitting(chosen, entry.shape[-1])
        else:
            types[name] = mix.dtype
    return {name: types[name] for name in gguf.entries}


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor's type changes at all."""
    rows = any(size != 1 for size in shape[:-1])
    return rows and name.endswith("weight") and not any(part in name for part in KEPT)


def fitting(dtype: Dtype, width: int) -> Dtype:
    """The type, or the next one whose blocks divide rows of `width`; f16 if there is none."""
    if width % dtype.block:
        dtype = dtype.smaller or dtype
    return f16 if width % dtype.block else dtype


def _place(name: str) -> tuple[int, bytes]:
    """The order in which llama-quantize counts tensors: by block, then by name."""
    block = _block(name)
    return -1 if block is None else block, name.encode()


def _block(name: str) -> int | None:
    matched = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(matched[1]) if matched else None


# ffn_down of a falcon: in the first sixteenth of the blocks, where others get more bits, elsewhere
FALCON_DOWN = {
    "Q3_K_M": (q5_K, q4_K, q3_K), "Q3_K_L": (q4_K, q4_K, q4_K), "Q4_K_S": (q4_K, q4_K, q4_K),
    "Q4_K_M": (q6_K, q5_K, q4_K),
}  # fmt: skip


class _Rules:
    """The rules of a mix for single tensors; counts the tensors of each kind."""

    keys = q8_0  # type of attn_k with eight experts

    def __init__(self, gguf: GGUF, mix: Mix, output: Dtype | None, weighed: bool) -> None:
        self.gguf, self.mix, self.output, self.weighed = gguf, mix, output, weighed
        self.architecture = gguf.metadata.get("general.architecture")
        self.blocks = self._number("block_count")
        self.experts = self._number("expert_count")
        self.values = sum(any(part in name for part in VALUES) for name in gguf.entries)
        self.tied = OUTPUT not in gguf.entries
        self.seen: Counter[str] = Counter()

    def _number(self, key: str, default: int = 0) -> int:
        key = f"{self.architecture}.{key}"
        number = self.gguf.metadata.get(key, default)
        if isinstance(number, np.ndarray) and number.size:  # of the first block, as llama-quantize
            number = number.item(0)
        if not isinstance(number, int):
            raise InputError(f"{self.gguf.path}: {key} is {number!r}; it must be a whole number")
        return number

    def choose(self, name: str, width: int) -> Dtype:
        if name == OUTPUT or (self.tied and name in EMBEDDING):
            return self._output(width)
        if name in EMBEDDING:
            return self.mix.embedding or self.mix.dtype
        if any(part in name for part in VALUES):
            return self._values()
        if "attn_k.weight" in name and self.experts == EXPERTS:
            return self.keys
        if "attn_k.weight" in name or "attn_q.weight" in name:
            return self.mix.queries or self.mix.dtype
        if "attn_output.weight" in name:
            return self._attended()
        for part in ("ffn_up", "ffn_gate"):
            if part in name:
                return self._forward(part, name)
        if "ffn_down" in name:
            return self._down(name)
        return self.mix.dtype

    def _output(self, width: int) -> Dtype:
        if self.output:
            return self.output
        narrow = width % self.mix.dtype.block or self.mix.dtype is q8_0
        return q8_0 if narrow else self.mix.head or q6_K

    def _values(self) -> Dtype:
        i = self.seen["values"]
        self.seen["values"] += 1
        if self.experts == EXPERTS:
            return q8_0
        first = FEW_VALUES if self.mix.few else FIRST_VALUES
        default_dtype = self.mix.shared if self.mix.shared and self._sharing() else self.mix.values
        dtype = self._instead(i, first, self.values, default_dtype)
        return q5_K if dtype in (q3_K, q4_K) and self._is_70b() else dtype

    def _is_70b(self) -> bool:
        """Whether this is a 70B with few value heads, which get more bits."""
        # all architectures take long to load beside what quantizing does, and few types ask
        architectures = import_module("packtrain.models.arch").ARCHITECTURES
        architecture = architectures.get(str(self.architecture))
        if architecture is None or not self.blocks or self.blocks != architecture.blocks_70b:
            return False
        heads = self._number("attention.head_count")
        return (
            not architecture.grouped_70b or self._number("attention.head_count_kv", heads) != heads
        )

    def _number_of(self, part: str, name: str) -> int:
        """Of how many such tensors this is the next."""
        i = self.seen[part]
        self.seen[part] += 1
        return (_block(name) or 0) if self.experts > 1 else i  # a block has several

    def _forward(self, part: str, name: str) -> Dtype:
        i, eighth = self._number_of(part, name), self.blocks // FIRST_SHARE
        inner = eighth <= i < 7 * self.blocks // FIRST_SHARE
        return (self.mix.middle if inner else None) or self.mix.dtype

    def _down(self, name: str) -> Dtype:
        i = self._number_of("ffn_down", name)
        first = self.mix.weighed if self.weighed else self.mix.unweighed
        if first and i < self.blocks // FIRST_SHARE:
            return first
        if self.mix.eight and self.experts == EXPERTS and _more(i, self.blocks):
            return self.mix.eight
        share = FEW_SHARE if self.mix.few else FIRST_SHARE
        return self._instead(i, self.blocks // share, self.blocks, self.mix.down)

    def _attended(self) -> Dtype:
        richer, attended_dtype = self.mix.dtype.richer, self.mix.attended
        if self.experts == EXPERTS:  # a mix that gives it these bits anyway does not here
            return richer if richer and richer is not attended_dtype else self.mix.dtype
        return attended_dtype or self.mix.dtype

    def _sharing(self) -> bool:
        """Whether so many heads share values that these get more bits."""
        heads = self._number("attention.head_count")
        shared = self._number("attention.head_count_kv", heads)
        return shared > 0 and heads // shared >= SHARING

    def _instead(self, i: int, first: int, count: int, default_dtype: Dtype | None) -> Dtype:
        """The mix's type for the i-th of `count` such tensors."""
        if self.mix.first and i < first:
            return self.mix.first
        spread_dtype = self.mix.spread if _more(i, count) else None
        return spread_dtype or default_dtype or self.mix.dtype


class _FalconRules(_Rules):
    """A falcon's: more bits for the head, fewer for the feed-forward and attention's output."""

    def _output(self, width: int) -> Dtype:
        return self.output or q8_0

    def _down(self, name: str) -> Dtype:
        default_dtype = super()._down(name)
        i = self.seen["ffn_down"] - 1
        first, spread_dtype, rest = FALCON_DOWN.get(
            self.mix.name, (default_dtype, default_dtype, default_dtype)
        )
        return (
            first
            if i < self.blocks // FEW_SHARE
            else spread_dtype
            if _more(i, self.blocks)
            else rest
        )

    def _attended(self) -> Dtype:
        return q4_K if self.mix.name == "Q3_K_L" else self.mix.dtype


class _SmallRules(_Rules):
    """Those of the types of about two bits, whatever the architecture: see llama_tensor_get_type_impl."""

    keys = q4_K

    def _output(self, width: int) -> Dtype:
        return q8_0 if self.architecture == "falcon" and not self.output else super()._output(width)

    def _values(self) -> Dtype:
        served = self._sharing() or self.experts >= SHARING
        return q4_K if served else self.mix.values or self.mix.dtype

    def _down(self, name: str) -> Dtype:
        i = self.seen["ffn_down"]
        self.seen["ffn_down"] += 1
        return (self.mix.weighed if i < self.blocks // FIRST_SHARE else None) or self.mix.dtype

    def _attended(self) -> Dtype:
        return q5_K if self.experts == EXPERTS else self.mix.attended or self.mix.dtype


def _more(i: int, count: int) -> bool:
    """Whether the i-th of `count` blocks gets more bits: the first and last eighth, and every third between."""
    return i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2
