"""Generation with a KV cache as graph functions: new tokens of any sequences, and cells that move."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from packtrain.dtypes import Dtype, f32, i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named, state
from packtrain.models import transformer, unfused_attention
from packtrain.models.activation_rounding import rounded
from packtrain.models.block_weights import Attend, Mixer, Weights
from packtrain.models.config import Config
from packtrain.models.kv_cell_table import lines
from packtrain.models.tensor_shapes import HEAD_BIAS
from packtrain.models.transformer import delta_rule, for_head, head, logits, output_norm, rule_of

STATES = 2  # of a sequence: the one that a run reads, and the one that it writes
EXACT = (
    64  # up to this many tokens products stay in f32: guesses are checked as they would be written
)


@dataclass(frozen=True, slots=True)
class Cache:
    """The cells of a KV cache.

    cells      of blocks that attend to all earlier tokens
    ring       of blocks with a window, used again once no window has them; 0: these use `cells`, too
    dtype      of keys and values: f32, f16 or q8_0
    sequences  most of a run
    longest    tokens of one sequence; 0: all cells
    """

    cells: int
    ring: int = 0
    dtype: Dtype = f32
    sequences: int = 1
    longest: int = 0

    @property
    def context(self) -> int:
        """Tokens of the longest possible text."""
        return self.longest or self.cells

    def pool(self, config: Config, i: int) -> str:
        """Which of both block i uses: the prefix of its inputs' names."""
        return "ring_" if self.ring and config.reach_of(i) else "cell_"

    def count(self, pool: str) -> int:
        return self.ring if pool == "ring_" else self.cells

    def pools(self, config: Config) -> tuple[str, ...]:
        every = range(config.block_count)
        return tuple(dict.fromkeys(self.pool(config, i) for i in every if self.leaves(config, i)))

    def states(self, config: Config) -> dict[str, Tensor]:
        """The states of scans: each sequence has one of each block, and there is room to write the next."""
        states, scan, count = {}, config.scan, STATES * self.sequences
        for i in range(config.block_count):
            if scan is not None and config.scans(i):
                sizes = scan.heads, scan.inner // scan.heads, scan.state
                states[f"s.{i}"] = state(f"cache.s.{i}", (count, *sizes), f32, "cache")
                conv_shape = count, scan.taps - 1, scan.convolved
                states[f"c.{i}"] = state(f"cache.c.{i}", conv_shape, f32, "cache")
        return states

    def leaf(self, config: Config, name: str, i: int) -> Tensor:
        """The keys (name k), the values (v) or the inputs of the convolution (x) of block i."""
        cells = self.count(self.pool(config, i))
        if name == "x":
            return state(f"cache.x.{i}", (cells, config.embedding_length), f32, "cache")
        shape = cells, *config.cached_heads(i)
        return state(f"cache.{name}.{i}", shape, self.dtype, "cache")

    def leaves(self, config: Config, i: int) -> dict[str, Tensor]:
        """What is kept of each token for block i."""
        parts = config.cached_parts if config.attends(i) else "x" if config.conv_width else ""
        parts = parts if config.source_of(i) == i else ""
        return {n: self.leaf(config, n, i) for n in parts}


def generation(
    config: Config,
    w: Weights,
    time: int,
    cache: Cache,
    num_logits: int = 1,
    *,
    hidden: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Logits (num_logits, V) for `time` new tokens of any sequences, and the updated cache handles.

    Inputs, i32: `tokens`, `pos`, `line` (time,); `rows` (num_logits,), the tokens whose logits are returned.
    For `cells`: `cell` (time,), the cell of each token; after that, of all cells, `cell_pos` (cells,), and for each
    sequence of the run a line of `cell_order` (lines, cells), its cells by position, as many as `cell_counts`
    (lines,) says; where attention is written out, instead `cell_seen` (lines, cells) f32 is 1 for the cells of a
    line, else 0. For convolutions `cell_before` (time, their width): the cells of the last tokens, the token's own
    last. Likewise `ring`, `ring_pos` … All of them are inputs, so that one plan serves every position and every mix
    of sequences.

    LoRA adapters whose scale each token has add their inputs, see Lora.

    hidden  the output of the last norm instead of logits, (num_logits, C)
    """
    exact = replace(config, precision="f32")
    config = config if time > EXACT else exact
    tokens, pos, line = (input(n, (time,), i32) for n in ("tokens", "pos", "line"))
    logit_rows, handles = input("rows", (num_logits,), i32), list[Tensor]()
    if config.lora is not None:
        scales = config.lora.inputs().items()
        w = {**w, **{name: input(name, (time, len(owners))) for owners, name in scales}}
    mixer = in_cells(config, cache, pos, line, handles)
    *_, h = transformer.stream(config, w, tokens, pos, mixer, cache.context)
    last = ops.get_rows(h, logit_rows)
    return output_norm(exact, w, last) if hidden else logits(exact, w, last), handles


def in_cells(
    config: Config, cache: Cache, pos: Tensor, line: Tensor, handles: list[Tensor]
) -> Mixer:
    """New tokens see the cells of their sequence; adds the handles of the cache with them."""
    (time,) = pos.shape
    places = {pool: places_of(pool, cache, time, config.flash) for pool in cache.pools(config)}

    prefix = "ring_" if cache.ring else "cell_"
    before = input(f"{prefix}before", (time, config.conv_width), i32) if config.conv_width else pos

    def convolve(i: int, x: Tensor, filters: Tensor) -> Tensor:
        handles.extend(ops.set_rows(cache.leaf(config, "x", i), x, places[prefix][0]))
        return ops.short_conv_cells(handles[-1], filters, before)

    states = cache.states(config)
    count = lines(time, cache.sequences)
    state_slots = (
        [input(f"state_{name}", (count,), i32) for name in ("from", "to")] if states else []
    )

    def filter(i: int, x: Tensor, filters: Tensor) -> Tensor:
        handle, y = ops.short_conv_states(states[f"c.{i}"], x, filters, line, *state_slots)
        handles.append(handle)
        return y

    def scan(i: int, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor) -> Tensor:
        args = x, delta, a, skip, line, *state_slots
        groups = transformer.scan_rule(config)["groups"]
        handle, y = ops.ssm_scan_cells(states[f"s.{i}"], *args, groups=groups)
        handles.append(handle)
        return y

    def delta(i: int, x: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        args = x, decay, beta, line, *state_slots
        handle, y = ops.delta_rule_cells(states[f"s.{i}"], *args, **delta_rule(config))
        handles.append(handle)
        return y

    attend = _attending(config, cache, (pos, line), places, handles)
    return Mixer(attend, convolve, filter, scan, delta, cached=True)


def _attending(
    config: Config, cache: Cache, at: tuple[Tensor, Tensor], places: Mapping[str, tuple[Tensor, ...]],
    handles: list[Tensor],
) -> Attend:  # fmt: skip
    """Attention of new tokens, at their positions and lines."""
    pos, line = at
    kv_handles = dict[int, list[Tensor]]()

    def attend(
        i: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        cell, cell_pos, *seq_inputs = places[cache.pool(config, i)]
        for name, x in (("k", k), ("v", v)):
            if x is not None:
                handles.extend(ops.set_rows(cache.leaf(config, name, i), x, cell))
                kv_handles.setdefault(i, []).append(handles[-1])
        source_kv = kv_handles[config.source_of(i)]
        k, v = source_kv[0], source_kv[-1]
        rule = rule_of(config, i)
        if config.flash:
            order, counts = seq_inputs
            y = ops.attention_cells(q, k, v, pos, line, order, counts, cell_pos, sinks, **rule)
        else:
            (seen,) = seq_inputs
            y = unfused_attention.attention_cells(q, k, v, pos, line, seen, cell_pos, sinks, **rule)
        return named(f"blk.{i}.attn", y)

    return attend


def hidden_losses(config: Config, w: Weights, count: int, chunk: int = 256) -> Tensor:
    """Losses (count,) of `targets` (count,) after `x` (count, C), what the last norm gives; `weights` are not used."""
    x = rounded(config, for_head(config, input("x", (count, config.embedding_length))), head(w))
    targets, weights = input("targets", (count,), i32), input("weights", (count,))
    cap, precision = config.final_softcap, config.precision
    _, losses, *_ = ops.linear_cross_entropy(
        x,
        head(w),
        targets,
        weights,
        w.get(HEAD_BIAS),
        chunk=chunk,
        softcap=cap,
        precision=precision,
    )
    return losses


def places_of(pool: str, cache: Cache, time: int, flash: bool = True) -> tuple[Tensor, ...]:
    """Inputs: the cells of new tokens, positions of all cells, the lines of cells by position, and their lengths.

    flash  else, instead of those two, which line has which cells
    """
    count, rows = cache.count(pool), lines(time, cache.sequences)
    new = input(pool.rstrip("_"), (time,), i32), input(f"{pool}pos", (count,), i32)
    if not flash:
        return *new, input(f"{pool}seen", (rows, count))
    return *new, input(f"{pool}order", (rows, count), i32), input(f"{pool}counts", (rows,), i32)


def moving(config: Config, w: Weights, count: int, cache: Cache) -> list[Tensor]:
    """Handles of a cache in which `count` cells at most of each pool move to others, with new positions.

    Inputs, i32 (count,), of each pool: `cell_from`, `cell_to`, negative for none, and `cell_by`, the change of the
    position; `ring_from` … Keys were rotated by their positions; they are rotated on.
    """
    handles = list[Tensor]()
    names = "from", "to", "by"
    inputs = {p: [input(p + n, (count,), i32) for n in names] for p in cache.pools(config)}
    turns = {
        p: transformer.rope_tables(config, w, by, cache.context, turn=True)
        for p, (*_, by) in inputs.items()
    }
    for i in range(config.block_count):
        pool, rope = cache.pool(config, i), config.rope_of(i)
        source, to, _ = inputs[pool]
        for name, leaf in cache.leaves(config, i).items():
            x = ops.get_rows(leaf, source)
            if name == "k" and rope is not None:
                x = ops.rope(x, turns[pool][rope][1], neox=config.traits.halves)
            handles.extend(ops.set_rows(leaf, x, to))
    return handles
