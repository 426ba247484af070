"""One session, many plans: leaves and arenas are shared, nothing is allocated later, failures are kept apart."""

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import packtrain as pt
from packtrain import Graph, RunError, Session, Stopped, make_plan, place
from packtrain.engine import backends, ops
from packtrain.engine.backends import Target, aligned
from packtrain.engine.optim.adamw import opt_step_adamw
from packtrain.engine.tensor import Kernel
from tests import alternate
from tests.alternate import Alternating
from tests.models import (
    CONFIG,
    bind_graph,
    eval_graph,
    relative_error,
    same_bits,
    seeded_batch,
    seeded_weights,
    step_graph,
)
from tests.models import gradient_graph as gradients_of

OPTIMIZER = alternate.OPTIMIZER
LINUX = sys.platform.startswith("linux")
ROOT = Path(__file__).parents[1]
SLACK = 16 * 4096  # bytes: what the interpreter itself may come to use


def child(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.alternate", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def leaves_of(graph: Graph) -> list[str]:
    """The names of what a session keeps for a graph."""
    return [leaf.label for leaf in graph.leaves if leaf.kind in ("weight", "state")]


# ---- plans that alternate ------------------------------------------------------------------------------------


def test_alternating_plans_give_the_losses_of_fresh_sessions():
    shared = Session()
    together = Alternating.bind(shared)
    shared.set(seeded_weights(alternate.CONFIG))
    expected_values: dict[str, np.ndarray] = seeded_weights(alternate.CONFIG)
    for t, name in enumerate(("train", "eval", "small", "eval", "train", "small", "train"), 1):
        fresh = Session()
        single = Alternating.bind(fresh, (name,))
        leaves = leaves_of(single.runs[name].placed.graph)
        fresh.set({n: expected_values[n] for n in leaves if n in expected_values})
        assert single.turn(name, t, t) == together.turn(name, t, t)
        expected_values |= {n: fresh.get(n) for n in leaves}
    assert same_bits({n: shared.get(n) for n in expected_values}, expected_values)


@pytest.mark.skipif(not LINUX, reason="private memory of another process is read from /proc")
def test_a_hundred_rounds_allocate_nothing_after_the_first():
    seen = []
    with child("rounds", "100") as process:
        for line in process.stdout:
            assert line == f"round {len(seen)}\n"
            seen.append(_private_dirty(process.pid))
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0 and len(seen) == 100
    # a page now and then is the heap's; what a round kept would be there a hundred times
    assert median(seen[-20:]) - median(seen[1:21]) <= SLACK


def _private_dirty(pid: int) -> int:
    """Bytes that no other process shares and that cannot be read anew from a file."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"Private_Dirty: +(\d+) kB", text))


def test_results_do_not_depend_on_the_number_of_threads():
    with child("threads", "3", NUMBA_NUM_THREADS="3") as process:
        digests = process.communicate()[0].split()
    assert process.returncode == 0 and len(digests) == 3
    assert len(set(digests)) == 1


def test_an_executor_added_later_moves_the_arena_of_the_earlier_ones():
    session = Session()
    small = bind_graph(eval_graph(CONFIG, 1, 8), seeded_weights(CONFIG), session)
    before = small(seeded_batch(CONFIG, 1, 8))
    first_arena = weakref.ref(session.buffer("host"))
    large = bind_graph(eval_graph(CONFIG, 4, 32), session=session)
    large(seeded_batch(CONFIG, 4, 32))
    assert large.plan.arena().nbytes > small.plan.arena().nbytes
    assert same_bits(small(seeded_batch(CONFIG, 1, 8)), before)
    gc.collect()
    assert first_arena() is None, "the first arena is still held"


# ---- failures ------------------------------------------------------------------------------------------------


def update() -> pt.Executor:
    graph = step_graph(CONFIG, 1, 8, OPTIMIZER, max_norm=1.0)
    return bind_graph(graph, seeded_weights(CONFIG))


def step_inputs(t: int = 1) -> dict[str, np.ndarray]:
    return seeded_batch(CONFIG, 1, 8, t) | OPTIMIZER.inputs(t)


def test_later_runs_read_their_own_inputs():
    """Also the sum that a product starts with, where it has to be copied."""
    x, acc = pt.input("x", (2, 3)), pt.input("acc", (2, 4))
    y = ops.matmul(x, pt.weight("w", (4, 3)), acc)
    session = Session()
    run = session.executor(place(Graph({"y": y, "both": ops.add(y, acc)})))
    session.set({"w": np.ones((4, 3))})
    for value in (1.0, 2.0, 3.0):
        got = run({"x": np.full((2, 3), value), "acc": np.full((2, 4), value)})
        assert (got["y"] == 4 * value).all() and (got["both"] == 5 * value).all()


def test_an_exception_inside_the_update_makes_the_session_dirty(monkeypatch):
    calls_left = [3]
    real = opt_step_adamw.kernels["cpu"].run

    def failing(*args, **attrs):
        calls_left[0] -= 1
        if not calls_left[0]:
            raise OSError("the lights went out")
        real(*args, **attrs)

    monkeypatch.setitem(opt_step_adamw.kernels, "cpu", Kernel(failing, strided=False))
    run = update()
    with pytest.raises(OSError, match="lights"):
        run(step_inputs())
    for refused in (lambda: run.session.get("output_norm.weight"), lambda: run(step_inputs(2))):
        with pytest.raises(RunError, match=r"dirty.*opt_step_adamw failed.*the lights went out"):
            refused()


@pytest.mark.parametrize(("name", "noun"), [("tokens", "index"), ("targets", "target")])
def test_an_exception_before_the_update_leaves_everything_as_it_was(name: str, noun: str):
    run, other = update(), update()
    run(step_inputs(1)), other(step_inputs(1))
    bad = step_inputs(2)
    bad[name][0, 3] = CONFIG.vocab_size
    with pytest.raises(IndexError, match=f"{noun} {CONFIG.vocab_size} at position 3"):
        run(bad)
    assert run.session.dirty is None
    assert same_bits(run(step_inputs(3)), other(step_inputs(3)))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("factor", [np.inf, np.nan, 1e25], ids=["inf", "nan", "overflow"])
def test_training_goes_on_as_if_a_bad_step_had_not_been(max_norm, factor):
    graph = step_graph(CONFIG, 1, 8, OPTIMIZER, max_norm=max_norm)
    run, other = (bind_graph(graph, seeded_weights(CONFIG)) for _ in range(2))
    run(step_inputs(1)), other(step_inputs(1))
    bad = step_inputs(2)
    bad["weights"] *= np.float32(factor)
    got = run(bad)
    assert np.isfinite(got["loss"]) == (factor == 1e25) and not np.isfinite(got["squares"])
    for t in (2, 3):
        assert same_bits(run(step_inputs(t)), other(step_inputs(t)))


def test_stop_is_asked_before_each_step():
    run, other = update(), update()
    stop_calls = []

    def stop() -> bool:
        stop_calls.append(None)
        return len(stop_calls) > 5

    with pytest.raises(Stopped, match=f"stopped before {run.placed.steps[5].op.name}"):
        run(step_inputs(), stop=stop)
    assert run.session.dirty is None
    assert same_bits(run(step_inputs(), stop=lambda: False), other(step_inputs()))


def test_stopping_inside_the_update_makes_the_session_dirty():
    run = update()
    steps_left = [run.first_update + 2]

    def stop() -> bool:
        steps_left[0] -= 1
        return steps_left[0] < 0

    with pytest.raises(Stopped):
        run(step_inputs(), stop=stop)
    with pytest.raises(RunError, match="dirty"):
        run.session.get("token_embd.weight")


def test_a_second_executor_of_a_session_at_the_same_time_is_refused():
    run, separate_run = update(), update()
    other, refusals = bind_graph(eval_graph(CONFIG, 1, 8), session=run.session), list[str]()
    inputs = seeded_batch(CONFIG, 1, 8)

    def intrude() -> None:
        try:
            other(inputs)
        except RunError as error:
            refusals.append(str(error))

    def interrupt_run(name: str, value: np.ndarray) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        intrude()
        separate_run(step_inputs())

    run.watch("blk.0.attn_norm", interrupt_run)
    run(step_inputs())
    assert (
        refusals == ["another executor of this session is running; its arena has room for one"] * 2
    )
    other(inputs)


# ---- what a run needs ----------------------------------------------------------------------------------------


def test_inputs_missing_and_unknown_are_all_named():
    run = bind_graph(eval_graph(CONFIG, 1, 8), seeded_weights(CONFIG))
    inputs = seeded_batch(CONFIG, 1, 8)
    del inputs["pos"], inputs["seq"]
    with pytest.raises(RunError, match=r"inputs missing: \['pos', 'seq'\]; unknown: \['noise'\]"):
        run(inputs | {"noise": np.zeros(3)})


UNFIT = {
    "shape": (np.zeros((1, 7), np.int32), r"a value of shape \[1, 7\] does not fit"),
    "kind": (np.full((1, 8), 0.7), "a value of float64 does not fit"),
    "too large": (np.full((1, 8), 2**32 + 5), "values from 4294967301 to 4294967301 do not fit"),
    "unsigned": (np.full((1, 8), 2**31, np.uint32), "values from 2147483648 to .* do not fit"),
}


@pytest.mark.parametrize(("value", "fact"), UNFIT.values(), ids=UNFIT)
def test_an_input_that_does_not_fit_is_not_cut(value, fact):
    run = bind_graph(eval_graph(CONFIG, 1, 8), seeded_weights(CONFIG))
    with pytest.raises(RunError, match=rf"tokens is i32\[1, 8\]; {fact}"):
        run(seeded_batch(CONFIG, 1, 8) | {"tokens": value})


def test_wider_numbers_that_fit_are_taken():
    run, inputs = (
        bind_graph(eval_graph(CONFIG, 1, 8), seeded_weights(CONFIG)),
        seeded_batch(CONFIG, 1, 8),
    )
    wide = {
        name: v.astype(np.int64 if v.dtype.kind == "i" else float) for name, v in inputs.items()
    }
    listed = {name: v.tolist() for name, v in inputs.items()}
    expected = run(inputs)
    assert same_bits(run(wide), expected) and same_bits(run(listed), expected)


def test_weights_without_a_value_are_all_named():
    weights = seeded_weights(CONFIG)
    del weights["blk.0.attn_q.weight"], weights["output_norm.weight"]
    run = bind_graph(eval_graph(CONFIG, 1, 8), weights)
    text = "weights without a value: blk.0.attn_q.weight, output_norm.weight"
    with pytest.raises(RunError, match=text):
        run(seeded_batch(CONFIG, 1, 8))


def test_values_that_fit_no_leaf():
    session = bind_graph(eval_graph(CONFIG, 1, 8)).session
    with pytest.raises(RunError, match=r"output_norm.weight is f32\[24\]; .* \[23\] does not fit"):
        session.set({"output_norm.weight": np.ones(23)})
    with pytest.raises(RunError, match=r"no leaf is called blk.9; there are blk.0.attn_k.weight"):
        session.set({"blk.9": np.ones(3)})
    with pytest.raises(RunError, match=r"no leaf is called blk\.9"):
        session.get("blk.9")


def test_a_leaf_that_two_graphs_see_differently():
    session = Session()
    bind_graph(Graph([ops.neg(pt.weight("w", (3,)))]), session=session)
    with pytest.raises(RunError, match=r"w is f32\[3\] on host .* wants f32\[4\] on host"):
        bind_graph(Graph([ops.neg(pt.weight("w", (4,)))]), session=session)


def test_constants_belong_to_their_graphs():
    session, x = Session(), np.arange(3, dtype=np.float32)
    graphs = [
        Graph({"y": ops.mul(pt.input("x", (3,)), pt.constant("k", np.full(3, k)))}) for k in (2, 3)
    ]
    double, triple = (bind_graph(graph, session=session) for graph in graphs)
    for _ in range(2):
        assert double({"x": x})["y"].tolist() == [0, 2, 4]
        assert triple({"x": x})["y"].tolist() == [0, 3, 6]


def test_outputs_and_leaves_are_copies():
    run = bind_graph(eval_graph(CONFIG, 1, 8), seeded_weights(CONFIG))
    first = run(seeded_batch(CONFIG, 1, 8, 1))
    first_copy = {name: value.copy() for name, value in first.items()}
    run(seeded_batch(CONFIG, 1, 8, 2))
    assert same_bits(first, first_copy)
    run.session.get("output_norm.weight")[:] = 0
    assert run.session.get("output_norm.weight").all()


# ---- memory spaces -------------------------------------------------------------------------------------------

NUMPY_BACKENDS = (backends.numpy,)
OTHER_HOST = backends.Host("numpy", "other")
REMOTE_NAMES = [
    n for n in seeded_weights(CONFIG) if n.startswith("blk.1.") or n == "output_norm.weight"
]


def test_weights_in_another_space_are_copied_to_and_fro():
    graph = gradients_of(CONFIG, 2, 9)
    placed = place(graph, Target(homes=dict.fromkeys(REMOTE_NAMES, OTHER_HOST)))
    plan = make_plan(placed)
    pt.verify(plan, placed)
    assert [a.space for a in plan.arenas] == ["host", "other"]
    assert all(a.nbytes > 0 for a in plan.arenas)
    away_sizes = (
        aligned(seeded_weights(CONFIG)[n].nbytes, OTHER_HOST.alignment) for n in REMOTE_NAMES
    )
    assert plan.arena("other").weight_nbytes == sum(away_sizes)
    session = Session()
    run = session.executor(placed, plan)
    session.set(seeded_weights(CONFIG))
    got, expected = (
        run(seeded_batch(CONFIG, 2, 9)),
        bind_graph(graph, seeded_weights(CONFIG))(seeded_batch(CONFIG, 2, 9)),
    )
    assert got.keys() == expected.keys()
    deviations = {name: relative_error(got[name], expected[name]) for name in got}
    assert max(deviations.values()) < 1e-5


def test_copies_stand_at_the_borders_and_nowhere_else():
    graph = eval_graph(CONFIG, 2, 9)
    placed = place(graph, Target(NUMPY_BACKENDS, homes=dict.fromkeys(REMOTE_NAMES, OTHER_HOST)))
    crossing = 0
    for step in placed.steps:
        spaces = {placed.home[t.base].space for t in (*step.reads, *step.results)}
        assert len(spaces) == 1 or step.op.name == "cont", f"{step.op.name} works on {spaces}"
        crossing += len(spaces) > 1
    assert crossing >= 2
    assert [b.space for b, _ in placed.splits][:2] == ["host", "other"]
    at_home = bind_graph(graph, seeded_weights(CONFIG), backend=backends.numpy)
    session = Session()
    run = session.executor(placed)
    session.set(seeded_weights(CONFIG))
    assert same_bits(run(seeded_batch(CONFIG, 2, 9)), at_home(seeded_batch(CONFIG, 2, 9)))


def test_training_with_weights_and_their_moments_away():
    graph = step_graph(CONFIG, 2, 9, OPTIMIZER, max_norm=1.0)
    homes = {f"{kind}{name}": OTHER_HOST for name in REMOTE_NAMES for kind in ("", "m/", "v/")}
    session, reference = Session(), Session()
    runs = [
        session.executor(place(graph, Target(NUMPY_BACKENDS, homes=homes))),
        bind_graph(graph, session=reference, backend=backends.numpy),
    ]
    for s in (session, reference):
        s.set(seeded_weights(CONFIG))
    for t in (1, 2, 3):
        first, second = (run(seeded_batch(CONFIG, 2, 9, t) | OPTIMIZER.inputs(t)) for run in runs)
        assert same_bits(first, second)
    names = leaves_of(graph)
    assert same_bits({n: session.get(n) for n in names}, {n: reference.get(n) for n in names})


def test_one_leaf_cannot_live_in_two_spaces_of_a_session():
    session = Session()
    graph = Graph([ops.neg(pt.weight("w", (3,)))])
    session.executor(place(graph, Target(NUMPY_BACKENDS)))
    with pytest.raises(RunError, match=r"w is f32\[3\] on host .* wants f32\[3\] on other"):
        session.executor(place(graph, Target(NUMPY_BACKENDS, homes={"w": OTHER_HOST})))
