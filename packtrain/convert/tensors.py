"""Which tensors of a checkpoint become which of a GGUF file, in what shape and how changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from packtrain import quant
from packtrain.convert.checkpoint import Checkpoint
from packtrain.convert.safetensors import Stored
from packtrain.errors import InputError

PART = 1 << 20  # elements that are in memory at a time, as long as a row or a head is not longer
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
}  # fmt: skip
FEED_FORWARD = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
LLAMA = ATTENTION | {"post_attention_layernorm": "ffn_norm"} | FEED_FORWARD
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA2 = LLAMA | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
PHI3 = {
    "input_layernorm": "attn_norm", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
MIXTRAL = ATTENTION | {
    "post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{}.w1": "ffn_gate_exps", "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: C width, H heads, K kv heads, D head width, F feed-forward width, E experts, V vocabulary."""

    C: int
    H: int
    K: int
    D: int
    F: int
    E: int
    V: int
    blocks: int

    def of(self, part: str, fused: bool) -> tuple[int, ...]:
        """The shape of a part's weight; of one expert's where there are several."""
        q, kv = self.H * self.D, self.K * self.D
        up = 2 * self.F if fused else self.F
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (q, self.C), "attn_k": (kv, self.C), "attn_v": (kv, self.C), "attn_qkv": (q + 2 * kv, self.C),
            "attn_output": (self.C, q), "ffn_gate": (self.F, self.C), "ffn_up": (up, self.C),
            "ffn_down": (self.C, self.F), "ffn_gate_inp": (self.E, self.C), "ffn_gate_exps": (self.F, self.C),
            "ffn_up_exps": (self.F, self.C), "ffn_down_exps": (self.C, self.F), "attn_q_norm": (self.D,),
            "attn_k_norm": (self.D,),
        }  # fmt: skip
        return shapes.get(part, (self.C,))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `sources` of the checkpoint, stacked if they are several, each of a shape.

    turned  heads whose rows go from halves to pairs, 0 for none
    shift   what is added to every value
    """

    name: str
    sources: tuple[Stored, ...]
    stacked: bool = False
    turned: int = 0
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.sources[0].shape
        return (len(self.sources), *one) if self.stacked else one

    def values(self) -> Iterator[np.ndarray]:
        """The values of one source after the other as f32, some rows at a time; heads are not cut."""
        for source in self.sources:
            array = source.array()
            head = len(array) // self.turned if self.turned else 1
            step = max(PART * len(array) // (array.size * head), 1) * head
            for start in range(0, len(array), step):
                rows = quant.dequantize(array[start : start + step])
                if self.turned:
                    rows = paired(rows, len(rows) // head)
                yield rows + np.float32(self.shift) if self.shift else rows


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, where rotation pairs (i, i + D / 2) of a head become (2i, 2i + 1)."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of paired."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def tensors_of(
    checkpoint: Checkpoint,
    sizes: Sizes,
    block: Mapping[str, str],
    *,
    paired_heads: bool,
    norm_shift: float,
    tied: bool,
) -> list[Tensor]:
    """Every tensor of the GGUF file, in order. Raises InputError for missing, unknown and misshapen tensors."""
    found = _Found(checkpoint)
    turned = {"attn_q": sizes.H, "attn_k": sizes.K} if paired_heads else {}
    made = [
        Tensor("token_embd.weight", (found.take("model.embed_tokens.weight", (sizes.V, sizes.C)),))
    ]
    for i in range(sizes.blocks):
        for source, part in block.items():
            shape = sizes.of(part, "attn_qkv" in block.values())
            name, there = f"blk.{i}.{part}", f"model.layers.{i}.{source}"
            shift = norm_shift if part.endswith("_norm") else 0.0
            experts = range(sizes.E) if "{}" in source else (0,)
            taken = tuple(found.take(f"{there.format(e)}.weight", shape) for e in experts)
            made.append(Tensor(f"{name}.weight", taken, "{}" in source, turned.get(part, 0), shift))
            if part in biases(checkpoint):
                bias = (found.take(f"{there}.bias", shape[:1]),)
                made.append(Tensor(f"{name}.bias", bias, turned=turned.get(part, 0)))
    norm = (found.take("model.norm.weight", (sizes.C,)),)
    made.append(Tensor("output_norm.weight", norm, shift=norm_shift))
    if tied:
        found.tensors.pop("lm_head.weight", None)  # some folders repeat the embedding
    else:
        made.append(Tensor("output.weight", (found.take("lm_head.weight", (sizes.V, sizes.C)),)))
    found.check_empty()
    return made


def biases(checkpoint: Checkpoint) -> set[str]:
    """The parts of a block that have a bias."""
    attention = {"attn_q", "attn_k", "attn_v"}
    if checkpoint.kind == "Qwen2ForCausalLM":
        return attention
    parts = attention | {"attn_output"} if checkpoint.flag("attention_bias") else set()
    return parts | ({"ffn_gate", "ffn_up", "ffn_down"} if checkpoint.flag("mlp_bias") else set())


class _Found:
    """The tensors of a checkpoint that have not been taken yet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self.tensors = checkpoint.folder, dict(checkpoint.tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self.tensors.pop(name, None)
        if stored is None:
            raise InputError(f"{self.folder}: tensor {name} is missing; its shape is {[*shape]}")
        if stored.shape != shape:
            raise InputError(
                f"{stored.path}: {name} has shape {[*stored.shape]}; by config.json it must be {[*shape]}"
            )
        return stored

    def check_empty(self) -> None:
        if self.tensors:
            name, stored = next(iter(self.tensors.items()))
            raise InputError(
                f"{stored.path}: tensor {name} is not part of the model that config.json describes"
                f" ({len(self.tensors)} such tensors)"
            )
