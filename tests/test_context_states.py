"""Contexts: states, rings and checkpoints, files and memory limits, and what is refused."""

import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain import Session
from packtrain.common.errors import DoesNotFit
from packtrain.dtypes import Dtype, f16, f32
from packtrain.engine.optim import AdamW
from packtrain.inference.kv_cache import (
    Cache,
    CacheFull,
    Context,
    ContextError,
    Sizes,
    context_size,
    placements,
)
from packtrain.inference.kv_cache.saved_state import DIGEST, HEAD, MAGIC, VERSION, Origin, of_bytes
from packtrain.models.config import Config
from packtrain.models.model_file import open_model
from tests.architectures import CONFIGS, random_model
from tests.models import batch, bind, steps, values
from tests.test_context import Q8_0, RING, WINDOWED, context, off

# ---- what is refused


def test_numbers_out_of_range_change_nothing():
    made = context()
    made.decode([1, 2, 3], 1)
    before = made.pools.all.sets.copy()
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
            made.decode(tokens, seqs)
    for wanted in ([3], [-1], [1, 0], [1, 1]):
        with pytest.raises(
            ContextError, match=r"wanted places must ascend, from 0 to 2; these are"
        ):
            made.decode([1, 2, 3], 0, wanted=wanted)
    for call in (made.remove, made.keep, made.release):
        with pytest.raises(ContextError, match="there is no sequence 9"):
            call(9)
    with pytest.raises(ContextError, match="divisor is 0; it must be a whole number, at least 1"):
        made.divide(1, 0)
    for call, line in (
        (lambda: made.remove(1, -2), "since is -2; it must be a whole number, at least 0"),
        (lambda: made.copy(1, 0, 0, 1.5), "until is 1.5; it must be a whole number"),
        (lambda: made.shift(1, 0.5), "by is 0.5; it must be a whole number"),
        (lambda: made.shift(1, 2**31 - 1), "positions are at most 2147483647"),
        (lambda: made.divide(1, 2**31), "positions are at most 2147483647"),
        (lambda: made.decode([1], 0, wanted=[0.5]), "wanted places must ascend"),
        (lambda: made.tokens(-1), "there is no sequence -1"),
        (lambda: made.next(9), "there is no sequence 9"),
    ):
        with pytest.raises(ContextError, match=line):
            call()
    assert np.array_equal(made.pools.all.sets, before) and made.tokens(1) == [1, 2, 3]


def test_states_that_are_damaged_or_of_others_are_refused(tmp_path: Path):
    made = context()
    made.decode([1, 2, 3], 1)
    state, path = made.save([1]), tmp_path / "a.state"
    made.save_file(path, [1])
    assert path.read_bytes() == state
    for at in (2, 5, 40, len(state) // 2, len(state) - 1):
        damaged = bytearray(state)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        line = "not a state" if at < 4 else "does not|do not match its checksum"
        with pytest.raises(ContextError, match=f"a.state: .*({line})"):
            made.restore_file(path)
    for cut in (0, 3, 20, len(state) - 1):
        with pytest.raises(ContextError, match=r"not a state|checksum"):
            made.restore(state[:cut])
    with pytest.raises(ContextError, match="the state has 1 sequences; 2 are given"):
        made.restore(state, [0, 1])
    with pytest.raises(ContextError, match=r"one sequence cannot take several .*\[2, 2\]"):
        made.restore(made.save([0, 1]), [2, 2])
    with pytest.raises(ContextError, match="saved with another type of cache"):
        of_bytes(state, replace(Origin(), cache="f16"), {})
    small = context(cells=2)
    with pytest.raises(CacheFull, match="the state does not fit: 3 cells wanted, 2 of 2 are free"):
        small.restore(state)
    assert not small.pools.all.sets.any()


def signed(about: bytes, rest: bytes) -> bytes:
    """A state whose checksum fits."""
    whole = HEAD.pack(MAGIC, VERSION, len(about)) + about + rest
    return whole + hashlib.sha256(whole).digest()


def test_states_that_fit_their_checksum_but_no_context_are_refused():
    made = context()
    made.decode([1, 2, 3], 1)
    state = made.save([1])
    size = HEAD.unpack(state[: HEAD.size])[2]
    about = json.loads(state[HEAD.size : HEAD.size + size])
    rest = state[HEAD.size + size : -DIGEST]
    assert signed(json.dumps(about).encode(), rest) == state
    far = np.array([7, 7, 7], "i8").tobytes()
    for how, line in (
        ({"cells": {"cell_": 10**30}}, r"has no 1,000,.* cells"),
        ({"cells": {"cell_": -3}}, "has no -3 cells"),
        ({"cells": {}}, "has no -1 cells"),
        ({"cells": {"cell_": 1e999}}, "description cannot be read"),
        ({"cells": 5}, "description cannot be read"),
        ({"seqs": "x"}, "description cannot be read"),
        ({"seqs": []}, "cells belong to no sequence"),
        ({"origin": {"model": [1]}}, "another model"),
        ({"origin": {"cache": {}, "other": 1}}, "description cannot be read"),
    ):
        with pytest.raises(ContextError, match=line):
            made.restore(signed(json.dumps(about | how).encode(), rest))
    for text in (b"", b"[]", b"[" * 10**5, b"\xff"):
        with pytest.raises(ContextError, match="description cannot be read"):
            made.restore(signed(text, rest))
    for damaged in (rest[:12] + far + rest[36:], b"\xff" * 12 + rest[12:]):
        with pytest.raises(ContextError, match="cells belong to no sequence"):
            made.restore(signed(json.dumps(about).encode(), damaged))
    with pytest.raises(ContextError, match="has no 3 cells"):
        made.restore(signed(json.dumps(about).encode(), rest[:-1]))
    assert made.tokens(1) == [1, 2, 3] and not made.next(0)


@pytest.mark.parametrize("dtype", [f32, f16, Q8_0], ids=str)
def test_a_restored_text_goes_on_bit_for_bit(dtype: Dtype):
    """In other cells, as another sequence, beside others, with a ring and without."""
    draw = np.random.default_rng(1)
    text, other = draw.integers(0, 50, (2, 40)).tolist()
    made = context(WINDOWED, ring=RING, dtype=dtype)
    made.decode(text, 2)
    busy = context(WINDOWED, ring=RING, dtype=dtype)
    busy.decode(other[:20], 1)
    busy.restore(made.save([2]), [0])
    busy.decode(other[20:], 1)
    busy.remove(1, 5, 30)
    full = context(WINDOWED, dtype=dtype)
    full.decode(text, 3)
    assert busy.tokens(0) == text == full.tokens(3)
    for at in range(0, 24, 3):
        part = text[at : at + 3]
        want = made.decode(part, 2, wanted=[0, 1, 2])
        assert np.array_equal(want, full.decode(part, 3, wanted=[0, 1, 2]))
        assert np.array_equal(want, busy.decode(part, 0, wanted=[0, 1, 2]))


# ---- rings and checkpoints


def test_a_text_that_differs_late_reads_a_window_at_most():
    rng, lines = np.random.default_rng(3), list[str]()
    made = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=8)
    made._say = lines.append
    text = rng.integers(0, 50, 300).tolist()
    made.decode(text)
    turn = [*text[:280], *rng.integers(0, 50, 30).tolist()]
    known = made.reuse(0, turn)
    assert 280 - WINDOWED.window <= known <= 280
    got = made.decode(turn[known:])
    fresh = context(WINDOWED, cells=400)
    assert off(got, fresh.decode(turn)) < 1e-5
    far = [*text[:100], *rng.integers(0, 50, 10).tolist()]
    assert made.reuse(0, far) == 0 and lines == [
        "sequence 0: no checkpoint is left of its window; its text is read anew"
    ]
    assert off(made.decode(far), context(WINDOWED, cells=400).decode(far)) < 1e-5


def test_what_is_known_is_less_than_all():
    made = context()
    made.decode([5, 6, 7])
    assert made.reuse(0, [5, 6, 7]) == 2 and made.tokens(0) == [5, 6]
    assert made.reuse(0, [5, 6, 7, 8]) == 2 and made.reuse(0, [9]) == 0 and made.next(0) == 0


def test_a_copy_is_not_taken_back_to_what_the_sequence_was():
    one, other = np.random.default_rng(5).integers(0, 50, (2, 150)).tolist()
    made = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=100)
    made.decode(one, 1)
    made.decode(other, 0)
    made.release(1)
    made.copy(0, 1)
    turn = [*other[:60], 1, 2, 3]
    got = made.decode(turn[made.reuse(1, turn) :], 1)
    assert off(got, context(WINDOWED, cells=400).decode(turn)) < 1e-5


def test_tokens_that_were_given_back_leave_no_checkpoint():
    made = context(replace(WINDOWED, window=40), cells=400, ring=60, checkpoints=20)
    made._checkpoints.spacing = 4
    draw = np.random.default_rng(6)
    made.decode(draw.integers(0, 50, 56).tolist())
    made.divide(0, 4)
    with pytest.raises(CacheFull):
        made.decode(draw.integers(0, 50, 30).tolist())
    assert made.next(0) == 14 and made._checkpoints.last(0, 1000) is None


def test_states_have_the_window_and_fit_beside_full_ones():
    """A sequence alone has all of the ring; its states do not."""
    draw = np.random.default_rng(7)
    made = context(WINDOWED, cells=400, ring=4 * 8 + 4 * 32 + 8, checkpoints=8)
    text = draw.integers(0, 50, 150).tolist()
    made.decode(text)
    state = made.save([0])
    for seq in (1, 2, 3):
        made.decode(draw.integers(0, 50, 60).tolist(), seq)
    turn = [*text[:130], 1, 2]
    fresh = context(WINDOWED, cells=400)
    assert off(made.decode(turn[made.reuse(0, turn) :]), fresh.decode(turn)) < 1e-5
    made.restore(state)
    fresh.remove(0)
    assert off(made.decode([3]), fresh.decode([*text, 3])) < 1e-5


# ---- room


@pytest.mark.parametrize("parts", [False, True])
def test_what_is_released_stays_where_it_would_not_make_enough_room(parts: bool):
    made = context(cells=40, parts=parts)
    made.decode([1, 2, 3], 1)
    made.release(1)
    with pytest.raises(CacheFull, match="41 tokens wanted"):
        made.decode([1] * 41, 0)
    assert made.tokens(1) == [1, 2, 3]


def test_a_copy_without_room_changes_nothing():
    made = context(cells=32, parts=True)
    made.decode([1] * 8, 0)
    made.decode([2] * 8, 1)
    made.shift(1, 4)
    with pytest.raises(CacheFull):
        made.copy(0, 1, 0, 8)
    assert made.tokens(1) == [2] * 8 and made.next(1) == 12


# ---- files


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "gemma4", "qwen3", "deepseek2"])
def test_a_context_of_a_file_and_a_limit(tmp_path: Path, name: str):
    random_model(tmp_path / "m.gguf", name)
    made = Context(tmp_path / "m.gguf", cells=64, sequences=2, cache="f32")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    first, second = made.decode([*tokens, *tokens[:3]], [0] * 8 + [1] * 3)
    alone = Context(tmp_path / "m.gguf", cells=64, cache="f32")
    assert off(first, alone.decode(tokens)[0]) < 1e-5
    alone.remove(0)
    assert off(second, alone.decode(tokens[:3])[0]) < 1e-5


@pytest.mark.parametrize("name", ["llama", "deepseek2", "deepseek2 unsplit"])
def test_what_is_left_of_a_text_moves_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """In one block, keys and values know no other token: a text without its middle is as if read anew."""
    monkeypatch.setitem(CONFIGS, name, replace(CONFIGS[name], block_count=1))
    random_model(tmp_path / "m.gguf", name)
    made, fresh = (Context(tmp_path / "m.gguf", cells=64, cache="f32") for _ in range(2))
    made.decode([3, 1, 4, 1, 5, 9, 2, 6])
    made.remove(0, 2, 5)
    made.shift(0, -3, 5)
    assert off(made.decode([7])[0], fresh.decode([3, 1, 9, 2, 6, 7])[0]) < 1e-5


LIMITED = """
import sys
import packtrain as pt
try:
    made = pt.Context(sys.argv[1], cells=int(sys.argv[2]), memory=int(sys.argv[3]))
    print("cells", made.cache.cells)
except pt.DoesNotFit as error:
    print(error)
"""


def test_a_limit_names_the_largest_context(tmp_path: Path):
    model = tmp_path / "m.gguf"
    random_model(model, "llama")

    def said(cells: int, memory: int) -> str:
        given = (sys.executable, "-c", LIMITED, str(model), str(cells), str(memory))
        return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()

    line = r"a context of 50,000,000 tokens needs .* GiB, and 1.0 GiB are allowed; the largest that fits is ([\d,]+)"
    found = re.fullmatch(line, said(50_000_000, 1 << 30))
    assert found
    most = int(found[1].replace(",", ""))
    assert most > 1000 and said(most, 1 << 30) == f"cells {most}"
    assert "is the least" in said(4096, 1 << 20)
    assert Context(model, cells=64, memory="16GiB").cache.cells == 64


def test_few_plans_tell_the_largest_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where all cells together need less than the slack."""
    asked = list[int]()

    def counted(placed: Any, stored: Any) -> int:
        asked.append(placed["cells"])
        return 1000 * asked[-1]

    monkeypatch.setattr(context_size, "needed", counted)
    random_model(tmp_path / "m.gguf", "llama")
    made: Any = lambda cells: (Cache(cells), {"cells": cells})  # noqa: E731
    for cells in (64, 4000, 4200, 100_000):
        with pytest.raises(DoesNotFit, match="is the least"):
            context_size.check_room(cells, 1, made, open_model(tmp_path / "m.gguf"), 0)
    assert len(asked) == 8


# ---- threads


def test_contexts_and_training_in_threads_of_their_own_give_what_they_give_alone():
    """Large enough that regions of kernels meet."""
    config = Config(300, 256, 192, 2, 512, 6, 2)
    cache, sizes = Cache(256, dtype=f16), Sizes((32, 8, 1), 1)
    text = np.random.default_rng(4).integers(0, 300, 120).tolist()

    def write(seed: int) -> list[bytes]:
        session = Session()
        runs = session.executors(placements(config, cache, sizes))
        session.set(values(config, seed))
        made, found = Context.within(config, cache, sizes, runs), list[bytes]()
        for _ in range(3):
            found.append(made.decode(text)[0].tobytes())
            for _ in range(20):
                last = np.frombuffer(found[-1], np.float32)
                found.append(made.decode([int(last.argmax())])[0].tobytes())
            made.remove(0)
        return found

    def train(seed: int) -> list[bytes]:
        optimizer = AdamW(lr=1e-3)
        run = bind(steps(config, 2, 96, optimizer), values(config, seed))
        given = batch(config, 2, 96, seed)
        return [run(given | optimizer.inputs(t))["loss"].tobytes() for t in range(1, 16)]

    jobs = (write, 0), (write, 1), (train, 2)
    alone = [work(seed) for work, seed in jobs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            running = [pool.submit(work, seed) for work, seed in jobs]
            assert [one.result() for one in running] == alone
