"""Transformers as graph functions: one definition for every architecture, for training and cached generation.

Builds tensors from a Config and leaves. Weights have their GGUF names; `attend` is the difference between training
(keys and values of the batch) and generation (keys and values of the cache).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TypedDict

import numpy as np

from packtrain import ops
from packtrain.dtypes import Dtype, bf16, f32, i32, i64
from packtrain.models import written
from packtrain.models.config import Config, Rope
from packtrain.models.lora import EMBEDDING, KEY, A, B
from packtrain.models.part import Part, Weights
from packtrain.models.rounding import product, rounded
from packtrain.tensor import Tensor, constant, input, named, weight

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NO_TYPES: Mapping[str, Dtype] = MappingProxyType({})
Tables = Mapping[Rope | None, tuple[Tensor, Tensor]]
Shapes = dict[str, tuple[int, ...]]


class Rule(TypedDict):
    """Attributes of an attention."""

    scale: float
    window: int
    softcap: float


def weights(config: Config, types: Mapping[str, Dtype] = NO_TYPES) -> dict[str, Tensor]:
    """The model's weight leaves by GGUF name; `types` has those not stored as f32.

    LoRA adapters come last.
    """
    c = config.embedding_length
    shapes: Shapes = {"token_embd.weight": (config.vocab_size, c)}
    factors = [name for name in config.optional if name.startswith("rope_")]
    block = block_shapes(config)
    for i in range(config.block_count):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (c,)
    if not config.tied:
        shapes["output.weight"] = (config.vocab_size, c)
    shapes |= dict.fromkeys(factors, (config.rope_width // 2,))
    if config.lora is not None:
        shapes |= dict(config.lora.shapes(shapes, config.block_count))
    return {
        name: weight(name, shape, types.get(name, f32), "table" if name in factors else "weight")
        for name, shape in shapes.items()
    }


def block_shapes(config: Config) -> Shapes:
    """Shapes of the weights of a block by their names within it, each followed by its bias if there is one."""
    shapes: Shapes = {}
    for name, shape in (_attention_shapes(config) | _feed_forward_shapes(config)).items():
        shapes[f"{name}.weight"] = shape
        if f"{name}.bias" in config.optional:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _attention_shapes(config: Config) -> Shapes:
    c, d, traits = config.embedding_length, config.head_width, config.traits
    q, kv = config.head_count * d, config.head_count_kv * d
    apart: Shapes = {"attn_q": (q, c), "attn_k": (kv, c), "attn_v": (kv, c)}
    shapes: Shapes = {"attn_norm": (c,)} if traits.pre_norms else {}
    shapes |= {"attn_qkv": (q + 2 * kv, c)} if traits.fused else apart
    shapes |= {"attn_q_norm": (d,), "attn_k_norm": (d,)} if traits.head_norms else {}
    shapes |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)} if traits.whole_norms else {}
    shapes["attn_output"] = (c, q)
    return shapes | ({"post_attention_norm": (c,)} if traits.post_norms else {})


def _feed_forward_shapes(config: Config) -> Shapes:
    c, f, e, traits = (
        config.embedding_length, config.expert_width, config.expert_count, config.traits
    )  # fmt: skip
    shapes: Shapes = {traits.ffn_norm: (c,)} if traits.pre_norms else {}
    if e:
        exps: Shapes = {"ffn_gate_exps": (e, f, c), "ffn_up_exps": (e, f, c)}
        exps["ffn_down_exps"] = (e, c, f)
        return shapes | {"ffn_gate_inp": (e, c)} | exps
    shapes |= {"ffn_up": (2 * f, c)} if traits.fused_ffn else {"ffn_gate": (f, c), "ffn_up": (f, c)}
    shapes["ffn_down"] = (c, f)
    return shapes | ({"post_ffw_norm": (c,)} if traits.post_norms else {})


def initial(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Initial values of all weights, see initialise."""
    values = {name: np.empty(leaf.shape, np.float32) for name, leaf in weights(config).items()}
    initialise(config, seed, lambda name, fill: fill(values[name]))
    return values


def initialise(
    config: Config, seed: int, at: Callable[[str, Callable[[np.ndarray], None]], None]
) -> None:
    """Initialize weights in place: at(name, fill) calls fill(array) for each weight in turn.

    Normal with deviation 0.02, divided by sqrt(2 blocks) for projections into the residual stream; norms are 1.
    """
    rng = np.random.default_rng(seed)
    for name, leaf in weights(config).items():
        adds = name.endswith(("attn_output.weight", "ffn_down.weight"))
        deviation = np.float32(0.02 / (2 * config.block_count) ** 0.5 if adds else 0.02)

        def normal(array: np.ndarray, deviation: np.float32 = deviation) -> None:
            rng.standard_normal(dtype=np.float32, out=array)
            array *= deviation

        at(name, normal if len(leaf.shape) > 1 else lambda array: array.fill(1))


@dataclass(frozen=True, slots=True)
class Block(Part):
    """Builds one block, and names its activations."""

    def named(self, name: str, tensor: Tensor) -> Tensor:
        return named(f"blk.{self.number}.{name}", tensor)

    def linear(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) (+ acc)."""
        return self.named(name, self.product(name, x, acc))

    def saved(self, x: Tensor) -> Tensor:
        """x as the backward pass will read it: all read the rounded value, so that recomputation changes no bit."""
        return ops.cast(ops.cast(x, dtype=bf16)) if self.config.saved == "bf16" else x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.named(name, ops.rms_norm(x, self.weight(name), eps=self.config.rms_eps))

    def heads(self, name: str, x: Tensor, count: int) -> Tensor:
        """x @ weight.T by heads, (..., count, D)."""
        y = self.linear(name, x)
        if self.config.traits.whole_norms and name != "attn_v":
            y = self.norm(f"{name}_norm", self.saved(y))
        return ops.reshape(y, shape=(*y.shape[:-1], count, self.config.head_width))

    def norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm("attn_q_norm", self.saved(q)), self.norm("attn_k_norm", self.saved(k))

    def join(self, name: str, x: Tensor, norm: str, h: Tensor) -> Tensor:
        """h + x @ weight.T, normalized or scaled before the sum if the model does so."""
        if self.config.residual_scale:
            return ops.add(ops.scale(self.linear(name, x), by=self.config.residual_scale), h)
        if not self.config.traits.post_norms:
            return self.linear(name, x, h)
        return ops.add(self.norm(norm, self.saved(self.linear(name, x))), h)


def block(config: Config, w: Weights, i: int, h: Tensor, tables: Tables, attend: Attend) -> Tensor:
    """One transformer block: h (..., C) -> (..., C)."""
    part, traits = Block(config, w, i), config.traits
    x = part.saved(part.norm("attn_norm", h)) if traits.pre_norms else h
    q = part.heads("attn_q", x, config.head_count)
    k = part.heads("attn_k", x, config.head_count_kv)
    v = part.heads("attn_v", x, config.head_count_kv)
    if traits.head_norms and not traits.late_norms:
        q, k = part.norm_heads(q, k)
    rope = config.rope_of(i)
    if rope is not None:
        for_q, for_k = tables[rope]
        q = part.named("q_rope", ops.rope(q, for_q, neox=traits.halves))
        k = part.named("k_rope", ops.rope(k, for_k, neox=traits.halves))
    if traits.late_norms:
        q, k = part.norm_heads(q, k)
    y = attend(i, *map(part.saved, (q, k, v)))
    y = ops.reshape(y, shape=(*h.shape[:-1], config.head_count * config.head_width))
    return feed_forward(part, part.join("attn_output", y, "post_attention_norm", h))


def feed_forward(part: Block, h: Tensor) -> Tensor:
    """The second half of a block: h (..., C) -> (..., C)."""
    traits = part.config.traits
    x = part.saved(part.norm(traits.ffn_norm, h)) if traits.pre_norms else h
    if part.config.expert_count:
        return part.named("ffn_experts", mixture(part, x, h))
    gate, up = (part.saved(part.linear(name, x)) for name in ("ffn_gate", "ffn_up"))
    name, gated = ("ffn_geglu", ops.geglu) if traits.gelu else ("ffn_swiglu", ops.swiglu)
    y = part.named(name, gated(gate, up))
    return part.join("ffn_down", part.saved(y), "post_ffw_norm", h)


def mixture(part: Block, x: Tensor, h: Tensor) -> Tensor:
    """h plus the output of the experts for x, with their LoRA adapters."""
    names = {"gate_inp": "ffn_gate_inp", **{n: f"ffn_{n}_exps" for n in ("gate", "up", "down")}}
    choose, gate, up, down = map(part.weight, names.values())
    found = {short: part.low(name) for short, name in names.items()}
    low = {short: addition for short, addition in found.items() if addition is not None}
    used = part.config.expert_used_count
    return ops.experts(x, choose, gate, up, down, h, used=used, low=low)


def rope_tables(
    config: Config, w: Weights, pos: Tensor, context: int, *, turn: bool = False
) -> Tables:
    """The rope tables of all blocks for queries and keys, computed once for each kind of rotation.

    context  the longest possible text: beyond the context of pretraining, the long rope factors apply
    turn     keys that have been rotated are rotated on by `pos`: their lengths stay
    """
    original, rate = config.original_context, config.temperature_scale
    length = "long" if context > original else "short"
    factors = w.get("rope_freqs.weight", w.get(f"rope_factors_{length}.weight"))
    ropes = dict.fromkeys(config.rope_of(i) for i in range(config.block_count))
    tables: dict[Rope | None, tuple[Tensor, Tensor]] = {}
    for rope in (rope for rope in ropes if rope is not None):
        how = replace(rope, magnitude=1.0) if turn else rope
        for_k = for_q = rope_table(config, how, pos, factors)
        if rate and not turn:
            for_q = rope_table(config, rope, pos, factors, growth=(rate, original))
        tables[rope] = for_q, for_k
    return tables


def rope_table(
    config: Config, rope: Rope, pos: Tensor, factors: Tensor | None,
    growth: tuple[float, int] = (0.0, 1),
) -> Tensor:  # fmt: skip
    table = ops.rope_table(
        pos, factors, dims=config.rope_width, base=rope.base, divisor=rope.divisor, blend=rope.blend,
        magnitude=rope.magnitude, growth=growth,
    )  # fmt: skip
    return named("rope_table", table)


def embedding(config: Config, w: Weights, tokens: Tensor) -> Tensor:
    """The embeddings of tokens (...), with their LoRA adapter if there is one, (..., C)."""
    h = ops.get_rows(w[EMBEDDING], tokens)
    a, lora = w.get(EMBEDDING + A), config.lora
    if a is not None and lora is not None:
        low, rows = ops.get_rows(a, tokens), w.get(lora.input_of(EMBEDDING))
        low = ops.scale(low, by=lora.scale(a.shape[-1])) if rows is None else ops.mul(low, rows)
        h = ops.matmul(low, w[EMBEDDING + B], h)
    if config.traits.scaled_embedding:
        h = ops.scale(h, by=config.embedding_length**0.5)
    if config.embedding_scale:
        h = ops.scale(h, by=config.embedding_scale)
    return named("token_embd", h)


def stream(
    config: Config, w: Weights, tokens: Tensor, pos: Tensor, attend: Attend, context: int
) -> Iterator[Tensor]:
    """The residual stream: the embedding of tokens (...), then the output of each block, (..., C) each."""
    tables = rope_tables(config, w, pos, context)
    h = embedding(config, w, tokens)
    yield h
    for i in range(config.block_count):
        h = block(config, w, i, h, tables, attend)
        yield h


def mixed(config: Config, i: int, q: Tensor, k: Tensor, v: Tensor, *where: Tensor) -> Tensor:
    """The attention output of block i, see ops.attention."""
    rule = rule_of(config, i)
    y = (
        ops.attention(q, k, v, *where, **rule)[0]
        if config.flash
        else written.attention(q, k, v, *where, **rule)
    )
    return named(f"blk.{i}.attn", y)


def rule_of(config: Config, i: int) -> Rule:
    """Attributes of the attention of block i."""
    return {
        "scale": config.attention_scale,
        "window": config.window_of(i),
        "softcap": config.attention_softcap,
    }


def output_norm(config: Config, w: Weights, h: Tensor) -> Tensor:
    return named("output_norm", ops.rms_norm(h, w["output_norm.weight"], eps=config.rms_eps))


def head(w: Weights) -> Tensor:
    """The output head: its own matrix, or the embedding if the two are tied."""
    return w.get("output.weight", w["token_embd.weight"])


def for_head(config: Config, x: Tensor) -> Tensor:
    """What the head multiplies: the output of the last norm, divided where logits are."""
    return ops.scale(x, by=1 / config.logit_scale) if config.logit_scale else x


def logits(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Logits (..., V) from the output of the last block, (..., C)."""
    x, cap = for_head(config, output_norm(config, w, h)), config.final_softcap
    y = product(config, x, head(w))
    if cap:
        y = ops.scale(ops.tanh(ops.scale(y, by=1 / cap)), by=cap)
    return named("logits", y)


# ---- training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """loss () is sum of weights * losses; losses (B, T); right (B, T) is 1 where the target is the likeliest token.

    x, targets, weights  what the head takes
    blocks  the residual stream, to keep when recomputing: one tensor for each part of the batch, in the order written
    """

    loss: Tensor
    losses: Tensor
    right: Tensor
    blocks: list[Tensor]
    x: Tensor
    targets: Tensor
    weights: Tensor


def loss(
    config: Config, w: Weights, batch: int, time: int, *, chunk: int = 256, parts: int = 1,
    skipped: int = 0, even: bool = False,
) -> Loss:  # fmt: skip
    """Next-token loss of inputs `tokens`, `targets`, `weights`, `pos`, `seq`, all (B, T).

    A target counts with its weight (1 / number of targets gives the mean). Tokens see earlier positions of the same
    `seq`: several samples can share a row. Dropout adds an input `dropout` (2,) i64: a seed and the step's number.

    parts    each block processes the batch in this many parts: it then needs memory for one of them, and its weights'
             gradients are complete before those of the block below begin. The last part goes first, so that these
             gradients are summed in the order of the rows.
    skipped  positions at the beginning of a row without a target: `targets`, `weights`, losses are (B, T - skipped)
    even     every target counts 1, without `weights`: for the gradient of a function of `losses`
    """
    shape, counted = (batch, time), (batch, time - skipped)
    if config.lora is not None and config.lora.dropout:
        w = {**w, KEY: input(KEY, (2,), i64)}
    tokens, targets = input("tokens", shape, i32), input("targets", counted, i32)
    pos, seq = input("pos", shape, i32), input("seq", shape, i32)
    layers = list(in_parts(config, w, (tokens, pos, seq), parts))
    last = layers[-1][0] if parts == 1 else ops.concat(layers[-1][::-1], axis=0)
    if skipped:
        last = ops.narrow(last, axis=1, start=skipped, length=time - skipped)
    x = rounded(config, for_head(config, output_norm(config, w, last)), head(w))
    weights = constant("ones", np.ones(counted, np.float32)) if even else input("weights", counted)
    cap, how = config.final_softcap, config.precision
    results = ops.linear_cross_entropy(
        x, head(w), targets, weights, chunk=chunk, softcap=cap, precision=how
    )
    loss, losses, right = map(named, ("loss", "losses", "right"), results)
    return Loss(loss, losses, right, [*chain(*layers)], x, targets, weights)


def in_parts(
    config: Config, w: Weights, batch: tuple[Tensor, Tensor, Tensor], parts: int
) -> Iterator[tuple[Tensor, ...]]:
    """The residual stream of `tokens`, `pos` and `seq` (B, T), block by block; in each, the last part first."""
    rows, time = batch[0].shape[0] // parts, batch[0].shape[1]

    def part(at: int) -> Iterator[Tensor]:
        tokens, pos, seq = (
            x if parts == 1 else ops.narrow(x, axis=0, start=at * rows, length=rows) for x in batch
        )

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mixed(config, i, q, k, v, pos, pos, seq, seq)

        return stream(config, w, tokens, pos, attend, time)

    return zip(*(part(at) for at in reversed(range(parts))), strict=True)
