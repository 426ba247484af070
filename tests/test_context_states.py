"""Contexts: states, rings and checkpoints, files and memory limits, and what is refused."""

import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain import Session
from packtrain.common.errors import DoesNotFit
from packtrain.dtypes import Dtype, f16, f32
from packtrain.engine.optim import AdamW
from packtrain.inference.kv_cache import (
    CacheFull,
    CacheLayout,
    Context,
    ContextError,
    RunSizes,
    context_size,
    place_runs,
)
from packtrain.inference.kv_cache.saved_state import (
    DIGEST_NBYTES,
    HEAD,
    MAGIC,
    VERSION,
    StateOrigin,
    unpack_state,
)
from packtrain.models.config import Config
from tests.architectures import CONFIGS, random_model
from tests.models import bind_graph, seeded_batch, seeded_weights, step_graph
from tests.test_context import Q8_0, RING, WINDOWED, context, max_relative_error

# ---- what is refused


def test_numbers_out_of_range_change_nothing():
    ctx = context()
    ctx.decode([1, 2, 3], 1)
    before = ctx.pools.all.sets.copy()
    for tokens, seqs, line in (
        ([1], 4, "there is no sequence 4; there are 4, from 0 on"),
        ([1, 2], [0], "there are 2 tokens and sequences for 1"),
        ([], 0, "there are 0 tokens"),
        ([50], 0, "tokens are whole numbers from 0 to 49"),
        ([1.5], 0, "tokens are whole numbers from 0 to 49"),
        (
            [1],
            [(0, 1)],
            "for sequences 0 and 1, whose next positions are 0 and 3; they must be equal",
        ),
        ([1], [()], "each token needs one"),
        ([1] * 20, [*[0] * 19, (0, 1)], "for sequences 0 and 1, whose next positions are 19 and 3"),
    ):
        with pytest.raises(ContextError, match=line):
            ctx.decode(tokens, seqs)
    for positions in ([3], [-1], [1, 0], [1, 1]):
        with pytest.raises(
            ContextError, match=r"wanted places must ascend, from 0 to 2; these are"
        ):
            ctx.decode([1, 2, 3], 0, wanted=positions)
    for call in (ctx.remove, ctx.keep, ctx.release):
        with pytest.raises(ContextError, match="there is no sequence 9"):
            call(9)
    with pytest.raises(ContextError, match="divisor is 0; it must be a whole number, at least 1"):
        ctx.divide(1, 0)
    for call, line in (
        (lambda: ctx.remove(1, -2), "since is -2; it must be a whole number, at least 0"),
        (lambda: ctx.copy(1, 0, 0, 1.5), "until is 1.5; it must be a whole number"),
        (lambda: ctx.shift(1, 0.5), "by is 0.5; it must be a whole number"),
        (lambda: ctx.shift(1, 2**31 - 1), "positions are at most 2147483647"),
        (lambda: ctx.divide(1, 2**31), "positions are at most 2147483647"),
        (lambda: ctx.decode([1], 0, wanted=[0.5]), "wanted places must ascend"),
        (lambda: ctx.tokens(-1), "there is no sequence -1"),
        (lambda: ctx.next(9), "there is no sequence 9"),
    ):
        with pytest.raises(ContextError, match=line):
            call()
    assert np.array_equal(ctx.pools.all.sets, before) and ctx.tokens(1) == [1, 2, 3]


def test_states_that_are_damaged_or_of_others_are_refused(tmp_path: Path):
    ctx = context()
    ctx.decode([1, 2, 3], 1)
    state, path = ctx.save([1]), tmp_path / "a.state"
    ctx.save_file(path, [1])
    assert path.read_bytes() == state
    for at in (2, 5, 40, len(state) // 2, len(state) - 1):
        damaged = bytearray(state)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        line = "not a state" if at < 4 else "does not|do not match its checksum"
        with pytest.raises(ContextError, match=f"a.state: .*({line})"):
            ctx.restore_file(path)
    for cut in (0, 3, 20, len(state) - 1):
        with pytest.raises(ContextError, match=r"not a state|checksum"):
            ctx.restore(state[:cut])
    with pytest.raises(ContextError, match="the state has 1 sequences; 2 are given"):
        ctx.restore(state, [0, 1])
    with pytest.raises(ContextError, match=r"each saved sequence needs its own; .*\[2, 2\]"):
        ctx.restore(ctx.save([0, 1]), [2, 2])
    with pytest.raises(ContextError, match="saved with another type of cache"):
        unpack_state(state, replace(StateOrigin(), cache="f16"), {})
    small = context(cells=2)
    with pytest.raises(CacheFull, match="the state does not fit: 3 cells wanted, 2 of 2 are free"):
        small.restore(state)
    assert not small.pools.all.sets.any()


def signed_state(about: bytes, rest: bytes) -> bytes:
    """A state whose checksum fits."""
    payload = HEAD.pack(MAGIC, VERSION, len(about)) + about + rest
    return payload + hashlib.sha256(payload).digest()


def test_states_that_fit_their_checksum_but_no_context_are_refused():
    ctx = context()
    ctx.decode([1, 2, 3], 1)
    state = ctx.save([1])
    size = HEAD.unpack(state[: HEAD.size])[2]
    about = json.loads(state[HEAD.size : HEAD.size + size])
    rest = state[HEAD.size + size : -DIGEST_NBYTES]
    assert signed_state(json.dumps(about).encode(), rest) == state
    bad_bytes = np.array([7, 7, 7], "i8").tobytes()
    for changes, line in (
        ({"cells": {"cell_": 10**30}}, r"has no 1,000,.* cells"),
        ({"cells": {"cell_": -3}}, "has no -3 cells"),
        ({"cells": {}}, "has no -1 cells"),
        ({"cells": {"cell_": 1e999}}, "description cannot be read"),
        ({"cells": 5}, "description cannot be read"),
        ({"seqs": "x"}, "description cannot be read"),
        ({"seqs": []}, "cells belong to none of its sequences"),
        ({"origin": {"model": [1]}}, "another model"),
        ({"origin": {"cache": {}, "other": 1}}, "description cannot be read"),
    ):
        with pytest.raises(ContextError, match=line):
            ctx.restore(signed_state(json.dumps(about | changes).encode(), rest))
    for text in (b"", b"[]", b"[" * 10**5, b"\xff"):
        with pytest.raises(ContextError, match="description cannot be read"):
            ctx.restore(signed_state(text, rest))
    for damaged in (rest[:12] + bad_bytes + rest[36:], b"\xff" * 12 + rest[12:]):
        with pytest.raises(ContextError, match="cells belong to none of its sequences"):
            ctx.restore(signed_state(json.dumps(about).encode(), damaged))
    with pytest.raises(ContextError, match="has no 3 cells"):
        ctx.restore(signed_state(json.dumps(about).encode(), rest[:-1]))
    assert ctx.tokens(1) == [1, 2, 3] and not ctx.next(0)


@pytest.mark.parametrize("dtype", [f32, f16, Q8_0], ids=str)
def test_a_restored_text_goes_on_bit_for_bit(dtype: Dtype):
    """In other cells, as another sequence, beside others, with a ring and without."""
    draw = np.random.default_rng(1)
    text, other_text = draw.integers(0, 50, (2, 40)).tolist()
    ctx = context(WINDOWED, ring=RING, dtype=dtype)
    ctx.decode(text, 2)
    busy = context(WINDOWED, ring=RING, dtype=dtype)
    busy.decode(other_text[:20], 1)
    busy.restore(ctx.save([2]), [0])
    busy.decode(other_text[20:], 1)
    busy.remove(1, 5, 30)
    full = context(WINDOWED, dtype=dtype)
    full.decode(text, 3)
    assert busy.tokens(0) == text == full.tokens(3)
    for at in range(0, 24, 3):
        part = text[at : at + 3]
        expected = ctx.decode(part, 2, wanted=[0, 1, 2])
        assert np.array_equal(expected, full.decode(part, 3, wanted=[0, 1, 2]))
        assert np.array_equal(expected, busy.decode(part, 0, wanted=[0, 1, 2]))


# ---- rings and checkpoints


def test_a_text_that_differs_late_reads_a_window_at_most():
    rng, lines = np.random.default_rng(3), list[str]()
    ctx = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=8)
    ctx._report = lines.append
    text = rng.integers(0, 50, 300).tolist()
    ctx.decode(text)
    turn = [*text[:280], *rng.integers(0, 50, 30).tolist()]
    num_reused = ctx.reuse(0, turn)
    assert 280 - WINDOWED.window <= num_reused <= 280
    got = ctx.decode(turn[num_reused:])
    fresh = context(WINDOWED, cells=400)
    assert max_relative_error(got, fresh.decode(turn)) < 1e-5
    early_change = [*text[:100], *rng.integers(0, 50, 10).tolist()]
    assert ctx.reuse(0, early_change) == 0 and lines == [
        "sequence 0: no checkpoint is left of its window; its text is read anew"
    ]
    assert (
        max_relative_error(
            ctx.decode(early_change), context(WINDOWED, cells=400).decode(early_change)
        )
        < 1e-5
    )


def test_what_is_known_is_less_than_all():
    ctx = context()
    ctx.decode([5, 6, 7])
    assert ctx.reuse(0, [5, 6, 7]) == 2 and ctx.tokens(0) == [5, 6]
    assert ctx.reuse(0, [5, 6, 7, 8]) == 2 and ctx.reuse(0, [9]) == 0 and ctx.next(0) == 0


def test_a_copy_is_not_taken_back_to_what_the_sequence_was():
    first_text, second_text = np.random.default_rng(5).integers(0, 50, (2, 150)).tolist()
    ctx = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=100)
    ctx.decode(first_text, 1)
    ctx.decode(second_text, 0)
    ctx.release(1)
    ctx.copy(0, 1)
    turn = [*second_text[:60], 1, 2, 3]
    got = ctx.decode(turn[ctx.reuse(1, turn) :], 1)
    assert max_relative_error(got, context(WINDOWED, cells=400).decode(turn)) < 1e-5


def test_tokens_that_were_given_back_leave_no_checkpoint():
    ctx = context(replace(WINDOWED, window=40), cells=400, ring=60, checkpoints=20)
    ctx._checkpoints.token_spacing = 4
    draw = np.random.default_rng(6)
    ctx.decode(draw.integers(0, 50, 56).tolist())
    ctx.divide(0, 4)
    with pytest.raises(CacheFull):
        ctx.decode(draw.integers(0, 50, 30).tolist())
    assert ctx.next(0) == 14 and ctx._checkpoints.latest_state(0, 1000) is None


def test_states_have_the_window_and_fit_beside_full_ones():
    """A sequence alone has all of the ring; its states do not."""
    draw = np.random.default_rng(7)
    ctx = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=8)
    text = draw.integers(0, 50, 150).tolist()
    ctx.decode(text)
    state = ctx.save([0])
    for seq in (1, 2, 3):
        ctx.decode(draw.integers(0, 50, 60).tolist(), seq)
    turn = [*text[:130], 1, 2]
    fresh = context(WINDOWED, cells=400)
    assert max_relative_error(ctx.decode(turn[ctx.reuse(0, turn) :]), fresh.decode(turn)) < 1e-5
    ctx.restore(state)
    fresh.remove(0)
    assert max_relative_error(ctx.decode([3]), fresh.decode([*text, 3])) < 1e-5


# ---- room


@pytest.mark.parametrize("parts", [False, True])
def test_what_is_released_stays_where_it_would_not_make_enough_room(parts: bool):
    ctx = context(cells=40, parts=parts)
    ctx.decode([1, 2, 3], 1)
    ctx.release(1)
    with pytest.raises(CacheFull, match="41 tokens wanted"):
        ctx.decode([1] * 41, 0)
    assert ctx.tokens(1) == [1, 2, 3]


def test_a_copy_without_room_changes_nothing():
    ctx = context(cells=32, parts=True)
    ctx.decode([1] * 8, 0)
    ctx.decode([2] * 8, 1)
    ctx.shift(1, 4)
    with pytest.raises(CacheFull):
        ctx.copy(0, 1, 0, 8)
    assert ctx.tokens(1) == [2] * 8 and ctx.next(1) == 12


# ---- files


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "gemma4", "qwen3", "deepseek2"])
def test_a_context_of_a_file_and_a_limit(tmp_path: Path, name: str):
    random_model(tmp_path / "m.gguf", name)
    ctx = Context(tmp_path / "m.gguf", cells=64, sequences=2, cache="f32")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    first, second = ctx.decode([*tokens, *tokens[:3]], [0] * 8 + [1] * 3)
    single = Context(tmp_path / "m.gguf", cells=64, cache="f32")
    assert max_relative_error(first, single.decode(tokens)[0]) < 1e-5
    single.remove(0)
    assert max_relative_error(second, single.decode(tokens[:3])[0]) < 1e-5


@pytest.mark.parametrize("name", ["llama", "deepseek2", "deepseek2 unsplit"])
def test_what_is_left_of_a_text_moves_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """In one block, keys and values know no other token: a text without its middle is as if read anew."""
    monkeypatch.setitem(CONFIGS, name, replace(CONFIGS[name], block_count=1))
    random_model(tmp_path / "m.gguf", name)
    ctx, fresh = (Context(tmp_path / "m.gguf", cells=64, cache="f32") for _ in range(2))
    ctx.decode([3, 1, 4, 1, 5, 9, 2, 6])
    ctx.remove(0, 2, 5)
    ctx.shift(0, -3, 5)
    assert max_relative_error(ctx.decode([7])[0], fresh.decode([3, 1, 9, 2, 6, 7])[0]) < 1e-5


LIMITED = """
import sys
import packtrain as pt
try:
    made = pt.Context(sys.argv[1], cells=int(sys.argv[2]), memory=int(sys.argv[3]))
    print("cells", made.cache.num_cells)
except pt.DoesNotFit as error:
    print(error)
"""


def test_a_limit_names_the_largest_context(tmp_path: Path):
    model = tmp_path / "m.gguf"
    random_model(model, "llama")

    def said(cells: int, memory: int) -> str:
        command = (sys.executable, "-c", LIMITED, str(model), str(cells), str(memory))
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    line = r"a context of 50,000,000 tokens needs .* GiB, and 1.0 GiB are allowed; the largest that fits is ([\d,]+)"
    match = re.fullmatch(line, said(50_000_000, 1 << 30))
    assert match
    max_cells = int(match[1].replace(",", ""))
    assert max_cells > 1000 and said(max_cells, 1 << 30) == f"cells {max_cells}"
    assert "is the least" in said(4096, 1 << 20)
    assert Context(model, cells=64, memory="16GiB").cache.num_cells == 64


def test_few_plans_tell_the_largest_context():
    """Also where all cells together need less than the slack."""
    planned_cells = list[int]()

    def counted(num_cells: int) -> int:
        planned_cells.append(num_cells)
        return 1000 * num_cells

    for cells in (64, 4000, 4200, 100_000):
        with pytest.raises(DoesNotFit, match=r"is the least, for a context of 32$"):
            context_size.check_room(cells, 1, counted)
    assert len(planned_cells) == 8


# ---- threads


def test_contexts_and_training_in_threads_of_their_own_give_what_they_give_alone():
    """Large enough that regions of kernels meet."""
    config = Config(300, 256, 192, 2, 512, 6, 2)
    cache, sizes = CacheLayout(256, dtype=f16), RunSizes((32, 8, 1), 1)
    text = np.random.default_rng(4).integers(0, 300, 120).tolist()

    def write(seed: int) -> list[bytes]:
        session = Session()
        runs = session.executors(place_runs(config, cache, sizes))
        session.set(seeded_weights(config, seed))
        ctx, outputs = Context.within(config, cache, sizes, runs), list[bytes]()
        for _ in range(3):
            outputs.append(ctx.decode(text)[0].tobytes())
            for _ in range(20):
                last = np.frombuffer(outputs[-1], np.float32)
                outputs.append(ctx.decode([int(last.argmax())])[0].tobytes())
            ctx.remove(0)
        return outputs

    def train(seed: int) -> list[bytes]:
        optimizer = AdamW(lr=1e-3)
        run = bind_graph(step_graph(config, 2, 96, optimizer), seeded_weights(config, seed))
        inputs = seeded_batch(config, 2, 96, seed)
        return [run(inputs | optimizer.inputs(t))["loss"].tobytes() for t in range(1, 16)]

    jobs = (write, 0), (write, 1), (train, 2)
    expected = [work(seed) for work, seed in jobs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            running = [pool.submit(work, seed) for work, seed in jobs]
            assert [future.result() for future in running] == expected
