"""Generation with a KV cache as graph functions: new tokens of any sequences, and moves of cells."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from packtrain.dtypes import Dtype, f32, i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named, state
from packtrain.models import transformer, unfused_attention
from packtrain.models.block_weights import Attend, Mixer
from packtrain.models.config import Config
from packtrain.models.lora_weights import Weights
from packtrain.models.transformer import delta_rule, logits, output_norm, rule_of

STATES = 2  # per sequence: a run reads one and writes the other
# up to this many tokens products are in f32, so that checked drafts have the bits of written tokens
MAX_EXACT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cells of a KV cache."""

    num_cells: int  # cells of blocks that attend to all earlier tokens
    # cells of blocks with a window, reused once no window sees them; 0: the blocks use `num_cells`
    ring: int = 0
    dtype: Dtype = f32  # element type of keys and values: f32, f16 or q8_0
    max_sequences: int = 1  # most sequences of a run
    max_sequence_tokens: int = 0  # most tokens of one sequence; 0: all cells

    @property
    def max_context(self) -> int:
        """Return the number of tokens of the longest possible sequence."""
        return self.max_sequence_tokens or self.num_cells

    def pool(self, config: Config, i: int) -> str:
        """Return the pool of KV cells that block i uses, "ring_" (for sliding windows, whose cells are reused) or
        "cell_"; the names of the pool's graph inputs begin so."""
        return "ring_" if self.ring and config.visible_tokens_of(i) else "cell_"

    def num_cells_of(self, pool: str) -> int:
        return self.ring if pool == "ring_" else self.num_cells

    def pools(self, config: Config) -> tuple[str, ...]:
        every = range(config.block_count)
        return tuple(dict.fromkeys(self.pool(config, i) for i in every if self.leaves(config, i)))

    def scan_states(self, config: Config) -> dict[str, Tensor]:
        """Return the state tensors of all scans by name, s.{block} and c.{block} (its convolution), with rows for each
        sequence: one to read and one to write."""
        leaves, scan_sizes, num_states = {}, config.scan, STATES * self.max_sequences
        for i in range(config.block_count):
            if scan_sizes is not None and config.has_scan(i):
                sizes = scan_sizes.heads, scan_sizes.inner // scan_sizes.heads, scan_sizes.state
                leaves[f"s.{i}"] = state(f"cache.s.{i}", (num_states, *sizes), f32, "cache")
                conv_shape = num_states, scan_sizes.taps - 1, scan_sizes.conv_channels
                leaves[f"c.{i}"] = state(f"cache.c.{i}", conv_shape, f32, "cache")
        return leaves

    def cache_leaf(self, config: Config, name: str, i: int) -> Tensor:
        """Return the graph's state tensor of block i for `name`: k (keys), v (values) or x (a convolution's inputs)."""
        num_cells = self.num_cells_of(self.pool(config, i))
        if name == "x":
            return state(f"cache.x.{i}", (num_cells, config.embedding_length), f32, "cache")
        shape = num_cells, *config.cached_heads(i)
        return state(f"cache.{name}.{i}", shape, self.dtype, "cache")

    def leaves(self, config: Config, i: int) -> dict[str, Tensor]:
        """Return the graph's state tensors of block i by name: k and v, or x; none if it uses another block's."""
        parts = config.cached_tensors if config.attends(i) else "x" if config.conv_width else ""
        parts = parts if config.source_of(i) == i else ""
        return {name: self.cache_leaf(config, name, i) for name in parts}


def generation(
    config: Config, w: Weights, time: int, cache: CacheLayout, num_logits: int = 1, *, return_hidden: bool = False,
    hidden_states: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Compute logits (num_logits, V) for `time` new tokens of any sequences; also returns the updated cache tensors.

    Inputs, i32: `tokens`, `pos`, `line` (time,); `rows` (num_logits,), the tokens whose logits are returned. `cell`
    (time,) is the cell of each token, `cell_pos` (cells,) the position of each cell. Each sequence of the run has a
    line of `cell_order` (lines, cells): its cells by position, `cell_counts` (lines,) of them. Attention that is
    written out reads `cell_seen` (lines, cells) f32 instead: 1 for the cells of a line, else 0. Convolutions read
    `cell_before` (time, width): the cells of the last tokens, the token's own last. Pools with a ring have `ring`,
    `ring_pos` … All are inputs, so that one plan serves every position and every mix of sequences. LoRA adapters with a
    scale for each token add inputs, see Lora.scale_inputs.

    return_hidden  return the output of the last norm, (num_logits, C), instead of logits
    hidden_states  appends the values before the last norm, (time, C), from which `logits` computes any row
    """
    exact = replace(config, precision="f32")
    config = config if time > MAX_EXACT_TOKENS else exact
    tokens, pos, token_lines = (input(n, (time,), i32) for n in ("tokens", "pos", "line"))
    logit_rows, cache_handles = input("rows", (num_logits,), i32), list[Tensor]()
    if config.lora is not None:
        scale_inputs = config.lora.scale_inputs().items()
        w = {**w, **{name: input(name, (time, len(owners))) for owners, name in scale_inputs}}
    mixer = cell_mixer(config, cache, pos, token_lines, cache_handles)
    *_, h = transformer.residual_stream(config, w, tokens, pos, mixer, cache.max_context)
    if hidden_states is not None:
        hidden_states.append(h)
    last = ops.get_rows(h, logit_rows)
    return output_norm(exact, w, last) if return_hidden else logits(exact, w, last), cache_handles


def cell_mixer(
    config: Config, cache: CacheLayout, pos: Tensor, line: Tensor, cache_handles: list[Tensor]
) -> Mixer:
    """Return a Mixer in which new tokens, at `pos` (time,), see their sequence's cells in the KV cache: `line` (time,)
    is the number of the list of cells to see. Each write appends a new cache tensor to `cache_handles`."""
    (time,) = pos.shape
    places = {pool: pool_inputs(pool, cache, time, config.flash) for pool in cache.pools(config)}

    prefix = "ring_" if cache.ring else "cell_"
    before = input(f"{prefix}before", (time, config.conv_width), i32) if config.conv_width else pos

    def convolve(i: int, x: Tensor, filters: Tensor) -> Tensor:
        cache_handles.extend(ops.set_rows(cache.cache_leaf(config, "x", i), x, places[prefix][0]))
        return ops.short_conv_cells(cache_handles[-1], filters, before)

    states = cache.scan_states(config)
    num_lines = count_lines(time, cache.max_sequences)
    state_slots = [input(f"state_{n}", (num_lines,), i32) for n in ("from", "to")] if states else []

    def convolve_states(i: int, x: Tensor, filters: Tensor) -> Tensor:
        handle, y = ops.short_conv_states(states[f"c.{i}"], x, filters, line, *state_slots)
        cache_handles.append(handle)
        return y

    def scan(i: int, x: Tensor, delta: Tensor, a: Tensor, skip: Tensor) -> Tensor:
        scan_inputs = x, delta, a, skip, line, *state_slots
        num_groups = transformer.scan_attrs(config)["groups"]
        handle, y = ops.ssm_scan_cells(states[f"s.{i}"], *scan_inputs, groups=num_groups)
        cache_handles.append(handle)
        return y

    def delta_rule_in_cells(i: int, x: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        delta_inputs = x, decay, beta, line, *state_slots
        handle, y = ops.delta_rule_cells(states[f"s.{i}"], *delta_inputs, **delta_rule(config))
        cache_handles.append(handle)
        return y

    attend = _attend_cells(config, cache, (pos, line), places, cache_handles)
    return Mixer(attend, convolve, convolve_states, scan, delta_rule_in_cells, is_cached=True)


def _attend_cells(
    config: Config, cache: CacheLayout, at: tuple[Tensor, Tensor], inputs_by_pool: Mapping[str, tuple[Tensor, ...]],
    cache_handles: list[Tensor],
) -> Attend:  # fmt: skip
    """Return the attention of new tokens to cached ones. `at`: (positions, line numbers) of the new tokens, both
    (time,); a line lists a sequence's cells. `inputs_by_pool`: see pool_inputs; `cache_handles`: see cell_mixer."""
    pos, line = at
    kv_handles = dict[int, list[Tensor]]()

    def attend(
        i: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        new_cells, cell_pos, *line_inputs = inputs_by_pool[cache.pool(config, i)]
        for name, x in (("k", k), ("v", v)):
            if x is not None:
                cache_handles.extend(ops.set_rows(cache.cache_leaf(config, name, i), x, new_cells))
                kv_handles.setdefault(i, []).append(cache_handles[-1])
        source_kv = kv_handles[config.source_of(i)]
        k, v = source_kv[0], source_kv[-1]
        rule = rule_of(config, i)
        if config.flash:
            cell_order, counts = line_inputs
            y = ops.attention_cells(q, k, v, pos, line, cell_order, counts, cell_pos, sinks, **rule)
        else:
            (seen,) = line_inputs
            y = unfused_attention.attention_cells(q, k, v, pos, line, seen, cell_pos, sinks, **rule)
        return named(f"blk.{i}.attn", y)

    return attend


def count_lines(time: int, max_sequences: int) -> int:
    """Return how many lists of cells a run of `time` tokens reads: one per sequence, and an empty one for padding."""
    return min(time, max_sequences) + 1


def pool_inputs(pool: str, cache: CacheLayout, time: int, flash: bool = True) -> tuple[Tensor, ...]:
    """Return a pool's graph inputs (a line: a list of one sequence's cells): cells of new tokens, positions of cells,
    each line's cells by position, counts of these; not `flash`: 1 or 0 by line and cell instead of the last two."""
    num_cells, rows = cache.num_cells_of(pool), count_lines(time, cache.max_sequences)
    new = input(pool.rstrip("_"), (time,), i32), input(f"{pool}pos", (num_cells,), i32)
    if not flash:
        return *new, input(f"{pool}seen", (rows, num_cells))
    return *new, input(f"{pool}order", (rows, num_cells), i32), input(f"{pool}counts", (rows,), i32)


def move_cells(config: Config, w: Weights, max_moves: int, cache: CacheLayout) -> list[Tensor]:
    """Build the graph that moves up to `max_moves` KV cells of each pool (of all blocks, or of those with a window) to
    other cells and positions, as when a full context is shifted; returns the cache's tensors afterwards.

    Inputs, i32 (max_moves,), of each pool: `cell_from`, `cell_to`, negative for none, and `cell_by`, the change of the
    position; `ring_from` … Keys are already rotated by their old positions, so rope rotates them by the change.
    """
    cache_handles = list[Tensor]()
    suffixes = "from", "to", "by"
    inputs = {p: [input(p + n, (max_moves,), i32) for n in suffixes] for p in cache.pools(config)}
    shift_tables = {
        prefix: transformer.make_rope_tables(config, w, shift, cache.max_context, is_shift=True)
        for prefix, (*_, shift) in inputs.items()
    }
    for i in range(config.block_count):
        pool_name, rope = cache.pool(config, i), config.rope_of(i)
        source_cells, target, _ = inputs[pool_name]
        for name, leaf in cache.leaves(config, i).items():
            x = ops.get_rows(leaf, source_cells)
            if name == "k" and rope is not None:
                x = ops.rope(x, shift_tables[pool_name][rope][1], neox=config.traits.halves)
            cache_handles.extend(ops.set_rows(leaf, x, target))
    return cache_handles
