"""Generation through the KV cache against the full forward without one, for any cutting of the prompt."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from packtrain import Executor, Graph, Session, Stopped, interpret
from packtrain.dtypes import BLOCK_TYPES, Dtype, f16, f32, i32
from packtrain.engine import ops
from packtrain.engine.tensor import constant, input, state
from packtrain.inference.kv_cache.kv_cells import CacheFull, CellTable
from packtrain.kernels.quant import quantized_arrays
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.models.config import Config
from tests.cell_inputs import feed_inputs
from tests.models import CONFIG, bind_graph, logits_graph, same_bits, seeded_weights

TOLERANCE = 1e-5  # of the largest logit
CELLS, SEQUENCES = 48, 3
LONG = Config(50, 320, 64, 1, 96, 4, 2, tied=False)  # its cells fill several blocks of attention


@dataclass
class Cached:
    """A model with a cache in one session, and a plan for every chunk size in `sizes`."""

    sizes: tuple[int, ...] = (1, 8)
    config: Config = CONFIG
    cells: CellTable = field(default_factory=lambda: CellTable(CELLS))
    cache: Dtype = f32
    session: Session = field(default_factory=Session)
    runs: dict[int, Executor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in self.sizes:
            logits, handles = generation(
                self.config,
                transformer.weights(self.config),
                size,
                CacheLayout(len(self.cells), dtype=self.cache, max_sequences=SEQUENCES),
                size,
            )
            self.runs[size] = bind_graph(Graph([logits], handles), session=self.session)
        self.session.set(seeded_weights(self.config))

    def feed(self, tokens: np.ndarray, seqs: np.ndarray) -> np.ndarray:
        """The logits of every token given; the smallest plan that holds them runs, filled with padding."""
        count = len(tokens)
        size = min(size for size in self.sizes if size >= count)
        rows = np.append(np.arange(count), np.full(size - count, -1))
        feeds = feed_inputs(self.cells, tokens, seqs, rows, size=size, max_sequences=SEQUENCES)
        return self.runs[size](feeds)["logits"][:count]

    def feed_sequence(self, seq: int, tokens: np.ndarray, chunk: int = 8) -> np.ndarray:
        """The logits of one sequence's next tokens, a chunk at a time."""
        pieces = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return np.concatenate([self.feed(p, np.full(len(p), seq, np.int32)) for p in pieces])


def random_prompt(length: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, CONFIG.vocab_size, length).astype(np.int32)


def full_logits(tokens: np.ndarray, config: Config = CONFIG) -> np.ndarray:
    """Logits (T, V) of the full forward, by the specification in float64."""
    positions = np.arange(len(tokens), dtype=np.int32)[None]
    feeds = {"tokens": tokens[None], "pos": positions, "seq": np.zeros_like(positions)}
    return interpret(logits_graph(config, 1, len(tokens)), seeded_weights(config) | feeds)[
        "logits"
    ][0]


def is_close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max())


def split_tokens(tokens: np.ndarray, lengths: Iterable[int]) -> list[np.ndarray]:
    return np.split(tokens, np.cumsum([*lengths]))[:-1]


CUTTINGS = {
    "token by token": [1] * 23,
    "whole chunks and a rest": [8, 8, 7],
    "ends with decoding": [8, 8, 1, 1, 1, 1, 1, 1, 1],
    **{
        f"at random {seed}": np.diff(
            [0, *np.unique(np.random.RandomState(seed).randint(1, 23, 12)), 23]
        ).tolist()
        for seed in range(4)
    },
}


def test_the_full_forward_on_the_cpu():
    tokens = random_prompt(23, 1)
    positions = np.arange(23, dtype=np.int32)[None]
    feeds = {"tokens": tokens[None], "pos": positions, "seq": np.zeros_like(positions)}
    got = bind_graph(logits_graph(CONFIG, 1, 23), seeded_weights(CONFIG))(feeds)["logits"][0]
    assert is_close(got, full_logits(tokens))


@pytest.mark.parametrize("lengths", CUTTINGS.values(), ids=CUTTINGS)
def test_any_cutting_of_the_prompt_gives_the_full_logits(lengths):
    tokens = random_prompt(23, 1)
    cut = [piece for part in split_tokens(tokens, lengths) for piece in np.split(part, [8, 16])]
    model = Cached()
    got = [model.feed_sequence(0, piece) for piece in cut if len(piece)]
    assert is_close(np.concatenate(got), full_logits(tokens))


@pytest.mark.parametrize("chunk", [1, 37, 64])
def test_a_prompt_longer_than_a_block_of_attention(chunk):
    model, tokens, other = (
        Cached((1, 64), LONG, CellTable(320)),
        random_prompt(250, 12),
        random_prompt(70, 13),
    )
    model.feed_sequence(0, other[:30], chunk)
    got = model.feed_sequence(1, tokens, chunk)
    model.feed_sequence(0, other[30:], chunk)
    assert is_close(got, full_logits(tokens, LONG))


def test_logits_of_the_wanted_rows_alone():
    model, tokens = Cached((8,)), random_prompt(8, 1)
    logits, handles = generation(CONFIG, transformer.weights(CONFIG), 8, CacheLayout(CELLS), 2)
    run = bind_graph(Graph([logits], handles), session=model.session)
    feeds = feed_inputs(model.cells, tokens, np.zeros(8, np.int32), np.array([7, 2], np.int32))
    assert is_close(run(feeds)["logits"], full_logits(tokens)[[7, 2]])


def test_padding_leaves_no_trace():
    tokens = random_prompt(5, 2)
    padded = Cached((8,))
    assert is_close(padded.feed_sequence(0, tokens), full_logits(tokens))
    for name in (f"cache.{kv}.{i}" for kv in "kv" for i in range(CONFIG.block_count)):
        assert padded.session.get(name)[:5].all(), f"tokens were not written to {name}"
        assert not padded.session.get(name)[5:].any(), f"padding was written to {name}"


def test_one_decode_plan_serves_every_position():
    model, tokens = Cached((1,)), random_prompt(CELLS, 3)
    before = model.session.generation
    assert is_close(model.feed_sequence(0, tokens, chunk=1), full_logits(tokens))
    assert model.session.generation == before and len(model.runs) == 1


def interleaved(model: Cached, first: np.ndarray, second: np.ndarray, order: str) -> np.ndarray:
    """Feed two sequences in the order given by letters; the logits of a, then those of b."""
    logits_by_seq: dict[str, list[np.ndarray]] = {"a": [], "b": []}
    remaining = {"a": list(first), "b": list(second)}
    for group in order.split():
        tokens = np.array([remaining[c].pop(0) for c in group], np.int32)
        seqs = np.array([ord(c) - ord("a") for c in group], np.int32)
        for c, row in zip(group, model.feed(tokens, seqs), strict=True):
            logits_by_seq[c].append(row)
    return np.array(logits_by_seq["a"] + logits_by_seq["b"])


ORDER = "aab b a babab aaa b bbab a b"


def test_two_sequences_do_not_see_each_other():
    count = {c: ORDER.count(c) for c in "ab"}
    first, second = random_prompt(count["a"], 4), random_prompt(count["b"], 5)
    got = interleaved(Cached(), first, second, ORDER)
    assert is_close(got[: count["a"]], full_logits(first))
    assert is_close(got[count["a"] :], full_logits(second))


def test_changing_one_sequence_changes_no_bit_of_the_other():
    count = {c: ORDER.count(c) for c in "ab"}
    first, second, third = (
        random_prompt(count["a"], 4),
        random_prompt(count["b"], 5),
        random_prompt(count["b"], 6),
    )
    before = interleaved(Cached(), first, second, ORDER)
    after = interleaved(Cached(), first, third, ORDER)
    assert same_bits({"a": after[: count["a"]]}, {"a": before[: count["a"]]})
    assert not np.array_equal(after[count["a"] :], before[count["a"] :])


def test_cells_of_a_dropped_sequence_are_used_again():
    model, gone, stays, comes = (
        Cached(),
        random_prompt(20, 7),
        random_prompt(24, 8),
        random_prompt(22, 9),
    )
    model.feed_sequence(0, gone)
    got_stays = [model.feed_sequence(1, stays[:12])]
    left_by_gone = set(model.cells.of(0))
    model.cells.drop_positions(0)
    got_comes = model.feed_sequence(2, comes)
    got_stays.append(model.feed_sequence(1, stays[12:]))
    assert set(model.cells.of(2)) & left_by_gone
    assert is_close(got_comes, full_logits(comes))
    assert is_close(np.concatenate(got_stays), full_logits(stays))


def test_a_sequence_is_taken_back_to_an_earlier_position():
    model, tokens, other = Cached(), random_prompt(18, 10), random_prompt(9, 11)
    model.feed_sequence(0, tokens)
    model.cells.drop_positions(0, since=7)
    full_prompt = np.concatenate((tokens[:7], other))
    assert is_close(model.feed_sequence(0, other), full_logits(full_prompt)[7:])


@pytest.mark.parametrize("after", [0, 12, 30])
def test_a_reply_stopped_between_two_ops_is_taken_back(after):
    model, tokens = Cached((8,)), random_prompt(16, 1)
    model.feed_sequence(0, tokens[:8])
    feeds = feed_inputs(
        model.cells, tokens[8:], np.zeros(8, np.int32), np.arange(8), max_sequences=SEQUENCES
    )
    stop_calls = iter(range(1000))
    with pytest.raises(Stopped):
        model.runs[8](feeds, stop=lambda: next(stop_calls) >= after)
    model.cells.drop_positions(0, since=8)
    assert is_close(model.feed_sequence(0, tokens[8:]), full_logits(tokens)[8:])


@pytest.mark.parametrize("kind", [f16, BLOCK_TYPES["q8_0"]], ids=str)
@pytest.mark.parametrize(("time", "width"), [(1, 64), (3, 32), (17, 96), (90, 160)])
def test_attention_reads_what_is_packed_as_the_values_it_has(time, width, kind):
    rng, cells = np.random.default_rng(time), 150
    values = rng.standard_normal((2, cells, 2, width)).astype(np.float32)
    stored = values.astype(np.float16) if kind == f16 else quantized_arrays.quantize(values, kind)
    outputs, pos = [], constant("pos", cells - time + np.arange(time), i32)
    order = constant("order", rng.permutation(cells)[None], i32)
    of_cells = constant("k_pos", np.argsort(order.value[0]), i32)
    cell_inputs = constant("row", np.zeros(time), i32), order, constant("counts", [cells], i32)
    for dtype, pair in ((kind, stored), (f32, quantized_arrays.dequantize(stored))):
        k, v = (constant(n, x, dtype) for n, x in zip("kv", pair, strict=True))
        q = input("q", (time, 6, width))
        y = ops.attention_cells(
            q, k, v, pos, *cell_inputs, of_cells, scale=width**-0.5, window=70, softcap=3.0
        )
        run = bind_graph(Graph({"y": y}))
        queries = np.random.default_rng(0).standard_normal(q.shape).astype(np.float32)
        outputs.append(run({"q": queries}))
    assert same_bits(*outputs)


@pytest.mark.parametrize("kind", [f16, BLOCK_TYPES["q8_0"]], ids=str)
@pytest.mark.parametrize("count", [3, 300])
def test_rows_are_packed_as_the_quantizer_packs_them(kind, count):
    rng = np.random.default_rng(count)
    x, ids = (
        rng.standard_normal((count, 2, 64)).astype(np.float32),
        rng.permutation(2 * count)[:count],
    )
    ids[::3] = -1
    leaf = state("cache", (2 * count, 2, 64), kind)
    (handle,) = ops.set_rows(leaf, input("x", x.shape), constant("ids", ids, i32))
    run = bind_graph(Graph({}, [handle]))
    run({"x": x})
    expected = run.session.get("cache")
    expected[ids[ids >= 0]] = (
        x[ids >= 0].astype(np.float16)
        if kind == f16
        else quantized_arrays.quantize(x[ids >= 0], kind)
    )
    assert run.session.get("cache").tobytes() == expected.tobytes()
    assert (
        not run.session.get("cache")[np.setdiff1d(np.arange(2 * count), ids)].tobytes().strip(b"\0")
    )


def test_a_cache_of_halves_is_near_and_rounds_to_nearest():
    tokens, model = random_prompt(23, 1), Cached(cache=f16)
    got = model.feed_sequence(0, tokens)
    assert 0 < np.abs(got - full_logits(tokens)).max() < 5e-3
    exact = Cached()
    exact.feed_sequence(0, tokens)
    for name in ("cache.k.0", "cache.v.0"):
        halves = model.session.get(name)
        assert halves.dtype == np.float16
        assert np.array_equal(halves, exact.session.get(name).astype(np.float16))


def take_cells(cells: CellTable, seq: int, num_tokens: int) -> list[int]:
    """Take cells for the next tokens of a sequence; returns the tokens' positions."""
    tokens = np.zeros(num_tokens, np.int32)
    return feed_inputs(cells, tokens, np.full(num_tokens, seq), [num_tokens - 1])["pos"].tolist()


def test_a_full_cache_refuses_and_takes_nothing():
    cells = CellTable(6)
    take_cells(cells, 0, 4)
    before = cells.sets.copy(), cells.pos.copy()
    with pytest.raises(CacheFull, match="3 cells wanted, 2 of 6 are free"):
        take_cells(cells, 1, 3)
    tokens = np.zeros(3, np.int32)
    with pytest.raises(CacheFull):
        feed_inputs(cells, tokens, np.array([1, 1, 1], np.int32), np.array([2], np.int32))
    assert np.array_equal(cells.sets, before[0]) and np.array_equal(cells.pos, before[1])
    cells.drop_positions(0)
    assert not cells.sets.any()
    take_cells(cells, 1, 6)


def test_positions_go_on_where_a_sequence_stopped():
    cells = CellTable(8)
    take_cells(cells, 5, 2)
    take_cells(cells, 6, 2)
    assert take_cells(cells, 5, 2) == [2, 3]
    cells.drop_positions(5, since=1)
    assert take_cells(cells, 5, 1) == [1]
