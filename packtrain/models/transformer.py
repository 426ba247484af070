"""Transformers as graph functions: one definition for training and for cached generation.

A Config and leaves go in, tensors come out. Weights bear their GGUF names; `attend` is what differs between
training (keys and values of the batch) and generation (keys and values of the cache).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from packtrain import ops
from packtrain.dtypes import Dtype, f32, i32
from packtrain.tensor import Tensor, input, named, state, weight

Weights = Mapping[str, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NO_TYPES: Mapping[str, Dtype] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a llama; names follow the GGUF metadata keys `llama.*`."""

    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    rope_freq_base: float = 10_000.0
    rms_eps: float = 1e-5
    tied: bool = True

    @property
    def head_width(self) -> int:
        return self.embedding_length // self.head_count


PRESETS = {
    "1m": Config(2_048, 256, 128, 4, 384, 4, 2),
    "15m": Config(32_000, 256, 256, 8, 768, 8, 8),
    "110m": Config(32_000, 512, 768, 12, 2_048, 12, 12),
}


def weights(config: Config, types: Mapping[str, Dtype] = NO_TYPES) -> dict[str, Tensor]:
    """The model's weight leaves by GGUF name; `types` says which are stored otherwise than as f32."""
    c, f, d = config.embedding_length, config.feed_forward_length, config.head_width
    q, kv = config.head_count * d, config.head_count_kv * d
    block = {
        "attn_norm": (c,), "attn_q": (q, c), "attn_k": (kv, c), "attn_v": (kv, c), "attn_output": (c, q),
        "ffn_norm": (c,), "ffn_gate": (f, c), "ffn_up": (f, c), "ffn_down": (c, f),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, c)}
    for i in range(config.block_count):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (c,)
    if not config.tied:
        shapes["output.weight"] = (config.vocab_size, c)
    return {name: weight(name, shape, types.get(name, f32)) for name, shape in shapes.items()}


def initial(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Fresh values of all weights, see initialise."""
    values = {name: np.empty(leaf.shape, np.float32) for name, leaf in weights(config).items()}
    initialise(config, seed, lambda name, fill: fill(values[name]))
    return values


def initialise(
    config: Config, seed: int, at: Callable[[str, Callable[[np.ndarray], None]], None]
) -> None:
    """Fresh values, made where they are to live: at(name, fill) calls fill(array) for each weight in turn.

    Normal with deviation 0.02, less by sqrt(2 blocks) where a block adds to the stream; norms are 1.
    """
    rng = np.random.default_rng(seed)
    for name, leaf in weights(config).items():
        adds = name.endswith(("attn_output.weight", "ffn_down.weight"))
        deviation = np.float32(0.02 / (2 * config.block_count) ** 0.5 if adds else 0.02)

        def normal(array: np.ndarray, deviation: np.float32 = deviation) -> None:
            rng.standard_normal(dtype=np.float32, out=array)
            array *= deviation

        at(name, normal if len(leaf.shape) > 1 else lambda array: array.fill(1))


def block(config: Config, w: Weights, i: int, h: Tensor, table: Tensor, attend: Attend) -> Tensor:
    """One transformer block: h (..., C) -> (..., C)."""

    def part(name: str) -> Tensor:
        return w[f"blk.{i}.{name}.weight"]

    def call(name: str, made: Tensor) -> Tensor:
        return named(f"blk.{i}.{name}", made)

    def heads(x: Tensor, count: int) -> Tensor:
        return ops.reshape(x, shape=(*x.shape[:-1], count, config.head_width))

    x = call("attn_norm", ops.rms_norm(h, part("attn_norm"), eps=config.rms_eps))
    q = heads(call("attn_q", ops.matmul(x, part("attn_q"))), config.head_count)
    k = heads(call("attn_k", ops.matmul(x, part("attn_k"))), config.head_count_kv)
    v = heads(call("attn_v", ops.matmul(x, part("attn_v"))), config.head_count_kv)
    y = attend(i, call("q_rope", ops.rope(q, table)), call("k_rope", ops.rope(k, table)), v)
    y = ops.reshape(y, shape=(*h.shape[:-1], config.head_count * config.head_width))
    h = call("attn_output", ops.matmul(y, part("attn_output"), h))

    x = call("ffn_norm", ops.rms_norm(h, part("ffn_norm"), eps=config.rms_eps))
    gate, up = (
        call("ffn_gate", ops.matmul(x, part("ffn_gate"))),
        call("ffn_up", ops.matmul(x, part("ffn_up"))),
    )
    return call(
        "ffn_down", ops.matmul(call("ffn_swiglu", ops.swiglu(gate, up)), part("ffn_down"), h)
    )


def stream(config: Config, w: Weights, tokens: Tensor, pos: Tensor, attend: Attend) -> list[Tensor]:
    """The residual stream: the embedding of tokens (...) and what each block leaves, (..., C) each."""
    table = named(
        "rope_table", ops.rope_table(pos, dims=config.head_width, base=config.rope_freq_base)
    )
    h = [named("token_embd", ops.get_rows(w["token_embd.weight"], tokens))]
    for i in range(config.block_count):
        h.append(block(config, w, i, h[-1], table, attend))
    return h


def output_norm(config: Config, w: Weights, h: Tensor) -> Tensor:
    return named("output_norm", ops.rms_norm(h, w["output_norm.weight"], eps=config.rms_eps))


def head(w: Weights) -> Tensor:
    """The projection to the vocabulary: its own, or the embedding where the two are tied."""
    return w.get("output.weight", w["token_embd.weight"])


# ---- training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """loss () is sum of weights * losses; losses (B, T); blocks: the residual stream, to keep when recomputing."""

    loss: Tensor
    losses: Tensor
    blocks: list[Tensor]


def loss(config: Config, w: Weights, batch: int, time: int, *, chunk: int = 256) -> Loss:
    """Next-token loss of inputs `tokens`, `targets`, `weights`, `pos`, `seq`, all (B, T).

    A target counts with its weight (1 / number of targets gives the mean). Tokens see earlier positions of the
    same `seq`, so that several samples can share a row.
    """
    shape = (batch, time)
    tokens, targets = input("tokens", shape, i32), input("targets", shape, i32)
    pos, seq = input("pos", shape, i32), input("seq", shape, i32)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, _ = ops.attention(q, k, v, pos, pos, seq, seq, scale=config.head_width**-0.5)
        return named(f"blk.{i}.attn", y)

    h = stream(config, w, tokens, pos, attend)
    x = output_norm(config, w, h[-1])
    made = ops.linear_cross_entropy(x, head(w), targets, input("weights", shape), chunk=chunk)
    return Loss(named("loss", made[0]), named("losses", made[1]), h)


# ---- cached generation ---------------------------------------------------------------------------------------


def generation(
    config: Config, w: Weights, time: int, cells: int, wanted: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """Logits (wanted, V) for `time` new tokens of any sequences, and the updated cache handles.

    Inputs, all i32: `tokens`, `pos`, `seq`, `cell` (time,), the cell each token goes to; `cell_pos`, `cell_seq`
    (cells,) as they are after that; `length` (1,), cells in use; `rows` (wanted,), the tokens whose logits are
    wanted. All of them come at run time, so one plan serves every position and every mix of sequences.
    """
    tokens, pos, seq, cell = (
        input(name, (time,), i32) for name in ("tokens", "pos", "seq", "cell")
    )
    cell_pos, cell_seq = input("cell_pos", (cells,), i32), input("cell_seq", (cells,), i32)
    length, wanted_rows = input("length", (1,), i32), input("rows", (wanted,), i32)
    handles: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        return ops.reshape(x, shape=(1, *x.shape))

    def remember(name: str, x: Tensor) -> Tensor:
        leaf = state(name, (cells, config.head_count_kv, config.head_width))
        handles.extend(ops.set_rows(leaf, x, cell))
        return one(handles[-1])

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = remember(f"cache.k.{i}", k), remember(f"cache.v.{i}", v)
        where = one(pos), one(cell_pos), one(seq), one(cell_seq), length
        y, _ = ops.attention(one(q), keys, values, *where, scale=config.head_width**-0.5)
        return named(f"blk.{i}.attn", y)

    h = stream(config, w, tokens, pos, attend)[-1]
    x = output_norm(config, w, ops.get_rows(h, wanted_rows))
    return named("logits", ops.matmul(x, head(w))), handles
