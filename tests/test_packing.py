"""Offsets for any list of (start, end, size): best on small problems, anytime on large ones, checked by a sweep."""

import importlib
import itertools
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from benchmarks import packing as benchmark
from packtrain import kernels
from packtrain.engine.optim import AdamW, training_graph
from packtrain.engine.packing import (
    Packing,
    exact,
    lower_bound,
    pack,
    packing_height,
    packings,
)
from packtrain.engine.packing.exact import SearchClock
from packtrain.models import transformer
from packtrain.models.config import PRESETS
from tests.overlap import find_overlap

PACK_MODULE = importlib.import_module(
    "packtrain.engine.packing.pack"
)  # `pack` alone is its function
ROOT = Path(__file__).parent.parent
PROBLEMS = ROOT.parent / "shared/data/minimalloc/challenging"
needs_problems = pytest.mark.shared
CAPACITY = 1_048_576

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]


def problem(seed: int, max_buffers: int, steps: int = 8) -> Problem:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, max_buffers + 1))
    start = rng.integers(0, steps, n)
    return start, start + rng.integers(1, 2 + steps // 2, n), 64 * rng.integers(1, 9, n)


def minimalloc(name: str) -> Problem:
    rows = np.loadtxt(PROBLEMS / f"{name}.{CAPACITY}.csv", delimiter=",", skiprows=1, dtype=str)
    start, end, size = (rows[:, k].astype(np.int64) for k in (1, 2, 3))
    return start, end, size


def optimum(start: np.ndarray, end: np.ndarray, size: np.ndarray) -> int:
    """The least bytes, by stacking the buffers in every order, each on top of those it meets."""
    buffers = list(zip(start.tolist(), end.tolist(), size.tolist(), strict=True))
    min_nbytes = sum(size.tolist())

    def stack(left: list[int], tops: list[tuple[int, int, int]], highest: int) -> None:
        nonlocal min_nbytes
        if highest >= min_nbytes:
            return
        if not left:
            min_nbytes = highest
        for i in left:
            first, last, nbytes = buffers[i]
            floor = max((t for s, e, t in tops if s < last and first < e), default=0)
            rest = [j for j in left if j != i]
            stack(rest, [*tops, (first, last, floor + nbytes)], max(highest, floor + nbytes))

    stack(list(range(len(buffers))), [], 0)
    return min_nbytes


def pairs_apart(start: np.ndarray, end: np.ndarray, size: np.ndarray, at: np.ndarray) -> bool:
    return not any(
        start[i] < end[j] and start[j] < end[i] and at[i] < at[j] + size[j] and at[j] < at[i] + size[i]
        for i, j in itertools.combinations(range(len(size)), 2)
    )  # fmt: skip


# ---- small problems, every one of them to the optimum ----------------------------------------------------------


@pytest.mark.parametrize("hundred", range(4))
def test_small_problems_are_packed_best(hundred: int) -> None:
    """Both by all that there is and by the exact search alone, from offsets one above the other."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        start, end, size = problem(seed, 7)
        *_, best = packings(start, end, size)
        min_nbytes = optimum(start, end, size)
        assert (best.nbytes, best.is_optimal) == (min_nbytes, True), seed
        assert packing_height(size, best.offsets) == min_nbytes and best.offsets.min() == 0
        assert pairs_apart(start, end, size, best.offsets), seed
        stacked_offsets = np.cumsum(size) - size
        bound, _ = lower_bound(start, end, size)
        searched = list(exact.lower(start, end, size, stacked_offsets, bound))
        if packing_height(size, stacked_offsets) > bound:
            offsets, proved = searched[-1]
            assert (packing_height(size, offsets), proved) == (min_nbytes, True), seed
            assert pairs_apart(start, end, size, offsets), seed


# seeds of `level` whose optimum lies above the bound
GAPS = [60, 65, 186, 547, 868, 1508, 1695, 1823]


def level_problem(seed: int) -> Problem:
    """Up to 9 buffers with equally many bytes alive at every step, so that nothing may be left between them."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 6, 5)
    end = np.minimum(start + rng.integers(1, 5, 5), 6)
    size = rng.integers(1, 4, 5)
    alive = np.array([size[(start <= t) & (t < end)].sum() for t in range(6)])
    edges = [0, *(np.flatnonzero(np.diff(alive)) + 1), 6]
    fill = [(a, b, alive.max() - alive[a]) for a, b in itertools.pairwise(edges)]
    fillers = np.array([buffer for buffer in fill if buffer[2]]).reshape(-1, 3).T
    return tuple(np.concatenate(pair) for pair in zip((start, end, size), fillers, strict=True))


@pytest.mark.parametrize("seed", [*GAPS, *range(20)])
def test_what_cannot_reach_the_bound_is_proved(seed: int) -> None:
    start, end, size = level_problem(seed)
    *_, best = packings(start, end, size)
    assert best.is_optimal and best.nbytes == optimum(start, end, size)
    assert (best.nbytes > best.bound_nbytes) == (seed in GAPS)
    assert find_overlap(start, end, size, best.offsets) is None


@pytest.mark.parametrize("seed", range(30))
def test_larger_problems_are_packed_soundly(seed: int) -> None:
    start, end, size = problem(seed, 60, steps=40)
    results = list(itertools.islice(packings(start, end, size, seconds=0.2), 20))
    for packing in results:
        assert pairs_apart(start, end, size, packing.offsets)
        assert packing.nbytes == packing_height(size, packing.offsets) >= packing.bound_nbytes
        alive = (start <= packing.peak_step) & (packing.peak_step < end)
        assert size[alive].sum() == packing.bound_nbytes
    for before, after in itertools.pairwise(results):
        assert after.nbytes < before.nbytes or (after.is_optimal and not before.is_optimal)


def cut_up(seed: int, pieces: int, steps: int, nbytes: int) -> Problem:
    """A rectangle cut into pieces, the largest first: they fit into its bytes, which are also the bound."""
    rng = np.random.default_rng(seed)
    rectangles = [(0, steps, 0, nbytes)]
    while len(rectangles) < pieces:
        rectangles.sort(key=lambda r: (r[1] - r[0]) * (r[3] - r[2]))
        first, end, low, top = rectangles.pop()
        if top - low == 1 or (end - first > 2 and rng.random() < 0.5):
            cut = int(rng.integers(first + 1, end))
            rectangles += [(first, cut, low, top), (cut, end, low, top)]
        else:
            cut = int(rng.integers(low + 1, top))
            rectangles += [(first, end, low, cut), (first, end, cut, top)]
    start, end, low, top = np.array(rectangles).T
    return start, end, top - low


# (seed, pieces, steps, bytes); the last two are where a bound too strong by one byte shows
CUT_UP = [
    *((seed, 10 + seed % 15, 12, 9) for seed in range(200)),
    (120, 18, 20, 5),
    (62, 24, 20, 7),
]


def test_what_was_cut_up_goes_together_again() -> None:
    """By the exact search alone. A rule that prunes too much would claim that it does not."""
    for case in CUT_UP:
        start, end, size = cut_up(*case)
        stacked_offsets, nbytes = np.cumsum(size) - size, case[-1]
        *_, (offsets, proved) = exact.lower(
            start, end, size, stacked_offsets, nbytes, clock=SearchClock(30)
        )
        assert pairs_apart(start, end, size, offsets), case
        assert (packing_height(size, offsets), proved) == (nbytes, True), case


def beside_each_other(columns: int, pieces: int, steps: int, nbytes: int) -> Problem:
    """Rectangles cut up, one after the other, and a buffer of one byte that is alive in all of them: one part."""
    problems = [cut_up(seed, pieces, steps, nbytes) for seed in range(columns)]
    start, end, size = (np.concatenate(rows) for rows in zip(*problems, strict=True))
    shift = np.repeat(np.arange(columns) * steps, pieces)
    return (
        np.append(start + shift, 0),
        np.append(end + shift, columns * steps),
        np.append(size, 1),
    )


def test_a_part_of_thousands_goes_together_again() -> None:
    """6,001 buffers that overlap each other in a chain, and whose bound the heuristics miss."""
    columns = beside_each_other(250, pieces=24, steps=20, nbytes=50)
    start, end, size = columns
    assert all((start < t).sum() > (end <= t).sum() for t in range(1, int(end.max())))
    results = list(packings(*columns))
    assert [p.nbytes == 51 for p in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].bound_nbytes == 51 and find_overlap(*columns, results[-1].offsets) is None
    *_, (offsets, proved) = exact.lower(*columns, np.cumsum(size) - size, 51)
    assert proved and packing_height(size, offsets) == 51


# ---- the caller says when it is enough -------------------------------------------------------------------------


def last_packing(*columns: np.ndarray, **limits: float) -> Packing:
    *_, best = packings(*columns, **limits)
    return best


def hard_problem(pieces: int) -> Problem:
    return cut_up(0, pieces, steps=200, nbytes=100_000)


def test_time_is_kept() -> None:
    start_time = time.monotonic()
    best = last_packing(*hard_problem(400), seconds=1.0)
    assert not best.is_optimal and best.gap > 0
    assert 0.5 < time.monotonic() - start_time < 5


def test_no_time_still_gives_offsets() -> None:
    kernels.load_all(["packing"])
    best = last_packing(*hard_problem(200), seconds=0.0)
    assert find_overlap(*hard_problem(200), best.offsets) is None
    assert (
        last_packing(*hard_problem(200), seconds=3.0, target_height=best.nbytes - 1).nbytes
        < best.nbytes
    )


def test_it_stops_at_what_is_enough() -> None:
    columns = hard_problem(200)
    first, *_ = packings(*columns)
    target = (first.nbytes + first.bound_nbytes) // 2
    results = list(packings(*columns, target_height=target, seconds=20))
    assert results[-1].nbytes <= target
    assert all(packing.nbytes > target for packing in results[:-1])


def test_equal_problems_have_equal_offsets() -> None:
    columns = hard_problem(60)
    assert last_packing(*columns).gap == 0
    assert np.array_equal(pack(*columns), pack(*columns))


def test_thousands_of_buffers_need_no_deep_stack_of_the_caller() -> None:
    """The search descends one level for each buffer; threads have a stack of 512 KiB on some platforms."""
    n = 5000
    start, end, size = np.zeros(n, np.int64), np.arange(n) + 1, np.arange(n) % 7 + 1
    bound, _ = lower_bound(start, end, size)
    before = threading.stack_size(512 << 10)
    try:
        with ThreadPoolExecutor(1) as pool:
            initial_offsets = np.arange(n) * 8
            results = pool.submit(
                lambda: list(exact.lower(start, end, size, initial_offsets, bound))
            ).result()
    finally:
        threading.stack_size(before)
    assert packing_height(size, results[-1][0]) == bound


def test_times_may_be_far_apart_and_negative() -> None:
    start, end, size = problem(3, 7)
    far = start * 10**14 - 10**15, end * 10**14 - 10**15
    assert last_packing(*far, size).nbytes == last_packing(start, end, size).nbytes
    assert lower_bound(*far, size)[0] == lower_bound(start, end, size)[0]


def test_plain_lists_will_do() -> None:
    assert pack([0, 1, 2], [2, 3, 4], [64, 128, 64]).tolist() == [128, 0, 128]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (([0, 1], [1, 1], [8, 8]), "buffer 1 has start 1, end 1, size 8; end > start"),
        (([0, 1], [1, 2], [8, 0]), "buffer 1 has start 1, end 2, size 0; size > 0"),
        (([0, 1], [1, 2], [8]), "lists of one length"),
        (([[0]], [[1]], [[8]]), "lists of one length"),
    ],
)
def test_what_is_no_problem_is_refused(columns: tuple[list[int], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pack(*columns)


# ---- the checker -----------------------------------------------------------------------------------------------


def test_the_checker_agrees_with_looking_at_each_pair() -> None:
    seen = set()
    for seed in range(300):
        start, end, size = problem(seed, 7)
        at = 64 * np.random.default_rng(seed).integers(0, 30, len(size))
        clashing_pair = find_overlap(start, end, size, at)
        assert (clashing_pair is None) == pairs_apart(start, end, size, at), seed
        if clashing_pair is not None:
            two = list(clashing_pair)
            assert not pairs_apart(start[two], end[two], size[two], at[two]), seed
        seen.add(clashing_pair is None)
    assert seen == {True, False}


def test_the_checker_finds_one_byte_too_low() -> None:
    """Each buffer that lies on another, moved down by one byte, lies in it."""
    start, end, size = problem(5, 40, steps=20)
    best = pack(start, end, size)
    for i in np.flatnonzero(best):
        moved = best.copy()
        moved[i] -= 1
        buffers_below = (best + size == best[i]) & (start < end[i]) & (start[i] < end)
        assert (find_overlap(start, end, size, moved) is not None) == buffers_below.any()


# ---- known problems --------------------------------------------------------------------------------------------


@needs_problems
@pytest.mark.parametrize("name", ["C", "G", "K"])
def test_problems_of_minimalloc_fit(name: str) -> None:
    columns = minimalloc(name)
    best = last_packing(*columns, target_height=CAPACITY, seconds=30)
    assert best.nbytes <= CAPACITY
    assert find_overlap(*columns, best.offsets) is None


def test_a_clipped_step_that_first_fit_cannot_pack_is_at_its_bound() -> None:
    config = PRESETS["110m"]
    weights = transformer.weights(config)
    outputs = transformer.loss(config, weights, 1, config.context_length)
    graph = training_graph({"loss": outputs.loss}, list(weights.values()), AdamW(), max_norm=1.0)
    plan = pt.make_plan(pt.place(graph))
    assert plan.arena().gap == 0
    assert plan == pt.make_plan(pt.place(graph))


def test_an_ordinary_plan_loads_no_kernels() -> None:
    code = (
        "import sys, packtrain as pt; from packtrain.models import transformer; "
        "from packtrain.models.config import PRESETS; "
        "from packtrain.engine.optim import AdamW, training_graph; config = PRESETS['1m']; "
        "weights = transformer.weights(config); made = transformer.loss(config, weights, 4, 256); "
        "graph = training_graph({'loss': made.loss}, list(weights.values()), AdamW(), "
        "keep=made.block_outputs, max_norm=1.0); "
        "assert pt.make_plan(pt.place(graph)).arena().gap == 0; print(pt.kernels.is_loaded('packing'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def pareto_problem(seed: int, count: int) -> Problem:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 2 * count, count)
    lifetimes = 1 + np.minimum(rng.pareto(1.0, count) * 4, count).astype(np.int64)
    return start, start + lifetimes, 64 * rng.integers(1, 99, count)


@pytest.mark.parametrize("seed", range(6))
def test_compiled_heuristics_give_the_offsets_of_the_plain_ones(seed: int) -> None:
    columns = pareto_problem(seed, 50 + 150 * seed)
    for packer, keys in PACK_MODULE._packer_orders(*columns):
        order, limits = np.lexsort(keys), np.zeros(4, np.int64)
        args = packer.__name__, np.stack(columns, 1), order, limits, SearchClock(None)
        assert np.array_equal(PACK_MODULE.run_compiled(*args), packer(*columns, order))


def test_many_buffers_are_packed_by_kernels_until_the_caller_or_the_clock_stops_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = pareto_problem(0, 500)
    expected = [p.nbytes for p, _ in zip(packings(*columns), range(3), strict=False)]
    monkeypatch.setattr(PACK_MODULE, "MIN_COMPILED_BUFFERS", 499)
    assert [p.nbytes for p, _ in zip(packings(*columns), range(3), strict=False)] == expected
    kernels.load_all(["packing"])
    limited = packings(*columns, seconds=30)
    assert find_overlap(*columns, next(limited).offsets) is None  # shelves
    assert find_overlap(*columns, next(limited).offsets) is None
    limited.close()
    expired_clock = SearchClock(0.0)
    assert (
        PACK_MODULE.run_compiled(
            "skyline", np.stack(columns, 1), np.arange(500), np.ones(4, int), expired_clock
        )
        is None
    )


# ---- the command for problems in files -------------------------------------------------------------------------

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"  # MiniMalloc's, fits into 12


def run_benchmark(monkeypatch: pytest.MonkeyPatch, *flags: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["packing.py", *map(str, flags)])
    return benchmark.main()


def test_a_problem_in_a_file(tmp_path: Path) -> None:
    """As its docstring says it: a script, two files."""
    problem_file, solution_file = tmp_path / "in.csv", tmp_path / "out.csv"
    problem_file.write_text(EXAMPLE)
    flags = [
        "--csv",
        problem_file,
        "--capacity",
        "12",
        "--seconds",
        "5",
        "--solution",
        solution_file,
    ]
    said = subprocess.run(
        [sys.executable, "benchmarks/packing.py", *map(str, flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert "height 12, lower bound 12" in said.stdout and "no packing is lower" in said.stdout
    head, *rows = solution_file.read_text().splitlines()
    offsets = dict(row.split(",") for row in rows)
    assert head == "id,offset" and list(offsets) == ["b1", "b2", "b3", "b4", "b5"]
    start, end, size = np.array([line.split(",")[1:] for line in EXAMPLE.split()[1:]], int).T
    at = np.array(list(offsets.values()), int)
    assert pairs_apart(start, end, size, at) and packing_height(size, at) == 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no buffers"),
        ("id,lower,upper,size\n", "has no buffers"),
        ("id,lower,upper\n1,2,3\n", "line 1: the columns must be id,lower,upper,size"),
        ("id,lower,upper,size,gaps\n1,2,3,4,5\n", "line 1: the columns must be"),
        ("id,lower,upper,size\n1,2,3,4,5\n", "line 2: 4 columns are needed"),
        ("id,lower,upper,size\n1,2,3,4\n2,1,x,1\n", "line 3: upper is 'x'; a whole number"),
        ("id,lower,upper,size\n1,2,3\n", "line 2: size is ''; a whole number"),
        ("id,lower,upper,size\n1,3,3,4\n", r"line 2: \[3, 3\) of size 4; lower < upper"),
        ("id,lower,upper,size\n1,2,3,0\n", "line 2: .* size > 0"),
        ("id,lower,upper,size\n1,2,3,99999999999999999999\n", "line 2: size .* less than 63 bits"),
        ("id,lower,upper,size\n1,2,3,4\n1,2,3,4\n", "id 1 is there twice"),
        (f"id,lower,upper,size\n1,2,3,{1 << 61}\n2,2,3,{1 << 61}\n", "too much for 64 bits"),
        ("\0\0", "no buffers|columns must be|not a CSV file"),
    ],
)
def test_a_bad_file_gets_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    problem_file, solution_file = tmp_path / "in.csv", tmp_path / "out.csv"
    problem_file.write_text(text)
    assert run_benchmark(monkeypatch, "--csv", problem_file, "--solution", solution_file) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("packing: error: --csv: ")
    assert re.search(said, line) and str(problem_file) in line
    assert not solution_file.exists()


def test_bad_flags_get_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem_file, solution_file = tmp_path / "in.csv", tmp_path / "out.csv"
    assert run_benchmark(monkeypatch, "--csv", problem_file, "--solution", solution_file) == 2
    assert "does not exist" in capsys.readouterr().err
    problem_file.write_bytes(b"id,lower,upper,size\n\xff\xfe,1,2,3\n")
    for flags in (
        ("--csv", problem_file, "--solution", solution_file),
        ("--csv", tmp_path, "--solution", solution_file),
        ("--csv", problem_file),
        ("--solution", solution_file),
        ("--csv", problem_file, "--solution", tmp_path),
        ("--csv", problem_file, "--solution", tmp_path / "no" / "out.csv"),
        ("--csv", problem_file, "--solution", solution_file, "--capacity", "-1"),
        ("--csv", problem_file, "--solution", solution_file, "--seconds", "nan"),
    ):
        assert run_benchmark(monkeypatch, *flags) == 2, flags
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and line.startswith("packing: error: --"), line


def test_a_capacity_out_of_reach_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem_file, solution_file = tmp_path / "in.csv", tmp_path / "out.csv"
    problem_file.write_text(EXAMPLE)
    assert (
        run_benchmark(
            monkeypatch, "--csv", problem_file, "--solution", solution_file, "--capacity", 11
        )
        == 3
    )
    assert "within 11: it cannot be" in capsys.readouterr().err
    assert not solution_file.exists()
