"""Contexts: states, rings and checkpoints, files and memory limits, and what is refused."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain import Session
from packtrain.context import Cache, CacheFull, Context, ContextError, Sizes, placements
from packtrain.context.state import Origin, of_bytes
from packtrain.dtypes import Dtype, f16, f32
from packtrain.models.config import Config
from packtrain.optim import AdamW
from tests.architectures import random_model
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
        ([50], 0, "tokens are from 0 to 49"),
        (
            [1],
            [(0, 1)],
            "for sequences 0 and 1, whose next positions are 0 and 3; they must be equal",
        ),
        ([1], [()], "each token needs one"),
    ):
        with pytest.raises(ContextError, match=line):
            made.decode(tokens, seqs)
    for call in (made.remove, made.keep, made.release):
        with pytest.raises(ContextError, match="there is no sequence 9"):
            call(9)
    with pytest.raises(ContextError, match="the divisor is 0; it must be at least 1"):
        made.divide(1, 0)
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
    with pytest.raises(ContextError, match="saved with another type of cache"):
        of_bytes(state, replace(Origin(), cache="f16"), {})
    small = context(cells=2)
    with pytest.raises(CacheFull, match="the state does not fit: 3 cells wanted, 2 of 2 are free"):
        small.restore(state)
    assert not small.pools.all.sets.any()


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


# ---- files


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_context_of_a_file_and_a_limit(tmp_path: Path, name: str):
    random_model(tmp_path / "m.gguf", name)
    made = Context(tmp_path / "m.gguf", cells=64, sequences=2, cache="f32")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    first, second = made.decode([*tokens, *tokens[:3]], [0] * 8 + [1] * 3)
    alone = Context(tmp_path / "m.gguf", cells=64, cache="f32")
    assert off(first, alone.decode(tokens)[0]) < 1e-5
    alone.remove(0)
    assert off(second, alone.decode(tokens[:3])[0]) < 1e-5


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
