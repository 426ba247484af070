"""Contexts: random schedules against a cache of plain keys in float64; states, rings, and what is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from packtrain import Session, Stopped
from packtrain.dtypes import BLOCK_TYPES, Dtype, f16, f32
from packtrain.inference.kv_cache import (
    CacheFull,
    CacheLayout,
    Context,
    ContextError,
    RunSizes,
    place_runs,
)
from packtrain.inference.kv_cache.decode_plans import make_cache
from packtrain.models.config import Config
from tests.models import seeded_weights

BASE_CONFIG = Config(50, 512, 64, 3, 96, 2, 1)
WINDOWED = replace(BASE_CONFIG, window=9, window_pattern=(True, False, True))
CELLS, RING, SEQUENCES, ROWS = 96, 48, 4, 4
SIZES = RunSizes((8, 4, 1), ROWS)
Q8_0 = BLOCK_TYPES["q8_0"]
OFF = {f32: 1e-5, f16: 1e-2, Q8_0: 0.15}  # of the largest logit


def context(
    config: Config = BASE_CONFIG,
    cells: int = CELLS,
    ring: int = 0,
    dtype: Dtype = f32,
    **options: int | bool,
) -> Context:
    cache, session = CacheLayout(cells, ring, dtype, SEQUENCES), Session()
    runs = session.executors(place_runs(config, cache, SIZES, has_moves=True))
    session.set(seeded_weights(config))
    return Context.within(config, cache, SIZES, runs, SEQUENCES, **options)


def test_a_cache_of_another_type_is_refused() -> None:
    with pytest.raises(ContextError, match="cache is 'q4'; it must be one of f16, f32, q8_0"):
        make_cache(BASE_CONFIG, CELLS, 1, "q4", 8, swa_full=False)


@pytest.mark.parametrize(
    "name", ["cells", "sequences", "rows", "longest", "checkpoints", "spacing"]
)
@pytest.mark.parametrize("number", [-1, 1.5])
def test_numbers_of_a_context_are_whole_and_not_below_zero(name: str, number: float) -> None:
    with pytest.raises(ContextError, match=f"{name} is {number}; it must be a whole number"):
        Context("none.gguf", **{name: number})


# ---- the reference: each sequence has its own keys, not rotated


@dataclass
class Entry:
    pos: int
    token: int
    keys: list[np.ndarray]
    values: list[np.ndarray]


class ReferenceContext:
    """What a context computes, written down in float64: token by token, keys rotated when they are read."""

    def __init__(self, config: Config) -> None:
        self.config, self.w = (
            config,
            {n: v.astype(np.float64) for n, v in seeded_weights(config).items()},
        )
        self.texts: dict[int, list[Entry]] = {seq: [] for seq in range(SEQUENCES)}

    def next(self, seq: int) -> int:
        return max((e.pos for e in self.texts[seq]), default=-1) + 1

    def rotate(self, x: np.ndarray, pos: int) -> np.ndarray:
        angles = pos * self.config.rope_freq_base ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config.rms_eps) * self.w[f"{name}.weight"]

    def add(self, token: int, seqs: Sequence[int]) -> np.ndarray:
        c, text = self.config, self.texts[seqs[0]]
        new = Entry(self.next(seqs[0]), token, [], [])
        for seq in seqs:
            self.texts[seq].append(new)
        h = self.w["token_embd.weight"][token]
        for i in range(c.block_count):
            part = f"blk.{i}."
            x = self.norm(f"{part}attn_norm", h)
            q, k, v = (
                (self.w[f"{part}attn_{n}.weight"] @ x).reshape(-1, c.head_width) for n in "qkv"
            )
            new.keys.append(k)
            new.values.append(v)
            window = c.window_of(i) or 1 << 30
            seen = [e for e in text if new.pos - window < e.pos <= new.pos]
            y = np.empty_like(q)
            for head, query_head in enumerate(self.rotate(q, new.pos)):
                kv = head * c.head_count_kv // c.head_count
                z = np.array([self.rotate(e.keys[i][kv], e.pos) @ query_head for e in seen])
                p = np.exp((z - z.max()) * c.attention_scale)
                y[head] = p / p.sum() @ np.array([e.values[i][kv] for e in seen])
            h = h + self.w[f"{part}attn_output.weight"] @ y.reshape(-1)
            x = self.norm(f"{part}ffn_norm", h)
            gate, up = (self.w[f"{part}ffn_{n}.weight"] @ x for n in ("gate", "up"))
            h = h + self.w[f"{part}ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return self.w["token_embd.weight"] @ self.norm("output_norm", h)

    def change(self, seq: int, f: Callable[[int], int], since: int, until: int) -> None:
        moved_entries = (
            replace(e, pos=f(e.pos)) if since <= e.pos < until else e for e in self.texts[seq]
        )
        self.texts[seq] = [e for e in moved_entries if e.pos >= 0]


def max_relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


# ---- random schedules


class Schedule:
    """Random calls on a context and on the reference; each kind is a method."""

    def __init__(self, ctx: Context, seed: int) -> None:
        self.ctx, self.reference = ctx, ReferenceContext(ctx.config)
        self.rng, self.worst, self.saved = np.random.default_rng(seed), 0.0, list[tuple]()
        self.divided = False

    def seq(self) -> int:
        return int(self.rng.integers(SEQUENCES))

    def add(self, stop: int = -1) -> None:
        """Tokens of several sequences in one batch; stopped between ops, it is tried again."""
        seqs = np.sort(self.rng.integers(0, SEQUENCES, self.rng.integers(1, 14)))
        seqs = [int(s) for s in seqs if self.usable(int(s))]
        tokens = [int(t) for t in self.rng.integers(0, BASE_CONFIG.vocab_size, len(seqs))]
        if not seqs or self.refused(tokens, seqs):
            return
        if stop >= 0:
            calls, before = iter(range(10**6)), {s: self.ctx.next(s) for s in range(SEQUENCES)}
            with pytest.raises(Stopped):
                self.ctx.decode(tokens[:1], seqs[:1], stop=lambda: next(calls) >= stop)
            assert before == {s: self.ctx.next(s) for s in range(SEQUENCES)}
        logit_indices = np.flatnonzero(self.rng.random(len(seqs)) < 0.5).tolist()
        before = [pool.sets.copy() for pool in self.ctx.pools.pools.values()]
        try:
            got = self.ctx.decode(tokens, seqs, wanted=logit_indices)
        except CacheFull:  # a window may have more tokens than positions
            assert self.divided and self.ctx.pools.ring_cells
            assert np.array_equal(before[0], self.ctx.pools.all.sets)
            return
        expected = [self.reference.add(t, [s]) for t, s in zip(tokens, seqs, strict=True)]
        assert len(got) == len(logit_indices)
        for row, i in zip(got, logit_indices, strict=True):
            self.worst = max(self.worst, max_relative_error(row, expected[i]))

    def refused(self, tokens: list[int], seqs: list[int]) -> bool:
        """Whether there is no room; then nothing changes."""
        pool = self.ctx.pools.all
        tokens_per_seq = Counter(seqs if pool.num_parts > 1 else len(seqs) * [0])
        if all(count <= len(pool.free_cells(seq)) for seq, count in tokens_per_seq.items()):
            return False
        before = pool.sets.copy()
        with pytest.raises(CacheFull, match=r"tokens? wanted"):
            self.ctx.decode(tokens, seqs)
        assert np.array_equal(pool.sets, before)
        return True

    def usable(self, seq: int) -> bool:
        """Whether it goes on; one taken back too far is refused, and begun again."""
        if self.ctx.pools.is_complete(seq):
            return True
        with pytest.raises(ContextError, match="taken back further than its window"):
            self.ctx.decode([1], seq)
        self.ctx.remove(seq)
        self.reference.texts[seq] = []
        return True

    def abort(self) -> None:
        self.add(stop=int(self.rng.integers(0, 40)))

    def shared(self) -> None:
        """One token for two sequences."""
        a, b = self.seq(), self.seq()
        equal = a != b and self.ctx.next(a) == self.ctx.next(b)
        if equal and all(map(self.ctx.pools.is_complete, (a, b))):
            entries_a = [(e.pos, e.token) for e in self.reference.texts[a]]
            if (
                entries_a == [(e.pos, e.token) for e in self.reference.texts[b]]
                and self.ctx.pools.all.free_cells(a).size
            ):
                got = self.ctx.decode([7], [(a, b)])
                self.worst = max(
                    self.worst, max_relative_error(got[0], self.reference.add(7, [a, b]))
                )

    def copy(self) -> None:
        a, b = self.seq(), self.seq()
        if a != b and self.fits(a, b):
            self.ctx.remove(b)
            self.ctx.copy(a, b)
            self.reference.texts[b] = [*self.reference.texts[a]]

    def fits(self, a: int, b: int) -> bool:
        """Copies need cells where sequences have their own part."""
        return self.ctx.pools.all.num_parts == 1 or self.ctx.next(a) <= CELLS // SEQUENCES

    def remove(self) -> None:
        seq = self.seq()
        since = int(self.rng.integers(0, self.reference.next(seq) + 1))
        until = since + int(self.rng.integers(1, 40))
        self.ctx.remove(seq, since, until)
        self.reference.texts[seq] = [
            e for e in self.reference.texts[seq] if not since <= e.pos < until
        ]

    def shift(self) -> None:
        seq = self.seq()
        since, by = (
            int(self.rng.integers(0, self.reference.next(seq) + 1)),
            int(self.rng.integers(-9, 6)),
        )
        stays = {e.pos for e in self.reference.texts[seq] if e.pos < since}
        moved = [e.pos + by for e in self.reference.texts[seq] if e.pos >= since]
        if stays & set(moved):
            with pytest.raises(ContextError, match="positions may not meet"):
                self.ctx.shift(seq, by, since)
        elif self.room(len(moved)):
            self.ctx.shift(seq, by, since)
            self.reference.change(seq, lambda pos: pos + by, since, 10**9)

    def room(self, count: int) -> bool:
        return all((pool.sets == 0).sum() >= count for pool in self.ctx.pools.pools.values())

    def divide(self) -> None:
        seq = self.seq()
        if self.reference.next(seq) and self.room(len(self.reference.texts[seq])):
            self.ctx.divide(seq, 2)
            self.divided = True
            self.reference.change(seq, lambda pos: pos // 2, 0, 10**9)

    def save(self) -> None:
        seqs = sorted({self.seq(), self.seq()})
        texts = {seq: [replace(e) for e in self.reference.texts[seq]] for seq in seqs}
        self.saved.append((seqs, self.ctx.save(seqs), texts))

    def restore(self) -> None:
        if not self.saved:
            return
        _, state, texts = self.saved[self.rng.integers(len(self.saved))]
        before = self.ctx.pools.all.sets.copy()
        try:
            self.ctx.restore(state)
            self.reference.texts |= {seq: [*text] for seq, text in texts.items()}
        except CacheFull:
            assert np.array_equal(self.ctx.pools.all.sets, before)

    def purge(self) -> None:
        """What is released makes room."""
        seq, other = self.seq(), self.seq()
        count = len(self.ctx.pools.all.free_cells(other)) + 1
        if seq == other or self.ctx.pools.all.num_parts > 1 or not self.usable(other):
            return
        exclusive_cells = self.ctx.pools.all.sets == 1 << seq
        if exclusive_cells.any():
            self.ctx.release(seq)
            tokens = self.rng.integers(0, 50, count).tolist()
            got = self.ctx.decode(tokens, other)
            assert self.ctx.next(seq) == 0
            self.reference.texts[seq] = []
            expected = [self.reference.add(t, [other]) for t in tokens][-1]
            self.worst = max(self.worst, max_relative_error(got[0], expected))

    def check(self) -> None:
        for seq, text in self.reference.texts.items():
            assert self.ctx.next(seq) == self.reference.next(seq)
            ordered = [e.token for e in sorted(text, key=lambda e: e.pos)]
            assert sorted(self.ctx.tokens(seq)) == sorted(ordered)


KINDS = [
    "add",
    "add",
    "add",
    "add",
    "abort",
    "shared",
    "copy",
    "remove",
    "shift",
    "divide",
    "save",
    "restore",
    "purge",
]
LAYOUTS = {
    "plain": {},
    "own parts": {"parts": True},
    "windows": {"config": WINDOWED},
    "rings": {"config": WINDOWED, "ring": RING},
    "halves": {"config": WINDOWED, "ring": RING, "dtype": f16},
    "q8_0": {"dtype": Q8_0},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 34))]
)
def test_schedules(layout: str, seed: int) -> None:
    ctx = context(**LAYOUTS[layout])
    generation, schedule = ctx._session.generation, Schedule(ctx, seed)
    for kind in schedule.rng.choice(KINDS, 40):
        getattr(schedule, kind)()
        schedule.check()
    assert 0 < schedule.worst <= OFF[ctx.cache.dtype]
    assert ctx._session.generation == generation  # nothing was allocated


def test_a_cache_in_blocks_that_heads_do_not_fill_is_refused() -> None:
    narrow = Config(50, 32, 24, 1, 32, 4, 2)
    with pytest.raises(
        ContextError, match="cache is 'q8_0', which packs 32 values, and heads have 6; use 'f16'"
    ):
        make_cache(narrow, 96, 1, "q8_0", 8, False)
