"""Blocks in tiles of rows: keys and values of all rows first, then the rest of the block, a few rows at a time.

A block of attention then needs memory for its input and output, for keys and values, and for inner values of one tile.
In blocks with convolutions or scans, only the feed-forward is tiled. Results are those of untiled blocks; gradients of
weights are sums over tiles, the first rows first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from packtrain.engine.row_tiles import BuildBody, in_tiles
from packtrain.engine.tensor import Tensor
from packtrain.models.block import compute_block, feed_forward, mix_tokens
from packtrain.models.block_weights import Attend, BlockBuilder, Mixer, RopeTables
from packtrain.models.config import Config

ALL_ROWS = "keys", "values", "positions", "sequences"  # what attention reads of all rows


def can_tile(config: Config) -> bool:
    """Whether blocks can run in tiles of tokens: not with dropout, which numbers all tokens, nor with --aware."""
    return config.lora is None or not (config.lora.dropout or config.lora.aware)


class TiledBlocks:
    """Computes blocks for tokens at positions `pos` of sequences `seq`, both (B, T), in `count` tiles of T / count.

    attend  a function such as transformer.attend_batch; `keys_values` fills with those of each block, by its number
    """

    def __init__(self, attend: Callable[..., Tensor], pos: Tensor, seq: Tensor, count: int) -> None:
        self.attend, self.pos, self.seq, self.count = attend, pos, seq, count
        self.keys_values = dict[int, tuple[Tensor, ...]]()

    def compute(
        self, block: BlockBuilder, h: Tensor, rope_tables: RopeTables, mixer: Mixer
    ) -> Tensor:
        """Compute a block as `block.compute_block` does, h (B, T, C) -> (B, T, C), but T / count tokens of each row at
        a time. `mixer` is for blocks with scans and convolutions, which are not tiled."""
        config, i = block.config, block.block_index
        wholes = {name: t for name, t in block.w.items() if name.startswith(f"blk.{i}.")}
        if not config.attends(i) or config.has_scan(i):
            mixed = mix_tokens(block, h, rope_tables, mixer)

            def feed(tiles: Sequence[Tensor], w: Mapping[str, Tensor]) -> list[Tensor]:
                return [feed_forward(replace(block, w=w), *tiles)]

            return block.named("tiles", in_tiles(feed, mixed, wholes, self.count)[0])
        tables = dict.fromkeys(t for pair in rope_tables.values() for t in pair)
        rows = h, self.pos, self.seq, *tables
        keys_and_values, rest = self._bodies(block, rows, rope_tables)
        if config.source_of(i) == i:
            results = in_tiles(keys_and_values, rows, wholes, self.count)
            self.keys_values[i] = tuple(map(block.named, ("keys", "values"), results))
        read = (*self.keys_values[config.source_of(i)], self.pos, self.seq)
        wholes |= dict(zip(ALL_ROWS, read, strict=True))
        return block.named("tiles", in_tiles(rest, rows, wholes, self.count)[0])

    def _bodies(
        self, block: BlockBuilder, rows: Sequence[Tensor], rope_tables: RopeTables
    ) -> tuple[BuildBody, BuildBody]:
        """Return two functions that build the graph of one tile of `rows` (h and what goes with its tokens): the first
        returns [keys, values], the second, once all keys are there, [the block's output]."""

        def run(tiles: Sequence[Tensor], w: Mapping[str, Tensor], attend: Attend) -> Tensor:
            tile_of = dict(zip(rows, tiles, strict=True))
            tile_tables = {rope: (tile_of[q], tile_of[k]) for rope, (q, k) in rope_tables.items()}
            return compute_block(replace(block, w=w), tiles[0], tile_tables, Mixer(attend))

        def keys_and_values(tiles: Sequence[Tensor], w: Mapping[str, Tensor]) -> list[Tensor]:
            results = list[Tensor]()

            def attend(i: int, q: Tensor, *keys_values_sinks: Tensor | None) -> Tensor:
                results.extend(t for t in keys_values_sinks[:2] if t is not None)
                return q  # what follows is no part of the results

            run(tiles, w, attend)
            return results

        def rest(tiles: Sequence[Tensor], w: Mapping[str, Tensor]) -> list[Tensor]:
            keys, values, pos, seq = (w[name] for name in ALL_ROWS)

            def attend(i: int, q: Tensor, k: object, v: object, sinks: Tensor | None) -> Tensor:
                read = q, keys, values, sinks, tiles[1], pos, tiles[2], seq
                return self.attend(block.config, i, *read)

            return [run(tiles, w, attend)]

        return keys_and_values, rest
