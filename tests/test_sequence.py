"""Explicit sequences with barriers, several arenas in one graph, one buffer for all leaves, and the least order.

Traces are made by hand from ggml's rules: best fit, in order, and with a sequence bytes are freed at barriers alone.
A unit is 64 bytes, a matrix of 4 by 4.
"""

from dataclasses import replace

import numpy as np
import pytest

import packtrain as pt
from packtrain.engine import backends, ops
from packtrain.engine.backends import Host, Target
from packtrain.engine.memory_plan.memory_order import call_dependencies, candidate_orders
from packtrain.engine.placement import BARRIER, Placed
from tests import checks, plan_checks
from tests.online import Allocator, BufferUse, best_fit, replay_steps
from tests.random_graphs import random_case

UNIT = 64
NUMPY = Target((backends.numpy,))  # products without workspaces
W = pt.weight("w", (4, 4))
B = BARRIER


def named_product(name: str, x: pt.Tensor, y: pt.Tensor = W) -> pt.Tensor:
    return pt.named(name, ops.matmul(x, y))


def chain() -> pt.Graph:
    """x, a = x w, b = a w, c = b w, d = c a."""
    a = named_product("a", pt.input("x", (4, 4)))
    c = named_product("c", named_product("b", a))
    return pt.Graph({"d": named_product("d", c, a)})


def offsets(plan: pt.Plan) -> dict[str, int]:
    return {name: b.offset // UNIT for b in plan.buffers for name in b.tensors}


def plan_offsets(graph: pt.Graph, sequence: list[int] | None) -> dict[str, int]:
    placed = pt.place(graph, NUMPY, sequence)
    plan = pt.make_plan(placed, packer=best_fit)
    pt.verify(plan, placed)
    pt.verify(pt.make_plan(placed), placed)
    return offsets(plan)


# sequence, and the offset of x, a, b, c and d
CHAINS = [
    (None, "01020"),
    ([0, B, 1, B, 2, B, 3, B], "01020"),
    ([0, 1, 2, 3], "01234"),
    ([0, B, 1, 2, B, 3], "01020"),
    ([0, 1, B, 2, 3], "01203"),
    ([0, 1, 2, B, 3], "01232"),
]


@pytest.mark.parametrize(("sequence", "expected_offsets"), CHAINS)
def test_bytes_are_freed_at_barriers(sequence: list[int] | None, expected_offsets: str) -> None:
    assert plan_offsets(chain(), sequence) == {
        n: int(at) for n, at in zip("xabcd", expected_offsets, strict=True)
    }


@pytest.mark.parametrize(("sequence", "expected_offsets"), CHAINS)
def test_the_allocator_that_knows_no_graphs_agrees(
    sequence: list[int] | None, expected_offsets: str
) -> None:
    """x is there before the first step, as one that a step of its own has made."""
    reads_by_name = {"x": "", "a": "x", "b": "a", "c": "b", "d": "ca"}
    steps = [BufferUse({name: ("host", 1)}, list(reads)) for name, reads in reads_by_name.items()]
    shifted = None if sequence is None else [0, *(i if i == B else i + 1 for i in sequence)]
    offsets = replay_steps(steps, {"host": Allocator()}, shifted)
    assert "".join(str(offsets[name]) for name in reads_by_name) == expected_offsets


def test_a_value_is_overwritten_only_if_nobody_reads_it_since_the_barrier() -> None:
    """exp may overwrite a; b = a w reads it, too."""
    a = named_product("a", pt.input("x", (4, 4)))
    b, y = named_product("b", a), pt.named("y", ops.exp(a))
    graph = pt.Graph({"z": named_product("z", b, y)})
    shared = ("a", "y")
    for sequence, is_shared in (
        (None, True),
        ([0, B, 1, 2, B, 3], False),
        ([0, B, 1, B, 2, 3], True),
        ([0, 1, B, 2, B, 3], True),
        ([0, B, 2, B, 1, B, 3], False),  # read afterwards
    ):
        placed = pt.place(graph, NUMPY, sequence)
        plan = pt.make_plan(placed)
        pt.verify(plan, placed)
        assert (shared in [b.tensors for b in plan.buffers]) == is_shared, sequence


def test_another_order_is_another_plan_of_the_same_bits() -> None:
    """p and q do not need one another: one after the other, or first all that p needs."""
    x = pt.input("x", (4, 4))
    p, q = named_product("p", x), named_product("q", x)
    graph = pt.Graph({"s": named_product("s", named_product("p2", p), named_product("q2", q))})
    values = {"x": np.eye(4, dtype=np.float32), "w": np.full((4, 4), 0.5, np.float32)}
    assert [call.op.name for call in graph.calls] == ["matmul"] * 5
    placed_plans = []
    for sequence in (None, [0, B, 2, B, 1, B, 3, B, 4], [1, 0, B, 3, 2, B, 4]):
        placed = pt.place(graph, NUMPY, sequence)
        placed_plans.append((placed, pt.make_plan(placed)))
    with pytest.raises(pt.GraphError, match="plan it again"):
        pt.verify(placed_plans[0][1], placed_plans[1][0])
    results = [checks.execute(pt.Session().executor(*pair), values)["s"] for pair in placed_plans]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        ([0, 1, 2], "call 3, matmul, is missing"),
        ([0, 1, 1, 2, 3], "call 1, matmul, comes twice"),
        ([1, 0, 2, 3], "call 1, matmul, comes before its input a"),
        ([0, 1, 2, 4], "4 is no call; the graph has 4"),
        ([0, 1, 2, -2], "-2 is no call"),
        ([], "call 0, matmul, is missing"),
    ],
)
def test_wrong_sequences_are_refused(sequence: list[int], said: str) -> None:
    with pytest.raises(pt.GraphError, match=f"^sequence: {said}"):
        pt.place(chain(), NUMPY, sequence)


def updated_cache() -> pt.Graph:
    """A cache that is read, written, and read again; the number of its write is 1."""
    cache, ids = pt.state("cache", (4, 4)), pt.constant("ids", np.array([1]), pt.i32)
    before = ops.sum(ops.sqr(cache))
    row = ops.reshape(pt.input("row", (4,)), shape=(1, 4))
    (after,) = ops.set_rows(cache, row, ids)
    return pt.Graph({"before": before, "after": ops.sum(ops.tanh(after))}, [after])


def test_a_leaf_is_read_before_it_is_written() -> None:
    graph = updated_cache()
    names = [call.op.name for call in graph.calls]
    write, reader = names.index("set_rows"), names.index("sqr")
    late_order = [i for i in range(len(names)) if i not in (reader, reader + 1)] + [
        reader,
        reader + 1,
    ]
    with pytest.raises(pt.GraphError, match=r"sqr: reads cache as it was before set_rows wrote it"):
        pt.place(graph, NUMPY, late_order)
    assert reader in call_dependencies(graph)[write]
    for order in candidate_orders(graph):
        assert order.index(reader) < order.index(write)


def test_the_verifier_knows_barriers() -> None:
    """A plan for one call after the other does not serve where two may run at once."""
    a = named_product("a", pt.input("x", (4, 4)))
    b, y = named_product("b", a), pt.named("y", ops.exp(a))
    graph = pt.Graph({"z": named_product("z", b, y)})
    serial, concurrent = (pt.place(graph, NUMPY, s) for s in (None, [0, B, 1, 2, B, 3, B]))
    plan = replace(pt.make_plan(serial), fingerprint=concurrent.fingerprint)
    with pytest.raises(
        pt.PlanError, match="step 2 exp and step 1 matmul share bytes, and no barrier"
    ):
        pt.verify(plan, concurrent)
    plan = pt.make_plan(concurrent)
    truncated = replace(
        plan, buffers=tuple(replace(b, end=b.end - (b.name == "a")) for b in plan.buffers)
    )
    with pytest.raises(pt.PlanError, match=r"a: planned for steps \[0, 2\), used in \(0, 3\)"):
        pt.verify(truncated, concurrent)
    graph = updated_cache()
    calls = range(len(graph.calls))
    placed = pt.place(graph, NUMPY, list(calls))
    with pytest.raises(pt.PlanError, match="set_rows and step 0 sqr share bytes, and no barrier"):
        pt.verify(pt.make_plan(placed), placed)


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_with_barriers(seed: int) -> None:
    plan_checks.check_sequence(seed)


# ---- several arenas ------------------------------------------------------------------------------------------------


def test_tensors_in_arenas_of_their_own() -> None:
    """Of x, a, b, c, d: b and d in the arena `odd`; a block that one frees does not serve the other."""
    placed = pt.place(chain(), NUMPY)
    arenas = {"b": "odd", "d": "odd"}
    plan = pt.make_plan(placed, packer=best_fit, arenas=arenas)
    pt.verify(plan, placed)
    assert offsets(plan) == {"x": 0, "a": 1, "b": 0, "c": 0, "d": 0}
    assert {b.tensors[0]: b.arena for b in plan.buffers if b.arena} == arenas
    main, odd = plan.arena("host"), plan.arena("host", "odd")
    assert (main.nbytes, odd.nbytes) == (2 * UNIT, UNIT)
    assert "host: arena odd 64 B" in str(plan) and main.weight_nbytes == UNIT
    assert pt.Plan.from_json(plan.to_json()) == plan
    by_function = pt.make_plan(placed, packer=best_fit, arenas=lambda name: arenas.get(name, ""))
    assert by_function == plan
    with pytest.raises(pt.GraphError, match="arenas names w, zz, which has no bytes in an arena"):
        pt.make_plan(placed, arenas={"w": "odd", "zz": "odd"})


def test_nothing_is_overwritten_across_arenas() -> None:
    x = pt.input("x", (4, 4))
    placed = pt.place(pt.Graph({"z": pt.named("z", ops.exp(pt.named("y", ops.neg(x))))}), NUMPY)
    shared_plan, split_plan = pt.make_plan(placed), pt.make_plan(placed, arenas={"z": "results"})
    assert [b.tensors for b in shared_plan.buffers] == [("x", "y", "z")]
    assert [b.tensors for b in split_plan.buffers] == [("x", "y"), ("z",)]
    pt.verify(split_plan, placed)
    without_arena = replace(
        split_plan, buffers=tuple(replace(b, arena="") for b in split_plan.buffers)
    )
    with pytest.raises(pt.PlanError, match="host: lower bound 64 at step 0, counted 128"):
        pt.verify(without_arena, placed)
    missing_arena = replace(split_plan, arenas=split_plan.arenas[:1])
    with pytest.raises(pt.PlanError, match="z: the plan has no arena results on host"):
        pt.verify(missing_arena, placed)


@pytest.mark.parametrize("seed", range(20))
def test_random_arenas_in_two_spaces_change_no_bit(seed: int) -> None:
    case, rng = random_case(seed), np.random.default_rng(seed)
    placed = pt.place(case.graph)
    plan = pt.make_plan(placed, arenas=lambda name: ("", "one", "two")[int(rng.integers(3))])
    pt.verify(plan, placed)
    got = plan_checks.poisoned_results(case, placed, plan)
    checks.assert_same_bits(got, checks.run_graph(case.graph, case.values), f"seed {seed}")


def test_limits_count_all_arenas_of_a_space() -> None:
    placed = pt.place(chain(), NUMPY)
    plan = pt.make_plan(placed, packer=best_fit, arenas={"b": "odd", "d": "odd"})
    assert plan.beyond({"host": 4 * UNIT}) is None
    assert "needs 256 B of the memory of host, which has 255 B" in str(plan.beyond({"host": 255}))
    session = pt.Session({"host": 255})
    with pytest.raises(pt.DoesNotFit, match="256 B"):
        session.executor(placed, plan)


# ---- one buffer for the leaves ---------------------------------------------------------------------------------------


class CountingHost(Host):
    """A memory that counts what is asked of it."""

    requested_nbytes: list[int]

    def alloc(self, nbytes: int) -> np.ndarray:
        self.requested_nbytes.append(nbytes)
        return super().alloc(nbytes)


def counting_backend(space: str) -> CountingHost:
    backend = CountingHost("numpy", space)
    object.__setattr__(backend, "requested_nbytes", [])
    return backend


def shared_leaf_graphs() -> tuple[pt.Graph, pt.Graph]:
    """Graphs that share the weight u (100 bytes) and have v (36 bytes) and a state (4 bytes) each for itself."""
    u, v = pt.weight("u", (5, 5)), pt.weight("v", (3, 3))
    n, shared = pt.state("n", (1,)), pt.weight("shared", (5,))
    first_graph = pt.Graph({"y": ops.add(ops.sum(ops.mul(u, shared)), ops.sum(v))})
    return first_graph, pt.Graph({"z": ops.add(ops.sum(u), ops.sum(n))})


def test_all_leaves_of_a_model_are_in_one_buffer() -> None:
    memory = counting_backend("there")
    target = Target((memory,))
    placed = {str(i): pt.place(graph, target) for i, graph in enumerate(shared_leaf_graphs())}
    session = pt.Session()
    session.share({"shared": np.ones(5, np.float32)})
    executors = session.executors(placed)
    arenas = [e.plan.arena("there").nbytes for e in executors.values()]
    assert memory.requested_nbytes[0] == 128 + 64 + 64 and memory.requested_nbytes[1:] == [
        arenas[0]
    ]
    ones = {"u": np.ones((5, 5)), "v": np.ones((3, 3)), "n": np.ones(1)}
    session.set({name: value.astype(np.float32) for name, value in ones.items()})
    assert executors["0"]({})["y"] == 34 and executors["1"]({})["z"] == 26
    buffers = {name: session._leaves[name].buffer for name in ("u", "v", "n", "shared")}
    assert buffers["u"] is buffers["v"] is buffers["n"] and buffers["shared"] is not buffers["u"]
    assert [session._leaves[name].offset for name in ("u", "v", "n")] == [0, 128, 192]
    for name in ones:
        assert session._leaves[name].array.__array_interface__["data"][0] % memory.alignment == 0


def test_what_comes_later_has_a_buffer_of_its_own() -> None:
    memory = counting_backend("there")
    session = pt.Session()
    session.share({"shared": np.ones(5, np.float32)})
    for graph in shared_leaf_graphs():
        session.executor(pt.place(graph, Target((memory,))))
    assert (
        next(n for n in memory.requested_nbytes if n >= UNIT) == 128 + 64
        and UNIT in memory.requested_nbytes[1:]
    )


def test_a_plan_of_training_counts_what_is_allocated() -> None:
    """Leaves, rounded up as they are in their buffer; the arena; constants."""
    from packtrain.engine.optim import AdamW
    from packtrain.planner.step_shape import StepShape
    from packtrain.planner.training_plans import make_plans
    from packtrain.training.training_engine import TrainingEngine
    from tests.models import CONFIG

    memory = counting_backend("there")
    plans = make_plans(StepShape(CONFIG, 2, 16), AdamW(), target=Target((memory,)))
    TrainingEngine(plans, AdamW())
    assert sum(memory.requested_nbytes) == plans.nbytes_in("there")
    assert len(memory.requested_nbytes) <= 2 + len(plans.plans)


# ---- the order with the fewest bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_the_least_order_needs_no_more_and_changes_no_bit(seed: int) -> None:
    case = random_case(seed)
    sequence = pt.least_order(case.graph)
    written, min_placed = pt.place(case.graph), pt.place(case.graph, sequence=sequence)
    plan, other = pt.make_plan(written), pt.make_plan(min_placed)
    pt.verify(other, min_placed)
    assert other.arena().nbytes <= plan.arena().nbytes
    got, expected = (
        plan_checks.poisoned_results(case, p, memory_plan)
        for p, memory_plan in ((min_placed, other), (written, plan))
    )
    checks.assert_same_bits(got, expected, f"seed {seed}")


def wide_graph(count: int) -> pt.Graph:
    """ggml's shape of many branches written first and joined last: only one need be there at a time."""
    x = pt.input("x", (4, 4))
    branches = [named_product(f"b{i}", named_product(f"a{i}", x)) for i in range(count)]
    total = branches[0]
    for branch in branches[1:]:
        total = ops.matmul(total, branch)
    return pt.Graph({"total": total})


def test_branches_are_joined_as_soon_as_they_are_there() -> None:
    """Written: x and 8 branches and the last a. Depth-first: x, the total, a branch and the next total."""
    graph = wide_graph(8)
    written = pt.place(graph, NUMPY)
    min_placed = pt.place(graph, NUMPY, pt.least_order(graph, NUMPY))
    assert pt.make_plan(written).arena().nbytes == 9 * UNIT
    assert pt.make_plan(min_placed).arena().nbytes == 4 * UNIT
    assert min_placed.barriers is None


def test_where_nothing_is_gained_the_order_stays_as_written() -> None:
    graph = chain()
    assert pt.least_order(graph, NUMPY) == [0, B, 1, B, 2, B, 3, B]
    assert pt.place(graph, NUMPY, pt.least_order(graph, NUMPY)).fingerprint == placed_alone(graph)


def placed_alone(graph: pt.Graph) -> str:
    placed: Placed = pt.place(graph, NUMPY)
    return placed.fingerprint


def test_the_larger_part_comes_first() -> None:
    """Sethi and Ullman's rule: of two inputs the one that needs more while it is computed, and leaves as little."""
    small = named_product("small", named_product("s", W))
    big = named_product("big", pt.input("x", (4, 4)), pt.weight("up", (32, 4)))  # 8 units
    y = named_product("y", small, named_product("narrow", big, pt.weight("down", (4, 32))))
    graph = pt.Graph({"y": y})
    written, min_placed = (pt.place(graph, NUMPY, s) for s in (None, pt.least_order(graph, NUMPY)))
    assert pt.make_plan(written).arena().nbytes == 10 * UNIT  # big beside small and x, or narrow
    assert pt.make_plan(min_placed).arena().nbytes == 9 * UNIT
