"""Transformers as graph functions: one definition for every architecture, for training and cached generation.

Builds tensors from a Config and leaves. Weights have their GGUF names; the Mixer is the difference between training
(keys and values of the batch) and generation (keys and values of the cache)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from types import MappingProxyType
from typing import TypedDict

import numpy as np

from packtrain.dtypes import Dtype, f32, i32, i64
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, constant, input, named, weight
from packtrain.models import altup, unfused_attention
from packtrain.models.activation_rounding import matmul_weight, rounded
from packtrain.models.arch.architecture import CHOICE, CONV_OUT, LAYER_INPUTS, LAYER_SCALE, SCAN_OUT
from packtrain.models.block import transformer_block
from packtrain.models.block_weights import Mixer, RopeTables, apply_norm
from packtrain.models.config import Config, Rope
from packtrain.models.lora import EMBEDDING, KEY, A, B
from packtrain.models.lora_weights import Weights
from packtrain.models.tensor_shapes import HEAD_BIAS, POSITIONS, unused_weights, weight_shapes
from packtrain.models.tiled_block import TiledBlocks

ADDING = tuple(f"{name}.weight" for name in ("attn_output", "ffn_down", CONV_OUT, SCAN_OUT))
NO_TYPES: Mapping[str, Dtype] = MappingProxyType({})
KeysAndValues = dict[int, tuple[Tensor, Tensor]]


class AttentionAttrs(TypedDict):
    """Attributes of the attention op."""

    scale: float
    window: int
    softcap: float


def weights(config: Config, dtypes: Mapping[str, Dtype] = NO_TYPES) -> dict[str, Tensor]:
    """Return the model's weights as graph leaves by GGUF name, LoRA adapters last; `dtypes` has the element types that
    are not f32. Graphs of the same model share leaves, which are made once."""
    return dict(_weight_leaves(config, tuple(dtypes.items())))


@lru_cache(maxsize=4)
def _weight_leaves(config: Config, dtype_items: tuple[tuple[str, Dtype], ...]) -> dict[str, Tensor]:
    dtypes, unread_names = dict(dtype_items), {*unused_weights(config)}
    return {
        name: weight(
            name, shape, dtypes.get(name, f32),
            # divisors of rope's frequencies, scales of blocks and biases of routers have no gradient
            "table" if name.startswith("rope_") or name.endswith((CHOICE, LAYER_SCALE)) or name in unread_names
            else "weight",
        )
        for name, shape in weight_shapes(config).items()
    }  # fmt: skip


def initialize_weights(
    config: Config, seed: int, visit_weight: Callable[[str, Callable[[np.ndarray], None]], None]
) -> None:
    """Initialize weights: visit_weight(name, fill) must call fill(f32 array), which fills in place. Matrices: normal of
    deviation 0.02, over sqrt(2 blocks) for projections into the residual stream; biases 0, ssm_a -1, norms 1."""
    rng = np.random.default_rng(seed)
    for name, leaf in weights(config).items():
        adds_to_residual = name.endswith(ADDING)
        deviation = np.float32(0.02 / (2 * config.block_count) ** 0.5 if adds_to_residual else 0.02)

        def fill_normal(array: np.ndarray, deviation: np.float32 = deviation) -> None:
            rng.standard_normal(dtype=np.float32, out=array)
            array *= deviation

        fill_value = 0 if name.endswith(".bias") else -1 if name.endswith(".ssm_a") else 1
        is_weight_matrix = len(leaf.shape) > 1 and name.endswith(".weight")
        visit_weight(name, fill_normal if is_weight_matrix else partial(np.copyto, src=fill_value))


def make_rope_tables(
    config: Config, w: Weights, pos: Tensor, context: int, *, is_shift: bool = False
) -> RopeTables:
    """Return the rope tables of all blocks for queries and keys, one pair for each kind of rotation.

    context   longest possible text: beyond the context of pretraining, the long rope factors apply
    is_shift  the tables rotate keys further by `pos`, without changing their length
    """
    original_context, rate = config.original_context, config.temperature_scale
    factor_set = "long" if context > original_context else "short"
    rope_factors = w.get("rope_freqs.weight", w.get(f"rope_factors_{factor_set}.weight"))
    ropes = dict.fromkeys(config.rope_of(i) for i in range(config.block_count))
    rope_tables: dict[Rope | None, tuple[Tensor, Tensor]] = {}
    for rope in (rope for rope in ropes if rope is not None):
        rotation = replace(rope, magnitude=1.0) if is_shift else rope
        for_k = for_q = make_rope_table(rotation, pos, rope_factors)
        if rate and not is_shift:
            for_q = make_rope_table(rope, pos, rope_factors, growth=(rate, original_context, 0))
        rope_tables[rope] = for_q, for_k
    if config.traits.chunk_temperature and not is_shift:
        warm = ops.grown(pos, rate=config.traits.chunk_temperature, length=config.window, offset=1)
        warm = named("warmth", ops.reshape(warm, shape=(*pos.shape, 1, 1)))
        rope_tables[None] = warm, warm
    return rope_tables


def make_rope_table(
    rope: Rope, pos: Tensor, factors: Tensor | None, growth: tuple[float, int, int] = (0.0, 1, 0)
) -> Tensor:
    """Return the table of cosines and sines of a rotation at `pos`; `factors`: divisors of its frequencies, or None;
    `growth`: (rate, length, offset) by which long contexts scale queries, see ops.rope_table."""
    rope_values = ops.rope_table(
        pos, factors if rope.use_factors else None, dims=rope.rotated_width, base=rope.base, divisor=rope.divisor,
        blend=rope.blend, magnitude=rope.magnitude, growth=growth,
    )  # fmt: skip
    return named("rope_table", rope_values)


def embedding(config: Config, w: Weights, tokens: Tensor, pos: Tensor) -> Tensor:
    """Return the embeddings (..., C) of tokens (...), with their LoRA adapter, and of positions if they have some."""
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


def residual_stream(
    config: Config, w: Weights, tokens: Tensor, pos: Tensor, mixer: Mixer, context: int
) -> Iterator[Tensor]:
    """Yield the embedding of tokens (...), then each block's output: (..., [S,] C); `context`: see make_rope_tables."""
    rope_tables = make_rope_tables(config, w, pos, context)
    h, layer_inputs = embedding(config, w, tokens, pos), None
    if config.embedding_length_per_layer:
        layer_inputs = layer_embeddings(config, w, tokens, h)
        h = ops.scale(h, by=1.0)  # written after layer_inputs, which are saved with it
    h = altup.spread(config, w, h) if config.traits.num_streams else h
    yield h
    for i in range(config.block_count):
        h = transformer_block(config, w, i, h, rope_tables, mixer, layer_inputs)
        yield h


def layer_embeddings(config: Config, w: Weights, tokens: Tensor, h: Tensor) -> Tensor:
    """Return each block's own embedding (..., L, P) of the tokens (...), from a table and the embedding h (..., C)."""
    p, width = config.embedding_length_per_layer, config.embedding_length
    table_name, projection_name, norm_name = LAYER_INPUTS
    shape = (*tokens.shape, config.block_count, p)
    table_rows = ops.scale(ops.get_rows(w[f"{table_name}.weight"], tokens), by=(p / 2) ** 0.5)
    projected = ops.scale(matmul_weight(config, h, w[f"{projection_name}.weight"]), by=width**-0.5)
    projected = apply_norm(config, w, norm_name, ops.reshape(projected, shape=shape))
    layer_inputs = ops.add(ops.scale(projected, by=0.5**0.5), ops.reshape(table_rows, shape=shape))
    return named("per_layer_inputs", layer_inputs)


def attend_batch(
    config: Config, i: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *token_positions: Tensor,
) -> Tensor:  # fmt: skip
    """Compute block i's attention over a batch, fused or written out; positions are q_pos, k_pos, q_seq and k_seq."""
    rule, (q_pos, k_pos, q_seq, k_seq) = rule_of(config, i), token_positions
    if config.flash:
        y = ops.attention(q, k, v, q_pos, k_pos, q_seq, k_seq, None, sinks, **rule)[0]
    else:
        y = unfused_attention.attention(q, k, v, q_pos, k_pos, q_seq, k_seq, sinks, **rule)
    return named(f"blk.{i}.attn", y)


def batch_mixer(
    config: Config, pos: Tensor, seq: Tensor, keys_values: KeysAndValues | None = None
) -> Mixer:
    """Return a Mixer for batches without a cache: tokens see earlier tokens of their row and sequence (equal `seq`).
    `keys_values` is filled with {block: (keys, values)}."""
    keys_values = {} if keys_values is None else keys_values

    def attend(
        i: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        if k is not None and v is not None:
            keys_values[i] = k, v
        return attend_batch(
            config, i, q, *keys_values[config.source_of(i)], sinks, pos, pos, seq, seq
        )

    def convolve(i: int, x: Tensor, filters: Tensor) -> Tensor:
        return ops.short_conv(x, filters, seq)

    def scan(i: int, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor) -> Tensor:
        return ops.ssm_scan(x, delta, a, skip, seq, **scan_attrs(config))

    def apply_delta_rule(i: int, x: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        rule_attrs = delta_rule(config)
        return ops.delta_rule(x, decay, beta, seq, **rule_attrs, width=scan_attrs(config)["width"])

    return Mixer(attend, convolve, convolve, scan, apply_delta_rule)


def scan_attrs(config: Config) -> dict[str, int]:
    """Return the attributes of scan ops: groups of heads, and the width of the state."""
    assert config.scan is not None
    return {"groups": config.scan.groups, "width": config.scan.state}


class DeltaRuleAttrs(TypedDict):
    """Attributes of the gated delta rule op."""

    groups: int
    tiled: bool
    eps: float


def delta_rule(config: Config) -> DeltaRuleAttrs:
    is_tiled = config.traits.delta == "tiled"
    return {"groups": scan_attrs(config)["groups"], "tiled": is_tiled, "eps": config.rms_eps}


def rule_of(config: Config, i: int) -> AttentionAttrs:
    """Return the attributes of block i's attention op; window 0: none, negative: chunks of that many tokens."""
    return {
        "scale": config.attention_scale,
        "window": -config.window_of(i) if config.traits.attention_chunk else config.window_of(i),
        "softcap": config.attention_softcap,
    }


def output_norm(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Normalize the last block's output h, (..., C) or (..., S, C), whose S streams are merged first: (..., C)."""
    h = altup.merge_streams(config, w, h) if config.traits.num_streams else h
    return named("output_norm", apply_norm(config, w, config.traits.last_norm, h))


def head(w: Weights) -> Tensor:
    """Return the output head: its own matrix, or the embedding if the two are tied."""
    return w.get("output.weight", w["token_embd.weight"])


def head_input(config: Config, x: Tensor) -> Tensor:
    """Return the head's input: the last norm's output x, times the model's factor of logits if it has one."""
    logit_scale = config.logit_scale
    if not logit_scale:
        return x
    return ops.scale(x, by=logit_scale if config.traits.multiplies_logits else 1 / logit_scale)


def logits(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Compute logits (..., V) from the last block's output (..., C)."""
    x, softcap = head_input(config, output_norm(config, w, h)), config.final_softcap
    y = matmul_weight(config, x, head(w))
    if HEAD_BIAS in w:
        y = ops.add(y, w[HEAD_BIAS])
    if softcap:
        y = ops.scale(ops.tanh(ops.scale(y, by=1 / softcap)), by=softcap)
    return named("logits", y)


# ---- training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """loss () is sum of weights * losses; losses (B, T); right (B, T) is 1 where the target is the likeliest token.

    x, targets, weights  inputs of the head
    block_outputs        residual stream, saved when blocks are recomputed: a tensor per part of the batch, as written
    """

    loss: Tensor
    losses: Tensor
    right: Tensor
    block_outputs: list[Tensor]
    x: Tensor
    targets: Tensor
    weights: Tensor


def loss(
    config: Config, w: Weights, batch_size: int, time: int, *, chunk: int = 256, num_parts: int = 1,
    skipped: int = 0, even: bool = False, num_row_tiles: int = 1,
) -> LossOutputs:  # fmt: skip
    """Compute the next-token loss of inputs `tokens`, `targets`, `weights`, `pos`, `seq`, each (batch_size, time).

    A target counts with its weight (1 / number of targets gives the mean). Tokens see earlier positions of the same
    `seq`: several samples can share a row. Dropout adds an input `dropout` (num_parts, 3) i64, see lora.KEY.

    chunk      tokens whose logits exist at a time
    num_parts  each block processes the batch in this many parts: it then needs memory for one part, and its weights'
               gradients are complete before those of the block below begin. The last part goes first, so that
               gradients are summed in the order of the rows.
    skipped    positions at the beginning of a row without a target: `targets`, `weights`, losses are (B, T - skipped)
    even       every target counts 1, without `weights`: for the gradient of a function of `losses`
    num_row_tiles  each block processes its rows in this many tiles, see tiled_block
    """
    shape, counted = (batch_size, time), (batch_size, time - skipped)
    if config.lora is not None and config.lora.dropout:
        w = {**w, KEY: input(KEY, (num_parts, 3), i64)}
    tokens, targets = input("tokens", shape, i32), input("targets", counted, i32)
    pos, seq = input("pos", shape, i32), input("seq", shape, i32)
    batch = tokens, pos, seq
    block_outputs = list(residual_stream_in_parts(config, w, batch, num_parts, num_row_tiles))
    last = block_outputs[-1][0] if num_parts == 1 else ops.concat(block_outputs[-1][::-1], axis=0)
    if skipped:
        last = ops.narrow(last, axis=1, start=skipped, length=time - skipped)
    x = rounded(config, head_input(config, output_norm(config, w, last)), head(w))
    weights = constant("ones", np.ones(counted, np.float32)) if even else input("weights", counted)
    loss_results = cross_entropy(config, w, x, targets, weights, chunk)
    loss, losses, correct = map(named, ("loss", "losses", "right"), loss_results)
    return LossOutputs(loss, losses, correct, [*chain(*block_outputs)], x, targets, weights)


def cross_entropy(
    config: Config, w: Weights, x: Tensor, targets: Tensor, weights: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Compute (loss, losses by token, whether each target is the likeliest) by the head from its input x (..., C), see
    ops.linear_cross_entropy; `chunk`: tokens whose logits exist at a time."""
    return ops.linear_cross_entropy(
        x, head(w), targets, weights, w.get(HEAD_BIAS), chunk=chunk, softcap=config.final_softcap,
        precision=config.precision,
    )  # fmt: skip


def residual_stream_in_parts(
    config: Config, w: Weights, batch: tuple[Tensor, ...], num_parts: int, num_row_tiles: int = 1
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the embedding, then each block's output, as a tuple of `num_parts` parts of the batch, the last rows first.
    `batch`: tokens, pos and seq, all (B, T); `num_row_tiles`: see tiled_block."""
    rows_per_part, num_tokens = batch[0].shape[0] // num_parts, batch[0].shape[1]

    def part_stream(part_index: int) -> Iterator[Tensor]:
        start, parts = part_index * rows_per_part, batch
        if num_parts > 1:
            parts = tuple(ops.narrow(x, axis=0, start=start, length=rows_per_part) for x in batch)
        part_weights, (tokens, pos, seq) = w, parts
        if KEY in w:
            key = ops.narrow(w[KEY], axis=0, start=part_index, length=1)
            part_weights = {**w, KEY: ops.reshape(key, shape=(3,))}
        mixer = batch_mixer(config, pos, seq)
        if num_row_tiles > 1:
            mixer = replace(
                mixer, compute=TiledBlocks(attend_batch, pos, seq, num_row_tiles).compute
            )
        return residual_stream(config, part_weights, tokens, pos, mixer, num_tokens)

    return zip(*(part_stream(part_index) for part_index in reversed(range(num_parts))), strict=True)
