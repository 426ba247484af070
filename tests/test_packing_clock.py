"""The packer and its command end when the time given is over; the clock is a fake."""

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import packing as benchmark
from packtrain import kernels
from packtrain.engine.packing import Packing, exact, packing_height, packings
from packtrain.engine.packing.exact import SearchClock
from packtrain.engine.packing.pack import peak_alive_nbytes, shelves
from tests.overlap import find_overlap
from tests.test_packing import EXAMPLE, Problem, hard_problem, last_packing, pairs_apart, problem


class TickingClock:
    """A clock of which each look takes a second."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


@pytest.mark.parametrize("seconds", [1, 5, 50, 450, 2_500, 4_000])
def test_every_phase_looks_at_the_clock(seconds: int) -> None:
    """Each buffer placed costs a look: time runs out in first fits, in skylines, and in the search."""
    kernels.load_all(["packing"])
    columns, clock = hard_problem(400), TickingClock()
    *_, best = packings(*columns, seconds=seconds, now=clock)
    assert clock.looks <= seconds + 10
    assert find_overlap(*columns, best.offsets) is None
    repeated = last_packing(*columns, seconds=seconds, now=TickingClock())
    assert seconds > 3_000 or np.array_equal(best.offsets, repeated.offsets)


def test_a_search_is_stopped_by_the_clock() -> None:
    """Its limit of work would last for years."""
    start, end, size = hard_problem(400)
    part = exact._PackingPart(start, end, size, np.cumsum(size) - size, 1, np.arange(400))
    clock = TickingClock()
    budget = exact._WorkBudget(SearchClock(20, clock))
    assert budget.work_left == exact.UNLIMITED_WORK
    assert not part._search_height(100_000, exact.UNLIMITED_WORK, budget)
    assert 20 < clock.looks < 30


def test_shelves_hold_what_has_no_time() -> None:
    for seed in range(50):
        start, end, size = problem(seed, 40, steps=20)
        offsets = shelves(start, end, size)
        assert pairs_apart(start, end, size, offsets)
        octaves = np.frexp(size - 0.5)[1]
        kinds = [octaves == k for k in set(octaves.tolist())]
        max_height = sum(
            max(int((members & (start <= t) & (t < end)).sum()) for t in start)
            * int(size[members].max())
            for members in kinds
        )
        assert packing_height(size, offsets) <= max_height


def test_the_crowd_of_a_buffer_is_the_most_alive_in_its_life() -> None:
    for seed in range(30):
        start, end, size = problem(seed, 40, steps=20)
        alive = [int(size[(start <= t) & (t < end)].sum()) for t in range(int(end.max()))]
        expected = [max(alive[s:e]) for s, e in zip(start, end, strict=True)]
        assert peak_alive_nbytes(start, end, size).tolist() == expected


def test_the_time_of_reading_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(EXAMPLE)
    start, left = time.monotonic() - 7, []

    def timed(columns: Problem, enough: int, seconds: float) -> tuple[Packing, float]:
        left.append(seconds)
        return last_packing(*columns), 0.0

    monkeypatch.setattr(benchmark, "timed_packing", timed)
    assert benchmark.solve(source, 0, 10.0, output, start) == 0
    assert left[0] <= 3
