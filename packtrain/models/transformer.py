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

from packtrain.dtypes import Dtype, f32, i32, i64
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, constant, input, named, weight
from packtrain.models import altup, unfused_attention
from packtrain.models.activation_rounding import product, rounded
from packtrain.models.arch.architecture import CHOICE, CONV_OUT, LAYER_INPUTS, LAYER_SCALE, SCAN_OUT
from packtrain.models.block import block
from packtrain.models.block_weights import Mixer, Tables, Weights, normalized
from packtrain.models.config import Config, Rope
from packtrain.models.lora import EMBEDDING, KEY, A, B
from packtrain.models.tensor_shapes import HEAD_BIAS, POSITIONS, shapes, unread

ADDING = tuple(f"{part}.weight" for part in ("attn_output", "ffn_down", CONV_OUT, SCAN_OUT))
NO_TYPES: Mapping[str, Dtype] = MappingProxyType({})
KeysValues = dict[int, tuple[Tensor, Tensor]]


class Rule(TypedDict):
    """Attributes of an attention."""

    scale: float
    window: int
    softcap: float


def weights(config: Config, types: Mapping[str, Dtype] = NO_TYPES) -> dict[str, Tensor]:
    """The model's weight leaves by GGUF name; `types` has those not stored as f32.

    LoRA adapters come last.
    """
    unread_names = {*unread(config)}
    return {
        name: weight(
            name,
            shape,
            types.get(name, f32),
            "table" if learned_otherwise(name) or name in unread_names else "weight",
        )
        for name, shape in shapes(config).items()
    }


def learned_otherwise(name: str) -> bool:
    """Whether a tensor has no gradient: divisors of rope's frequencies, scales of blocks, what chooses experts."""
    return name.startswith("rope_") or name.endswith((CHOICE, LAYER_SCALE))


def initial(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Initial values of all weights, see initialise."""
    values = {name: np.empty(leaf.shape, np.float32) for name, leaf in weights(config).items()}
    initialise(config, seed, lambda name, fill: fill(values[name]))
    return values


def initialise(
    config: Config, seed: int, at: Callable[[str, Callable[[np.ndarray], None]], None]
) -> None:
    """Initialize weights in place: at(name, fill) calls fill(array) for each weight in turn.

    Normal with deviation 0.02, divided by sqrt(2 blocks) for projections into the residual stream; norms are 1,
    biases 0.
    """
    rng = np.random.default_rng(seed)
    for name, leaf in weights(config).items():
        adds = name.endswith(ADDING)
        deviation = np.float32(0.02 / (2 * config.block_count) ** 0.5 if adds else 0.02)

        def normal(array: np.ndarray, deviation: np.float32 = deviation) -> None:
            rng.standard_normal(dtype=np.float32, out=array)
            array *= deviation

        fill_value = 0 if name.endswith(".bias") else -1 if name.endswith(".ssm_a") else 1

        def even(array: np.ndarray, value: int = fill_value) -> None:
            array.fill(value)

        matrix = len(leaf.shape) > 1 and name.endswith(".weight")
        at(name, normal if matrix else even)


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
        rotation = replace(rope, magnitude=1.0) if turn else rope
        for_k = for_q = rope_table(rotation, pos, factors)
        if rate and not turn:
            for_q = rope_table(rope, pos, factors, growth=(rate, original, 0))
        tables[rope] = for_q, for_k
    if config.traits.warmth and not turn:
        warm = ops.grown(pos, rate=config.traits.warmth, length=config.window, offset=1)
        warm = named("warmth", ops.reshape(warm, shape=(*pos.shape, 1, 1)))
        tables[None] = warm, warm
    return tables


def rope_table(
    rope: Rope, pos: Tensor, factors: Tensor | None, growth: tuple[float, int, int] = (0.0, 1, 0)
) -> Tensor:
    table = ops.rope_table(
        pos, factors if rope.factors else None, dims=rope.dims, base=rope.base, divisor=rope.divisor,
        blend=rope.blend, magnitude=rope.magnitude, growth=growth,
    )  # fmt: skip
    return named("rope_table", table)


def embedding(config: Config, w: Weights, tokens: Tensor, pos: Tensor) -> Tensor:
    """The embeddings of tokens (...), with their LoRA adapter if there is one, and of their positions, (..., C)."""
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
    if config.traits.learned_positions:
        h = ops.add(h, ops.get_rows(w[POSITIONS], pos))
    return named("token_embd", h)


def stream(
    config: Config, w: Weights, tokens: Tensor, pos: Tensor, mixer: Mixer, context: int
) -> Iterator[Tensor]:
    """The residual stream: the embedding of tokens (...), then the output of each block, (..., C) each.

    Of several streams (..., S, C).
    """
    tables = rope_tables(config, w, pos, context)
    h, layer_inputs = embedding(config, w, tokens, pos), None
    if config.embedding_length_per_layer:
        layer_inputs = embeddings(config, w, tokens, h)
        h = ops.scale(h, by=1.0)  # written after it: what is computed before a block is kept
    h = altup.spread(config, w, h) if config.traits.streams else h
    yield h
    for i in range(config.block_count):
        h = block(config, w, i, h, tables, mixer, layer_inputs)
        yield h


def embeddings(config: Config, w: Weights, tokens: Tensor, h: Tensor) -> Tensor:
    """What each block has of the tokens (...) for itself, (..., L, P), and of their embedding h (..., C)."""
    p, c = config.embedding_length_per_layer, config.embedding_length
    table, proj, norm = LAYER_INPUTS
    shape = (*tokens.shape, config.block_count, p)
    rows = ops.scale(ops.get_rows(w[f"{table}.weight"], tokens), by=(p / 2) ** 0.5)
    projected = ops.scale(product(config, h, w[f"{proj}.weight"]), by=c**-0.5)
    projected = normalized(config, w, norm, ops.reshape(projected, shape=shape))
    both = ops.add(ops.scale(projected, by=0.5**0.5), ops.reshape(rows, shape=shape))
    return named("per_layer_inputs", both)


def mixed(
    config: Config,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *positions: Tensor,
) -> Tensor:
    """The attention output of block i, see ops.attention; `positions` are q_pos, k_pos, q_seq and k_seq."""
    rule, (q_pos, k_pos, q_seq, k_seq) = rule_of(config, i), positions
    places = q_pos, k_pos, q_seq, k_seq
    if config.flash:
        y = ops.attention(q, k, v, *places, None, sinks, **rule)[0]
    else:
        y = unfused_attention.attention(q, k, v, *places, sinks, **rule)
    return named(f"blk.{i}.attn", y)


def in_batch(
    config: Config, pos: Tensor, seq: Tensor, keys_values: KeysValues | None = None
) -> Mixer:
    """Tokens see those before them in their line, of the same sequence.

    keys_values  keys and values by block; filled
    """
    keys_values = {} if keys_values is None else keys_values

    def attend(
        i: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        if k is not None and v is not None:
            keys_values[i] = k, v
        return mixed(config, i, q, *keys_values[config.source_of(i)], sinks, pos, pos, seq, seq)

    def convolve(i: int, x: Tensor, filters: Tensor) -> Tensor:
        return ops.short_conv(x, filters, seq)

    def scan(i: int, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor) -> Tensor:
        return ops.ssm_scan(x, delta, a, skip, seq, **scan_rule(config))

    def delta(i: int, x: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        rule = delta_rule(config)
        return ops.delta_rule(x, decay, beta, seq, **rule, width=scan_rule(config)["width"])

    return Mixer(attend, convolve, convolve, scan, delta)


def scan_rule(config: Config) -> dict[str, int]:
    """Attributes of scans."""
    assert config.scan is not None
    return {"groups": config.scan.groups, "width": config.scan.state}


class DeltaRule(TypedDict):
    """Attributes of a gated delta rule."""

    groups: int
    tiled: bool
    eps: float


def delta_rule(config: Config) -> DeltaRule:
    tiled = config.traits.delta == "tiled"
    return {"groups": scan_rule(config)["groups"], "tiled": tiled, "eps": config.rms_eps}


def rule_of(config: Config, i: int) -> Rule:
    """Attributes of the attention of block i."""
    return {
        "scale": config.attention_scale,
        "window": -config.window_of(i) if config.traits.chunk else config.window_of(i),
        "softcap": config.attention_softcap,
    }


def output_norm(config: Config, w: Weights, h: Tensor) -> Tensor:
    h = altup.merged(config, w, h) if config.traits.streams else h
    return named("output_norm", normalized(config, w, config.traits.last_norm, h))


def head(w: Weights) -> Tensor:
    """The output head: its own matrix, or the embedding if the two are tied."""
    return w.get("output.weight", w["token_embd.weight"])


def for_head(config: Config, x: Tensor) -> Tensor:
    """What the head multiplies: the output of the last norm, scaled where logits are."""
    by = config.logit_scale
    if not by:
        return x
    return ops.scale(x, by=by if config.traits.logits_times else 1 / by)


def logits(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Logits (..., V) from the output of the last block, (..., C)."""
    x, cap = for_head(config, output_norm(config, w, h)), config.final_softcap
    y = product(config, x, head(w))
    if HEAD_BIAS in w:
        y = ops.add(y, w[HEAD_BIAS])
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
    cap, precision = config.final_softcap, config.precision
    results = ops.linear_cross_entropy(
        x,
        head(w),
        targets,
        weights,
        w.get(HEAD_BIAS),
        chunk=chunk,
        softcap=cap,
        precision=precision,
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

        return stream(config, w, tokens, pos, in_batch(config, pos, seq), time)

    return zip(*(part(at) for at in reversed(range(parts))), strict=True)
